"""From the best pipelines of a search to the plan: on the clock, with other schedules, the simplest of equals.

All pipelines near the best by the closed form (:mod:`lightning_mist.tuner.search.search_loop`) are run on the clock,
and the fastest there is the best. Other schedules are tried on them
(:mod:`lightning_mist.tuner.select.schedule_variants`), interleaved 1F1B also on equal stages
(:mod:`lightning_mist.tuner.select.equal_stages`). Where one of them gains, it does without savings that nothing is lost
by. Where none does, the simplest of the plans is taken that cannot be told apart from the fastest (:data:`Simplicity`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from lightning_mist.cost import CostModel, least_seconds, predictions, seconds_with
from lightning_mist.hardware import AnyCluster
from lightning_mist.plan import Plan, Predicted, StagePlan, ZeroStage
from lightning_mist.plan.changes import OFFLOADS, ZERO, anywhere, burdens
from lightning_mist.plan.grid import rank_layout, rank_layouts
from lightning_mist.plan.plan_tables import counted
from lightning_mist.tuner.inter_stage import PRECISION, InterStageProblem
from lightning_mist.tuner.options import OPTIONS
from lightning_mist.tuner.search import Outcome, Stages, layout_of
from lightning_mist.tuner.select.equal_stages import even_chunks
from lightning_mist.tuner.select.schedule_variants import PlanRoom, best_variant, clocked, refuse_without_variant
from lightning_mist.tuner.space import Space
from lightning_mist.units import format_bytes, format_seconds

Status = Literal["optimal", "explored", "time limit"]

CERTIFIED = (
    "HiGHS certifies that no plan with as many stages and microbatches as the best by the closed form is faster by it "
    "than that one"
)
"""What is said if HiGHS has proven its part."""

UNCERTIFIED = "HiGHS has not certified it"
"""What is said if it has not."""

CLOSED_FORM_AND_CLOCK = (
    "the closed form is the formula of a step's seconds that the search minimises; the clock runs a plan's schedule "
    "action by action, and predicted steps are the clock's"
)
"""What the two kinds of seconds are."""

LEAST_SHARE = 5e-4
"""A share of the seconds that shows in figures with one decimal of a percent."""


def status_of(gap: float) -> Status:
    """What a search has proven that may have left out faster plans by a share of their seconds."""
    return "optimal" if gap <= 10 * PRECISION else "time limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan of another kind than the chosen one.

    Attributes:
        name: What distinguishes it, for example ``"2 stages"``.
    """

    name: str
    plan: Plan

    @property
    def predicted(self) -> Predicted:
        """Its predicted seconds and bytes."""
        return self.plan.prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneStats:
    """How the search went.

    Attributes:
        seconds: Seconds that the whole search computed.
        candidates: Stage candidates whose seconds and bytes were looked at.
        pipelines: Pairs of stage and microbatch counts in the search space.
        solved: Pairs that had to be solved.
    """

    seconds: float
    candidates: int
    pipelines: int
    solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The best plan and why.

    Attributes:
        status: ``"optimal"`` if no plan of the search space under the schedule of the exact search (1F1B or GPipe) is
            faster by the closed form of the cost model than the best that was found, of the plans that were run on the
            clock (all near the best by the closed form, :mod:`lightning_mist.tuner.search.search_loop`) none is faster
            there than the chosen one, or by so little that they cannot be told apart, and is not as simple
            (:data:`Simplicity`); and no other schedule gains on them. ``"explored"`` if another schedule gained: it is
            the fastest that was tried. ``"time limit"`` if time was up before a proof.
        bound: No plan under the schedule of the exact search takes fewer seconds by the closed form, as the dynamic
            program has proven for all numbers of stages and of microbatches.
        gap: How far the best plan by the closed form may be above the bound, as a share of its seconds. About seconds
            on the clock, which ``predicted`` has, nothing is proven; nor has the chosen plan to be the best by the
            form.
        closed_form_seconds: The plan's seconds by the closed form; under another schedule those of the plan under the
            schedule of the exact search that it competed with.
        alternatives: The best plans of other numbers of stages, fastest first: of those that take at most 5 %
            longer by the closed form than the best of all, with state in host memory at most 1 %, and the best
            single stage where it takes at most a quarter longer. The fastest half dozen are kept, and that one.
        notes: What was ruled out and why, and where numbers come from, for people.
        certified: Whether HiGHS has proven the same once more of the best plan's numbers of stages and of microbatches:
            that none with these is faster by more than a billionth. Its program leaves out stages that by the least
            sums of steady times in front of them and behind them cannot belong to such a plan.
        is_late: Whether time was up before all was looked at.
    """

    plan: Plan
    status: Status
    bound: float
    gap: float
    closed_form_seconds: float
    alternatives: tuple[Alternative, ...]
    stats: TuneStats
    notes: tuple[str, ...]
    certified: bool = False
    is_late: bool = False

    @property
    def predicted(self) -> Predicted:
        """Predicted seconds and bytes of the plan."""
        return self.plan.prediction

    @property
    def is_proven(self) -> bool:
        """Whether the search has shown that there is none better of what it looks at."""
        return self.status in ("optimal", "explored") and self.gap <= 10 * PRECISION

    @property
    def proof(self) -> tuple[str, ...]:
        """How sure it is that the plan is the best: lines for people."""
        # The clock may have chosen another plan than the best by the closed form, which is what is proven of.
        behind = 1 - self.bound / self.closed_form_seconds if self.closed_form_seconds > 0 else 0.0
        least = min((item.predicted.step_seconds for item in self.alternatives), default=np.inf)
        clock = "more" if least >= self.predicted.step_seconds else "none so much that it could be told"
        proof = {
            "optimal": "no plan of the search space is faster by the closed form of the cost model"
            if behind < LEAST_SHARE
            else f"by the closed form of the cost model another plan takes {behind:.1%} less, on the clock {clock}",
            "explored": f"{self.plan.schedule} gains on the pipelines that it was tried on; others may gain more"
            if self.bound > 0
            else "it is the fastest that was tried; of others nothing is proven",
            "time limit": f"time was up; by the closed form a plan could be faster by at most {behind:.1%}",
        }[self.status]
        looked = f"chosen among {self.stats.candidates:,} stage candidates in {self.stats.pipelines:,} pipelines"
        return f"{looked}: {proof}", CERTIFIED if self.certified else UNCERTIFIED

    @property
    def compared(self) -> tuple[str, ...]:
        """The plans of other kinds beside the chosen one: lines for people."""
        return tuple(_compare(item, self.predicted.step_seconds) for item in self.alternatives)

    def explain(self) -> tuple[str, ...]:
        """Why this plan: lines for people."""
        return (*self.proof, *self.compared, *self.notes)


def _compare(item: Alternative, seconds: float) -> str:
    slower = item.predicted.step_seconds / seconds - 1
    peak = max(stage.peak_bytes for stage in item.predicted.stages)
    return (
        f"{item.name} instead: {format_seconds(item.predicted.step_seconds)} per step ({slower:+.1%}), "
        f"peak {format_bytes(peak)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """A plan in all its layouts.

    Attributes:
        plans: The plan, and the same in its other layouts.
        floors: Seconds that a step of each takes at least.
    """

    plans: tuple[Plan, ...]
    floors: tuple[float, ...]

    @property
    def floor(self) -> float:
        """Seconds that a step takes at least in any layout."""
        return min(self.floors)

    def fastest(self, model: CostModel, best: float = np.inf) -> tuple[Plan, float]:
        """The plan in the fastest of its layouts, the first of those that take as long, and its seconds on the clock.

        Args:
            best: Step seconds of another plan. If this one is slower by more than a layout can gain it stays as it is.
        """
        plan, *others = self.plans
        least = seconds_with(model, plan)
        if least * (1 - OPTIONS.layout_gain) > best:
            return plan, least
        for other, floor in zip(others, self.floors[1:], strict=True):
            if floor < least and (seconds := seconds_with(model, other)) < least:
                plan, least = other, seconds
        return plan, least


def in_every_layout(model: CostModel, plans: Sequence[Plan]) -> list[Layouts]:
    """Some plans in all their layouts; on unlike devices, or with context parallelism, they stay as they are."""
    every = [(plan, *_others(model, plan)) for plan in plans]
    floors = iter(least_seconds(model, [item for found in every for item in found]))
    return [Layouts(plans=found, floors=tuple(next(floors) for _ in found)) for found in every]


def _others(model: CostModel, plan: Plan) -> tuple[Plan, ...]:
    meshes = [stage.mesh for stage in plan.stages]
    is_settled = len(meshes) == 1 or any(mesh.context_parallel_degree > 1 for mesh in meshes)
    if is_settled or len(model.cluster.parts) > 1:
        return ()
    degrees = [(mesh.data_parallel_degree, mesh.tensor_parallel_degree) for mesh in meshes]
    found = []
    for layout in rank_layouts(degrees, model.cluster.devices_per_node):
        if any(mesh.devices != devices for mesh, devices in zip(meshes, layout, strict=True)):
            stages = tuple(
                replace(stage, mesh=replace(stage.mesh, devices=devices))
                for stage, devices in zip(plan.stages, layout, strict=True)
            )
            found.append(replace(plan, stages=stages))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clocked:
    """A plan of the exact search, its seconds on the clock and by the closed form."""

    plan: Plan
    seconds: float
    closed_form_seconds: float


def choose(stages: Stages, outcome: Outcome, stats: TuneStats) -> TuneResult:
    """The plan that an outcome leads to, with notes on how it was chosen.

    Args:
        stages: What stages may be and cost.
        outcome: What the search has found, at least one answer.
        stats: How the search went.

    Raises:
        InfeasibleError: If only other schedules are asked for, and nothing fits under these.
    """
    found = _on_the_clock(stages, outcome)
    best: dict[int, _Clocked] = {}
    for item in found:
        count = item.plan.num_stages
        if count not in best or item.seconds < best[count].seconds:
            best[count] = item
    shown = {1, *sorted(best, key=lambda count: best[count].seconds)[: OPTIONS.shown]}
    best = {count: item for count, item in best.items() if count in shown}
    plain = fastest = min(best.values(), key=lambda item: item.seconds)
    # Which pipeline gains most under another schedule the closed form does not say.
    others = [item.plan for item in found if item is not fastest]
    space = stages.space
    other, notes = _under_other_schedule(stages, fastest, others)
    if other is None:
        plan = simplest((item.plan, item.seconds) for item in found)
        plain = next(item for item in found if item.plan == plan)
    alternatives = [(stages_in_words(count), item) for count, item in best.items() if count != plain.plan.num_stages]
    if other is not None and space.schedule in space.search.schedules:
        alternatives.append((space.schedule, fastest))
    elif plain.plan.num_stages == fastest.plan.num_stages and plain is not fastest:
        alternatives.append(("the fastest on the clock", fastest))
    alternatives.sort(key=lambda item: item[1].seconds)
    predicted_each = predictions(stages.model, [item.plan for _, item in alternatives])
    assert outcome.winner is not None
    least = outcome.winner.answer.objective
    bound = min(outcome.bound, least)
    gap = max(0.0, (least - bound) / least)
    return TuneResult(
        plan=clocked(stages.model, plain.plan) if other is None else other,
        status=status_of(gap) if other is None else "explored",
        bound=bound,
        gap=gap,
        closed_form_seconds=plain.closed_form_seconds,
        alternatives=tuple(
            Alternative(name=name, plan=replace(item.plan, predicted=predicted))
            for (name, item), predicted in zip(alternatives, predicted_each, strict=True)
        ),
        stats=stats,
        notes=(*outcome.notes, *_clock_notes(found[0], fastest, plain), *notes),
        certified=outcome.certified,
        is_late=outcome.is_late,
    )


def _on_the_clock(stages: Stages, outcome: Outcome) -> list[_Clocked]:
    """The pipelines near the best by the closed form on the clock, the best of all first.

    Those are left out that take so long in any layout that they can be neither the fastest with as many stages nor as
    good as the fastest of all.
    """
    assert outcome.winner is not None
    made: dict[Plan, float] = {}
    for item in (outcome.winner, *outcome.found.values()):
        answer = item.answer
        sooner = ending_sooner(item.problem, answer.chosen)
        for chosen in filter(None, (answer.chosen, *sooner, answer.lower_bottleneck)):
            plan = make_plan(stages.space, item.problem, chosen, stages.model.cluster)
            made.setdefault(plan, item.problem.objective(chosen))
    found: dict[Plan, _Clocked] = {}
    least: dict[int, float] = {}
    for layouts, objective in zip(in_every_layout(stages.model, list(made)), made.values(), strict=True):
        best, count = min(least.values(), default=np.inf), layouts.plans[0].num_stages
        if layouts.floor > max(least.get(count, np.inf), best * (1 + OPTIONS.alike)):
            continue
        plan, seconds = layouts.fastest(stages.model, best)
        found.setdefault(plan, _Clocked(plan=plan, seconds=seconds, closed_form_seconds=objective))
        least[count] = min(seconds, least.get(count, np.inf))
    return list(found.values())


def ending_sooner(problem: InterStageProblem, chosen: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The same stages, each with the least boundary seconds of what takes as long per microbatch, or of all.

    These seconds hide under 1F1B behind the stages in front, as far as the closed form counts; elsewhere less may, and
    of an update in the next first forward hardly anything does. So the others have the least seconds of a whole step.
    """
    found = []
    for slot, index in zip(problem.slots, chosen, strict=True):
        names = ("start_K", "layers_K", "devices_K", "part_K")
        is_alike_K = np.all(
            [values_K == values_K[index] for values_K in (getattr(slot, name) for name in names)], axis=0
        )
        is_fast_K = is_alike_K & (slot.steady_K <= slot.steady_K[index] * (1 + PRECISION))
        alone_K = problem.num_microbatches * slot.steady_K + slot.boundary_K
        pairs = (is_fast_K, slot.boundary_K), (is_alike_K, alone_K)
        found.append([int(np.where(is_there_K, values_K, np.inf).argmin()) for is_there_K, values_K in pairs])
    return tuple(zip(*found, strict=True))


