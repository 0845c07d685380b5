"""The outer loop: every number of stages and of microbatches, the best plan of each, the best of all.

Pipelines ``(S, G)`` are taken in the order of a cheap lower bound of their step seconds. Each is solved exactly by the
dynamic program (:mod:`lightning_mist.tuner.bound`); one whose lower bound is no better than the best plan with as many
stages is not solved at all. The winner is solved once more by HiGHS, which starts from the program's answer and adds a
proof of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

import numpy as np

from lightning_mist.cost import StageCostModel, predict_with
from lightning_mist.hardware import Cluster, HardwareProfile, catalog_profile
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Checkpointing, Plan, Predicted, StageMesh, StagePlan, ZeroStage
from lightning_mist.tuner import space as search_space
from lightning_mist.tuner.bound import PRECISION, solve
from lightning_mist.tuner.infeasible import explain_infeasible
from lightning_mist.tuner.inter_stage import solve_program
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.problem import Answer, InterStageProblem
from lightning_mist.tuner.space import SearchSpace, Space, rank_layout
from lightning_mist.units import format_bytes, format_seconds

USABLE_MEMORY = 0.8
"""Share of a device's memory that plans use by default. What a prediction leaves out (context, communicators,
fragmentation) stayed below a quarter of it in all 454 runs of Fujii, Watanabe and Yokota, 2024 (arXiv 2411.06465)."""

CHECK_SECONDS = 5.0
"""The most seconds for which HiGHS checks a proven optimum."""

Status = Literal["optimal", "time limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan of another kind than the chosen one.

    Attributes:
        name: What distinguishes it, for example ``"2 stages"``.
        plan: The plan, with its prediction.
    """

    name: str
    plan: Plan

    @property
    def predicted(self) -> Predicted:
        """Its predicted seconds and bytes."""
        assert self.plan.predicted is not None
        return self.plan.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneStats:
    """How the search went.

    Attributes:
        seconds: Seconds of the whole search.
        candidates: Stage candidates whose seconds and bytes were computed.
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
        plan: The plan, with its prediction.
        status: ``"optimal"`` if no plan of the search space is faster by the cost model, ``"time limit"`` if that could
            not be proven in time.
        bound: No plan of the search space takes fewer seconds per step by the cost model.
        gap: ``(predicted - bound) / predicted``.
        predicted: Predicted seconds and bytes of the plan.
        alternatives: The best plan of every other number of stages, fastest first.
        stats: How the search went.
        notes: What was ruled out and why, and where numbers come from, for people.
    """

    plan: Plan
    status: Status
    bound: float
    gap: float
    predicted: Predicted
    alternatives: tuple[Alternative, ...]
    stats: TuneStats
    notes: tuple[str, ...]

    def explain(self) -> tuple[str, ...]:
        """Why this plan: lines for people."""
        proof = (
            "no plan of the search space is faster by the cost model"
            if self.status == "optimal"
            else f"time was up; a plan could be faster by at most {self.gap:.1%}"
        )
        lines = [
            f"chosen among {self.stats.candidates} stage candidates in {self.stats.pipelines} pipelines: {proof}",
            *(_compare(item, self.predicted.step_seconds) for item in self.alternatives),
            *self.notes,
        ]
        return tuple(lines)


def _compare(item: Alternative, seconds: float) -> str:
    slower = item.predicted.step_seconds / seconds - 1
    peak = max(stage.peak_bytes for stage in item.predicted.stages)
    return (
        f"{item.name} instead: {format_seconds(item.predicted.step_seconds)} per step ({slower:+.1%}), "
        f"peak {format_bytes(peak)}"
    )


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
        memory_limit: Bytes that a plan may use of each device; by default :data:`USABLE_MEMORY` of its memory.
        search: Limits of the search; by default none.

    Raises:
        InfeasibleError: If no plan fits, with the least that any needs and what binds.
        PlanError: If the batch does not come in equal parts from the devices.
        ProfileError: If the profile lacks what the cost model needs.
    """
    began = perf_counter()
    search = search or SearchSpace()
    space = search_space.apply(search, spec, cluster.world_size, global_batch_size)
    model = StageCostModel(spec, profile or catalog_profile(cluster), cluster)
    limit = USABLE_MEMORY * cluster.device.memory_bytes if memory_limit is None else float(memory_limit)
    intra = IntraStage(model, space, limit)
    outcome = _search(intra, space, began + search.solver_seconds)
    if outcome.winner is None:
        explain_infeasible(intra, lambda problem, chosen: make_plan(space, problem, chosen))
    plans = {
        num_stages: _predicted(model, make_plan(space, found.problem, found.answer.chosen))
        for num_stages, found in outcome.best.items()
    }
    plan = plans.pop(outcome.winner)
    assert plan.predicted is not None
    seconds = plan.predicted.step_seconds
    bound = min(outcome.bound, seconds)
    gap = max(0.0, (seconds - bound) / seconds)
    alternatives = [Alternative(name=_stages(count), plan=other) for count, other in plans.items()]
    return TuneResult(
        plan=plan,
        status="optimal" if gap <= 10 * PRECISION else "time limit",
        bound=bound,
        gap=gap,
        predicted=plan.predicted,
        alternatives=tuple(sorted(alternatives, key=lambda item: item.predicted.step_seconds)),
        stats=TuneStats(
            seconds=perf_counter() - began,
            candidates=intra.evaluated,
            pipelines=outcome.pipelines,
            solved=outcome.solved,
        ),
        notes=(*space.notes, *_numbers(model, plan, limit, memory_limit)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    problem: InterStageProblem
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The best answer for every number of stages, the winning number, and a bound over all pipelines."""

    best: dict[int, _Found]
    winner: int | None
    bound: float
    pipelines: int
    solved: int


