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

**Beside the best** the clock and other schedules choose among pipelines that are enumerated on purpose. Which these are
depends on the network, the machine and the question alone: every pipeline whose best plan is near the best of all,
those that are so with all state resident, by their bounds after the search, until there are enough, and the best single
stage to compare with (:func:`beside`). The search solves the first to their proven optima in the whole space.

**Copies.** Pipelines that come in several copies need less memory for the batches that their ranks load: a rank may
have the batches of all ranks of its copy at a time. There are as many copies as the greatest common divisor of the
stages' data-parallel degrees, which no stage knows by itself, so that a search prices every stage with the divisor that
all its arrangements have. Of what does not fit so, something may fit with its own: every plan is one of those whose
degrees are all multiples of some number, and searched among these it is priced with that many copies or more
(:func:`search_copies`).
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from time import thread_time
from typing import TypeAlias

import numpy as np

from lightning_mist.model.spec import ModelSpec, bytes_at
from lightning_mist.tuner.candidates import TimeIsUpError
from lightning_mist.tuner.inter_stage import (
    PRECISION,
    Incumbent,
    Pipeline,
    PipelineGroup,
    check,
    solve,
    solve_each,
    solve_family,
)
from lightning_mist.tuner.options import OPTIONS
from lightning_mist.tuner.search.pipelines import Stages
from lightning_mist.tuner.space import Space, divisors


@dataclass(slots=True, kw_only=True)
class SearchState:
    """What a search has found and proven so far.

    Attributes:
        bounds: Step seconds that no plan of each pipeline goes below.
        deadline: Value of ``thread_time()`` at which to stop.
        patience: The same as long as there is no plan.
        found: The best answers of pipelines, proven of the whole space.
        met: Answers of pipelines that need not be the best.
        below: Step seconds of a plan that is known beforehand.
        is_stopped: Whether some were not because time was up.
    """

    pipelines: Stages
    bounds: dict[Pipeline, float]
    deadline: float
    patience: float
    below: float = np.inf
    found: dict[Pipeline, Incumbent] = field(default_factory=dict)
    met: dict[Pipeline, Incumbent] = field(default_factory=dict)
    solved: set[Pipeline] = field(default_factory=set)
    is_stopped: bool = False

    @classmethod
    def of(cls, pipelines: Stages, deadline: float, below: float, known: Mapping[Pipeline, float]) -> "SearchState":
        """Before anything is found, with ``deadline`` as ``thread_time()`` tells it, and some ``known`` bounds."""
        patience, quick = max(deadline, thread_time() + OPTIONS.first_seconds), pipelines.quick_bounds()
        bounds = {key: max(bound, known.get(key, 0.0)) for key, bound in quick.items()}
        return cls(pipelines=pipelines, bounds=bounds, deadline=deadline, patience=patience, below=below)

    @property
    def end(self) -> float:
        """When time is up."""
        return self.deadline if self.found or self.met else self.patience

    @property
    def is_late(self) -> bool:
        """Whether time is up."""
        return thread_time() > self.end

    @property
    def least(self) -> float:
        """The least step seconds that are known."""
        every = (*self.found.values(), *self.met.values())
        return min([self.below, *(item.answer.objective for item in every)])

    @property
    def near(self) -> float:
        """Multiple of the least step seconds below which every pipeline of the space is solved.

        Where a plan is known beforehand only better ones are: whether there are any is the question.
        """
        if self.below < np.inf:
            return 1.0
        return OPTIONS.near_offloaded if self.pipelines.space.offload_ratios else OPTIONS.near_resident

    @property
    def winner(self) -> tuple[Pipeline, Incumbent] | None:
        """The best answer and its pipeline; of equally good ones that with the fewest stages."""
        every = [*self.found.items(), *self.met.items()]
        return min(every, key=lambda item: (item[1].answer.objective, item[0]), default=None)

    def bound_of(self, group: PipelineGroup) -> float:
        """Step seconds that no plan of a group is known to go below."""
        return min(self.bounds[group.pipeline(count)] for count in group.counts)

    def raise_bound(self, group: PipelineGroup, below: float) -> float:
        """The same with what the memory of stages says, as far as it is less than ``below``."""
        lowest = self.bound_of(group)
        if lowest >= below * (1 - PRECISION) or below == np.inf or group.counts == (1,):
            return lowest
        bound = self.pipelines.lower_bound(group, below, self.end)
        for count in group.counts:
            key = group.pipeline(count)
            self.bounds[key] = max(self.bounds[key], bound)
        return self.bound_of(group)

    def nearest(self, groups: Iterable[PipelineGroup], cutoff: Callable[[], float]) -> Iterator[PipelineGroup]:
        """Groups that may take fewer seconds than a cutoff, those with the least bounds first.

        Bounds are raised as groups come, so that none is that a lower cutoff by then rules out.

        Args:
            cutoff: Seconds, which may fall.
        """
        waiting = [(self.bound_of(group), False, group) for group in groups]
        heapq.heapify(waiting)
        while waiting:
            bound, is_raised, group = heapq.heappop(waiting)
            # What was proven of a pipeline before is so but for rounding.
            if bound >= cutoff() * (1 - PRECISION):
                return
            if is_raised:
                yield group
            else:
                heapq.heappush(waiting, (self.raise_bound(group, cutoff()), True, group))

    def optima(
        self, group: PipelineGroup, counts: list[int], below: float, *, resident: bool = False
    ) -> dict[Pipeline, Incumbent]:
        """The best answers of some numbers of stages of a group that take fewer seconds than ``below``.

        Args:
            resident: Whether all state stays on the device.

        Raises:
            TimeIsUpError: If there is no time left to evaluate their stages.
        """
        self.solved |= {group.pipeline(count) for count in counts}
        if group.counts == (1,):
            problem = self.pipelines.single(group.num_microbatches, below=below, resident=resident, deadline=self.end)
            answers = {1: solve(problem, below=below, deadline=self.deadline)}
            problems = {1: problem}
        else:
            family = self.pipelines.family(group, counts, below=below, resident=resident, deadline=self.end)
            answers = solve_each(family, dict.fromkeys(family.heads, below), deadline=self.deadline)
            problems = {count: family.problem(count) for count in answers}
        return {
            group.pipeline(count): Incumbent(problem=problems[count], answer=answer)
            for count, answer in answers.items()
            if answer.chosen
        }

    def meet(self, key: Pipeline, item: Incumbent) -> None:
        """Remember an answer that need not be the best."""
        if key not in self.met or item.answer.objective < self.met[key].answer.objective:
            self.met[key] = item


