"""The search loop: branch and bound over numbers of stages and of microbatches, and the parts of unlike devices.

Pipelines of several stages whose stages cost the same, but for how many are behind them, form a group. Groups are taken
in the order of a lower bound of their step seconds that knows how much memory their stages have
(:mod:`lightning_mist.tuner.bounds.pipeline_bounds`), until it reaches the cutoff: a little more than the incumbent, so
that every pipeline near the best is solved too, for the clock and other schedules to choose among. Most groups are
ruled out by their bound before any of their stages is evaluated. Each that is left is solved exactly by the dynamic
program (:mod:`lightning_mist.tuner.inter_stage.exact_solver`), and the winner once more by HiGHS, which starts from
that answer. All this is about the closed form of the step (:mod:`lightning_mist.cost.step_time`).

A single stage is looked at first, unless it is far slower, as it is over unlike devices. Of pipelines those that may be
faster are first solved with all state resident, which is cheap, for an incumbent. As long as there is none, a cutoff is
assumed, little above the lower bound of all; if nothing is found below it, ever larger ones. So stages that are far too
slow are never evaluated.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from lightning_mist.tuner.candidates import TimeIsUpError
from lightning_mist.tuner.inter_stage import PRECISION, Incumbent, Pipeline, PipelineGroup, check, solve_family
from lightning_mist.tuner.search.near_optimal import beside
from lightning_mist.tuner.search.pipelines import Pipelines
from lightning_mist.tuner.search.search_state import NEAR_RESIDENT, SearchState

ASSUMED = (1.2, 1.5, 2.0, 4.0, np.inf)
"""Multiples of the lower bound of all pipelines that are assumed as cutoffs, until a plan is found below one."""

CLOSE = 1.05
"""Up to this multiple of a cutoff what is known is as good a one: otherwise all would be looked at twice."""

LIKELY = 1.2
"""Multiple of the least bound of all up to which groups are as likely to have the best: a bound of that with the most
microbatches, whose stages have the fewest choices, says to the others what is near. A single stage that is not as
likely waits for what others say."""

BEYOND = 1.01
"""Multiple of what is near up to which bounds are asked for: a little less memory makes plans a little slower, and what
is known of others need not be asked for again."""

Groups: TypeAlias = Sequence[PipelineGroup]

_NOTHING: Mapping[Pipeline, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search found.

    Attributes:
        winner: The best answer, if there is a plan.
        found: The best answers of pipelines near the best, and of a single stage to compare with
            (:mod:`lightning_mist.tuner.search.near_optimal`).
        bound: No plan takes fewer seconds.
        certified: Whether HiGHS has proven of the winner's pipeline what the dynamic program has of all.
        solved: How many of them were solved.
        notes: What went otherwise than it should, for people.
        is_late: Whether time was up before all was looked at: if there is no plan, one may yet fit.
        bounds: Step seconds that no plan of each pipeline goes below.
    """

    winner: Incumbent | None
    found: dict[Pipeline, Incumbent]
    bound: float
    certified: bool
    pipelines: int
    solved: int
    notes: tuple[str, ...] = ()
    is_late: bool = False
    bounds: Mapping[Pipeline, float] = field(default_factory=dict)

    @property
    def least(self) -> float:
        """The step seconds of the best answer, infinite without one."""
        return np.inf if self.winner is None else self.winner.answer.objective

    @classmethod
    def nothing(cls, pipelines: int) -> "Outcome":
        """Where it is known that none of so many pipelines fits."""
        return cls(winner=None, found={}, bound=np.inf, certified=False, pipelines=pipelines, solved=0)


def search_pipelines(
    pipelines: Pipelines, deadline: float, below: float = np.inf, known: Mapping[Pipeline, float] = _NOTHING
) -> Outcome:
    """The best pipeline, proven, those near it, and the best single stage.

    Args:
        deadline: Value of ``thread_time()`` at which to stop with what has been found.
        below: Step seconds of a plan that is known: nothing else is of interest, and need not be found.
        known: Step seconds that no plan of some pipelines is known to go below.
    """
    state = SearchState.of(pipelines, deadline, below, known)
    pipelines.try_ratios(pipelines.space.offload_ratios, state.patience)
    single = [group for group in pipelines.groups if group.counts == (1,)]
    several = [group for group in pipelines.groups if group.counts != (1,)]
    # One stage has so few choices that what it takes is found at once, to be beaten.
    likely = LIKELY * min(map(state.bound_of, several), default=np.inf)
    _solve(state, [group for group in single if state.bound_of(group) <= likely])
    _solve_several(state, several, single)
    if state.winner is None and state.is_late:
        # It may fit where nothing else was found in time.
        state.wait_again()
        pipelines.try_ratios(pipelines.space.offload_ratios, state.patience)
    _solve(state, single)
    bound = min(state.bounds.values(), default=np.inf)
    if state.winner is None:
        return _outcome(state, None, {}, bound, bounds=state.bounds)
    key, winner = state.winner
    checked = check(winner, deadline)
    # Those of what is looked at below are with all state resident.
    bounds = {} if checked.refutes else dict(state.bounds)
    found = {**(state.met if state.is_stopped else {}), **state.found, key: checked.found}
    cutoff = checked.found.answer.objective * state.near
    near = {key: item for key, item in found.items() if item.answer.objective < cutoff or state.is_stopped}
    with suppress(TimeIsUpError):
        near |= beside(state, near, checked.found.answer.objective)
    return _outcome(
        state,
        checked.found,
        near,
        0.0 if checked.refutes else bound,  # Nothing that has been proven can be relied on.
        # What is proven of a smaller problem is not of the whole one.
        certified=checked.certified and key in state.found,
        notes=checked.notes,
        bounds=bounds,
    )


