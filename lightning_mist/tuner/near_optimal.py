"""Pipelines beside the best that the clock and other schedules choose among, enumerated on purpose.

Which these are depends on the network, the machine and the question alone, and not on the order in which the search
ruled out others: every pipeline whose best plan takes at most :data:`NEAR` times as long as the best of all, which the
search solves to its proven optimum in the whole space, and the best pipeline of a few other numbers of stages.
"""

import heapq

from lightning_mist.tuner.problem import PRECISION, Incumbent, Pipeline, PipelineGroup
from lightning_mist.tuner.search_state import SearchState
from lightning_mist.tuner.space import Space

NEAR = 1.05
"""Multiple of the best plan's seconds by the closed form below which every pipeline is solved, to be run on the clock
and tried under other schedules: for 2.7 billion parameters on 4 L4 one that takes 3.7 % longer by the form wins so."""

COMPARED = 1.25
"""Multiple of the best plan's seconds below which other numbers of stages are searched for theirs."""


def compared(space: Space, winner: int) -> tuple[int, ...]:
    """Numbers of stages to compare the winner with: one, half, one less, one more, twice as many.

    Args:
        space: The search space.
        winner: The best number of stages.
    """
    wanted = {1, winner // 2, winner - 1, winner + 1, 2 * winner} - {winner}
    return tuple(sorted(count for count in wanted if 1 <= count <= space.max_stages))


def to_compare_with(
    state: SearchState, near: dict[Pipeline, Incumbent], winner: Incumbent
) -> dict[Pipeline, Incumbent]:
    """The best answers of a few other numbers of stages than those of ``near``.

    Raises:
        TimeIsUpError: If there is no time left to evaluate their stages.
    """
    # They are there to compare with, so all or nothing of each kind of state will do.
    state.pipelines.try_ratios(state.pipelines.space.offload_ratios[-1:], state.deadline)
    found: dict[Pipeline, Incumbent] = {}
    known = {key.num_stages for key in near}
    for num_stages in compared(state.pipelines.space, len(winner.answer.chosen)):
        if num_stages not in known:
            found |= _best_of(state, num_stages, winner.answer.objective * COMPARED)
    return found


def _best_of(state: SearchState, num_stages: int, below: float) -> dict[Pipeline, Incumbent]:
    """The best answer of all pipelines with a number of stages, if one takes fewer seconds than ``below``."""
    best: dict[Pipeline, Incumbent] = {}
    alone = [group._replace(counts=(num_stages,)) for group in state.pipelines.groups if num_stages in group.counts]
    waiting: list[tuple[float, bool, PipelineGroup]] = [(state.bound_of(group), False, group) for group in alone]
    heapq.heapify(waiting)
    while waiting and not state.is_late:
        bound, is_bounded, group = heapq.heappop(waiting)
        if bound >= below * (1 - PRECISION):
            break
        if not is_bounded:
            # What bounds a whole group says little of one number of stages.
            heapq.heappush(waiting, (state.raise_bound(group, below), True, group))
            continue
        for key, item in state.optima(group, [num_stages], below).items():
            best, below = {key: item}, item.answer.objective
    return best