def _search(intra: IntraStage, space: Space, deadline: float) -> _Outcome:
    pipelines = space.pipelines()
    problems = {key: _problem(intra, space, *key) for key in pipelines}
    lower = {key: _lower_bound(problem) for key, problem in problems.items()}
    best: dict[int, _Found] = {}
    bound, solved = np.inf, 0
    for key in sorted(pipelines, key=lambda item: (lower[item], item)):
        known = best[key[0]].answer.objective if key[0] in best else np.inf
        if lower[key] >= known:
            bound = min(bound, known)
            continue
        if perf_counter() > deadline and best:
            bound = min(bound, lower[key])
            continue
        answer = solve(problems[key], below=known, deadline=deadline)
        solved += 1
        bound = min(bound, answer.bound)
        if answer.chosen:
            best[key[0]] = _Found(problem=problems[key], answer=answer)
    if not best:
        return _Outcome(best=best, winner=None, bound=bound, pipelines=len(pipelines), solved=solved)
    winner = min(best, key=lambda count: (best[count].answer.objective, count))
    checked = solve_program(
        best[winner].problem,
        time_limit=max(0.1, min(CHECK_SECONDS, deadline - perf_counter())),
        incumbent=best[winner].answer,
    )
    if checked.chosen and checked.objective < best[winner].answer.objective:
        best[winner] = _Found(problem=best[winner].problem, answer=checked)
    return _Outcome(best=best, winner=winner, bound=bound, pipelines=len(pipelines), solved=solved)


def _problem(intra: IntraStage, space: Space, num_stages: int, num_microbatches: int) -> InterStageProblem:
    return InterStageProblem(
        num_layers=space.num_layers,
        num_devices=space.world_size,
        num_microbatches=num_microbatches,
        slots=tuple(intra.frontier(index, num_stages, num_microbatches) for index in range(num_stages)),
    )


def _lower_bound(problem: InterStageProblem) -> float:
    """Step seconds that no answer goes below, from rates alone.

    With ``r`` the most layers per second and device that any choice reaches, ``max t >= L / (N r)``; and every layer
    takes at least the least time per layer of any choice.
    """
    if any(not len(slot) for slot in problem.slots):
        return np.inf
    per_layer = [slot.steady_K / np.maximum(slot.layers_K, 1) for slot in problem.slots]
    per_device = [time * slot.devices_K for time, slot in zip(per_layer, problem.slots, strict=True)]
    layers = max(1, problem.num_layers)
    slowest = layers * min(float(time.min()) for time in per_device) / problem.num_devices
    total = layers * min(float(time.min()) for time in per_layer)
    return (problem.num_microbatches - 1) * slowest + max(total, slowest)


def make_plan(space: Space, problem: InterStageProblem, chosen: tuple[int, ...]) -> Plan:
    """The plan that one choice per stage describes."""
    picked = [(slot, index) for slot, index in zip(problem.slots, chosen, strict=True)]
    layout = rank_layout([int(slot.devices_K[index]) for slot, index in picked])
    stages, first = [], 0
    for (slot, index), devices in zip(picked, layout, strict=True):
        end = first + int(slot.layers_K[index])
        stages.append(
            StagePlan(
                layers=(first, end),
                mesh=StageMesh(devices=devices, data_parallel_degree=len(devices)),
                microbatch_size=space.rows(problem.num_microbatches, len(devices)),
                zero_stage=ZeroStage(int(slot.zero_stage_K[index])),
                checkpointing=Checkpointing(layers=int(slot.checkpointed_K[index])),
            )
        )
        first = end
    return Plan(
        global_batch_size=space.batch_rows * space.world_size,
        num_microbatches=problem.num_microbatches,
        stages=tuple(stages),
        schedule=space.search.schedule,
    )


def _predicted(model: StageCostModel, plan: Plan) -> Plan:
    return replace(plan, predicted=predict_with(model, plan))


def _stages(count: int) -> str:
    return "1 stage (data parallel)" if count == 1 else f"{count} stages"


def _numbers(model: StageCostModel, plan: Plan, limit: float, asked: int | None) -> Iterable[str]:
    """Where the numbers behind a plan come from."""
    sources = {model.region_seconds(stage.microbatch_size).source for stage in plan.stages}
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
