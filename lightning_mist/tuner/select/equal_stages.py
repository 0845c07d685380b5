"""Plans whose stages are all alike: as many layers each, one arrangement of devices, one set of savings.

This is what people choose by hand, as in the grid of tensor, data and pipeline parallelism of Megatron-LM (Narayanan et
al., 2021). There are so few arrangements that all are looked at. Three questions are asked about them:

* Which is the fastest in one piece (:func:`fastest_uniform`)? That every stage saves the same is a rule between stages,
  which frontiers of single stages cannot keep: all settings of an arrangement are priced at once, and the best by the
  closed form are run on the clock, as in a search.
* Which gains most in interleaved chunks (:func:`even_chunks`)? Chunks have no closed form, so that the search cannot
  find the pipeline that gains most by them. Each is tried with as few recomputed layers as let it fit in one piece to
  begin with, if all layers are alike: it keeps at least as much in chunks. Where layers cannot be dealt out equally
  some stages have one more: those in the middle, as the first computes the embedding beside its layers and the last
  the loss, as Llama 3 does with 126 layers in 16 stages (Dubey et al., 2024).
* Which is the fastest whose devices share rows (:func:`fastest_with_context`), where context parallelism is asked for
  or rows are long? The exact search has none of these plans. What is recomputed goes in quarters of stages, and the
  first ZeRO stage that fits is taken, since each more exchanges more.

Array axes
    S  stages
    K  settings that all stages share: recomputed layers, ZeRO stages and what is in host memory
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lightning_mist.cost import StageCandidates, StageCostModel, StageSlot, seconds_with, step_seconds_of
from lightning_mist.cost.inputs import FloatArray, IntArray, OffloadCandidates, prefix_sums
from lightning_mist.cost.memory import host_bytes, stage_phases
from lightning_mist.plan import (
    OFFLOADED,
    Checkpointing,
    ModuleMap,
    OffloadRatios,
    Plan,
    SearchSpace,
    StageMesh,
    StagePlan,
    ZeroStage,
)
from lightning_mist.plan.rank_order import rank_layout
from lightning_mist.tuner.bounds import least_correction
from lightning_mist.tuner.candidates import IntraStage, may_offload
from lightning_mist.tuner.inter_stage import Pipeline
from lightning_mist.tuner.options import OPTIONS
from lightning_mist.tuner.search import MixedStages, Stages, mixed_layout
from lightning_mist.tuner.select.schedule_variants import best_variant, clocked, first_stages, fitted, has_chunks, parts
from lightning_mist.tuner.select.simplest_plan import fits_within
from lightning_mist.tuner.space import Shape, Space, layer_classes

CLOCKED = OPTIONS.clocked
"""Plans of one search of equal stages that are run on the clock; searches that are compared run as many."""


class Alike(NamedTuple):
    """Equal stages but for what they save.

    Attributes:
        shape: How the devices of each are arranged.
        shares_rows: Whether devices that would share layers share rows in their place.
    """

    num_stages: int
    num_microbatches: int
    shape: Shape
    shares_rows: bool = False

    def plan(
        self,
        space: Space,
        zero_stage: int,
        recomputed: int,
        offload: OffloadRatios | None = None,
        layout: Sequence[tuple[int, ...]] | None = None,
    ) -> Plan:
        """The plan with what every stage saves.

        Args:
            recomputed: Layers of each stage.
            layout: Ranks of every stage, by default on devices that are all alike.
        """
        data, shared = self.shape.data, self.shape.tensor
        layout = layout or rank_layout([(data, shared)] * self.num_stages, space.devices_per_node)
        cuts = _cuts(space.num_layers, self.num_stages).tolist()
        return Plan(
            global_batch_size=space.global_batch_size,
            data_parallel_size=space.loaders([data]),
            num_microbatches=self.num_microbatches,
            schedule=space.schedule,
            stages=tuple(
                StagePlan(
                    layers=(cuts[stage], cuts[stage + 1]),
                    mesh=StageMesh(devices=devices, data_parallel_degree=data, context_parallel_degree=shared)
                    if self.shares_rows
                    else self.shape.mesh(devices),
                    microbatch_size=space.rows(self.num_microbatches, data),
                    zero_stage=ZeroStage(zero_stage),
                    checkpointing=Checkpointing(layers=recomputed, kind=self.shape.checkpointing),
                    offload=offload or OffloadRatios(),
                )
                for stage, devices in enumerate(layout)
            ),
        )

    def zero_stages(self, space: Space) -> tuple[int, ...]:
        """ZeRO stages that it may have, ascending: alone a rank has nobody to share with."""
        ranks = self.shape.devices if self.shares_rows else self.shape.data
        levels = tuple(sorted(level for level in space.search.zero_stages if level or not self.shape.shard))
        return levels if ranks > 1 else (0,)


def every_alike(space: Space) -> Iterator[Alike]:
    """Every arrangement of all devices in equal stages."""
    for num_stages, num_microbatches in space.pipelines():
        for shape in space.shapes(num_microbatches):
            if shape.devices * num_stages == space.world_size:
                yield Alike(num_stages, num_microbatches, shape)


def _cuts(num_layers: int, num_stages: int) -> IntArray:
    """Where every stage begins and the last ends; of unequal ones those in the middle have a layer more."""
    each, more = divmod(num_layers, num_stages)
    layers_S = np.full(num_stages, each)
    begin = (num_stages - more) // 2
    layers_S[begin : begin + more] += 1
    return np.concatenate([[0], np.cumsum(layers_S)])


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
    candidates, offload, slot, count = item.candidates, item.candidates.offload, item.slots[0], len(item.slots)
    arranged = slot.data_parallel_degree, slot.tensor_parallel_degree, slot.sequence_parallel, slot.checkpointing
    alike = Alike(count, slot.num_microbatches, Shape(*arranged, slot.shard_group or 0))
    layout = None
    if isinstance(stages, MixedStages) and slot.parts:
        layout = mixed_layout(stages.model.cluster, [(alike.shape.data, alike.shape.tensor)] * count, slot.parts)
    ratios = {name: 0.0 if offload is None else float(getattr(offload, f"{name}_K")[index]) for name in OFFLOADED}
    zero_stage, recomputed = int(candidates.zero_stage_K[index]), int(candidates.checkpointed_K[index])
    return alike.plan(stages.space, zero_stage, recomputed, OffloadRatios(**ratios), layout)


def even_chunks(stages: IntraStage, *, below: float = np.inf) -> Plan | None:
    """The fastest plan with equal stages in interleaved chunks, without offload.

    Args:
        stages: Knows the search space and the limits.
        below: Plans that do not take fewer seconds are of no interest.

    Returns:
        The plan with its prediction; None if none is faster, or the search does not leave layers open.
    """
    space = stages.space
    if not has_chunks(space):
        return None
    space = replace(space, search=replace(space.search, schedules=("interleaved-1f1b",)))
    whole = [
        alike.plan(space, zero_stage, recomputed)
        for alike in every_alike(space)
        if alike.num_stages > 1 and alike.num_microbatches % alike.num_stages == 0
        if _least_seconds(stages, alike) < below
        for recomputed in [int(space.recomputed(np.diff(_cuts(space.num_layers, alike.num_stages)))[1].min())]
        for zero_stage in alike.zero_stages(space)
    ]
    limits, near = (stages.limits, stages.host_limits), whole
    # Of unlike layers devices hold others in chunks than in one piece, which may need less.
    if len(set(layer_classes(stages.model.spec))) == 1:
        # The first stage alone is a lower bound of them all.
        more = zip(whole, first_stages(stages.model, space, stages.limits, whole), strict=True)
        near = [plan for plan, count in more if count is not None and _least_seconds_of(stages, plan, count) < below]
        near = [plan for plan in fitted(stages.model, space, *limits, near) if plan is not None]
    near = [plan for plan in near if _least_seconds_of(stages, plan) < below]
    return best_variant(stages.model, space, *limits, near, below=below, most=OPTIONS.chunked)


def _least_seconds_of(stages: IntraStage, plan: Plan, more: int = 0) -> float:
    """Seconds that a plan of equal stages takes at least in chunks if some more layers are recomputed."""
    recomputed = min(min(stage.checkpointing.layers + more, stage.num_layers) for stage in plan.stages)
    alike = Alike(plan.num_stages, plan.num_microbatches, Shape.of(plan.stages[0]))
    least = _least_seconds(stages, alike, recomputed)
    return max(least, _reduced_seconds(stages, plan))


def _reduced_seconds(stages: IntraStage, plan: Plan) -> float:
    """Seconds that some devices reduce gradients at least: of every microbatch under ZeRO-2 and ZeRO-3.

    In chunks devices hold other layers than in one piece; those with most have no less than all have on average. Over
    how many nodes the groups of hybrid sharding go is known with their places only.
    """
    model, first = stages.model, plan.stages[0]
    if first.zero_stage < ZeroStage.GRADIENTS or Shape.of(first).shard or not isinstance(model, StageCostModel):
        return 0.0
    slot = stages.slot(0, plan.num_stages, plan.num_microbatches, Shape.of(first))
    units = model.beside(slot, model.region_seconds(*slot.computed)).units
    mean = float(units.reduce_FR.min(axis=0).sum()) / plan.num_stages
    # The first microbatch finds no gradients to add to: its backward is left out.
    return (plan.num_microbatches - 1) * mean * least_correction(model)


def _least_seconds(stages: IntraStage, alike: Alike, recomputed: int = 0) -> float:
    """Seconds that the devices of some stage compute at least in chunks, with any number of them.

    They start when the first microbatch has come through the first chunk of all stages before, and these have as much
    to do when it has ended. The first microbatch finds no gradients to add to: its backward is left out. In chunks
    devices hold other layers than in one piece.
    """
    space, (num_stages, num_microbatches, shape, _) = stages.space, alike
    rows = space.rows(num_microbatches, shape.data)
    seconds = stages.model.region_seconds(rows, shape.tensor, shape.sequence, shape.checkpointing)
    forward_R, both_R = map(prefix_sums, (seconds.forward_R, seconds.forward_R + seconds.backward_R))
    again = float(seconds.recompute_R[1:-1].min())
    layers_S, least = np.diff(_cuts(space.num_layers, num_stages)), np.inf
    for chunks in (count for count in space.search.chunks if count <= layers_S.min()):
        layers_VS, again_VS = (
            np.array([parts(int(count), chunks) for count in counts_S]).T
            for counts_S in (layers_S, np.full(num_stages, recomputed))
        )
        # Head and tail are regions of their own.
        edge_B = np.concatenate([[0], 1 + np.cumsum(layers_VS)])
        edge_B[-1] += 1
        forward_VS, both_VS = (np.diff(prefix_R[edge_B]).reshape(chunks, -1) for prefix_R in (forward_R, both_R))
        busy_VS = both_VS + again * np.minimum(layers_VS, again_VS)
        before_S = np.cumsum(busy_VS[0]) - busy_VS[0]
        busy_S = before_S + (num_microbatches - 1) * busy_VS.sum(axis=0) + forward_VS.sum(axis=0)
        least = min(least, float(busy_S.max()))
    return least


def known_contexts(space: Space, module_map: ModuleMap) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The degrees asked for that the module allows, by default all of these, and why not others."""
    known = [split.degree for split in module_map.contexts]
    asked = space.search.context_parallel_degrees
    notes = []
    for degree in asked or ():
        if degree not in known:
            why = "; ".join(module_map.excludes("context")) or dict(module_map.uncontexts).get(
                degree, "it was not shown that so many devices that share rows compute the same"
            )
            notes.append(f"without context_parallel_degree {degree}: {why}")
    return tuple(degree for degree in (known if asked is None else asked) if degree in known), tuple(notes)


