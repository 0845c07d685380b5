"""What of a rank's state is in host memory by its plan."""

from collections.abc import Iterator, Mapping

from torch import nn
from torch.optim import Optimizer

from lightning_mist.plan import ModuleMap, ZeroStage
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.offload.gradients import OffloadedGradients
from lightning_mist.runtime.offload.host_pool import HostPool
from lightning_mist.runtime.offload.lanes import Lanes
from lightning_mist.runtime.offload.optimizer_state import OffloadedState
from lightning_mist.runtime.shards import UnitKey, UnitShards
from lightning_mist.runtime.transport import Transport
from lightning_mist.runtime.unit_gather import UnitGather
from lightning_mist.schedule.moves import check_update, update_actions
from lightning_mist.schedule.stage_units import defers_update, moved_parameters, shard_units


def updated_units(mesh: Mesh, module_map: ModuleMap) -> Iterator[tuple[UnitKey, tuple[str, ...]]]:
    """What the ranks of a stage, or of its chunks, update of each unit together; each parameter with its first."""
    known: set[str] = set()
    for stage in mesh.plan.chunks(mesh.stage):
        for unit in shard_units(module_map, mesh.plan.bounds, stage):
            names = tuple(name for name in unit.reduced if name not in known)
            known.update(names)
            if names:
                yield (stage, unit.unit), names


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
    values = moved_parameters(plan, module_map, mesh.stage, ratios.parameters, trained=False)
    units = dict(updated_units(mesh, module_map))
    moved = {
        kind: frozenset(key for key, of_unit in units.items() if not names.isdisjoint(of_unit))
        for kind, names in {"O": state, "P": values, "G": frozenset() if gradients is None else gradients.names}.items()
    }
    defers = defers_update(plan, module_map, mesh.stage)
    is_shared = mesh.is_sharded and plan.stages[mesh.stage].zero_stage < ZeroStage.PARAMETERS
    gather = UnitGather(mesh, parameters, units, transport) if defers and is_shared else None
    actions = update_actions(list(units), moved, gathers=gather is not None)
    check_update(actions, units, moved)
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
