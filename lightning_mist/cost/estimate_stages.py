"""What the most loaded device of every stage of a plan needs: allocated, reserved, device total."""

from dataclasses import dataclass, field

from lightning_mist.cost.candidates import StageSlot
from lightning_mist.cost.chunks import plan_memory
from lightning_mist.cost.communicators import communicators_of
from lightning_mist.cost.device_need import summed_need
from lightning_mist.cost.device_total import DeviceOverheads, device_overheads
from lightning_mist.cost.estimate_data import OUTER_TERMS, StageEstimate
from lightning_mist.cost.interval import Interval
from lightning_mist.cost.memory import MemoryModel, StageMemory
from lightning_mist.errors import PlanError
from lightning_mist.hardware import Cluster
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan


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
        need = summed_need(memory.peak_bytes, self.cluster, self._overheads(plan, index))
        return StageEstimate(
            stage=index,
            devices=plan.stages[index].devices,
            phase=memory.phase,
            allocated=need.allocated,
            reserved=need.reserved,
            device_total=need.device_total,
            terms=(*memory.terms, *((name, getattr(need, name)) for name in OUTER_TERMS)),
        )

    def _overheads(self, plan: Plan, index: int) -> DeviceOverheads:
        """What a device of a stage holds besides tensors."""
        if self.cluster.device.kind != "cuda":
            return device_overheads(self.cluster, ())
        communicators = communicators_of(plan, self.spec.module_map, plan.stages[index].devices[0])
        return device_overheads(self.cluster, communicators)


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