def _outcome(
    state: SearchState,
    winner: Incumbent | None,
    found: dict[Pipeline, Incumbent],
    bound: float,
    *,
    bounds: Mapping[Pipeline, float],
    certified: bool = False,
    notes: tuple[str, ...] = (),
) -> Outcome:
    return Outcome(
        winner=winner,
        found=found,
        bound=bound,
        certified=certified,
        pipelines=len(state.bounds),
        solved=len(state.solved),
        notes=notes,
        is_late=state.is_stopped,
        bounds=bounds,
    )


def _solve_several(state: SearchState, groups: Groups, single: Groups) -> None:
    """Solve pipelines of several stages, with a cutoff assumed as long as there is no incumbent, or only a slow one.

    Args:
        single: Pipelines of a single stage, of which those come first that may be below what is assumed.
    """
    _bound_several(state, groups)
    groups = [group for group in groups if state.bound_of(group) < state.least * state.near * (1 - PRECISION)]
    if not groups:
        return
    lowest = min(map(state.bound_of, groups))
    assumed = [lowest * factor if lowest else np.inf for factor in ASSUMED]
    # With a plan that is known there is something to beat already.
    for cutoff in assumed if state.pipelines.space.offload_ratios and state.below == np.inf else ():
        _solve_resident(state, groups, cutoff)
        if state.least < cutoff or state.is_late:
            break
    for cutoff in assumed:
        if cutoff < state.least < cutoff * CLOSE:
            continue
        _solve(state, single, cutoff)
        _solve(state, groups, cutoff)
        # What was met on the way may take longer than what was assumed, and prove nothing.
        if state.least <= cutoff or state.is_stopped:
            return


def _bound_several(state: SearchState, groups: Groups) -> None:
    """Bound groups as far as it takes to know which may be near the best.

    Far above what the best takes bounds say nothing and take long. So the first is asked for with ever larger cutoffs,
    as in solving them, until its bound is below one; others up to a little more than the least so far.
    """
    # What is as near as this is looked at with all state resident in the end, so that its bound is asked for at once.
    most = state.least * NEAR_RESIDENT
    for place, group in enumerate(_in_order(state, groups)):
        lowest = state.bound_of(group)
        if lowest >= most * (1 - PRECISION):
            continue
        # What is known of another number of microbatches may say little.
        for factor in ASSUMED if lowest and (not place or lowest < most / 2) else (np.inf,):
            below = min(most * BEYOND, lowest * factor * NEAR_RESIDENT if lowest else np.inf)
            bound = state.raise_bound(group, below)
            if bound < below * (1 - PRECISION):
                most = min(most, bound * NEAR_RESIDENT)
                break
            if below == most * BEYOND:
                break


def _in_order(state: SearchState, groups: Groups) -> list[PipelineGroup]:
    """Groups by their bounds, but first that with the most microbatches of those that are likely to have the best."""
    order = sorted(groups, key=lambda item: (state.bound_of(item), item))
    likely = [group for group in order if state.bound_of(group) <= state.bound_of(order[0]) * LIKELY]
    first = max(likely, key=lambda group: group.num_microbatches, default=None)
    return sorted(order, key=lambda group: group != first)


def _solve(state: SearchState, groups: Groups, assumed: float = np.inf) -> None:
    """Solve every pipeline that may take fewer seconds than the cutoff, those with the least bounds first."""

    def cutoff() -> float:
        return min(state.least, assumed) * state.near

    for group in state.nearest(groups, cutoff):
        below = cutoff()
        if state.is_late:
            state.is_stopped = True
            return
        keys = {group.pipeline(count): count for count in group.counts}
        counts = [count for key, count in keys.items() if key not in state.found and state.bounds[key] < below]
        if counts:
            _attempt(state, group, counts, below)


def _attempt(state: SearchState, group: PipelineGroup, counts: list[int], below: float) -> None:
    """Solve some pipelines of a group for answers of fewer seconds than ``below``, and remember what is proven."""
    try:
        answers = state.optima(group, counts, below)
    except TimeIsUpError:
        state.is_stopped = True
        return
    # Where time was up the dynamic program may have stopped before it had proven anything.
    is_proven = not state.is_late
    for key in (group.pipeline(count) for count in counts):
        if key not in answers:
            # A plan with a stage that was left out of the problem takes at least ``below``.
            state.bounds[key] = max(state.bounds[key], below if is_proven else 0.0)
            continue
        state.bounds[key] = max(state.bounds[key], min(below, answers[key].answer.bound))
        if answers[key].answer.is_proven:
            state.found[key] = answers[key]
        else:
            state.meet(key, answers[key])
    state.is_stopped |= not is_proven


def _solve_resident(state: SearchState, groups: Groups, assumed: float) -> None:
    """Solve groups with all state resident: what is found soon is to be beaten by what offloads."""
    state.pipelines.try_ratios(())
    try:
        # Bounds with all state resident are not of the whole space, so that none are raised here.
        for group in sorted(groups, key=lambda item: (state.bound_of(item), item)):
            below = min(state.least, assumed)
            if state.bound_of(group) >= below * (1 - PRECISION) or state.is_late:
                return
            counts = [count for count in group.counts if state.bounds[group.pipeline(count)] < below]
            family = state.pipelines.family(group, counts, below=below)
            if family.heads:
                for count, answer in solve_family(family, below=below, deadline=state.deadline).answers.items():
                    state.meet(group.pipeline(count), Incumbent(problem=family.problem(count), answer=answer))
    finally:
        state.pipelines.try_ratios(state.pipelines.space.offload_ratios, state.end)
