"""The estimate of a plan that carries the cost model's figures: nothing has to be traced for it."""

from dataclasses import replace

from lightning_mist.cost.memory import TERMS, StageMemory
from lightning_mist.errors import PlanError
from lightning_mist.estimate.estimate_data import MemoryEstimate
from lightning_mist.estimate.stage_estimates import (
    describe_cluster,
    rank_overheads,
    stage_device,
    summed_estimate,
    what_is_not_run,
)
from lightning_mist.hardware import AnyCluster, MixedCluster
from lightning_mist.plan import ModuleMap, Plan, PredictedStage


def estimate_prediction(plan: Plan, module_map: ModuleMap, cluster: AnyCluster, limit: int) -> MemoryEstimate:
    """What a plan needs by its own prediction.

    Args:
        limit: Bytes of each device that may be used.

    Raises:
        PlanError: If the plan predicts nothing.
    """
    if plan.predicted is None:
        raise PlanError("the plan predicts nothing: estimate it from a trace of the module")
    stages = []
    for index, stage in enumerate(plan.predicted.stages):
        devices = plan.stages[index].devices
        part, own = stage_device(cluster, devices, limit)
        overheads = rank_overheads(part, plan, module_map, devices[0])
        found = summed_estimate(plan, index, _memory(stage), part, overheads, own)
        stages.append(replace(found, limit=own) if isinstance(cluster, MixedCluster) else found)
    made_for = dict(plan.fingerprint)
    return MemoryEstimate(
        model="the module",
        cluster=describe_cluster(cluster),
        memory_limit=limit,
        plan=plan,
        precision=made_for.get("precision", "unknown precision"),
        optimizer="its optimizer",
        stages=tuple(stages),
        source="the plan's own prediction",
        notes=what_is_not_run(plan),
    )


def _memory(stage: PredictedStage) -> StageMemory:
    """The peak by term, as far as the prediction has terms."""
    known = dict(stage.breakdown)
    terms = {name: round(known.get(name, 0.0)) for name in TERMS}
    terms["working_bytes"] += stage.peak_bytes - sum(terms.values())
    return StageMemory(phase="peak", terms=tuple(terms.items()))