def _clock_notes(first: _Clocked, fastest: _Clocked, chosen: _Clocked) -> tuple[str, ...]:
    """What to say of a plan that is not the best by the closed form, or not the fastest on the clock.

    Args:
        chosen: The simplest of those that cannot be told apart from it.
    """
    notes = []
    gain = 1 - chosen.seconds / first.seconds
    if gain >= LEAST_SHARE:
        notes.append(f"{_named(chosen.plan)} take {gain:.1%} less on the clock than the best plan by the closed form")
    if chosen is not fastest:
        slower = chosen.seconds / fastest.seconds - 1
        notes.append(_simpler_note(chosen.plan, fastest.plan, slower, _named(fastest.plan)))
    return tuple(notes)


def _simpler_note(plan: Plan, other: Plan, slower: float, name: str) -> str:
    # It may even be a little faster.
    compared = "as fast as" if slower < 5e-5 else f"{slower:.2%} slower than"
    return f"the plan, {compared} {name}, is simpler: {why_simpler(plan, other)}"


def _named(plan: Plan) -> str:
    return f"{stages_in_words(plan.num_stages)} with {plan.num_microbatches} microbatches"


def _under_other_schedule(
    stages: Stages, base: _Clocked, others: Sequence[Plan]
) -> tuple[Plan | None, tuple[str, ...]]:
    """The best plan under another schedule than that of the exact search, if it gains by it; and what to say if not.

    Args:
        stages: What stages may be and cost.
        base: The fastest plan of the exact search.
    """
    space = stages.space
    tried = tuple(name for name in space.search.schedules if name not in ("1f1b", "gpipe"))
    if not tried:
        return None, ()
    is_asked = space.schedule in space.search.schedules
    below = base.seconds * (1 - OPTIONS.alike) if is_asked else np.inf
    # Equal stages in chunks are mostly faster, and rule out most others before these are made to fit.
    even = even_chunks(stages.parts[0], below=below) if len(stages.parts) == 1 else None
    least = below if even is None else even.prediction.step_seconds
    room = PlanRoom.of(stages)
    found = best_variant(room, [base.plan, *others], below=least) or even
    if not is_asked and found is None:
        refuse_without_variant(tried)
    if found is not None and (not is_asked or found.prediction.step_seconds <= below):
        plain = drop_savings(room, found)
        slower = plain.prediction.step_seconds / found.prediction.step_seconds - 1
        name = f"the fastest under {found.schedule}"
        return plain, () if plain is found else (_simpler_note(plain, found, slower, name),)
    note = f"no pipeline that was tried gains {OPTIONS.alike:.0%} under {' or '.join(tried)}"
    return None, (note,) if base.plan.num_stages > 1 else ()


