"""Plans whose stages are all alike: as many layers each, one arrangement of devices, one set of savings.

This is what people choose by hand, as in the grid of tensor, data and pipeline parallelism of Megatron-LM (Narayanan et
al., 2021). There are so few arrangements that all are looked at. Two questions are asked about them:

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
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from lightning_mist.cost import seconds_with
from lightning_mist.cost.inputs import IntArray, prefix_sums
from lightning_mist.plan import (
    ModuleMap,
    Plan,
    StageMesh,
    StagePlan,
    ZeroStage,
)
from lightning_mist.plan.grid import rank_layout
from lightning_mist.tuner.bounds import least_correction
from lightning_mist.tuner.candidates import IntraStage
from lightning_mist.tuner.options import OPTIONS
from lightning_mist.tuner.select.schedule_variants import (
    PlanRoom,
    best_variant,
    clocked,
    first_stages,
    fitted,
    has_chunks,
    parts,
)
from lightning_mist.tuner.space import Shape, Space, layer_classes


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

    def plan(self, space: Space, zero_stage: int, recomputed: int) -> Plan:
        """The plan with what every stage saves, so many recomputed layers of each among it."""
        data, shared = self.shape.data, self.shape.tensor
        layout = rank_layout([(data, shared)] * self.num_stages, space.devices_per_node)
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
                    **self.shape.method.settings(recomputed),
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
        for shape in space.shapes_at(0, num_stages, num_microbatches):
            if shape.devices * num_stages == space.world_size:
                yield Alike(num_stages, num_microbatches, shape)


def _cuts(num_layers: int, num_stages: int) -> IntArray:
    """Where every stage begins and the last ends; of unequal ones those in the middle have a layer more."""
    each, more = divmod(num_layers, num_stages)
    layers_S = np.full(num_stages, each)
    begin = (num_stages - more) // 2
    layers_S[begin : begin + more] += 1
    return np.concatenate([[0], np.cumsum(layers_S)])


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
    least = cache(partial(_least_seconds, stages))
    whole = [
        alike.plan(space, zero_stage, recomputed)
        for alike in every_alike(space)
        if alike.num_stages > 1 and alike.num_microbatches % alike.num_stages == 0
        if least(alike, 0) < below
        for recomputed in [int(space.recomputed(np.diff(_cuts(space.num_layers, alike.num_stages)))[1].min())]
        for zero_stage in alike.zero_stages(space)
    ]
    # More recomputation changes nothing about what is reduced.
    whole = [plan for plan in whole if _reduced_seconds(stages, plan) < below]
    room, near = PlanRoom.of(stages)._replace(space=space), whole
    # Of unlike layers devices hold others in chunks than in one piece, which may need less.
    if len(set(layer_classes(stages.model.spec))) == 1:
        # The first stage alone is a lower bound of them all.
        more = zip(whole, first_stages(room, whole), strict=True)
        near = [plan for plan, count in more if count is not None and _least_seconds_of(least, plan, count) < below]
        near = [plan for plan in fitted(room, near) if plan is not None]
    near = [plan for plan in near if _least_seconds_of(least, plan) < below]
    return best_variant(room, near, below=below, most=OPTIONS.chunked)


def _least_seconds_of(least: Callable[[Alike, int], float], plan: Plan, more: int = 0) -> float:
    """Seconds that the devices of a plan of equal stages compute at least if some more layers are recomputed."""
    recomputed = min(min(stage.checkpointing.layers + more, stage.num_layers) for stage in plan.stages)
    return least(Alike(plan.num_stages, plan.num_microbatches, Shape.of(plan.stages[0])), recomputed)


def _reduced_seconds(stages: IntraStage, plan: Plan) -> float:
    """Seconds that some devices reduce gradients at least: of every microbatch under ZeRO-2 and ZeRO-3.

    In chunks devices hold other layers than in one piece; those with most have no less than all have on average. Over
    how many nodes the groups of hybrid sharding go is known with their places only.
    """
    (model,), first = stages.model.parts, plan.stages[0]
    if first.zero_stage < ZeroStage.GRADIENTS or Shape.of(first).shard:
        return 0.0
    slot = stages.slot(0, plan.num_stages, plan.num_microbatches, Shape.of(first))
    beside = model.beside(slot, model.region_seconds(*slot.computed))
    mean = float(beside.reduce_JR.min(axis=0).sum()) / plan.num_stages
    # The first microbatch finds no gradients to add to: its backward is left out.
    return (plan.num_microbatches - 1) * mean * least_correction(model)


def _least_seconds(stages: IntraStage, alike: Alike, recomputed: int) -> float:
    """Seconds that the devices of some stage compute at least in chunks, with any number of them.

    They start when the first microbatch has come through the first chunk of all stages before, and these have as much
    to do when it has ended. The first microbatch finds no gradients to add to: its backward is left out. In chunks
    devices hold other layers than in one piece.
    """
    space, (num_stages, num_microbatches, shape, _) = stages.space, alike
    rows = space.rows(num_microbatches, shape.data)
    seconds = stages.model.region_seconds(rows, shape.tensor, shape.sequence, shape.method)
    forward_R, both_R = map(prefix_sums, (seconds.forward_R, seconds.forward_R + seconds.backward_R))
    again = float(seconds.recompute_R[1:-1].min())
    layers_S, least = np.diff(_cuts(space.num_layers, num_stages)), np.inf
    for chunks in (count for count in space.search.chunks if count <= layers_S.min()):
        layers_by_chunk_S, again_by_chunk_S = (
            np.array([parts(int(count), chunks) for count in counts_S]).T
            for counts_S in (layers_S, np.full(num_stages, recomputed))
        )
        # Head and tail are regions of their own.
        edges = np.concatenate([[0], 1 + np.cumsum(layers_by_chunk_S)])
        edges[-1] += 1
        forward_by_chunk_S, both_by_chunk_S = (
            np.diff(prefix_R[edges]).reshape(chunks, -1) for prefix_R in (forward_R, both_R)
        )
        busy_by_chunk_S = both_by_chunk_S + again * np.minimum(layers_by_chunk_S, again_by_chunk_S)
        before_S = np.cumsum(busy_by_chunk_S[0]) - busy_by_chunk_S[0]
        busy_S = before_S + (num_microbatches - 1) * busy_by_chunk_S.sum(axis=0) + forward_by_chunk_S.sum(axis=0)
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
    counts = space.stage_counts
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
                plan = next(filter(PlanRoom.of(stages).fits, plans), None)
                if plan is not None and (seconds := seconds_with(model, plan)) < least:
                    best, least = plan, seconds
    return None if best is None else clocked(model, best)