def fastest_with_context(stages: IntraStage) -> Plan | None:
    """The fastest plan that fits and whose devices share rows, with its prediction; None if there is none."""
    space, model = stages.space, stages.model
    degrees, _ = known_contexts(space, model.spec.module_map)
    fits, counts = fits_within(model, stages.limits, stages.host_limits), space.stage_counts
    best, least = None, np.inf
    for degree in degrees if counts else ():
        search = replace(space.search, num_stages=counts, layer_cuts=None, equal_stages=True, shard_degrees=())
        kinds = space.checkpointing_kinds[:1]
        found = replace(space, search=search, tensor=((degree, False),), checkpointing_kinds=kinds)
        for alike in (item._replace(shares_rows=True) for item in every_alike(found)):
            if space.cuts(alike.num_stages) not in (None, found.cuts(alike.num_stages)):
                continue
            shares = (space.search.checkpointed_shares or OPTIONS.recomputed) if space.checkpointing else (0.0,)
            for recomputed in sorted({round(share * (space.num_layers // alike.num_stages)) for share in shares}):
                plans = (alike.plan(space, level, recomputed) for level in alike.zero_stages(space))
                plan = next(filter(fits, plans), None)
                if plan is not None and (seconds := seconds_with(model, plan)) < least:
                    best, least = plan, seconds
    return None if best is None else clocked(model, best)
