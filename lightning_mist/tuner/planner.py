"""A planner of one network on one machine, which may be asked again.

The pipelines of a search (:mod:`lightning_mist.tuner.search`) are solved by the closed form of the step. The best
answers that were found on the way, one for every pipeline, are then run on the clock, and the fastest there is the
winner. Other schedules are tried on the pipelines that were found (:mod:`lightning_mist.tuner.variants`), interleaved
1F1B also on stages that are all alike (:mod:`lightning_mist.tuner.uniform`).
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from lightning_mist.cost import (
    CostModel,
    MixedCostModel,
    Profiles,
    StageCostModel,
    cost_model,
    predict_with,
    profiles_of,
)
from lightning_mist.errors import PlanError
from lightning_mist.hardware import AnyCluster, Cluster, HardwareProfile, MixedCluster
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Checkpointing, Plan, StagePlan, ZeroStage
from lightning_mist.plan.layout import rank_layout
from lightning_mist.tuner import space as search_space
from lightning_mist.tuner.bound import PRECISION
from lightning_mist.tuner.budget import USABLE_MEMORY, host_bytes_of_each, host_notes, usable_bytes
from lightning_mist.tuner.copies import search_copies
from lightning_mist.tuner.families import GridCosts
from lightning_mist.tuner.infeasible import explain_infeasible, refuse_late
from lightning_mist.tuner.intra_stage import IntraStage, TableKey
from lightning_mist.tuner.least_runs import LeastRuns
from lightning_mist.tuner.mixed import MixedStages, Stages, mixed_layout, mixed_stages
from lightning_mist.tuner.mixed_search import search_mixed
from lightning_mist.tuner.past import Past, Pasts
from lightning_mist.tuner.pieces import Pieces
from lightning_mist.tuner.problem import InterStageProblem
from lightning_mist.tuner.result import Alternative, Status, TuneResult, TuneStats
from lightning_mist.tuner.search import Outcome, search_pipelines
from lightning_mist.tuner.space import SearchSpace, Space
from lightning_mist.tuner.tables import Table
from lightning_mist.tuner.uniform import even_chunks
from lightning_mist.tuner.variants import best_variant, refuse_without_variant
from lightning_mist.units import format_bytes

CLOCKED = 12
"""Pipelines that are run on the clock, the best by the closed form."""
KEPT = 4
"""Search spaces whose candidates are kept."""

_Kept = tuple[dict[TableKey, Table], dict[Hashable, GridCosts], dict[int, LeastRuns]]
"""What is known of a search space: candidates, those of equal stages, what stages take at least."""

LEAST_GAIN = 0.01
"""Share of the step that another schedule than that of the exact search must gain by the cost model to be chosen: less
than this lies between runs of one and the same plan (the steps of DDP in the record
``throughput-against-ddp_amd-epyc-2-cores_202611.json``, but for one outlier)."""


class Planner:
    """Finds plans for one network on one machine; keeps what it has computed from one question to the next.

    Args:
        spec: The network.
        cluster: The devices.
        profile: How fast they are, one profile for every part of a cluster of unlike devices; by default from the
            catalog.
    """

    def __init__(self, spec: ModelSpec, cluster: AnyCluster, *, profile: Profiles = None) -> None:
        self.spec, self.cluster = spec, cluster
        self.model = cost_model(spec, profile, cluster)
        self._tables: dict[Space, _Kept] = {}
        self._pasts, self._pieces = Pasts(), Pieces()

    @property
    def alike(self) -> StageCostModel:
        """What stages cost on any of the devices, if they are all alike.

        Raises:
            PlanError: If they are not.
        """
        if isinstance(self.model, MixedCostModel):
            raise PlanError(
                f"cluster {self.cluster.text}: stages cost the same on any device only if all are alike; name one of "
                "its parts"
            )
        return self.model

    @property
    def profile(self) -> HardwareProfile | tuple[HardwareProfile, ...]:
        """How fast the devices are, of every part if they are unlike."""
        return self.model.profiles if isinstance(self.model, MixedCostModel) else self.model.profile

    def space(self, global_batch_size: int, search: SearchSpace | None = None) -> Space:
        """The search space at a batch size.

        Raises:
            PlanError: If the batch does not come in equal parts from the devices.
        """
        near = self.cluster.devices_per_node
        found = search_space.apply(
            search or SearchSpace(), self.spec, self.cluster.world_size, global_batch_size, devices_per_node=near
        )
        if found.search.offload and not all(map(_knows_copies, profiles_of(self.model), self.cluster.parts)):
            note = "without offload: how fast devices copy from and to the host is not known"
            found = replace(found, search=replace(found.search, offload=()), notes=(*found.notes, note))
        return found

    def stages(
        self,
        space: Space,
        memory_limit: int | None = None,
        host_memory_limit: int | None = None,
        more: float = 0.0,
    ) -> IntraStage:
        """What stages may be and cost; the same for a search and for what it is compared with.

        Args:
            space: The search space.
            memory_limit: Bytes of each device that may be used in all.
            host_memory_limit: Bytes of host memory of each node that offloading may take.
            more: Bytes that tensors may take on each device beyond that.

        Raises:
            PlanError: If the devices are unlike.
        """
        model = self.alike
        limit, host = usable_bytes(model.cluster, memory_limit), host_bytes_of_each(model.cluster, host_memory_limit)
        (tables, grids, runs), pieces, limit = self._tables_of(space), self._pieces, limit + more
        return IntraStage(model, space, limit, host_limit=host, tables=tables, grids=grids, runs=runs, pieces=pieces)

    def _look(
        self, space: Space, limits: tuple[int | None, int | None], deadline: float, more: float = 0.0
    ) -> tuple[Stages, Outcome]:
        """Search the pipelines, with so many more bytes on each device."""
        if isinstance(self.model, MixedCostModel):
            mixed = mixed_stages(self.model, space, *limits, more)
            return mixed, search_mixed(mixed, deadline)
        intra = self.stages(space, *limits, more)
        outcome = search_pipelines(intra, space, deadline, self._pasts.of(space))
        self._pasts.add(space, Past.of(intra.both_limits, outcome.bounds, tuple(outcome.found.values())))
        return intra, outcome

    def _tables_of(self, space: Space) -> _Kept:
        """What is known of a search space, of any stages and equal ones; those asked for longest ago are forgotten.

        Stages of a number of microbatches cost the same whichever such numbers, numbers of stages and schedules
        beside that of the exact search are looked at, and for how long.
        """
        looked = replace(
            space.search,
            max_stages=None,
            num_stages=None,
            num_microbatches=None,
            schedules=(space.schedule,),
            chunks=SearchSpace().chunks,
            solver_seconds=SearchSpace().solver_seconds,
        )
        key = replace(space, search=looked, max_stages=space.world_size, notes=())
        self._tables[key] = tables = self._tables.pop(key, ({}, {}, {}))
        while len(self._tables) > KEPT:
            del self._tables[next(iter(self._tables))]
        return tables

    def tune(
        self,
        *,
        global_batch_size: int,
        memory_limit: int | None = None,
        host_memory_limit: int | None = None,
        search: SearchSpace | None = None,
    ) -> TuneResult:
        """The fastest plan that fits.

        Args:
            global_batch_size: Rows that one Lightning batch brings over all devices.
            memory_limit: Bytes of each device that may be used in all; see :func:`usable_bytes`.
            host_memory_limit: Bytes of host memory of each node that offloading may take, its devices equal parts; by
                default a share of what the hosts have, see :func:`~lightning_mist.tuner.budget.usable_host_bytes`.
            search: Limits of the search; by default none.

        Raises:
            InfeasibleError: If no plan fits, with the least that any needs and what binds; or
                :class:`~lightning_mist.tuner.infeasible.UndecidedError`, if time was up before one was found.
            PlanError: If the batch does not come in equal parts from the devices.
            ProfileError: If the profile lacks what the cost model needs.
        """
        began, search = perf_counter(), search or SearchSpace()
        space = self.space(global_batch_size, search)
        deadline = began + search.solver_seconds
        stages, outcome = search_copies(
            lambda item, more: self._look(item, (memory_limit, host_memory_limit), deadline, more), self.spec, space
        )
        if outcome.winner is None and outcome.is_late:
            refuse_late(stages)
        if outcome.winner is None:
            until = max(deadline, perf_counter() + 0.1)
            explain_infeasible(stages, lambda problem, chosen: make_plan(space, problem, chosen, self.cluster), until)
        return _result(stages, outcome, began, (memory_limit, host_memory_limit))


def _knows_copies(profile: HardwareProfile, part: Cluster) -> bool:
    """Whether the rates of copies between a device and its host are known."""
    rates = profile.host_to_device_bytes_per_second, profile.device_to_host_bytes_per_second
    return part.device.kind != "cuda" or min(rates) > 0


def _result(intra: Stages, outcome: Outcome, began: float, asked: tuple[int | None, int | None]) -> TuneResult:
    """The plan that an outcome leads to, and why."""
    assert outcome.winner is not None
    model, space = intra.model, intra.space
    clocked = _clocked(model, space, outcome)
    plans = dict(clocked.plans)
    chosen = _with_schedule(intra, plans, plans.pop(clocked.best))
    plan, least = chosen.plan, outcome.best[outcome.winner].answer.objective
    bound = min(outcome.bound, least)
    gap = max(0.0, (least - bound) / least)
    alternatives = [Alternative(name=_stages(count), plan=other) for count, other in plans.items()]
    if plan is not chosen.base and space.schedule in space.search.schedules:
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
            candidates=intra.evaluated + intra.known,
            evaluated=intra.evaluated,
            pipelines=outcome.pipelines,
            solved=outcome.solved,
        ),
        certified=outcome.certified,
        notes=(
            *space.notes,
            *_part_notes(intra),
            *outcome.notes,
            *clocked.notes,
            *chosen.notes,
            *_numbers(intra, plan, *asked),
        ),
    )


def _part_notes(stages: Stages) -> Iterable[str]:
    """What was ruled out on a part of a mixed cluster, and not on all."""
    if isinstance(stages, MixedStages):
        for part, own in zip(stages.model.cluster.parts, stages.spaces, strict=True):
            yield from (f"on {part.text} {note}" for note in own.notes if note not in stages.space.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The plan, the one of the exact search that it competed with, and what to say of other schedules."""

    plan: Plan
    base: Plan
    notes: tuple[str, ...] = ()