def make_plan(
    space: Space, problem: InterStageProblem, chosen: tuple[int, ...], cluster: AnyCluster | None = None
) -> Plan:
    """The plan that one choice per stage describes.

    Args:
        chosen: The index of each stage's choice.
        cluster: The devices; by default equal ones, on nodes as the search space says.
    """
    picked = list(zip(problem.slots, chosen, strict=True))
    shapes = [slot.shape(index) for slot, index in picked]
    degrees = [(shape.data, shape.tensor) for shape in shapes]
    parts = [int(slot.part_K[index]) for slot, index in picked]
    layout = rank_layout(degrees, space.devices_per_node) if cluster is None else layout_of(cluster, degrees, parts)
    stages, first = [], 0
    for (slot, index), shape, devices in zip(picked, shapes, layout, strict=True):
        end = first + int(slot.layers_K[index])
        stages.append(
            StagePlan(
                layers=(first, end),
                mesh=shape.mesh(devices),
                microbatch_size=space.rows(problem.num_microbatches, shape.data),
                zero_stage=ZeroStage(int(slot.zero_stage_K[index])),
                offload=slot.offload(index),
                **shape.method.settings(int(slot.checkpointed_K[index])),
            )
        )
        first = end
    return Plan(
        global_batch_size=space.global_batch_size,
        data_parallel_size=space.loaders(shape.data for shape in shapes),
        num_microbatches=problem.num_microbatches,
        stages=tuple(stages),
        schedule=space.schedule,
    )


