"""Pipelines near the best by the closed form, enumerated on purpose: the clock and other schedules choose among them.

Which these are depends on the network, the machine and the question alone, and not on the order in which the search
ruled out others: every pipeline whose best plan takes at most :data:`~lightning_mist.tuner.tally.NEAR` times as long as
the best of all, each solved to its proven optimum in the whole space, and the best pipeline of a few other numbers of
stages, to compare with.
"""

import heapq
from collections.abc import Iterator
from contextlib import suppress

from lightning_mist.tuner.bound import solve, solve_each
from lightning_mist.tuner.offload_search import TimeIsUpError
from lightning_mist.tuner.problem import PRECISION, Incumbent
from lightning_mist.tuner.space import Space
from lightning_mist.tuner.tally import NEAR, Group, Tally, family_of, single_stage

COMPARED = 1.25
"""Multiple of the best plan's seconds below which other numbers of stages are searched for theirs."""

Pipelines = dict[tuple[int, int], Incumbent]
"""The best answers of pipelines, by numbers of stages and of microbatches."""


def near_optimal(tally: Tally, winner: Incumbent, groups: list[Group]) -> Pipelines:
    """The best answer of every pipeline near the best of all, and of a few other numbers of stages.

    Args:
        tally: What has been proven of pipelines; what is proven here is added.
        winner: The best answer.
        groups: The pipelines of the search space.
    """
    least = winner.answer.objective
    found: Pipelines = {}
    with suppress(TimeIsUpError):
        tally.intra.try_ratios(tally.space.offload_ratios, tally.deadline)
        for item in _near(tally, groups, least * NEAR):
            found[_key(item)] = item
        # They are there to compare with, so all or nothing of each kind of state will do.
        tally.intra.try_ratios(tally.space.offload_ratios[-1:], tally.deadline)
        known = {num_stages for num_stages, _ in found}
        for num_stages in compared(tally.space, len(winner.answer.chosen)):
            if num_stages not in known and (best := _best_of(tally, groups, num_stages, least * COMPARED)):
                found[_key(best)] = best
    if tally.is_late:  # What was met on the way is better than nothing.
        found = {**tally.found, **found}
    same = found.get(_key(winner))
    if same is None or same.answer.objective > winner.answer.objective * (1 + PRECISION):
        found[_key(winner)] = winner
    return found


def compared(space: Space, winner: int) -> tuple[int, ...]:
    """Numbers of stages to compare the winner with: one, half, one less, one more, twice as many.

    Args:
        space: The search space.
        winner: The best number of stages.
    """
    wanted = {1, winner // 2, winner - 1, winner + 1, 2 * winner} - {winner}
    return tuple(sorted(count for count in wanted if 1 <= count <= space.max_stages))


def _near(tally: Tally, groups: list[Group], most: float) -> Iterator[Incumbent]:
    """The best answer of every pipeline that takes fewer seconds than ``most``."""
    for counts, num_microbatches in groups:
        if tally.is_late or tally.floor(counts, num_microbatches, most) >= most * (1 - PRECISION):
            continue
        if counts == (1,):
            yield from _single(tally, num_microbatches, most)
            continue
        open_counts = tuple(count for count in counts if tally.lower[count, num_microbatches] < most)
        yield from _several(tally, open_counts, num_microbatches, most)


def _best_of(tally: Tally, groups: list[Group], num_stages: int, most: float) -> Incumbent | None:
    """The best answer of all pipelines with a number of stages, if it takes fewer seconds than ``most``."""
    best, below, counts = None, most, (num_stages,)
    waiting = [(tally.lower[num_stages, number], False, number) for among, number in groups if num_stages in among]
    heapq.heapify(waiting)
    while waiting and not tally.is_late:
        bound, is_bounded, number = heapq.heappop(waiting)
        if bound >= below * (1 - PRECISION):
            break
        if not is_bounded:
            # What bounds a whole family says little of one number of stages.
            heapq.heappush(waiting, (tally.floor(counts, number, below), True, number))
            continue
        for item in _single(tally, number, below) if num_stages == 1 else _several(tally, counts, number, below):
            best, below = item, item.answer.objective
    return best


def _single(tally: Tally, num_microbatches: int, below: float) -> Iterator[Incumbent]:
    """The best answer of one stage, if it takes fewer seconds than ``below``."""
    problem = single_stage(tally.intra, tally.space, num_microbatches, below)
    answer = solve(problem, below=below, deadline=tally.deadline)
    if answer.chosen:
        yield Incumbent(problem=problem, answer=answer)


def _several(tally: Tally, counts: tuple[int, ...], num_microbatches: int, below: float) -> Iterator[Incumbent]:
    """The best answer of each of some numbers of stages that takes fewer seconds than ``below``."""
    family = family_of(tally, counts, num_microbatches, below)
    answers = solve_each(family, dict.fromkeys(family.heads, below), deadline=tally.deadline)
    for count, answer in answers.items():
        yield Incumbent(problem=family.problem(count), answer=answer)


def _key(found: Incumbent) -> tuple[int, int]:
    return len(found.answer.chosen), found.problem.num_microbatches
