"""Equal stages dealt out in interleaved chunks, as Megatron-LM does it (Narayanan et al., 2021).

Chunks have no closed form, so that the search cannot find the pipeline that gains most by them. Of equal stages there
are few: every arrangement of devices and ZeRO stage is tried, with as few recomputed layers as let it fit in one piece
to begin with, if all layers are alike. It keeps at least as much in chunks, so that as many are recomputed as these
need, or more.
Where layers cannot be dealt out equally some stages have one more: those in the middle, as the first computes the
embedding beside its layers and the last the loss, as Llama 3 does with 126 layers in 16 stages (Dubey et al., 2024).
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.inputs import IntArray, prefix_sums
from lightning_mist.plan import Checkpointing, Plan, StagePlan, ZeroStage
from lightning_mist.plan.rank_order import rank_layout
from lightning_mist.tuner.bounds import least_correction
from lightning_mist.tuner.candidates import IntraStage
from lightning_mist.tuner.select.schedule_variants import best_variant, first_stages, fitted, has_chunks, parts
from lightning_mist.tuner.space import Shape, Space, layer_classes

TRIED = 48
"""The most plans with chunks that are run on the clock, the best by a bound of their seconds."""


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
        plan
        for arrangement in _arrangements(space)
        if _least_seconds(stages, *arrangement) < below
        for plan in _plans(space, *arrangement)
    ]
    limits, near = (stages.limits, stages.host_limits), whole
    # Of unlike layers devices hold others in chunks than in one piece, which may need less.
    if len(set(layer_classes(stages.model.spec))) == 1:
        # The first stage alone is a lower bound of them all.
        more = zip(whole, first_stages(stages.model, space, stages.limits, whole), strict=True)
        near = [plan for plan, count in more if count is not None and _least_seconds_of(stages, plan, count) < below]
        near = [plan for plan in fitted(stages.model, space, *limits, near) if plan is not None]
    near = [plan for plan in near if _least_seconds_of(stages, plan) < below]
    return best_variant(stages.model, space, *limits, near, below=below, most=TRIED)


def _arrangements(space: Space) -> Iterator[tuple[int, int, Shape]]:
    """Numbers of equal stages and of microbatches that chunks can have, and arrangements of a stage's devices."""
    for num_stages, num_microbatches in space.pipelines():
        if num_stages > 1 and num_microbatches % num_stages == space.world_size % num_stages == 0:
            for shape in space.shapes(num_microbatches):
                if shape.devices * num_stages == space.world_size:
                    yield num_stages, num_microbatches, shape


def _cuts(num_layers: int, num_stages: int) -> IntArray:
    """Where every stage begins and the last ends; of unequal ones those in the middle have a layer more."""
    each, more = divmod(num_layers, num_stages)
    layers_S = np.full(num_stages, each)
    begin = (num_stages - more) // 2
    layers_S[begin : begin + more] += 1
    return np.concatenate([[0], np.cumsum(layers_S)])


def _least_seconds_of(stages: IntraStage, plan: Plan, more: int = 0) -> float:
    """Seconds that a plan of equal stages takes at least in chunks if some more layers are recomputed."""
    recomputed = min(min(stage.checkpointing.layers + more, stage.num_layers) for stage in plan.stages)
    shape = Shape.of(plan.stages[0])
    least = _least_seconds(stages, plan.num_stages, plan.num_microbatches, shape, recomputed)
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


def _least_seconds(
    stages: IntraStage, num_stages: int, num_microbatches: int, shape: Shape, recomputed: int = 0
) -> float:
    """Seconds that the devices of some stage compute at least in chunks, with any number of them.

    They start when the first microbatch has come through the first chunk of all stages before, and these have as much
    to do when it has ended. The first microbatch finds no gradients to add to: its backward is left out. In chunks
    devices hold other layers than in one piece.
    """
    space = stages.space
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


def _plans(space: Space, num_stages: int, num_microbatches: int, shape: Shape) -> Iterator[Plan]:
    """Plans with equal stages in one piece, one for every ZeRO stage; with as few recomputed layers as there may be."""
    layout = rank_layout([(shape.data, shape.tensor)] * num_stages, space.devices_per_node)
    cuts = _cuts(space.num_layers, num_stages).tolist()
    recomputed = int(space.recomputed(np.diff(cuts))[1].min())
    kept = Checkpointing(layers=recomputed, kind=shape.checkpointing)
    rows, meshes = space.rows(num_microbatches, shape.data), [shape.mesh(devices) for devices in layout]
    levels = sorted(level for level in space.search.zero_stages if level or not shape.shard)
    for level in levels if shape.data > 1 else (0,):
        yield Plan(
            global_batch_size=space.global_batch_size,
            data_parallel_size=space.loaders([shape.data]),
            num_microbatches=num_microbatches,
            stages=tuple(
                StagePlan(
                    layers=(cuts[stage], cuts[stage + 1]),
                    mesh=mesh,
                    microbatch_size=rows,
                    zero_stage=ZeroStage(level),
                    checkpointing=kept,
                )
                for stage, mesh in enumerate(meshes)
            ),
        )
