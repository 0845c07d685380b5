"""Good pipelines beside the best: other numbers of stages to compare it with, and those that the clock may prefer."""

import heapq
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from lightning_mist.tuner.attempts import search_families, solve_some
from lightning_mist.tuner.bound import solve_each
from lightning_mist.tuner.offload_search import TimeIsUpError
from lightning_mist.tuner.past import Found, Precedent
from lightning_mist.tuner.problem import PRECISION
from lightning_mist.tuner.space import Space
from lightning_mist.tuner.tally import NEAR, Group, Tally, family_like, family_of

COMPARED = 1.25
"""Multiple of the best plan's seconds below which other numbers of stages are searched for theirs."""

ENOUGH, CLOSE = 3, 1.1
"""How many other numbers of stages are enough to compare with, if their plans take at most so many times as long."""

TRIED = 2
"""Numbers of microbatches with which that is done at most, the most promising first."""

ALIKE, SLOWER = 2, 1.1
"""By how many layers stages may differ from those of a pipeline that was found for an earlier question, and how many
times as slow they may be."""

NEARLY = 1e-4
"""Share by which there may be better ones: the clock tells more apart."""


def look_beside(tally: Tally, winner: int, groups: list[Group], precedents: Mapping[int, Precedent]) -> None:
    """Look for good pipelines beside the best: other numbers of stages, and those that the clock may prefer.

    Args:
        tally: What has been found.
        winner: The best number of stages.
        groups: The pipelines that there are.
        precedents: By number of stages a pipeline that was found for an earlier question.
    """
    # They are there to compare with, so all or nothing will do; that proves nothing of all.
    tally.intra.try_ratios(tally.space.offload_ratios[-1:], tally.deadline)
    most = tally.least * NEAR
    near = [group for group in groups if group[0] != (1,) and tally.known_floor(*group) < most]
    if near:
        # Like the best pipeline there are others that are good; without one, where most can be hoped for.
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
            search_families(tally, [group], most, num_stages)
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
        solve_some(tally, family_like(tally, num_stages, num_microbatches, pace, among_NL), most)


def _look_near(tally: Tally, counts: tuple[int, ...], num_microbatches: int, most: float) -> None:
    """Solve each pipeline of a family by itself, if its best plan takes fewer seconds than ``most``."""
    with suppress(TimeIsUpError):
        family = family_of(tally, counts, num_microbatches, most)
        below = {count: min(most, tally.least_of(count)) for count in family.heads}
        for count, answer in solve_each(family, below, precision=NEARLY, deadline=tally.deadline).items():
            tally.note(Found(problem=family.problem(count), answer=answer))


def compared(space: Space, winner: int) -> tuple[int, ...]:
    """Numbers of stages to compare the winner with: one, half, one less, one more, twice as many.

    Args:
        space: The search space.
        winner: The best number of stages.
    """
    wanted = {1, winner // 2, winner - 1, winner + 1, 2 * winner} - {winner}
    return tuple(sorted(count for count in wanted if 1 <= count <= space.max_stages))
