"""What the most loaded device of every stage of a plan needs: allocated, reserved, device total.

Where every allocation is known they are replayed through a simulation of the allocator. Otherwise (a network described
without its allocations, and while many plans are compared) the peak of tensors comes from the planner's memory model,
and what the allocator holds on top from how much that was elsewhere.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from lightning_mist.cost.inputs import StageSlot
from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.cost.memory import MemoryModel, StageMemory
from lightning_mist.errors import PlanError, ScheduleError
from lightning_mist.estimate.allocator import AllocatorSettings
from lightning_mist.estimate.device_need import (
    DeviceNeed,
    DeviceOverheads,
    communicators_by_degrees,
    communicators_of,
    device_overheads,
    replayed_need,
    summed_need,
)
from lightning_mist.estimate.estimate_data import OUTER_TERMS, PeakTensor, StageEstimate, need_of
from lightning_mist.estimate.picture import MemoryTimeline, timeline_of
from lightning_mist.estimate.replay import Alive, replay_group
from lightning_mist.hardware import AnyCluster, Cluster
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import ModuleMap, Plan, StageMethod, row_slice
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.units import format_bytes

SHOWN_TENSORS = 10
"""Tensors of a peak that are kept."""

_NUMBER = re.compile(r"\d+")

_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward to inputs",
    ActionKind.BACKWARD_WEIGHT: "gradients of weights",
    ActionKind.RECV_ACTIVATION: "receiving activations",
    ActionKind.SEND_ACTIVATION: "sending activations",
    ActionKind.RECV_GRADIENT: "receiving gradients",
    ActionKind.SEND_GRADIENT: "sending gradients",
    ActionKind.REDUCE_GRADIENTS: "gradient reduction",
    ActionKind.REDUCE_TIED: "tied gradients",
    ActionKind.OPTIMIZER_STEP: "optimizer step",
    ActionKind.GATHER_PARAMETERS: "parameter gathering",
    ActionKind.UNSHARD: "gathering of a layer",
    ActionKind.RESHARD: "freeing of a layer",
}


def phase_in_words(action: str) -> str:
    """An action as a reader wants it: ``"0B3"`` is ``"backward of microbatch 3"``."""
    try:
        parsed = Action.parse(action)
    except ScheduleError:
        return action
    where = "" if parsed.microbatch is None else f" of microbatch {parsed.microbatch}"
    return _WORDS[parsed.kind] + where


def tensors_at_peak(alive: Iterable[Alive], group: int) -> tuple[tuple[PeakTensor, ...], tuple[PeakTensor, ...]]:
    """The largest tensors that are alive, and the kinds of tensors that take most together.

    Tensors that differ in their layer or microbatch alone are of one kind, and are listed once, with their number.

    Args:
        group: The group of devices, which is the stage of what belongs to no other.

    Returns:
        Kinds by the size of one tensor, and kinds by the bytes of all; of each the first :data:`SHOWN_TENSORS`.
    """
    found: dict[tuple[object, ...], PeakTensor] = {}
    counts: dict[tuple[object, ...], int] = {}
    for item in alive:
        tensor = _tensor(item, group)
        alike = _NUMBER.sub("*", tensor.module)
        key = (tensor.bytes, tensor.term, alike, tensor.operator, tensor.line, tensor.dtype)
        found.setdefault(key, tensor)
        counts[key] = counts.get(key, 0) + 1
    kinds = [replace(tensor, count=counts[key]) for key, tensor in found.items()]
    most = sorted(kinds, key=lambda kind: -kind.all_bytes)
    return tuple(kinds[:SHOWN_TENSORS]), tuple(most[:SHOWN_TENSORS])


def _tensor(item: Alive, group: int) -> PeakTensor:
    label = item.label
    named = label.part is None or label.term == "gradient_bytes"
    return PeakTensor(
        bytes=item.nbytes,
        term=label.term,
        stage=group if item.stage is None else item.stage,
        microbatch=item.microbatch,
        module=label.name if named else label.module or label.name,
        operator=label.operator,
        line=label.line,
        dtype=label.dtype,
    )


Replaying: TypeAlias = Literal["all", "worst", "none"]


@dataclass(slots=True)
class Estimator:
    """Estimates plans of one network on one machine; keeps what it has computed.

    Attributes:
        limit: Bytes of each device that may be used; of unlike devices at most the memory of each.
        source: ``"traced"``, or where else the specification comes from, which is then less sure.
    """

    spec: ModelSpec
    cluster: AnyCluster
    limit: int
    source: str = "traced"
    _models: dict[tuple[int, bool, StageMethod], MemoryModel] = field(default_factory=dict)
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)

    def stages(self, plan: Plan, *, replay: Replaying = "all") -> tuple[StageEstimate, ...]:
        """Every stage of a plan.

        Args:
            replay: Which groups of devices have their allocations replayed: all, one after the other until the one that
                needs most is among them, or none.

        Raises:
            PlanError: If the plan does not fit the network or the machine.
        """
        check_plan_for(self.spec, self.cluster, plan)
        found = plan_memory(self._model, plan)
        replays = replay != "none" and can_replay(self.spec, plan)
        is_final = replay != "none" and not replays
        traced, module_map = self.source == "traced", self.spec.module_map
        groups = [
            summed_estimate(
                plan, group, found[group], self.cluster, module_map, self.limit, is_traced=traced, is_final=is_final
            )
            for group in range(plan.num_groups)
        ]
        left = set(range(plan.num_groups)) if replays else set()
        while left:
            among = left if replay == "all" else range(plan.num_groups)
            group = max(among, key=lambda group: need_of(groups[group]))
            if group not in left:
                break
            groups[group] = replace(self._replayed(plan, group), host_bytes=groups[group].host_bytes)
            left.remove(group)
        return tuple(replace(groups[plan.group_of(stage)], stage=stage) for stage in range(plan.num_stages))

    def timelines(self, plan: Plan) -> tuple[MemoryTimeline, ...]:
        """For every group of devices the bytes of its most loaded one over one step.

        Raises:
            PlanError: If the allocations of the plan are not known.
        """
        if not can_replay(self.spec, plan):
            why = "; ".join(what_is_not_run(plan)) or f"{self.spec.name} was described without its allocations"
            raise PlanError(f"the bytes over a step are not known: {why}; use a plan that is executed")
        return tuple(timeline_of(replay_group(self.spec, plan, group), group) for group in range(plan.num_groups))

    def _model(self, slot: StageSlot) -> MemoryModel:
        key = (slot.tensor_parallel_degree, slot.sequence_parallel, slot.method)
        if key not in self._models:
            self._models[key] = MemoryModel(self.spec.split(*key[:2]).computing(key[2]))
        return self._models[key]

    def _replayed(self, plan: Plan, group: int) -> StageEstimate:
        replay = replay_group(self.spec, plan, group)
        part, limit = stage_device(self.cluster, plan.stages[group].devices, self.limit)
        overheads = rank_overheads(part, plan, self.spec.module_map, replay.rank)
        need = replayed_need(replay.memory_events(), part, overheads, settings=self.allocator, limit=limit)
        terms = dict(replay.terms_at_peak())
        # Workspaces, and what rounding adds to sizes.
        terms["working_bytes"] += need.allocated.p50 - sum(terms.values())
        tensors, kinds = tensors_at_peak(replay.alive_at(replay.peak_event), group)
        found = _estimate(plan, group, self.cluster, limit, need, terms)
        return replace(found, phase=phase_in_words(replay.phase), tensors=tensors, kinds=kinds)


def stage_device(cluster: AnyCluster, devices: Sequence[int], limit: int) -> tuple[Cluster, int]:
    """The kind of device of a stage, of several the smallest, and the bytes of it that may be used."""
    if isinstance(cluster, Cluster):
        return cluster, limit
    parts = (cluster.parts[index] for index in sorted({cluster.part_of(device) for device in devices}))
    part = min(parts, key=lambda item: item.device.memory_bytes)
    return part, min(limit, part.device.memory_bytes)


def summed_estimate(
    plan: Plan,
    stage: int,
    memory: StageMemory,
    cluster: AnyCluster,
    module_map: ModuleMap,
    limit: int,
    *,
    is_traced: bool = True,
    is_final: bool = False,
) -> StageEstimate:
    """The estimate of a stage of which only the peak of tensors is known.

    Args:
        limit: Bytes of each device that may be used; of unlike devices at most the memory of each.
        is_traced: Whether the peak comes from a trace rather than from a closed form.
        is_final: Whether no replay will take its place.
    """
    devices = plan.stages[stage].devices
    part, limit = stage_device(cluster, devices, limit)
    overheads = rank_overheads(part, plan, module_map, devices[0])
    # What cuBLAS allocates is in no term of its own: it works for whatever multiplies.
    allocated = memory.peak_bytes + overheads.workspaces_bytes
    need = summed_need(allocated, part, overheads, limit=limit, is_traced=is_traced, is_final=is_final)
    terms = dict(memory.terms)
    terms["working_bytes"] += overheads.workspaces_bytes
    found = _estimate(plan, stage, cluster, limit, need, terms)
    return replace(found, phase=memory.phase, host_bytes=memory.host_bytes)


def rank_overheads(cluster: Cluster, plan: Plan, module_map: ModuleMap, rank: int) -> DeviceOverheads:
    """What a rank's device holds besides tensors: communicators of plans that are not executed by their degrees."""
    if cluster.device.kind != "cuda":
        return device_overheads(cluster, ())
    held = communicators_by_degrees(plan, rank) if plan.shares_both_ways else communicators_of(plan, module_map, rank)
    return device_overheads(cluster, held)


