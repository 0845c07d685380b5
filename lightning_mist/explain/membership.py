"""Whether a plan is one of those that a search looks at, by its settings and not by its seconds."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_mist.cost import MixedCostModel
from lightning_mist.explain.explanation import state_in_words
from lightning_mist.plan import OFFLOADED, Plan, SearchSpace, StagePlan
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.search import space_of
from lightning_mist.tuner.space import Shape, Space


def outside(planner: Planner, plan: Plan, search: SearchSpace | None = None) -> tuple[str, ...]:
    """What a plan has that a search does not look at, for people; empty if it looks at it.

    Limits of memory are not asked for.

    Raises:
        PlanError: If the plan's batch does not come in equal parts from the devices.
    """
    space = planner.space(plan.global_batch_size, search)
    found = list(_of_plan(plan, space))
    for index, stage in enumerate(plan.stages):
        found += [f"{text} on stage {index}" for text in _of_stage(stage, plan, _space_of_stage(planner, stage, space))]
    return tuple(found)


def _space_of_stage(planner: Planner, stage: StagePlan, space: Space) -> Space:
    """The search space of the part in which a stage lies, or of all devices."""
    model = planner.model
    if not isinstance(model, MixedCostModel):
        return space
    parts = {model.cluster.part_of(device) for device in stage.devices}
    return space if len(parts) > 1 else space_of(model.cluster.parts[parts.pop()], space, model.spec)


def _of_plan(plan: Plan, space: Space) -> Iterator[str]:
    search, groups = space.search, plan.num_groups
    if groups > 1 and plan.schedule not in search.schedules:
        yield f"schedule {plan.schedule}"
    if groups < plan.num_stages and plan.num_stages // groups not in search.chunks:
        yield f"{plan.num_stages // groups} chunks of each stage"
    if plan.data_parallel_size != space.loaders(stage.data_parallel_degree for stage in plan.stages):
        yield f"{plan.num_loaders} data loaders"
    if groups not in space.stage_counts:
        yield f"{groups} stage{'s' * (groups > 1)}"
    if search.num_microbatches is not None and plan.num_microbatches not in search.num_microbatches:
        yield f"{plan.num_microbatches} microbatches"
    if search.equal_stages and len({len(stage.devices) for stage in plan.stages}) > 1:
        yield "stages of unequal numbers of devices"
    cuts = space.cuts(groups) if groups == plan.num_stages else None
    starts = tuple(first for first, _ in plan.bounds)
    if cuts is not None and starts != cuts[:-1]:
        yield f"stages that begin at layers {', '.join(map(str, starts))}"


def _of_stage(stage: StagePlan, plan: Plan, space: Space) -> Iterator[str]:
    mesh, search, recomputed = stage.mesh, space.search, stage.checkpointing.layers
    shape = replace(Shape.of(stage), checkpointing=space.checkpointing_kinds[0])
    if mesh.context_parallel_degree > 1:
        yield "context parallelism"
    elif shape not in space.shapes(plan.num_microbatches):
        kind = " with sequence parallelism" if shape.sequence else ""
        kind += f" with ZeRO over groups of {shape.shard}" if shape.shard else ""
        yield f"data {shape.data} x tensor {shape.tensor}{kind} and {plan.num_microbatches} microbatches"
    if mesh.data_parallel_degree > 1 and int(stage.zero_stage) not in search.zero_stages:
        yield f"ZeRO-{int(stage.zero_stage)}"
    _, allowed = space.recomputed(np.array([stage.num_layers]))
    if recomputed not in allowed:
        yield f"{recomputed} recomputed layers"
    if recomputed and stage.checkpointing.kind not in space.checkpointing_kinds:
        yield f"{stage.checkpointing.kind} recomputation"
    for kind in OFFLOADED:
        ratio = getattr(stage.offload, kind)
        if ratio and (kind not in search.offloaded or ratio not in space.offload_ratios):
            yield f"{ratio:.0%} of {state_in_words(kind)} in host memory"
