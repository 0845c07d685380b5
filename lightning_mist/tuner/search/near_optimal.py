"""Pipelines beside the best that the clock and other schedules choose among, enumerated on purpose.

Which these are depends on the network, the machine and the question alone: every pipeline whose best plan is near the
best of all, those that are so with all state resident, by their bounds after the search, until there are enough
(:mod:`lightning_mist.tuner.search.search_state` says how near), and the best pipeline of a few other numbers of stages.
The search solves the first to their proven optima in the whole space.
"""

from contextlib import suppress

from lightning_mist.tuner.candidates import TimeIsUpError
from lightning_mist.tuner.inter_stage import Incumbent, Pipeline
from lightning_mist.tuner.search.search_state import NEAR_RESIDENT, SearchState
from lightning_mist.tuner.space import Space

COMPARED = 1.25
"""Multiple of the best plan's seconds below which other numbers of stages are searched for theirs."""

MOST_NEAR = 12
"""Pipelines that are enough for the clock and other schedules to choose among: others are not looked for any more. Of
long pipelines on many devices there are more, and the optimum of each is proven. The plans of all questions that
:mod:`benchmarks.planner.plan_hashes` asks are the same without this limit."""


def compared(space: Space, winner: int) -> tuple[int, ...]:
    """Numbers of stages to compare the winner with: one, half, one less, one more, twice as many."""
    wanted = {1, winner // 2, winner - 1, winner + 1, 2 * winner} - {winner}
    return tuple(sorted(count for count in wanted if 1 <= count <= space.max_stages))


def near_resident(state: SearchState, near: dict[Pipeline, Incumbent], least: float) -> dict[Pipeline, Incumbent]:
    """The best answers with all state resident of pipelines not in ``near`` that are as near as these may be.

    Those with the least bounds come first, until there are enough.

    Raises:
        TimeIsUpError: If there is no time left to evaluate their stages.
    """
    pipelines, cutoff = state.pipelines, least * NEAR_RESIDENT
    pipelines.try_ratios((), state.deadline)
    found: dict[Pipeline, Incumbent] = {}
    groups = pipelines.groups if pipelines.space.offload_ratios else ()
    for group in sorted(groups, key=lambda item: (state.bound_of(item), item)):
        if len(near) + len(found) >= MOST_NEAR:
            break
        keys = {group.pipeline(count): count for count in group.counts}
        counts = [count for key, count in keys.items() if key not in near and state.bounds[key] < cutoff]
        if counts and not state.is_late:
            found |= state.optima(group, counts, cutoff)
    return found


def to_compare_with(
    state: SearchState, near: dict[Pipeline, Incumbent], winner: Incumbent
) -> dict[Pipeline, Incumbent]:
    """The best answers of a few other numbers of stages than those of ``near``, of several with all state resident."""
    below = winner.answer.objective * COMPARED
    found: dict[Pipeline, Incumbent] = {}
    known = {key.num_stages for key in near}
    for num_stages in compared(state.pipelines.space, len(winner.answer.chosen)):
        if num_stages not in known:
            found |= _best_of(state, num_stages, min(below, state.below) if num_stages == 1 else below)
    return found


def _best_of(state: SearchState, num_stages: int, below: float) -> dict[Pipeline, Incumbent]:
    """A good answer of all pipelines with a number of stages, if one takes fewer seconds than ``below``."""
    # They are there to compare with: what would offload takes several times as long to look at, but for one stage.
    state.pipelines.try_ratios(state.pipelines.space.offload_ratios if num_stages == 1 else (), state.deadline)
    every = state.found.items() if num_stages == 1 else ()
    alone = {key: item for key, item in every if key.num_stages == 1 and item.answer.objective < below}
    best = dict(sorted(alone.items(), key=lambda item: (item[1].answer.objective, item[0]))[:1])
    every_group = state.pipelines.groups
    groups = [group._replace(counts=(num_stages,)) for group in every_group if num_stages in group.counts]

    def cutoff() -> float:
        return min((item.answer.objective for item in best.values()), default=below)

    # What bounds a whole group says little of one number of stages.
    with suppress(TimeIsUpError):
        for group in state.nearest(groups, cutoff):
            if state.is_late:
                break
            best = state.optima(group, [num_stages], cutoff()) or best
    return best