def _with_schedule(intra: Stages, others: Mapping[int, Plan], base: Plan) -> _Chosen:
    """The best plan of the exact search, or one under another schedule that gains by it."""
    space = intra.space
    tried = tuple(name for name in space.search.schedules if name not in ("1f1b", "gpipe"))
    if not tried:
        return _Chosen(plan=base, base=base)
    is_asked = space.schedule in space.search.schedules
    below = _seconds(base) * (1 - LEAST_GAIN) if is_asked else np.inf
    found = best_variant(intra.model, space, intra.limits, intra.host_limits, [base, *others.values()], below=below)
    if isinstance(intra, IntraStage):
        found = even_chunks(intra, below=below if found is None else min(below, _seconds(found))) or found
    if not is_asked:
        return _Chosen(plan=found if found is not None else refuse_without_variant(tried), base=base)
    if found is not None and _seconds(found) <= below:
        return _Chosen(plan=found, base=base)
    note = f"no pipeline that was tried gains {LEAST_GAIN:.0%} under {' or '.join(tried)}"
    return _Chosen(plan=base, base=base, notes=(note,) if base.num_stages > 1 else ())


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clocked:
    """The plan of each number of stages that is fastest on the clock, the fastest of all, and notes."""

    plans: dict[int, Plan]
    best: int
    closed_form_seconds: float
    notes: tuple[str, ...]


