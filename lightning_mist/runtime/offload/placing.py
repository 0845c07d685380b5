"""What of a rank's state is in host memory by its plan."""

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from lightning_mist.plan import ModuleMap
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport
from lightning_mist.runtime.host_memory import HostPool, Lanes
from lightning_mist.runtime.offload.gradient_offload import OffloadedGradients
from lightning_mist.runtime.offload.optimizer_state import OffloadedState
from lightning_mist.runtime.parameters import UnitGather, UnitShards
from lightning_mist.schedule import ActionKind
from lightning_mist.schedule.stage_units import defers_update, moved_parameters, stage_update, updated_units


def offload_optimizer_state(
    optimizer: Optimizer,
    mesh: Mesh,
    module_map: ModuleMap,
    parameters: Mapping[str, nn.Parameter],
    lanes: Lanes,
    pool: HostPool,
    shards: UnitShards | None,
    gradients: OffloadedGradients | None,
    transport: Transport,
) -> OffloadedState | None:
    """Let an optimizer step unit by unit where the plan moves what it needs; None if that is nothing.

    Args:
        optimizer: The user's optimizer over what this rank updates.
        mesh: The rank's place.
        module_map: Where parameters are used.
        parameters: The parameters of the rank's stages by canonical name.
        lanes: Copies between its device and the host.
        pool: The host memory.
        shards: The values of parameters that are not on the device all the time.
        gradients: Gradients that are in host memory.
        transport: Connects the ranks.
    """
    plan, ratios = mesh.plan, mesh.plan.stages[mesh.stage].offload
    if not (ratios.optimizer or ratios.parameters or ratios.gradients):
        return None
    state = moved_parameters(plan, module_map, mesh.stage, ratios.optimizer, trained=True)
    units = updated_units(plan, module_map, mesh.stage)
    actions, defers = stage_update(plan, module_map, mesh.stage), defers_update(plan, module_map, mesh.stage)
    is_given_out = any(action.kind is ActionKind.GATHER_PARAMETERS for action in actions)
    gather = UnitGather(mesh, parameters, units, transport) if is_given_out else None
    owned = {item.name for item in mesh.owned}
    return OffloadedState(
        optimizer,
        {key: [parameters[name] for name in of_unit if name in owned] for key, of_unit in units.items()},
        {parameters[name] for name in state if name in owned},
        actions,
        lanes=lanes,
        pool=pool,
        shards=shards if ratios.parameters else None,
        gradients=gradients,
        gather=gather,
        stale={key: {name: parameters[name] for name in of_unit} for key, of_unit in units.items()} if defers else None,
    )