COMPARED = OPTIONS.compared
"""Multiple of the best plan's seconds below which the best single stage is known."""


def beside(state: SearchState, near: dict[Pipeline, Incumbent], least: float) -> dict[Pipeline, Incumbent]:
    """Answers of pipelines that are not in ``near``: the best single stage, and others with all state resident.

    Those with the least bounds come first, until there are enough.

    Raises:
        TimeIsUpError: If there is no time left to evaluate their stages.
    """
    pipelines, cutoff = state.pipelines, least * OPTIONS.beside_offloaded
    found = {} if any(key.num_stages == 1 for key in near) else _single(state, min(least * COMPARED, state.below))
    groups = pipelines.groups if pipelines.space.offload_ratios else ()
    for group in sorted(groups, key=lambda item: (state.bound_of(item), item)):
        if len(near) + len(found) >= OPTIONS.enough_near:
            break
        keys = {group.pipeline(count): count for count in group.counts}
        counts = [count for key, count in keys.items() if key not in near | found and state.bounds[key] < cutoff]
        if counts and not state.is_late:
            found |= state.optima(group, counts, cutoff, resident=True)
    return found


def _single(state: SearchState, below: float) -> dict[Pipeline, Incumbent]:
    """The best answer of one stage, if it takes fewer seconds than ``below``."""
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


Groups: TypeAlias = Sequence[PipelineGroup]