def describe_cluster(cluster: AnyCluster) -> str:
    """A cluster in a few words."""
    return " and ".join(
        f"{f'{part.num_nodes} x ' if part.num_nodes > 1 else ''}{part.devices_per_node} x {part.device.name} with "
        f"{format_bytes(part.device.memory_bytes)} each"
        for part in cluster.parts
    )


def can_replay(spec: ModelSpec, plan: Plan) -> bool:
    """Whether every allocation is known: of a traced network, under a plan that is executed."""
    parts = [spec.on_row_part(degree) for degree in {stage.mesh.context_parallel_degree for stage in plan.stages}]
    known = all(
        part is not None and all(layer.events is not None for layer in (part.head, *part.layers, part.tail))
        for part in parts
    )
    return known and not what_is_not_run(plan)


def _estimate(
    plan: Plan, group: int, cluster: AnyCluster, limit: int, need: DeviceNeed, terms: Mapping[str, int]
) -> StageEstimate:
    return StageEstimate(
        stage=group,
        devices=plan.stages[group].devices,
        phase="",
        allocated=need.allocated,
        reserved=need.reserved,
        device_total=need.device_total,
        terms=(*terms.items(), *((name, getattr(need, name)) for name in OUTER_TERMS)),
        flushes=need.flushes,
        limit=None if isinstance(cluster, Cluster) else limit,
        least=need.least,
    )


