"""The outer loop: every number of stages and of microbatches, the best plan of each, the best of all.

Pipelines ``(S, G)`` are taken in the order of a cheap lower bound of their step seconds, until it is no better than the
best plan found. Each is solved exactly by the dynamic program (:mod:`lightning_mist.tuner.bound`), and the winner once
more by HiGHS, which starts from that answer. All this is about the closed form of the step
(:mod:`lightning_mist.cost.pipeline`). The best answers that were found on the way, one for every pipeline, are then run
on the clock, and the fastest there is the winner. Other schedules are tried on the pipelines that were found
(:mod:`lightning_mist.tuner.variants`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from lightning_mist.cost import StageCostModel, predict_with
from lightning_mist.hardware import Cluster, HardwareProfile, catalog_profile
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Checkpointing, Plan, StagePlan, ZeroStage
from lightning_mist.plan.layout import rank_layout
from lightning_mist.tuner import space as search_space
from lightning_mist.tuner.bound import PRECISION, solve
from lightning_mist.tuner.budget import USABLE_MEMORY, usable_bytes
from lightning_mist.tuner.infeasible import explain_infeasible
from lightning_mist.tuner.inter_stage import solve_program
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.problem import Answer, InterStageProblem
from lightning_mist.tuner.result import Alternative, Status, TuneResult, TuneStats
from lightning_mist.tuner.space import SearchSpace, Space
from lightning_mist.tuner.variants import best_variant, refuse_without_variant
from lightning_mist.units import format_bytes

CHECK_SECONDS = 5.0
"""The most seconds for which HiGHS checks a proven optimum."""

CLOCKED = 8
"""Pipelines that are run on the clock, the best by the closed form."""

LEAST_GAIN = 0.01
"""Share of the step that another schedule than that of the exact search must gain by the cost model to be chosen: less
than this lies between runs of one and the same plan (the steps of DDP in the record
``throughput-against-ddp_amd-epyc-2-cores_202611.json``, but for one outlier)."""


def tune(
    spec: ModelSpec,
    cluster: Cluster,
    *,
    profile: HardwareProfile | None = None,
    global_batch_size: int,
    memory_limit: int | None = None,
    search: SearchSpace | None = None,
) -> TuneResult:
    """The fastest plan that fits.

    Args:
        spec: The network.
        cluster: The devices.
        profile: How fast they are; by default from the catalog.
        global_batch_size: Rows that one Lightning batch brings over all devices.
        memory_limit: Bytes of each device that may be used in all; see :func:`usable_bytes`.
        search: Limits of the search; by default none.

    Raises:
        InfeasibleError: If no plan fits, with the least that any needs and what binds.
        PlanError: If the batch does not come in equal parts from the devices.
        ProfileError: If the profile lacks what the cost model needs.
    """
    began, search = perf_counter(), search or SearchSpace()
    near = cluster.devices_per_node
    space = search_space.apply(search, spec, cluster.world_size, global_batch_size, devices_per_node=near)
    intra = stages_of(space, spec, cluster, profile, memory_limit)
    model, limit = intra.model, intra.memory_limit
    outcome = _search(intra, space, began + search.solver_seconds)
    if outcome.winner is None:
        explain_infeasible(intra, lambda problem, chosen: make_plan(space, problem, chosen))
    clocked = _clocked(model, space, outcome)
    plans = dict(clocked.plans)
    chosen = _with_schedule(intra, plans, plans.pop(clocked.best))
    plan, least = chosen.plan, outcome.best[outcome.winner].answer.objective
    bound = min(outcome.bound, least)
    gap = max(0.0, (least - bound) / least)
    alternatives = [Alternative(name=_stages(count), plan=other) for count, other in plans.items()]
    if plan is not chosen.base and space.schedule in search.schedules:
        alternatives.append(Alternative(name=space.schedule, plan=chosen.base))
    status: Status = "optimal" if gap <= 10 * PRECISION else "time limit"
    assert plan.predicted is not None
    return TuneResult(
        plan=plan,
        status=status if plan is chosen.base else "explored",
        bound=bound,
        gap=gap,
        closed_form_seconds=clocked.closed_form_seconds,
        predicted=plan.predicted,
        alternatives=tuple(sorted(alternatives, key=lambda item: item.predicted.step_seconds)),
        stats=TuneStats(
            seconds=perf_counter() - began,
            candidates=intra.evaluated,
            pipelines=outcome.pipelines,
            solved=outcome.solved,
        ),
        notes=(*space.notes, *clocked.notes, *chosen.notes, *_numbers(model, plan, limit, memory_limit)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The plan, the one of the exact search that it competed with, and what to say of other schedules."""

    plan: Plan
    base: Plan
    notes: tuple[str, ...] = ()