_NOTHING: Mapping[Pipeline, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search found.

    Attributes:
        winner: The best answer, if there is a plan.
        found: The best answers of pipelines near the best, and of a single stage to compare with
            (:func:`beside`).
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
    pipelines: Stages, deadline: float, below: float = np.inf, known: Mapping[Pipeline, float] = _NOTHING
) -> Outcome:
    """The best pipeline, proven, those near it, and the best single stage.

    Args:
        deadline: Value of ``thread_time()`` at which to stop with what has been found.
        below: Step seconds of a plan that is known: nothing else is of interest, and need not be found.
        known: Step seconds that no plan of some pipelines is known to go below.
    """
    state = SearchState.of(pipelines, deadline, below, known)
    single = [group for group in pipelines.groups if group.counts == (1,)]
    several = [group for group in pipelines.groups if group.counts != (1,)]
    # One stage has so few choices that what it takes is found at once, to be beaten.
    likely = OPTIONS.likely * min(map(state.bound_of, several), default=np.inf)
    _solve(state, [group for group in single if state.bound_of(group) <= likely])
    _solve_several(state, several, single)
    if state.winner is None and state.is_late:
        # It may fit where nothing else was found in time: there is as much again as there was at least.
        state.patience = thread_time() + OPTIONS.first_seconds
    _solve(state, single)
    outcome = replace(
        Outcome.nothing(len(state.bounds)),
        bound=min(state.bounds.values(), default=np.inf),
        solved=len(state.solved),
        is_late=state.is_stopped,
        bounds=state.bounds,
    )
    if state.winner is None:
        return outcome
    key, winner = state.winner
    checked = check(winner, deadline)
    # Those of what is looked at below are with all state resident.
    bounds = {} if checked.refutes else dict(state.bounds)
    found = {**(state.met if state.is_stopped else {}), **state.found, key: checked.found}
    cutoff = checked.found.answer.objective * state.near
    near = {key: item for key, item in found.items() if item.answer.objective < cutoff or state.is_stopped}
    with suppress(TimeIsUpError):
        near |= beside(state, near, checked.found.answer.objective)
    return replace(
        outcome,
        winner=checked.found,
        found=near,
        bound=0.0 if checked.refutes else outcome.bound,  # Nothing that has been proven can be relied on.
        bounds=bounds,
        # What is proven of a smaller problem is not of the whole one.
        certified=checked.certified and key in state.found,
        notes=checked.notes,
        solved=len(state.solved),
        is_late=state.is_stopped,
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
    assumed = [lowest * factor if lowest else np.inf for factor in (*OPTIONS.assumed, np.inf)]
    # With a plan that is known there is something to beat already.
    for cutoff in assumed if state.pipelines.space.offload_ratios and state.below == np.inf else ():
        _solve_resident(state, groups, cutoff)
        if state.least < cutoff or state.is_late:
            break
    for cutoff in assumed:
        if cutoff < state.least < cutoff * OPTIONS.close:
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
    most = state.least * OPTIONS.near_resident
    for place, group in enumerate(_in_order(state, groups)):
        lowest = state.bound_of(group)
        if lowest >= most * (1 - PRECISION):
            continue
        # What is known of another number of microbatches may say little.
        for factor in (*OPTIONS.assumed, np.inf) if lowest and (not place or lowest < most / 2) else (np.inf,):
            below = min(most * OPTIONS.beyond, lowest * factor * OPTIONS.near_resident if lowest else np.inf)
            bound = state.raise_bound(group, below)
            if bound < below * (1 - PRECISION):
                most = min(most, bound * OPTIONS.near_resident)
                break
            if below == most * OPTIONS.beyond:
                break


def _in_order(state: SearchState, groups: Groups) -> list[PipelineGroup]:
    """Groups by their bounds, but first that with the most microbatches of those that are likely to have the best."""
    order = sorted(groups, key=lambda item: (state.bound_of(item), item))
    likely = [group for group in order if state.bound_of(group) <= state.bound_of(order[0]) * OPTIONS.likely]
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
    # Bounds with all state resident are not of the whole space, so that none are raised here.
    for group in sorted(groups, key=lambda item: (state.bound_of(item), item)):
        below = min(state.least, assumed)
        if state.bound_of(group) >= below * (1 - PRECISION) or state.is_late:
            return
        counts = [count for count in group.counts if state.bounds[group.pipeline(count)] < below]
        family = state.pipelines.family(group, counts, below=below, resident=True)
        if family.heads:
            for count, answer in solve_family(family, below=below, deadline=state.deadline).answers.items():
                state.meet(group.pipeline(count), Incumbent(problem=family.problem(count), answer=answer))


_NOTE = (
    "pipelines in several copies were looked for apart, as each loads the batches of its own ranks only; HiGHS has not "
    "checked them all"
)


def search_copies(
    look: Callable[[Space, float, float], tuple[Stages, Outcome]], spec: ModelSpec, space: Space
) -> tuple[Stages, Outcome]:
    """The best pipeline, of those in several copies too.

    Args:
        look: Searches a space with so many more bytes on each device, for plans below so many seconds.
    """
    stages, outcome = look(space, 0.0, inf)
    copies, saved = degrees_of_copies(space), most_saved(spec, space)
    matters = outcome.winner is None or saved / stages.memory_limit > OPTIONS.batches_matter
    if outcome.is_late or not copies or not matters:
        return stages, outcome
    # Whatever fits with the batches of its own copy fits with so many more bytes.
    _, loose = look(space, saved, outcome.least)
    if loose.least >= outcome.least * (1 - PRECISION):
        bound = min(outcome.bound, loose.bound)
        return stages, replace(outcome, bound=bound, is_late=loose.is_late)
    degrees = (replace(space.search, data_parallel_degrees=item) for item in copies)
    every = [(stages, outcome), *(look(replace(space, search=search), 0.0, outcome.least) for search in degrees)]
    is_late = any(item.is_late for _, item in every)
    bound = min(item.bound for _, item in every)
    stages, best = min(every, key=lambda item: item[1].least)
    notes = (*best.notes, _NOTE) if best.winner is not None else best.notes
    return stages, replace(best, bound=bound, certified=False, notes=notes, is_late=is_late)


def degrees_of_copies(space: Space) -> tuple[tuple[int, ...], ...]:
    """Data-parallel degrees that pipelines in several copies may have: those that are multiples of 2, of 3, ..

    Returns:
        Sets of degrees, each other than that of all; none where stages are priced with their own batches anyway.
    """
    degrees = space.data_degrees()
    numbers = sorted({number for degree in degrees for number in divisors(degree)} - {1})
    found = dict.fromkeys(tuple(degree for degree in degrees if degree % number == 0) for number in numbers)
    # One stage is one of all devices, and several have at most half of them on some.
    fit = (item for item in found if 2 * min(item) <= space.world_size and item != degrees)
    return tuple(fit) if max(space.stage_counts, default=1) > 1 else ()


def most_saved(spec: ModelSpec, space: Space) -> float:
    """Bytes by which a stage's own batches may be less than those that it is priced with, at most."""
    loaders, length = space.data_parallel_size, spec.sequence_length or 1
    if loaders is None:  # every copy loads one batch, of all rows at most
        return float(bytes_at(spec.batch_bytes, space.global_batch_size, length))
    return float((loaders - 1) * bytes_at(spec.batch_bytes, space.global_batch_size // loaders, length))