def check_plan_for(spec: ModelSpec, cluster: AnyCluster, plan: Plan) -> None:
    """Raise a PlanError about a plan for another network or machine."""
    if plan.num_layers != spec.num_layers:
        raise PlanError(
            f"the plan has {plan.num_layers} layers, {spec.name} has {spec.num_layers}: a plan must cover every layer; "
            "make a plan for this network"
        )
    if plan.world_size != cluster.world_size:
        raise PlanError(
            f"the plan has {plan.world_size} devices, the cluster {cluster.world_size}: a plan uses every device; "
            f"give a cluster of {plan.world_size}, or a plan for {cluster.world_size}"
        )


def what_is_not_run(plan: Plan) -> tuple[str, ...]:
    """Why the runtime would not execute a plan."""
    found = []
    if plan.shares_both_ways:
        found.append("context parallelism beside tensor parallelism is planned and not run yet")
    try:
        for stage in plan.stages:
            row_slice(plan, stage.devices[0], 0)
    except PlanError as error:
        found.append(f"such a plan is not executed: {error}")
    if plan.global_batch_size % plan.num_loaders:
        found.append(
            f"such a plan is not executed: {plan.num_loaders} loaders bring equal batches, and "
            f"{plan.global_batch_size} rows are no multiple"
        )
    return tuple(found)
