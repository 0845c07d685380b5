"""The fastest plan whose stages are all alike: as many layers each, one arrangement of devices, one set of savings.

This is what people choose by hand, as in the grid of tensor, data and pipeline parallelism of Megatron-LM. That every
stage saves the same is a rule between stages, which frontiers of single stages cannot keep, but there are so few such
plans that all are priced: the best by the closed form are run on the clock, as in a search.

Array axes
    S  stages
    K  settings that all stages share: recomputed layers, ZeRO stages and what is in host memory
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost import StageCandidates, StageSlot, seconds_with, step_seconds_of
from lightning_mist.cost.inputs import FloatArray, OffloadCandidates
from lightning_mist.cost.memory import host_bytes, stage_phases
from lightning_mist.plan import OFFLOADED, Checkpointing, OffloadRatios, Plan, SearchSpace, StagePlan, ZeroStage
from lightning_mist.plan.rank_order import rank_layout
from lightning_mist.tuner.candidates import IntraStage, may_offload
from lightning_mist.tuner.inter_stage import Pipeline
from lightning_mist.tuner.search import MixedStages, Stages, mixed_layout
from lightning_mist.tuner.select.equal_stages import even_chunks
from lightning_mist.tuner.select.selection import CLOCKED, clocked
from lightning_mist.tuner.space import Shape, layer_classes


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformPlans:
    """Plans whose stages are all alike.

    Attributes:
        search: Their space, with equal stages and without offload.
        offloads: What is in host memory: kinds of state live there by rule, and not where it pays.
        offloads_if_all_recomputed: What else may be, where all layers are recomputed.
    """

    search: SearchSpace
    offloads: tuple[OffloadRatios, ...] = (OffloadRatios(),)
    offloads_if_all_recomputed: tuple[OffloadRatios, ...] = ()

    @property
    def is_offloaded(self) -> bool:
        """Whether something is in host memory in any case."""
        return all(item.any for item in self.offloads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What the setting that misses least of a kind of memory needs where it misses most, and the limit there."""

    needed_bytes: float
    limit_bytes: float
    is_host: bool = False

    @property
    def missing(self) -> float:
        """Bytes that are missing; without a limit all that are needed."""
        return self.needed_bytes - (self.limit_bytes if np.isfinite(self.limit_bytes) else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """Plans that differ in what their stages save only.

    Attributes:
        candidates: One of them with every setting.
        seconds_K: Step seconds in closed form.
        peak_SK: Peak bytes of every stage's most loaded device.
        host_SK: Bytes that it has in host memory.
        host_limit_S: Bytes of host memory that it may use.
    """

    slots: tuple[StageSlot, ...]
    candidates: StageCandidates
    seconds_K: FloatArray
    peak_SK: FloatArray
    host_SK: FloatArray
    limit_S: FloatArray
    host_limit_S: FloatArray


def fastest_uniform(stages: Stages, family: UniformPlans) -> tuple[Plan | None, Shortage | None]:
    """The fastest plan that fits, with its prediction; and what is missing, if none does.

    Returns:
        The plan, if one fits, and the least shortage of those in one piece, which is ``None`` where nothing divides the
        batch.
    """
    model = stages.model
    found: list[tuple[float, _Priced, int]] = []
    shortages: list[Shortage] = []
    for item in _priced(stages, family):
        on_device_K = np.all(item.peak_SK <= item.limit_S[:, None], axis=0)
        fits_K = on_device_K & np.all(item.host_SK <= item.host_limit_S[:, None], axis=0)
        best_K = np.argsort(np.where(fits_K, item.seconds_K, np.inf), kind="stable")[: int(fits_K.sum())]
        found += [(float(item.seconds_K[index]), item, index) for index in best_K[:CLOCKED].tolist()]
        shortages += _shortage(item.peak_SK, item.limit_S, is_host=False)
        shortages += _shortage(item.host_SK[:, on_device_K], item.host_limit_S, is_host=True)
    found.sort(key=lambda each: each[0])
    plans = [_plan(stages, item, index) for _, item, index in found[:CLOCKED]]
    best = min(plans, key=lambda plan: seconds_with(model, plan), default=None)
    # Where a setting fits on its devices, host memory is what it lacks.
    least = min(shortages, key=lambda each: (not each.is_host, each.missing), default=None)
    below = np.inf if best is None else seconds_with(model, best)
    chunked = even_chunks(stages, below=below) if isinstance(stages, IntraStage) and not family.is_offloaded else None
    if chunked is not None:
        return chunked, least
    return None if best is None else clocked(model, best), least


def _shortage(uses_SK: FloatArray, limit_S: FloatArray, *, is_host: bool) -> Iterator[Shortage]:
    """What the setting that misses least uses where it misses most; nothing if there is no setting."""
    if not uses_SK.size:
        return
    missing_SK = uses_SK - np.where(np.isfinite(limit_S), limit_S, 0.0)[:, None]
    index = int(missing_SK.max(axis=0).argmin())
    stage = int(missing_SK[:, index].argmax())
    yield Shortage(needed_bytes=float(uses_SK[stage, index]), limit_bytes=float(limit_S[stage]), is_host=is_host)


def _priced(stages: Stages, family: UniformPlans) -> Iterator[_Priced]:
    """All plans: by number of stages and of microbatches, parts of the cluster, and arrangement of devices."""
    for makers, pipeline in _pipelines(stages):
        shapes = [maker.space.shapes_of(*pipeline[:2]) for maker in makers]
        for shape in shapes[0] if makers else ():
            if all(shape in others for others in shapes):
                yield _price(makers, pipeline, shape, family)


def _pipelines(stages: Stages) -> Iterator[tuple[list[IntraStage], Pipeline]]:
    """Pipelines of equal stages, with who makes each of these."""
    if isinstance(stages, IntraStage):
        for count, num_microbatches in stages.space.pipelines():
            yield [stages] * count, Pipeline(count, num_microbatches, ())
        return
    for pipeline in stages.pipelines:
        devices = stages.space.world_size // pipeline.num_stages
        if not pipeline.parts:
            yield [stages.together], pipeline
        elif all(size % devices == 0 for size in stages.sizes):
            parts = tuple(part for part in pipeline.parts for _ in range(stages.sizes[part] // devices))
            yield [stages.parts[part] for part in parts], pipeline._replace(parts=parts)


def _price(makers: Sequence[IntraStage], pipeline: Pipeline, shape: Shape, family: UniformPlans) -> _Priced:
    """Plans with an arrangement of devices. Stages with the same layers in the same role are looked at once."""
    count, num_microbatches, parts = pipeline
    slots = tuple(maker.slot(index, *pipeline[:2], shape, parts) for index, maker in enumerate(makers))
    classes = layer_classes(makers[0].model.spec)
    known: dict[Hashable, tuple[StageCandidates, FloatArray, FloatArray]] = {}
    rows: list[tuple[FloatArray, ...]] = []
    for index, (maker, slot) in enumerate(zip(makers, slots, strict=True)):
        first, end = maker.space.layer_range(index, count) or (0, maker.space.num_layers)
        # The layer before tells what is received.
        role = (index == 0, index == count - 1, classes[max(0, first - 1) : end], parts[max(0, index - 1) : index + 2])
        if role not in known:
            candidates = _candidates(maker, slot, family)
            seconds = maker.model.seconds(slot, candidates)
            known[role] = candidates, seconds.steady_K, seconds.boundary_K
        candidates, *seconds_K = known[role]
        memory, phases = maker.model.memory(slot), stage_phases(index, count, num_microbatches, slot.schedule)
        needs = memory.needs(slot, candidates)
        rows.append((*seconds_K, needs.peaks(phases), host_bytes(memory, slot, candidates, needs, phases)))
    steady_SK, boundary_SK, peak_SK, host_SK = (np.stack(found) for found in zip(*rows, strict=True))
    return _Priced(
        slots=slots,
        candidates=candidates,
        seconds_K=step_seconds_of(steady_SK, boundary_SK, num_microbatches),
        peak_SK=peak_SK,
        host_SK=host_SK,
        limit_S=np.array([maker.memory_limit for maker in makers]),
        host_limit_S=np.array([maker.host_limit for maker in makers]),
    )


def _candidates(maker: IntraStage, slot: StageSlot, family: UniformPlans) -> StageCandidates:
    """Everything that a stage may be, in an order that is the same for all stages."""
    every = (*family.offloads, *family.offloads_if_all_recomputed)
    offload_CO = np.array([[getattr(item, name) for name in OFFLOADED] for item in every])
    table = maker.everything(slot)
    order_K = np.lexsort((table.zero_stage_K, table.checkpointed_K))
    index_K, combination_K = np.repeat(order_K, len(every)), np.tile(np.arange(len(every)), len(table))
    is_all_K = table.checkpointed_K[index_K] == maker.space.num_layers // slot.num_stages
    kept_K = (combination_K < len(family.offloads)) | is_all_K
    kept_K &= may_offload(slot, offload_CO)[combination_K]
    offload_KO = offload_CO[combination_K[kept_K]]
    ratios = {f"{name}_K": offload_KO[:, place] for place, name in enumerate(OFFLOADED)}
    offload = OffloadCandidates(**ratios) if offload_CO.any() else None
    return replace(table.candidates(index_K[kept_K]), offload=offload)


def _plan(stages: Stages, item: _Priced, index: int) -> Plan:
    space, candidates, offload = stages.space, item.candidates, item.candidates.offload
    slot, count = item.slots[0], len(item.slots)
    arranged = slot.data_parallel_degree, slot.tensor_parallel_degree, slot.sequence_parallel, slot.checkpointing
    shape = Shape(*arranged, slot.shard_group or 0)
    degrees = [(shape.data, shape.tensor)] * count
    if isinstance(stages, MixedStages) and slot.parts:
        layout = mixed_layout(stages.model.cluster, degrees, slot.parts)
    else:
        layout = rank_layout(degrees, space.devices_per_node)
    ratios = {name: 0.0 if offload is None else float(getattr(offload, f"{name}_K")[index]) for name in OFFLOADED}
    return Plan(
        global_batch_size=space.global_batch_size,
        data_parallel_size=space.loaders([shape.data]),
        num_microbatches=slot.num_microbatches,
        stages=tuple(
            StagePlan(
                layers=(space.num_layers * stage // count, space.num_layers * (stage + 1) // count),
                mesh=shape.mesh(devices),
                microbatch_size=slot.rows,
                zero_stage=ZeroStage(int(candidates.zero_stage_K[index])),
                checkpointing=Checkpointing(layers=int(candidates.checkpointed_K[index]), kind=shape.checkpointing),
                offload=OffloadRatios(**ratios),
            )
            for stage, devices in enumerate(layout)
        ),
    )
