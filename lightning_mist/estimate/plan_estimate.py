"""What a plan needs of the memory of every device, of a network whose costs are known."""

from collections.abc import Sequence

from lightning_mist.cost.memory import TERMS, StageMemory
from lightning_mist.errors import PlanError
from lightning_mist.estimate.estimate_data import MemoryEstimate, StageEstimate, verdict_of, worst_of
from lightning_mist.estimate.host_need import HostNeed, host_need
from lightning_mist.estimate.stage_estimates import (
    Estimator,
    Replaying,
    describe_cluster,
    summed_estimate,
    what_is_not_run,
)
from lightning_mist.estimate.what_fits import changes_that_fit
from lightning_mist.hardware import AnyCluster, Cluster
from lightning_mist.plan import ModuleMap, Plan, PredictedStage
from lightning_mist.units import format_bytes, parse_bytes


def estimate_plan(
    estimator: Estimator, plan: Plan, *, advise: bool = True, replay: Replaying = "all"
) -> MemoryEstimate:
    """The estimate of a plan by an estimator that exists already; see :func:`estimate_memory`.

    Raises:
        PlanError: If the plan does not fit the network or the machine.
    """
    spec, cluster, limit = estimator.spec, estimator.cluster, estimator.limit
    stages = estimator.stages(plan, replay=replay)
    worst = worst_of(stages)
    fits = verdict_of(worst.device_total, worst.limit or limit) == "fits"
    advises = advise and not fits and isinstance(cluster, Cluster)
    return MemoryEstimate(
        model=spec.name,
        cluster=describe_cluster(cluster),
        memory_limit=limit,
        plan=plan,
        precision=spec.precision_text,
        optimizer=spec.optimizer.name,
        stages=stages,
        source=estimator.source,
        changes=changes_that_fit(estimator, plan) if advises else (),
        host=_host_need(cluster, plan, stages),
        notes=(*spec.notes, *what_is_not_run(plan), *_flush_notes(stages, limit)),
    )


def _host_need(cluster: AnyCluster, plan: Plan, stages: Sequence[StageEstimate]) -> HostNeed | None:
    return host_need(cluster, plan, {group: stages[group].host_bytes for group in range(plan.num_groups)})


def limit_of(cluster: Cluster, memory_limit: str | int | None) -> int:
    """Bytes of each device that may be used.

    Raises:
        ValueError: If the limit is not a size, is nothing, or is more than the device has.
    """
    has = cluster.device.memory_bytes
    if memory_limit is None:
        return has
    try:
        limit = parse_bytes(memory_limit)
    except ValueError as error:
        raise ValueError(f"memory_limit: {error}") from None
    if not 0 < limit <= has:
        raise ValueError(
            f"memory_limit = {memory_limit}: it must be more than nothing and at most the {format_bytes(has)} of one "
            f"{cluster.device.name}; leave it out to allow all of it"
        )
    return limit


def _flush_notes(stages: Sequence[StageEstimate], limit: int) -> tuple[str, ...]:
    """Stages whose allocator has to give memory back within a step, which costs time."""
    found = [item for item in stages if item.flushes and item.device_total.p50 <= (item.limit or limit)]
    names = ", ".join(str(item.stage) for item in found)
    if not names:
        return ()
    return (
        f"on stage {names} there is room only if the allocator gives back what is free within a step, which waits for "
        "the device; expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF may avoid it",
    )


def estimate_prediction(plan: Plan, module_map: ModuleMap, cluster: AnyCluster, limit: int) -> MemoryEstimate:
    """What a plan needs by its own prediction.

    Raises:
        PlanError: If the plan predicts nothing.
    """
    if plan.predicted is None:
        raise PlanError("the plan predicts nothing: estimate it from a trace of the module")
    stages = tuple(
        summed_estimate(plan, index, _memory(stage), cluster, module_map, limit)
        for index, stage in enumerate(plan.predicted.stages)
    )
    made_for = dict(plan.fingerprint)
    return MemoryEstimate(
        model="the module",
        cluster=describe_cluster(cluster),
        memory_limit=limit,
        plan=plan,
        precision=made_for.get("precision", "unknown precision"),
        optimizer="its optimizer",
        stages=stages,
        source="the plan's own prediction",
        host=_host_need(cluster, plan, stages),
        notes=what_is_not_run(plan),
    )


def _memory(stage: PredictedStage) -> StageMemory:
    """The peak by term, as far as the prediction has terms."""
    known = dict(stage.breakdown)
    terms = {name: round(known.get(name, 0.0)) for name in TERMS}
    terms["working_bytes"] += stage.peak_bytes - sum(terms.values())
    return StageMemory(phase="peak", terms=tuple(terms.items()))
