"""The search loop: every number of stages and of microbatches, in the order of what they take at least.

Pipelines of several stages with the same number of microbatches form a family: their stages differ only by how many
are behind them. Families are taken in the order of a lower bound of their step seconds that knows how much memory
their stages have (:mod:`lightning_mist.tuner.family_floors`), until it is no better than the best plan found; most are
ruled out by it before any of their stages is evaluated. Each that is left is solved exactly by the dynamic program
(:mod:`lightning_mist.tuner.bound`), all its numbers of stages at once, and the winner once more by HiGHS, which starts
from that answer. All this is about the closed form of the step (:mod:`lightning_mist.cost.pipeline`).

A single stage is looked at first, with everything that it may have in host memory. Of pipelines those that may be
faster are first solved without: the more has to be beaten, the less is worth evaluating.

Before there is a plan that a family would have to beat, one is assumed: a little slower than the best of equal stages,
or where candidates are known already little above the lower bound of all; if none is found below it, ever slower ones.
So stages that are far too slow are never evaluated.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import MappingProxyType

import numpy as np

from lightning_mist.cost import StageCostModel
from lightning_mist.tuner.bound import solve, solve_each, solve_family
from lightning_mist.tuner.checked import Checked, check
from lightning_mist.tuner.family_floors import FamilyFloors
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.likely import likely_seconds, quick_bounds
from lightning_mist.tuner.moved import TimeIsUpError
from lightning_mist.tuner.past import Found, Past, Precedent, known_answers, raised
from lightning_mist.tuner.problem import PRECISION
from lightning_mist.tuner.space import Space
from lightning_mist.tuner.tally import Group, Tally, family_like, family_of, single_stage

FIRST_SECONDS = 1.0
"""Seconds that a search may take until it has a plan, however little time it is given: with less it says nothing."""

ASSUMED = (1.2, 1.5, 2.0, 4.0, np.inf)
"""Multiples of the lower bound of all pipelines that a plan is assumed to take, until one is found. Where there is a
guess it stands in place of the first, and the others are as many times it as they are times the first."""

COMPARED = 1.25
"""Multiple of the best plan's seconds below which other numbers of stages are searched for theirs."""

ENOUGH, CLOSE = 3, 1.1
"""How many other numbers of stages are enough to compare with, if their plans take at most so many times as long."""

TRIED = 2
"""Numbers of microbatches with which that is done at most, the most promising first."""

ALIKE, SLOWER = 2, 1.1
"""By how many layers stages may differ from those of a pipeline that was found for an earlier question, and how many
times as slow they may be."""

NEAR = 1.03
"""Multiple of the best plan's seconds below which all numbers of stages are searched for theirs, to be run on the
clock: that and the closed form differ by so much (:mod:`lightning_mist.cost.pipeline`). It is done with one number of
microbatches, that of the best pipeline; if none was found, that of which most can be hoped."""

