"""The search loop: every number of stages and of microbatches, in the order of what they take at least.

Pipelines of several stages with the same number of microbatches form a family: their stages differ only by how many
are behind them. Families are taken in the order of a lower bound of their step seconds that knows how much memory
their stages have (:mod:`lightning_mist.tuner.family_floors`), until it is no better than the best plan found; most are
ruled out by it before any of their stages is evaluated. Each that is left is solved exactly by the dynamic program
(:mod:`lightning_mist.tuner.bound`), all its numbers of stages at once, and the winner once more by HiGHS, which starts
from that answer. All this is about the closed form of the step (:mod:`lightning_mist.cost.step_time`).

A single stage is looked at first, with everything that it may have in host memory. Of pipelines those that may be
faster are first solved without: the more has to be beaten, the less is worth evaluating.

Before there is a plan that a family would have to beat, one is assumed, little above the lower bound of all; if none is
found below it, ever slower ones.
So stages that are far too slow are never evaluated.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from types import MappingProxyType

import numpy as np

from lightning_mist.cost import StageCostModel
from lightning_mist.tuner.attempts import attempt, search_families, solve_some
from lightning_mist.tuner.checked import Checked, check
from lightning_mist.tuner.family_floors import FamilyFloors
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.likely import quick_bounds
from lightning_mist.tuner.near_optimal import near_optimal
from lightning_mist.tuner.offload_search import TimeIsUpError
from lightning_mist.tuner.problem import PRECISION, Incumbent
from lightning_mist.tuner.space import Space
from lightning_mist.tuner.tally import Group, Tally, family_of

FIRST_SECONDS = 1.0
"""Seconds that a search may take until it has a plan, however little time it is given: with less it says nothing."""

ASSUMED = (1.2, 1.5, 2.0, 4.0, np.inf)
"""Multiples of the lower bound of all pipelines that a plan is assumed to take, until one is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search found.

    Attributes:
        best: The best answer by number of stages.
        found: The best answer by numbers of stages and of microbatches, of pipelines near the best and of a few others
            (:mod:`lightning_mist.tuner.near_optimal`).
        winner: The winning number of stages, if there is a plan.
        bound: No plan takes fewer seconds.
        certified: Whether HiGHS has proven of the winner's numbers of stages and of microbatches what the dynamic
            program has of all.
        pipelines: Pairs of numbers of stages and of microbatches.
        solved: How many of them were solved.
        notes: What went otherwise than it should, for people.
        is_late: Whether time was up before all was looked at: if there is no plan, one may yet fit.
    """

    best: dict[int, Incumbent]
    found: dict[tuple[int, int], Incumbent]
    winner: int | None
    bound: float
    certified: bool
    pipelines: int
    solved: int
    notes: tuple[str, ...] = ()
    is_late: bool = False

    @classmethod
    def nothing(cls, pipelines: int) -> "Outcome":
        """Where it is known that no plan fits.

        Args:
            pipelines: Pairs of numbers of stages and of microbatches.
        """
        return cls(best={}, found={}, winner=None, bound=np.inf, certified=False, pipelines=pipelines, solved=0)


def search_pipelines(intra: IntraStage, space: Space, deadline: float) -> Outcome:
    """The best pipeline, proven, and good ones with other numbers of stages.

    Args:
        intra: What stages may be.
        space: The search space.
        deadline: Value of ``perf_counter()`` at which to stop with what has been found.
    """
    lower = quick_bounds(intra, space)
    patience = max(deadline, perf_counter() + FIRST_SECONDS)
    tally = Tally(
        intra=intra,
        space=space,
        lower=lower,
        deadline=deadline,
        patience=patience,
        bounds=dict(lower),
        floors=floors_of(intra, space),
    )
    groups = list(_groups(tuple(lower), are_equal=space.search.equal_stages))
    tally.floors.kinds = frozenset(space.search.offloaded if space.offload_ratios else ())
    # One stage has so few choices that all are looked at; what it takes is to be beaten.
    intra.try_ratios(space.offload_ratios, patience)
    search_families(tally, [group for group in groups if group[0] == (1,)], np.inf)
    _look(tally, [group for group in groups if group[0] != (1,)])
    bound = min(tally.bounds.values(), default=np.inf)
    if not tally.best:
        return _outcome(tally, None, bound)
    winner = min(tally.best, key=lambda count: (tally.best[count].answer.objective, count))
    is_whole = winner == 1 or not space.offload_ratios or _settle(tally, winner)
    checked = check(tally.best[winner], deadline)
    # What is proven of a smaller problem is not of the whole one.
    checked = replace(checked, certified=checked.certified and is_whole)
    tally.note(checked.found)
    if checked.refutes:
        bound = 0.0  # Nothing that has been proven can be relied on.
    near = near_optimal(tally, tally.best[winner], groups)
    return _outcome(tally, winner, bound, checked, near)


def floors_of(intra: IntraStage, space: Space) -> FamilyFloors:
    """Bounds of families that know how much memory stages have.

    Args:
        intra: The stages, of devices that are all alike.
        space: The search space.
    """
    assert isinstance(intra.model, StageCostModel)
    return FamilyFloors(model=intra.model, space=space, slot_of=intra.slot, memory_limit=intra.memory_limit)


def _look(tally: Tally, groups: list[Group]) -> None:
    """Search families of pipelines, with a plan to beat assumed as long as there is none or only one that is slow.

    Args:
        tally: What has been found.
        groups: The pipelines to look at.
    """
    groups = _open(tally, groups, tally.least)
    if not groups:
        return
    lowest = min(tally.lower[count, group[1]] for group in groups for count in group[0])
    every = [lowest * factor if lowest else np.inf for factor in ASSUMED]
    for assumed in every if tally.space.offload_ratios else ():
        _search_unmoved(tally, groups, assumed)
        if tally.least < assumed or tally.is_late:
            break
    for assumed in every:
        search_families(tally, groups, assumed)
        # What was met on the way may take longer than what was assumed, and prove nothing.
        if tally.least < assumed or tally.is_late:
            return


def _search_unmoved(tally: Tally, groups: list[Group], assumed: float) -> None:
    """Solve families as if nothing could be moved to the host: what is found soon is to be beaten by what can be.

    Args:
        tally: What has been found.
        groups: The pipelines to look at.
        assumed: Seconds that answers are to be better than, as well as than the best found.
    """
    below = min(tally.least, assumed)
    lowest = {group: tally.floor(*group, below) for group in groups}
    with _nothing_moved(tally):
        for group in sorted(lowest, key=lambda item: (lowest[item], item)):
            below = min(tally.least, assumed)
            if lowest[group] >= below * (1 - PRECISION) or tally.is_late:
                return
            counts = [count for count in group[0] if tally.lower[count, group[1]] < below]
            solve_some(tally, family_of(tally, counts, group[1], below), below)


@contextmanager
def _nothing_moved(tally: Tally) -> Iterator[None]:
    """Stages and bounds of families as if nothing could be moved to the host, meanwhile."""
    kinds = tally.floors.kinds
    tally.intra.try_ratios(())
    tally.floors.kinds = frozenset()
    try:
        yield
    finally:
        tally.intra.try_ratios(tally.space.offload_ratios, tally.deadline if tally.best else tally.patience)
        tally.floors.kinds = kinds


def _open(tally: Tally, groups: list[Group], below: float) -> list[Group]:
    """Families that may have a plan of fewer seconds."""
    return [group for group in groups if tally.floor(*group, below) < below * (1 - PRECISION)]


def _settle(tally: Tally, winner: int) -> bool:
    """Solve the winner's pipeline once more in the whole space: its answer may be one of a smaller.

    Returns:
        Whether there was time to find it, or one as good, again: the winner's problem is that of the whole space.
    """
    known = tally.best.pop(winner)
    key = winner, known.problem.num_microbatches
    tally.found.pop(key)
    with suppress(TimeIsUpError):
        # The answer is found again, which is no better than itself.
        attempt(tally, [winner], key[1], known.answer.objective * (1 + PRECISION / 2))
    if winner not in tally.best or tally.least_of(winner) > known.answer.objective:
        tally.best[winner] = tally.found[key] = known
        return False
    return True


def _groups(pipelines: tuple[tuple[int, int], ...], *, are_equal: bool) -> Iterator[Group]:
    """Pipelines whose stages cost the same, but for how many are behind them."""
    counts: dict[tuple[int, int], list[int]] = {}
    for num_stages, num_microbatches in pipelines:
        # One stage has nothing to send, and equal stages have other layers with every number of stages.
        kind = num_stages if are_equal else min(num_stages, 2)
        counts.setdefault((kind, num_microbatches), []).append(num_stages)
    for (_, num_microbatches), stages in sorted(counts.items()):
        yield tuple(sorted(stages)), num_microbatches


def _outcome(
    tally: Tally,
    winner: int | None,
    bound: float,
    checked: Checked | None = None,
    found: Mapping[tuple[int, int], Incumbent] = MappingProxyType({}),
) -> Outcome:
    best: dict[int, Incumbent] = {}
    for (count, _), item in found.items():
        if count not in best or item.answer.objective < best[count].answer.objective:
            best[count] = item
    return Outcome(
        best=best,
        found=dict(found),
        winner=winner,
        bound=bound,
        certified=checked is not None and checked.certified,
        pipelines=len(tally.lower),
        solved=len(tally.solved),
        notes=checked.notes if checked is not None else (),
        is_late=tally.is_stopped,
    )