def _with_schedule(intra: IntraStage, others: Mapping[int, Plan], base: Plan) -> _Chosen:
    """The best plan of the exact search, or one under another schedule that gains by it."""
    space = intra.space
    tried = tuple(name for name in space.search.schedules if name not in ("1f1b", "gpipe"))
    if not tried:
        return _Chosen(plan=base, base=base)
    is_asked = space.schedule in space.search.schedules
    below = _seconds(base) * (1 - LEAST_GAIN) if is_asked else np.inf
    found = best_variant(intra.model, space, intra.memory_limit, [base, *others.values()], below=below)
    if not is_asked:
        return _Chosen(plan=found if found is not None else refuse_without_variant(tried), base=base)
    if found is not None and _seconds(found) <= below:
        return _Chosen(plan=found, base=base)
    note = f"no pipeline that was tried gains {LEAST_GAIN:.0%} under {' or '.join(tried)}"
    return _Chosen(plan=base, base=base, notes=(note,) if base.num_stages > 1 else ())


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


def stages_of(
    space: Space, spec: ModelSpec, cluster: Cluster, profile: HardwareProfile | None, memory_limit: int | None
) -> IntraStage:
    """What stages may be and cost; the same for a search and for what it is compared with."""
    model = StageCostModel(spec, profile or catalog_profile(cluster), cluster)
    return IntraStage(model, space, usable_bytes(cluster, memory_limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    problem: InterStageProblem
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """Answers by number of stages, by pipeline, the winning number of stages, and a bound over all pipelines."""

    best: dict[int, _Found]
    found: dict[tuple[int, int], _Found]
    winner: int | None
    bound: float
    pipelines: int
    solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clocked:
    """The plan of each number of stages that is fastest on the clock, the fastest of all, and notes."""

    plans: dict[int, Plan]
    best: int
    closed_form_seconds: float
    notes: tuple[str, ...]


def _clocked(model: StageCostModel, space: Space, outcome: _Outcome) -> _Clocked:
    """Run the best answers by the closed form on the clock."""
    assert outcome.winner is not None
    near = sorted(outcome.found.values(), key=lambda found: found.answer.objective)[:CLOCKED]
    best: dict[int, tuple[Plan, float]] = {}
    first: Plan | None = None
    for found in (outcome.best[outcome.winner], *outcome.best.values(), *near):
        plan = _predicted(model, make_plan(space, found.problem, found.answer.chosen))
        first = first or plan
        if plan.num_stages not in best or _seconds(plan) < _seconds(best[plan.num_stages][0]):
            best[plan.num_stages] = plan, found.answer.objective
    assert first is not None
    winner, seconds = min(best.values(), key=lambda item: _seconds(item[0]))
    gain = 1 - _seconds(winner) / _seconds(first)
    note = (
        f"{_stages(winner.num_stages)} with {winner.num_microbatches} microbatches take {gain:.1%} less on the clock "
        "than the best plan by the closed form"
    )
    return _Clocked(
        plans={count: plan for count, (plan, _) in best.items()},
        best=winner.num_stages,
        closed_form_seconds=seconds,
        notes=(note,) if gain > 0 else (),
    )


def _search(intra: IntraStage, space: Space, deadline: float) -> _Outcome:
    """The best pipeline, proven; and good ones with other numbers of stages."""
    pipelines = space.pipelines()
    best: dict[int, _Found] = {}
    tally = _Tally(least=np.inf, bound=np.inf, solved=0)
    lower = {key: _quick_bound(intra, space, *key) for key in pipelines}
    ordered = sorted(pipelines, key=lambda key: (lower[key], key))
    for key in ordered:
        if lower[key] >= tally.least:
            tally.bound = min(tally.bound, lower[key])
            break
        if perf_counter() > deadline and best:
            tally.bound = min(tally.bound, lower[key])
            break
        _attempt(intra, space, key, best, tally, below=tally.least, deadline=deadline)
    if not best:
        return _outcome(best, tally, None, tally.bound, len(pipelines))
    winner = min(best, key=lambda count: (best[count].answer.objective, count))
    checked = solve_program(
        best[winner].problem,
        time_limit=max(0.1, min(CHECK_SECONDS, deadline - perf_counter())),
        incumbent=best[winner].answer,
    )
    if checked.chosen and checked.objective < best[winner].answer.objective:
        best[winner] = _Found(problem=best[winner].problem, answer=checked)
        tally.found[winner, best[winner].problem.num_microbatches] = best[winner]
    bound = tally.bound
    for num_stages in _compared(space, winner):
        for key in (key for key in ordered if key[0] == num_stages):
            known = best[num_stages].answer.objective if num_stages in best else np.inf
            if perf_counter() < deadline and lower[key] < known:
                _attempt(intra, space, key, best, tally, below=known, deadline=deadline)
    shown = {count: found for count, found in best.items() if count in (winner, *_compared(space, winner))}
    return _outcome(shown, tally, winner, bound, len(pipelines))


def _outcome(best: dict[int, _Found], tally: "_Tally", winner: int | None, bound: float, pipelines: int) -> _Outcome:
    return _Outcome(best=best, found=tally.found, winner=winner, bound=bound, pipelines=pipelines, solved=tally.solved)


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Least step seconds found, bound over what was looked at, problems solved, and the last answer of each."""

    least: float
    bound: float
    solved: int
    found: dict[tuple[int, int], _Found] = field(default_factory=dict)


def _attempt(
    intra: IntraStage,
    space: Space,
    key: tuple[int, int],
    best: dict[int, _Found],
    tally: _Tally,
    *,
    below: float,
    deadline: float,
) -> None:
    """Solve one pipeline, if it can be better than ``below``, and remember its answer."""
    problem = _problem(intra, space, *key, below=below)
    # A plan with a stage that was left out of the problem takes at least ``below``.
    bound = min(below, problem.lower_bound())
    if bound < below:
        answer = solve(problem, below=below, deadline=deadline)
        tally.solved += 1
        bound = min(below, answer.bound)
        if answer.chosen:
            best[key[0]] = tally.found[key] = _Found(problem=problem, answer=answer)
            tally.least = min(tally.least, answer.objective)
    tally.bound = min(tally.bound, bound)


def _compared(space: Space, winner: int) -> tuple[int, ...]:
    """Numbers of stages to compare the winner with: none, half, one less, one more, twice as many."""
    wanted = {1, winner // 2, winner - 1, winner + 1, 2 * winner} - {winner}
    return tuple(sorted(count for count in wanted if 1 <= count <= space.max_stages))


def _quick_bound(intra: IntraStage, space: Space, num_stages: int, num_microbatches: int) -> float:
    """Step seconds that no plan of a pipeline goes below, whatever memory it needs.

    Every region takes at least its least time over all numbers of devices that a stage may have, and all devices
    together at least its least time times devices.
    """
    most = space.world_size - num_stages + 1
    shapes = [shape for shape in space.shapes(num_microbatches) if shape.devices <= most]
    if num_stages == 1:
        shapes = [shape for shape in shapes if shape.devices == space.world_size]
    seconds = [
        intra.model.region_seconds(space.rows(num_microbatches, shape.data), shape.tensor, shape.sequence)
        for shape in shapes
    ]
    region_NR = np.stack([item.forward_R + item.backward_R for item in seconds])
    devices_N1 = np.array([shape.devices for shape in shapes])[:, None]
    slowest = float((region_NR * devices_N1).min(axis=0).sum()) / space.world_size
    total = float(region_NR.min(axis=0).sum())
    return (num_microbatches - 1) * slowest + max(total, slowest)


def _problem(
    intra: IntraStage, space: Space, num_stages: int, num_microbatches: int, *, below: float
) -> InterStageProblem:
    """The choices of every stage, without those that only plans of at least ``below`` seconds can have.

    A pipeline takes at least ``G`` times the steady time of any of its stages.
    """
    slowest = below / num_microbatches
    return InterStageProblem(
        num_layers=space.num_layers,
        num_devices=(space.world_size,),
        num_microbatches=num_microbatches,
        slots=tuple(intra.frontier(index, num_stages, num_microbatches, slowest) for index in range(num_stages)),
    )


def make_plan(space: Space, problem: InterStageProblem, chosen: tuple[int, ...]) -> Plan:
    """The plan that one choice per stage describes."""
    picked = [(slot, index) for slot, index in zip(problem.slots, chosen, strict=True)]
    shapes = [slot.shape(index) for slot, index in picked]
    layout = rank_layout([(shape.data, shape.tensor) for shape in shapes], space.devices_per_node)
    stages, first = [], 0
    for (slot, index), shape, devices in zip(picked, shapes, layout, strict=True):
        end = first + int(slot.layers_K[index])
        stages.append(
            StagePlan(
                layers=(first, end),
                mesh=shape.mesh(devices),
                microbatch_size=space.rows(problem.num_microbatches, shape.data),
                zero_stage=ZeroStage(int(slot.zero_stage_K[index])),
                checkpointing=Checkpointing(layers=int(slot.checkpointed_K[index])),
            )
        )
        first = end
    return Plan(
        global_batch_size=space.batch_rows * space.world_size,
        num_microbatches=problem.num_microbatches,
        stages=tuple(stages),
        schedule=space.schedule,
    )


def _predicted(model: StageCostModel, plan: Plan) -> Plan:
    return replace(plan, predicted=predict_with(model, plan))


def _stages(count: int) -> str:
    return "1 stage (data parallel)" if count == 1 else f"{count} stages"


def _numbers(model: StageCostModel, plan: Plan, limit: float, asked: int | None) -> Iterable[str]:
    """Where the numbers behind a plan come from."""
    sources = {model.region_seconds(stage.microbatch_size).source for stage in plan.stages}
    if any(stage.mesh.tensor_parallel_degree > 1 for stage in plan.stages) and model.spec.seconds:
        yield "seconds of split layers shrink as their FLOPs and bytes do; tensor parallelism is not measured"
    words = {
        "rates": f"seconds of layers follow from FLOPs and bytes and the profile's rates ({model.profile.source})",
        "extrapolated": "seconds of layers are extrapolated from measured microbatch sizes",
        "measured": "seconds of layers are measured",
    }
    yield from (words[name] for name in words if name in sources)
    if asked is None:
        yield (
            f"memory_limit is {format_bytes(limit)} per device, {USABLE_MEMORY:.0%} of the memory of "
            f"{model.cluster.device.name}"
        )
    elif limit < asked:
        yield (
            f"tensors may take {format_bytes(limit)} per device, {USABLE_MEMORY:.0%} of memory_limit: the rest is for "
            "the context, communicators and what the allocator keeps free"
        )