NEARLY = 1e-4
"""Share by which there may be better ones: the clock tells more apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search found.

    Attributes:
        best: The best answer by number of stages.
        found: The best answer by numbers of stages and of microbatches.
        winner: The winning number of stages, if there is a plan.
        bound: No plan takes fewer seconds.
        certified: Whether HiGHS has proven of the winner's numbers of stages and of microbatches what the dynamic
            program has of all.
        pipelines: Pairs of numbers of stages and of microbatches.
        solved: How many of them were solved.
        notes: What went otherwise than it should, for people.
        is_late: Whether time was up before all was looked at: if there is no plan, one may yet fit.
        bounds: Seconds that no plan of a pipeline goes below, as far as can be relied on.
    """

    best: dict[int, Found]
    found: dict[tuple[int, int], Found]
    winner: int | None
    bound: float
    certified: bool
    pipelines: int
    solved: int
    notes: tuple[str, ...] = ()
    is_late: bool = False
    bounds: dict[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def nothing(cls, pipelines: int) -> "Outcome":
        """Where it is known that no plan fits.

        Args:
            pipelines: Pairs of numbers of stages and of microbatches.
        """
        return cls(best={}, found={}, winner=None, bound=np.inf, certified=False, pipelines=pipelines, solved=0)


def search_pipelines(
    intra: IntraStage,
    space: Space,
    deadline: float,
    pasts: Sequence[Past] = (),
    precedents: Mapping[int, Precedent] = MappingProxyType({}),
) -> Outcome:
    """The best pipeline, proven, and good ones with other numbers of stages, from what earlier searches have left.

    Args:
        intra: What stages may be.
        space: The search space.
        deadline: Value of ``perf_counter()`` at which to stop with what has been found.
        pasts: Earlier searches of the same space.
        precedents: By number of stages a pipeline that was found for an earlier question.
    """
    limits = intra.both_limits
    lower = raised(quick_bounds(intra, space), pasts, limits)
    patience = max(deadline, perf_counter() + FIRST_SECONDS)
    tally = Tally(
        intra=intra,
        space=space,
        lower=lower,
        deadline=deadline,
        patience=patience,
        bounds=dict(lower),
        floors=floors_of(intra, space),
        is_warm=intra.is_warm,
    )
    for item in (known := known_answers(pasts, limits)):
        tally.note(item)
    groups = list(_groups(tuple(lower)))
    tally.floors.kinds = frozenset(space.search.offloaded if space.offload_ratios else ())
    # One stage has so few choices that all are looked at; what it takes is to be beaten.
    intra.try_ratios(space.offload_ratios, patience)
    _search(tally, [group for group in groups if group[0] == (1,)], np.inf)
    _look(tally, [group for group in groups if group[0] != (1,)])
    bound = min(tally.bounds.values(), default=np.inf)
    if not tally.best:
        return _outcome(tally, None, bound)
    winner = min(tally.best, key=lambda count: (tally.best[count].answer.objective, count))
    is_known = any(tally.best[winner] is item for item in known)  # Its problem has no other choices.
    is_whole = (not is_known and (winner == 1 or not space.offload_ratios)) or _settle(tally, winner)
    checked = check(tally.best[winner], deadline)
    # What is proven of a smaller problem is not of the whole one.
    checked = replace(checked, certified=checked.certified and is_whole)
    tally.note(checked.found)
    if checked.refutes:
        bound = 0.0  # Nothing that has been proven can be relied on.
    proven = dict(tally.bounds) if space.offload_ratios else tally.bounds
    _look_beside(tally, winner, groups, precedents)
    for key, value in tally.proven.items():
        proven[key] = max(proven[key], value)
    return replace(_outcome(tally, winner, bound, checked), bounds={} if checked.refutes else proven)


def _look_beside(tally: Tally, winner: int, groups: list[Group], precedents: Mapping[int, Precedent]) -> None:
    """Look for good pipelines beside the best: other numbers of stages, and those that the clock may prefer."""
    # They are there to compare with, so all or nothing will do; that proves nothing of all.
    tally.intra.try_ratios(tally.space.offload_ratios[-1:], tally.deadline)
    most = tally.least * NEAR
    near = [group for group in groups if group[0] != (1,) and tally.known_floor(*group) < most]
    if near:
        # Where a good pipeline was found there are others like it.
        _look_near(tally, *min(near, key=lambda item: (tally.least_in(*item), tally.known_floor(*item), item)), most)
    most = tally.least * COMPARED
    for num_stages in compared(tally.space, winner):
        close = [count for count in tally.best if tally.least_of(count) <= tally.least * CLOSE]
        if num_stages > 1 and len({*close} - {winner}) >= ENOUGH:
            return
        some: list[Group] = [((num_stages,), group[1]) for group in groups if num_stages in group[0]]
        like = precedents.get(num_stages)
        # With another batch the same microbatches need not leave devices for as many stages.
        if num_stages > 1 and like is not None and (num_stages, like.num_microbatches) in tally.lower:
            _look_like(tally, like, most)
        else:
            _compare(tally, some, most, num_stages)


def _compare(tally: Tally, groups: list[Group], most: float, num_stages: int) -> None:
    """Search a number of stages for a good plan that takes fewer seconds than ``most``, the most promising first."""
    waiting, tried = [(tally.known_floor(*group), False, group) for group in groups], 0
    heapq.heapify(waiting)
    while waiting and tried < TRIED and tally.least_of(num_stages) >= most and not tally.is_late:
        bound, is_settled, group = heapq.heappop(waiting)
        if bound >= most * (1 - PRECISION):
            return
        if is_settled:
            _search(tally, [group], most, num_stages)
            tried += 1
        else:
            # What bounds a whole family says little of one number of stages.
            heapq.heappush(waiting, (tally.floor(*group, most), True, group))


def _look_like(tally: Tally, precedent: Precedent, most: float) -> None:
    """Look for a pipeline like one that was found before, if none of fewer seconds than ``most`` is known."""
    num_stages, num_microbatches = len(precedent.layers), precedent.num_microbatches
    bound = tally.known_floor((num_stages,), num_microbatches)
    if tally.least_of(num_stages) < most or bound >= most * (1 - PRECISION) or tally.is_late:
        return
    among_NL = np.zeros((tally.space.world_size + 1, tally.space.num_layers + 1), dtype=bool)
    for devices, layers in zip(precedent.devices, precedent.layers, strict=True):
        among_NL[devices, max(1, layers - ALIKE) : layers + ALIKE + 1] = True
    pace = min(most / num_microbatches, precedent.slowest * SLOWER)
    with suppress(TimeIsUpError):
        family = family_like(tally, num_stages, num_microbatches, pace, among_NL)
        if family.heads:
            found = solve_family(family, below=most, deadline=tally.deadline)
            for count, answer in found.answers.items():
                tally.note(Found(problem=family.problem(count), answer=answer))


def _look_near(tally: Tally, counts: tuple[int, ...], num_microbatches: int, most: float) -> None:
    """Solve each pipeline of a family by itself, if its best plan takes fewer seconds than ``most``."""
    with suppress(TimeIsUpError):
        family = family_of(tally, counts, num_microbatches, most)
        below = {count: min(most, tally.least_of(count)) for count in family.heads}
        for count, answer in solve_each(family, below, precision=NEARLY, deadline=tally.deadline).items():
            tally.note(Found(problem=family.problem(count), answer=answer))


def floors_of(intra: IntraStage, space: Space) -> FamilyFloors:
    """Bounds of families that know how much memory stages have.

    Args:
        intra: The stages, of devices that are all alike.
        space: The search space.
    """
    assert isinstance(intra.model, StageCostModel)
    return FamilyFloors(
        model=intra.model, space=space, slot_of=intra.slot, memory_limit=intra.memory_limit, runs=intra.runs
    )


def _look(tally: Tally, groups: list[Group]) -> None:
    """Search families of pipelines, with a plan to beat assumed as long as there is none or only one that is slow."""
    groups = _open(tally, groups, tally.least)
    if not groups:
        return
    lower = {(count, group[1]): tally.lower[count, group[1]] for group in groups for count in group[0]}
    # Where candidates are known already, trying is cheaper than guessing.
    guess = np.inf if tally.is_warm else likely_seconds(tally.intra, lower, tally.deadline)
    start = min(lower.values()) * ASSUMED[0] if guess == np.inf else guess
    every = [start * factor / ASSUMED[0] if start else np.inf for factor in ASSUMED]
    for assumed in every if tally.space.offload_ratios else ():
        _search_unmoved(tally, groups, assumed)
        if tally.least < assumed or tally.is_late:
            break
    for assumed in every:
        _search(tally, groups, assumed)
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
    intra, kinds = tally.intra, tally.floors.kinds
    below = min(tally.least, assumed)
    lowest = {group: tally.floor(*group, below) for group in groups}
    intra.try_ratios(())
    tally.floors.kinds = frozenset()
    for group in sorted(lowest, key=lambda item: (lowest[item], item)):
        below = min(tally.least, assumed)
        if lowest[group] >= below * (1 - PRECISION) or tally.is_late:
            break
        counts = [count for count in group[0] if tally.lower[count, group[1]] < below]
        family = family_of(tally, counts, group[1], below)
        if family.heads:
            for count, answer in solve_family(family, below=below, deadline=tally.deadline).answers.items():
                tally.note(Found(problem=family.problem(count), answer=answer))
    intra.try_ratios(tally.space.offload_ratios, tally.deadline if tally.best else tally.patience)
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
        _attempt(tally, [winner], key[1], known.answer.objective * (1 + PRECISION / 2))
    if winner not in tally.best or tally.least_of(winner) > known.answer.objective:
        tally.best[winner] = tally.found[key] = known
        return False
    return True


def _groups(pipelines: tuple[tuple[int, int], ...]) -> Iterator[Group]:
    """Pipelines whose stages cost the same, but for how many are behind them."""
    counts: dict[tuple[bool, int], list[int]] = {}
    for num_stages, num_microbatches in pipelines:
        # One stage has nothing to send.
        counts.setdefault((num_stages > 1, num_microbatches), []).append(num_stages)
    for (_, num_microbatches), stages in sorted(counts.items()):
        yield tuple(sorted(stages)), num_microbatches


def _search(tally: Tally, groups: list[Group], assumed: float, only: int | None = None) -> None:
    """Solve families until none can have a better answer, of one number of stages if only that is asked for.

    Args:
        tally: What has been found.
        groups: The pipelines to look at.
        assumed: Seconds that answers are to be better than, as well as than the best found.
        only: Number of stages.
    """

    def below() -> float:
        known = tally.least if only is None else tally.least_of(only)
        return min(known, assumed)

    def enough() -> float:
        # What was proven of a pipeline before is so but for rounding.
        return below() * (1 - PRECISION)

    def counts_of(group: Group) -> tuple[int, ...]:
        return tuple(count for count in group[0] if only in (None, count))

    lowest = {
        group: bound for group in groups if (bound := tally.floor(counts_of(group), group[1], below())) < enough()
    }
    # Of equal bounds, as earlier searches leave them, that comes first which has the best answer.
    for group in sorted(lowest, key=lambda item: (lowest[item], tally.least_in(*item), item)):
        if lowest[group] >= enough():
            return
        if tally.is_late:
            tally.is_stopped = True
            return
        counts = [count for count in counts_of(group) if tally.lower[count, group[1]] < enough()]
        try:
            _attempt(tally, counts, group[1], below())
        except TimeIsUpError:
            tally.is_stopped = True
            return


def _outcome(tally: Tally, winner: int | None, bound: float, checked: Checked | None = None) -> Outcome:
    shown = {winner, *compared(tally.space, winner)} if winner else set()
    return Outcome(
        best={count: found for count, found in tally.best.items() if count in shown},
        found=tally.found,
        winner=winner,
        bound=bound,
        certified=checked is not None and checked.certified,
        pipelines=len(tally.lower),
        solved=len(tally.solved),
        notes=checked.notes if checked is not None else (),
        is_late=tally.is_stopped,
        bounds=tally.bounds,
    )


def _attempt(tally: Tally, counts: list[int], num_microbatches: int, below: float) -> None:
    """Solve some pipelines, if they can be better than ``below``, and remember their answers."""
    tally.solved |= {(count, num_microbatches) for count in counts}
    if counts == [1]:
        problem = single_stage(tally.intra, tally.space, num_microbatches, below)
        answer = solve(problem, below=below, deadline=tally.deadline)
        bound = answer.bound
        if answer.chosen:
            tally.note(Found(problem=problem, answer=answer))
    else:
        bound = below
        family = family_of(tally, counts, num_microbatches, below)
        if family.heads:
            result = solve_family(family, below=below, deadline=tally.deadline)
            bound = result.bound
            for count, answer in result.answers.items():
                tally.note(Found(problem=family.problem(count), answer=answer))
    # A plan with a stage that was left out of the problem takes at least ``below``.
    for count in counts:
        key = count, num_microbatches
        tally.bounds[key] = max(tally.bounds[key], min(below, bound))


def compared(space: Space, winner: int) -> tuple[int, ...]:
    """Numbers of stages to compare the winner with: none, half, one less, one more, twice as many."""
    wanted = {1, winner // 2, winner - 1, winner + 1, 2 * winner} - {winner}
    return tuple(sorted(count for count in wanted if 1 <= count <= space.max_stages))