def _clocked(model: CostModel, space: Space, outcome: Outcome) -> _Clocked:
    """Run the best answers by the closed form on the clock."""
    assert outcome.winner is not None
    near = sorted(outcome.found.values(), key=lambda found: found.answer.objective)[:CLOCKED]
    best: dict[int, tuple[Plan, float]] = {}
    first: Plan | None = None
    for found in (outcome.best[outcome.winner], *outcome.best.values(), *near):
        plan = _predicted(model, make_plan(space, found.problem, found.answer.chosen, model.cluster))
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


def make_plan(
    space: Space, problem: InterStageProblem, chosen: tuple[int, ...], cluster: AnyCluster | None = None
) -> Plan:
    """The plan that one choice per stage describes.

    Args:
        space: The search space.
        problem: The choices.
        chosen: Those that were chosen.
        cluster: The devices; by default equal ones, on nodes as the search space says.
    """
    picked = list(zip(problem.slots, chosen, strict=True))
    shapes = [slot.shape(index) for slot, index in picked]
    degrees = [(shape.data, shape.tensor) for shape in shapes]
    parts = [int(slot.part_K[index]) for slot, index in picked]
    layout = (
        mixed_layout(cluster, degrees, parts)
        if isinstance(cluster, MixedCluster)
        else rank_layout(degrees, space.devices_per_node)
    )
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
                offload=slot.offload(index),
            )
        )
        first = end
    return Plan(
        global_batch_size=space.batch_rows * space.world_size,
        num_microbatches=problem.num_microbatches,
        stages=tuple(stages),
        schedule=space.schedule,
    )


def _predicted(model: CostModel, plan: Plan) -> Plan:
    return replace(plan, predicted=predict_with(model, plan))


def _stages(count: int) -> str:
    return "1 stage (data parallel)" if count == 1 else f"{count} stages"


def _numbers(stages: Stages, plan: Plan, asked: int | None, asked_of_host: int | None) -> Iterable[str]:
    """Where the numbers behind a plan come from, and what devices may use."""
    model = stages.model
    sources = {model.region_seconds(stage.microbatch_size).source for stage in plan.stages}
    if any(stage.mesh.tensor_parallel_degree > 1 for stage in plan.stages) and model.spec.seconds:
        yield "seconds of split layers shrink as their FLOPs and bytes do; tensor parallelism is not measured"
    profiles = dict.fromkeys(text for item in profiles_of(model) for text in item.source.split("; "))
    words = {
        "rates": f"seconds of layers follow from FLOPs and bytes and the profile's rates ({'; '.join(profiles)})",
        "extrapolated": "seconds of layers are extrapolated from measured microbatch sizes",
        "measured": "seconds of layers are measured",
    }
    yield from (words[name] for name in words if name in sources)
    limits = stages.part_limits if isinstance(stages, MixedStages) else (stages.memory_limit,)
    names = (part.device.name for part in model.cluster.parts)
    for name, limit in dict.fromkeys(zip(names, limits, strict=True)):
        if asked is None or limit < asked:
            whole = f"the memory of {name}" if asked is None else "memory_limit"
            yield (
                f"tensors may take {format_bytes(limit)} per device, {USABLE_MEMORY:.0%} of {whole}: the rest is for "
                "the context, communicators and what the allocator keeps free"
            )
    yield from host_notes(model.cluster, asked_of_host) if stages.space.search.offload else ()