def stages_in_words(count: int) -> str:
    """How a number of stages is called."""
    return "1 stage (data parallel)" if count == 1 else f"{count} stages"


ALIKE = OPTIONS.alike
"""A share of the seconds of a step by which plans cannot be told apart."""

Simplicity: TypeAlias = tuple[int, int, int]
"""Numbers of techniques, of different shapes of stages, and of stages: the lesser, the simpler.

A technique is one more thing that takes part in every step and has to work: a kind of state in host memory, a kind of
state that data-parallel ranks share out (a ZeRO stage is as many of these as its number), doing so within groups,
tensor, sequence or context parallelism, recomputation, a schedule with chunks or split backwards.
"""


def shapes(plan: Plan) -> int:
    """How many different stages a plan has: by layers, arrangement of devices, rows and savings."""
    return len(set(map(anywhere, plan.stages)))


def simplicity(plan: Plan) -> Simplicity:
    """How simple a plan is, see :data:`Simplicity`."""
    return len(burdens(plan)), shapes(plan), plan.num_stages


def simplest(plans: Iterable[tuple[Plan, float]]) -> Plan:
    """The simplest of the plans that cannot be told apart from the fastest; of equally simple ones the fastest.

    Args:
        plans: Plans and their seconds on the clock, at least one.
    """
    found = list(plans)
    most = min(seconds for _, seconds in found) * (1 + OPTIONS.alike)
    near = [(plan, seconds) for plan, seconds in found if seconds <= most]
    return min(near, key=lambda item: (simplicity(item[0]), item[1]))[0]


