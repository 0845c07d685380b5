"""Numbers that the search is tuned with, each with its unit, its reason and where it comes from.

None of them is about what a plan costs or holds. Those that say how near the best something is looked at may change the
plan, by little; all others only how long it takes to find.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any


def _number(value: Any, unit: str) -> Any:
    """A field with a value in a unit, which is said where options are shown."""
    return field(default=value, metadata={"unit": unit})


@dataclass(slots=True, kw_only=True)
class Options:
    """Numbers that the search is tuned with; nothing but tests changes them.

    Attributes:
        near_resident: Multiple of the best plan's seconds by the closed form below which every pipeline is solved with
            all state resident, to be run on the clock and tried under other schedules. For 2.7 billion parameters on 4
            L4 one that takes 3.7 % longer by the form wins so.
        beside_offloaded: The same where state may be offloaded: of what is then best other schedules may gain nothing.
            For 2.7 billion parameters on 8 L4 one that takes 5.8 % longer by the form takes 15 % less under ZB-H1.
        near_offloaded: As ``near_resident`` with what may be offloaded, of which evaluating all that are so near takes
            most of a search. With 1.015, which takes 1.05 times the processor seconds, of the plans of all questions in
            the record ``plan-hashes-near_amd-epyc-2-cores_202612.json`` one takes 0.02 % less and one 0.4 % more, as
            in ``plan-hashes-pieces``.
        enough_near: Pipelines that are enough for the clock and other schedules to choose among: others are not looked
            for any more. Of long pipelines on many devices there are more, and the optimum of each is proven. The plans
            of all questions of :mod:`benchmarks.planner.plan_hashes` are the same without this limit.
        compared: Multiple of the best plan's seconds below which the best single stage is looked for, to be compared
            with: people know what it is.
        assumed: Multiples of the least bound of all pipelines that are assumed as cutoffs, until a plan is found below
            one. Stages that are far too slow are so never evaluated. Beginning at 1.2 searches take 1.1 times the
            processor seconds.
        close: Up to this multiple of a cutoff what is known is as good a one: otherwise all would be looked at twice.
        likely: Multiple of the least bound of all up to which groups are as likely to have the best: a bound of that
            with the most microbatches, whose stages have the fewest choices, says to the others what is near. A single
            stage that is not as likely waits for what others say.
        beyond: Multiple of what is near up to which bounds are asked for. A little less memory makes plans a little
            slower, and what is known of others need not be asked for again.
        bound_passes: How often the least sum of the steady times of all stages is asked for again, as the slowest stage
            may take less and less.
        bound_tolerance: Share by which a bound of pipelines may be less than what its dynamic program proves at most:
            it rules out as many.
        batches_matter: Share of the memory of a device above which the batches of other ranks are worth more searches,
            of pipelines in several copies, where something fits with all of them. Below it a plan may be missed that
            fits only without them, by this share of memory at most.
        alike: Share of the seconds of a step by which plans cannot be told apart: less lies between runs of one and the
            same plan (the steps of DDP in the record ``throughput-against-ddp_amd-epyc-2-cores_202611.json``, but for
            one outlier). So the simplest of such plans is chosen, and another schedule than that of the exact search
            has to gain more.
        chunked: The most plans with chunks that are run on the clock, the best by a bound of their seconds.
        recomputed: Parts of each stage's layers that are recomputed where devices share rows, unless shares are asked
            for: of plans that are all tried there should be few.
        layout_gain: Share of its step that a plan is taken to gain by another layout of ranks at most. Of plans for 13
            and 22 billion parameters on nodes of eight L4, between which everything takes long, the one that gained
            most took 0.123 less.
        shown: Numbers of stages that are shown beside the plan, the fastest; a single stage always is.
        sharing: The most devices that are tried to share layers. Narayanan et al., 2021, section 3, advise as many as a
            node has, and theirs have 8.
        first_seconds: What a search may take until it has a plan, however little time it is given: with less it says
            nothing.
        check_seconds: The most for which HiGHS checks a proven optimum.
        check_arcs: The most arcs of which a program is made for it: with more, HiGHS only reads it in seconds.
        check_paces: The most steady times for which its program has constraints of the family "bottlenecks": they make
            it tight, and long.
        least_seconds: Where nothing fits, after which the search for the least memory stops at the best found.
        hopeless_seconds: The same where not even parameters and optimizer state could be held.
    """

    near_resident: float = _number(1.05, "times the best plan's seconds")
    beside_offloaded: float = _number(1.08, "times the best plan's seconds")
    near_offloaded: float = _number(1.01, "times the best plan's seconds")
    enough_near: int = _number(12, "pipelines")
    compared: float = _number(1.25, "times the best plan's seconds")
    assumed: tuple[float, ...] = _number((1.1, 1.2, 1.5, 2.0, 4.0), "times the least bound")
    close: float = _number(1.05, "times a cutoff")
    likely: float = _number(1.2, "times the least bound")
    beyond: float = _number(1.01, "times what is near")
    bound_passes: int = _number(3, "passes")
    bound_tolerance: float = _number(3e-3, "of a bound")
    batches_matter: float = _number(0.01, "of a device's memory")
    alike: float = _number(0.01, "of a step's seconds")
    chunked: int = _number(48, "plans")
    recomputed: tuple[float, ...] = _number((0.0, 0.25, 0.5, 0.75, 1.0), "of a stage's layers")
    layout_gain: float = _number(0.15, "of a step's seconds")
    shown: int = _number(6, "numbers of stages")
    sharing: int = _number(8, "devices")
    first_seconds: float = _number(1.0, "seconds")
    check_seconds: float = _number(5.0, "seconds")
    check_arcs: int = _number(60_000, "arcs")
    check_paces: int = _number(64, "steady times")
    least_seconds: float = _number(10.0, "seconds")
    hopeless_seconds: float = _number(2.0, "seconds")

    def lines(self) -> Iterator[str]:
        """Every option with its value and unit, for people."""
        for item in fields(self):
            value = getattr(self, item.name)
            numbers = value if isinstance(value, tuple) else (value,)
            yield f"{item.name} = {', '.join(f'{number:g}' for number in numbers)} {item.metadata['unit']}"


OPTIONS = Options()
"""Those of every search."""
