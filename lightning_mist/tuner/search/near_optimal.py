"""Pipelines beside the best that the clock and other schedules choose among, enumerated on purpose.

Which these are depends on the network, the machine and the question alone: every pipeline whose best plan is near the
best of all, those that are so with all state resident, by their bounds after the search, until there are enough
(:mod:`lightning_mist.tuner.search.search_state` says how near), and the best single stage to compare with. The search
solves the first to their proven optima in the whole space.
"""

from contextlib import suppress

from lightning_mist.tuner.candidates import TimeIsUpError
from lightning_mist.tuner.inter_stage import Incumbent, Pipeline
from lightning_mist.tuner.search.search_state import NEAR_RESIDENT, SearchState

COMPARED = 1.25
"""Multiple of the best plan's seconds below which the best single stage is looked for."""

MOST_NEAR = 12
"""Pipelines that are enough for the clock and other schedules to choose among: others are not looked for any more. Of
long pipelines on many devices there are more, and the optimum of each is proven. The plans of all questions that
:mod:`benchmarks.planner.plan_hashes` asks are the same without this limit."""


def beside(state: SearchState, near: dict[Pipeline, Incumbent], least: float) -> dict[Pipeline, Incumbent]:
    """Answers of pipelines that are not in ``near``: the best single stage, and others with all state resident.

    Those with the least bounds come first, until there are enough.

    Raises:
        TimeIsUpError: If there is no time left to evaluate their stages.
    """
    pipelines, cutoff = state.pipelines, least * NEAR_RESIDENT
    found = {} if any(key.num_stages == 1 for key in near) else _single(state, min(least * COMPARED, state.below))
    pipelines.try_ratios((), state.deadline)
    groups = pipelines.groups if pipelines.space.offload_ratios else ()
    for group in sorted(groups, key=lambda item: (state.bound_of(item), item)):
        if len(near) + len(found) >= MOST_NEAR:
            break
        keys = {group.pipeline(count): count for count in group.counts}
        counts = [count for key, count in keys.items() if key not in near | found and state.bounds[key] < cutoff]
        if counts and not state.is_late:
            found |= state.optima(group, counts, cutoff)
    return found


def _single(state: SearchState, below: float) -> dict[Pipeline, Incumbent]:
    """The best answer of one stage, if it takes fewer seconds than ``below``."""
    state.pipelines.try_ratios(state.pipelines.space.offload_ratios, state.deadline)
    alone = [(key, item) for key, item in state.found.items() if key.num_stages == 1 and item.answer.objective < below]
    best = dict(sorted(alone, key=lambda item: (item[1].answer.objective, item[0]))[:1])

    def cutoff() -> float:
        return min((item.answer.objective for item in best.values()), default=below)

    with suppress(TimeIsUpError):
        for group in state.nearest([group for group in state.pipelines.groups if group.counts == (1,)], cutoff):
            if state.is_late:
                break
            best = state.optima(group, [1], cutoff()) or best
    return best
