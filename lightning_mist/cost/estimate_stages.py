"""What the most loaded device of every stage of a plan needs: allocated, reserved, device total."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_mist.cost.candidates import StageSlot
from lightning_mist.cost.chunks import plan_memory
from lightning_mist.cost.estimate_data import OUTER_TERMS, StageEstimate
from lightning_mist.cost.interval import Interval
from lightning_mist.cost.memory import MemoryModel, StageMemory
from lightning_mist.errors import PlanError
from lightning_mist.hardware import Cluster
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan

ALLOCATED_SPREAD = 1.04
"""By how much more than predicted tensors took at most, over plans that this runtime executed on CPUs: the bound that
``tests/integration/test_memory.py`` holds predictions to."""

RESERVED_OVER_ALLOCATED = 1.12
"""Mean of 26 stages of executed pipelines (Mist artifact, Dazz993/Mist at d69e530; 1.06 to 1.23)."""

TOTAL_OVER_ALLOCATED = 1.25
"""In all 454 runs of Fujii, Watanabe and Yokota, 2024 (arXiv 2411.06465) what predictions leave out stayed below a
quarter of them."""


@dataclass(slots=True)
class Estimator:
    """Estimates plans of one network on one machine; keeps what it has computed.

    Attributes:
        spec: The network.
        cluster: The machine.
    """

    spec: ModelSpec
    cluster: Cluster
    _models: dict[tuple[int, bool], MemoryModel] = field(default_factory=dict)

    def stages(self, plan: Plan) -> tuple[StageEstimate, ...]:
        """Every stage of a plan.

        Raises:
            PlanError: If the plan does not fit the network or the machine.
        """
        check_plan_for(self.spec, self.cluster, plan)
        found = plan_memory(self._model, plan)
        return tuple(self._stage(plan, index, memory) for index, memory in enumerate(found))

    def worst(self, plan: Plan) -> Interval:
        """Device total of the stage that needs most."""
        return max(stage.device_total for stage in self.stages(plan))

    def on(self, cluster: Cluster) -> "Estimator":
        """The same network on another machine."""
        return Estimator(self.spec, cluster, self._models)

    def _model(self, slot: StageSlot) -> MemoryModel:
        key = (slot.tensor_parallel_degree, slot.sequence_parallel)
        if key not in self._models:
            self._models[key] = MemoryModel(self.spec.split(*key))
        return self._models[key]

    def _stage(self, plan: Plan, index: int, memory: StageMemory) -> StageEstimate:
        peak = memory.peak_bytes
        allocated = Interval(p50=peak, p95=round(ALLOCATED_SPREAD * peak))
        on_cuda = self.cluster.device.kind == "cuda"
        reserved = Interval(p50=round(RESERVED_OVER_ALLOCATED * peak), p95=round(TOTAL_OVER_ALLOCATED * peak))
        outer: Mapping[str, int] = {"allocator_bytes": reserved.p50 - peak} if on_cuda else {}
        return StageEstimate(
            stage=index,
            devices=plan.stages[index].devices,
            phase=memory.phase,
            allocated=allocated,
            reserved=reserved if on_cuda else allocated,
            device_total=reserved if on_cuda else allocated,
            terms=(*memory.terms, *((name, outer.get(name, 0)) for name in OUTER_TERMS)),
        )


def check_plan_for(spec: ModelSpec, cluster: Cluster, plan: Plan) -> None:
    """Refuse a plan that is not one for a network and a machine.

    Raises:
        PlanError: Naming both numbers.
    """
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
    for index, stage in enumerate(plan.stages):
        if stage.offload.any:
            raise PlanError(
                f"stages[{index}] offloads: only stages without offload are modelled yet; set every offload ratio to 0"
            )
        if stage.mesh.context_parallel_degree > 1:
            raise PlanError(
                f"stages[{index}] has context_parallel_degree {stage.mesh.context_parallel_degree}: only 1 is modelled "
                "yet; use data parallelism"
            )