def why_simpler(plan: Plan, other: Plan) -> str:
    """What makes a plan simpler than another, in words: the first thing that counts."""
    own, others = burdens(plan), burdens(other)
    if len(own) < len(others):
        without = " and ".join(name for name in others if name not in own)
        return f"it does without {without}"
    if shapes(plan) < shapes(other):
        return f"it has {counted(shapes(plan), 'kind')} of stages in place of {shapes(other)}"
    return f"it has {counted(plan.num_stages, 'stage')} in place of {other.num_stages}"


def drop_savings(room: PlanRoom, plan: Plan) -> Plan:
    """A predicted plan with as few kinds of state offloaded or shared out as fit and take as long on the clock.

    A plan under another schedule keeps what the pipeline saves that it was made from, which was the best under the
    search's own schedule and by the closed form. Where the other schedule needs less, savings are left over.
    """
    most, best = plan.prediction.step_seconds * (1 + OPTIONS.alike), plan
    while True:
        count = len(burdens(best))
        less = (item for item in _with_less(best, room.space.search.zero_stages) if len(burdens(item)) < count)
        found = next((item for item in less if room.fits(item) and seconds_with(room.model, item) <= most), None)
        if found is None:
            return best if best is plan else clocked(room.model, best)
        best = found


def _with_less(plan: Plan, zero_stages: Sequence[int]) -> Iterator[Plan]:
    """Plans that offload one kind of state less, then those that share out less."""
    for saving in OFFLOADS.values():
        yield saving.at_most(plan, 0.0)
    for most in sorted(zero_stages):
        less = ZERO.at_most(plan, most)
        if all(item.zero_stage in zero_stages for item in less.stages):
            yield less
