"""What of a rank's state is in host memory by its plan."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.offload.host_pool import HostPool
from lightning_mist.runtime.offload.lanes import Lanes
from lightning_mist.runtime.offload.optimizer_state import OffloadedState
from lightning_mist.runtime.shards import UnitKey
from lightning_mist.schedule.moves import check_update, moved_names, update_actions
from lightning_mist.schedule.units import shard_units


def moved_of(plan: Plan, module_map: ModuleMap, stage: int, ratio: float, *, trained: bool) -> frozenset[str]:
    """Names of the parameters of which a stage moves something.

    A parameter belongs to the first unit of the whole module that uses it, whatever the stages.

    Args:
        plan: The plan.
        module_map: Where parameters are used.
        stage: The stage.
        ratio: Share of each unit's bytes that may be moved.
        trained: Whether only trained parameters count.
    """
    degree = plan.stages[stage].mesh.tensor_parallel_degree
    parts = {split.name: split for split in module_map.split(degree).parameters}
    sizes: dict[str, int] = {}
    for use in module_map.parameters:
        shape = parts[use.name].local_shape(use.shape, degree) if use.name in parts else use.shape
        if use.requires_grad or not trained:
            sizes[use.name] = torch.Size(shape).numel() * getattr(torch, use.dtype).itemsize
    units: list[list[tuple[str, int]]] = []
    known: set[str] = set()
    for unit in shard_units(module_map, ((0, len(module_map.blocks)),), 0):
        first = {name for name in unit.names if name not in known}
        known |= first
        units.append([(name, size) for name, size in sizes.items() if name in first])
    return moved_names(units, ratio)


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
) -> OffloadedState | None:
    """Keep in host memory what the plan says of an optimizer's state; None if that is nothing.

    Args:
        optimizer: The user's optimizer over what this rank updates.
        mesh: The rank's place.
        module_map: Where parameters are used.
        parameters: The parameters of the rank's stages by canonical name.
        lanes: Copies between its device and the host.
        pool: The host memory.
    """
    ratio = mesh.plan.stages[mesh.stage].offload.optimizer
    if ratio == 0.0:
        return None
    names = moved_of(mesh.plan, module_map, mesh.stage, ratio, trained=True)
    units = dict(updated_units(mesh, module_map))
    moving = {key for key, of_unit in units.items() if not names.isdisjoint(of_unit)}
    actions = update_actions(list(units), moving)
    check_update(actions, units, moving)
    owned = {item.name for item in mesh.owned}
    return OffloadedState(
        optimizer,
        {key: [parameters[name] for name in of_unit if name in owned] for key, of_unit in units.items()},
        {parameters[name] for name in names if name in owned},
        actions,
        lanes=lanes,
        pool=pool,
    )
