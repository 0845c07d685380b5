"""The units of a plan's stages: which parameters they have, what of them is sharded, reduced and offloaded.

What happens between units is said in :mod:`lightning_mist.schedule.stage_program`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from lightning_mist.plan import Feature, ModuleMap, ParameterUse, Plan, StagePlan, ZeroStage
from lightning_mist.plan.mesh import itemsize
from lightning_mist.plan.plan_tables import ranges
from lightning_mist.plan.sharding import moved_of_unit
from lightning_mist.schedule.action import HEAD, TAIL, Action
from lightning_mist.schedule.stage_program import Key, StageUnits, update_rows
from lightning_mist.schedule.unit_checks import check_update


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit:
    """One unit of a stage.

    Attributes:
        unit: Position of its layer, or :data:`HEAD`, or :data:`TAIL`.
        reduced: Names of those parameters whose gradient is complete when its backward has run: no earlier unit of the
            stage uses them.
    """

    unit: int
    names: tuple[str, ...]
    reduced: tuple[str, ...]


def shard_units(module_map: ModuleMap, bounds: tuple[tuple[int, int], ...], stage: int) -> tuple[ShardUnit, ...]:
    """The units of a stage that have parameters, in the order of forward.

    A parameter that no part of the traced step used belongs to the layer it lies in, or else to all units of its stage:
    another step may use it anywhere. A module without layers, or that uses parameters in ways that are not seen, is one
    unit, its head.
    """
    order = unit_order(module_map, bounds, stage)
    owners = module_map.owners(bounds)
    used: dict[int, list[str]] = {unit: [] for unit in order}
    reduced: dict[int, list[str]] = {unit: [] for unit in order}
    for use in module_map.parameters:
        if stage not in owners[use.name]:
            continue
        found = _units_of(module_map, use)
        units = [unit for unit in order if unit in found] or list(order)
        for unit in units:
            used[unit].append(use.name)
        if use.requires_grad:
            reduced[units[0]].append(use.name)
    return tuple(
        ShardUnit(unit=unit, names=tuple(used[unit]), reduced=tuple(reduced[unit])) for unit in order if used[unit]
    )


def unit_order(module_map: ModuleMap, bounds: tuple[tuple[int, int], ...], stage: int) -> tuple[int, ...]:
    """All units of a stage in the order of forward; one, its head, where uses of parameters are not known by layers."""
    if not module_map.blocks or module_map.excludes("shards"):
        return (HEAD,)
    first, end = bounds[stage] if len(bounds) > 1 else (0, len(module_map.blocks))
    return (*[HEAD] * (stage == 0), *range(first, end), *[TAIL] * (stage == len(bounds) - 1))


def used_elsewhere(module_map: ModuleMap, bounds: tuple[tuple[int, int], ...], found: ModuleMap) -> str | None:
    """The first parameter that another step of the module uses where its values are not, and where that is, if any.

    Args:
        module_map: Of the step by which parameters were given to units.
        found: Of the other step.
    """
    there: dict[int, set[str]] = {}
    for stage in range(len(bounds)):
        for item in shard_units(module_map, bounds, stage):
            there.setdefault(item.unit, set()).update(item.names)
    if len(bounds) == 1 and len(unit_order(module_map, bounds, 0)) == 1:
        return None  # all of it is there while it runs
    if module_map.blocks != found.blocks:
        why = next((item.reason for item in found.exclusions if item.feature == "pipeline"), "its layers are others")
        return f"it does not run the layers that training_step runs, in that order ({why})"
    for use in found.parameters:
        for unit in sorted(_units_of(found, use)):
            if use.name not in there.get(unit, ()):
                return f"it uses {use.name} in {_named([unit])}, where training_step does not"
    return None


def _units_of(module_map: ModuleMap, use: ParameterUse) -> set[int]:
    """The units that compute with a parameter; empty if any may."""
    blocks = module_map.blocks
    found: set[int] = set()
    for module_name, _, regions in use.slots:
        for region in regions:
            # The map counts what follows a layer to its region. What follows the last one is a unit of its own.
            inside = region >= 0 and _lies_in(module_name, blocks[region])
            found.add(TAIL if region == len(blocks) - 1 and not inside else region)
    if not found and any(_lies_in(name, block) for name, *_ in use.slots for block in blocks):
        found.add(module_map.home(use))
    return found


def _lies_in(module_name: str, block: str) -> bool:
    return f"{module_name}.".startswith(f"{block}.")


def stage_units(
    units: Sequence[ShardUnit],
    stage: StagePlan,
    order: Sequence[int],
    offloaded: Collection[str] = (),
    gradients: Collection[str] = (),
) -> StageUnits:
    """The units of a stage as the expansion needs them.

    Args:
        order: All its units; see :func:`unit_order`.
        offloaded: Names of parameters whose values are in host memory.
        gradients: Names of parameters whose gradients are.
    """
    shards = stage.zero_stage if stage.mesh.num_peers > 1 else ZeroStage.NONE
    found = {unit.unit: unit for unit in units}
    kept = frozenset(unit for unit in order if unit not in (HEAD, TAIL) and stage.kept_ratio(unit) > 0.0)
    return StageUnits(
        order=tuple(order) if kept else tuple(found),
        reduced=frozenset(key for key, unit in found.items() if unit.reduced and shards >= ZeroStage.GRADIENTS),
        sharded=frozenset(
            key
            for key, unit in found.items()
            if shards >= ZeroStage.PARAMETERS or not set(offloaded).isdisjoint(unit.names)
        ),
        activations=kept,
        gradients=frozenset(key for key, unit in found.items() if not set(gradients).isdisjoint(unit.reduced)),
        is_averaged=stage.mesh.num_peers > 1 and shards < ZeroStage.GRADIENTS,
    )


def defers_update(plan: Plan, module_map: ModuleMap, stage: int) -> bool:
    """Whether a stage takes the optimizer's step in the first forward of the next batch.

    It does where that hides copies, unless code of the user's may look at gradients or optimizer state behind a step.
    Who looks at parameters has the step taken first, which one rank alone can do but under ZeRO-1 and ZeRO-2.
    """
    item = plan.stages[stage]
    if not item.offload.updates_by_units:
        return False
    is_given_out = item.mesh.num_peers > 1 and item.zero_stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS)
    seen: tuple[Feature, ...] = ("sharded_gradients", "shards", *(("sharded_parameters",) if is_given_out else ()))
    return not any(module_map.excludes(feature) for feature in seen)


def plan_units(plan: Plan, module_map: ModuleMap, group: int) -> dict[int, tuple[ShardUnit, ...]]:
    """The units that have parameters of each stage of a group that shards gradients or moves anything, by stage."""
    return {
        index: shard_units(module_map, plan.bounds, index)
        for index in plan.chunks(group)
        if (stage := plan.stages[index]).offload.moves_in_passes
        or (stage.zero_stage >= ZeroStage.GRADIENTS and stage.mesh.num_peers > 1)
        or defers_update(plan, module_map, index)
    }


def expanded_units(
    plan: Plan, module_map: ModuleMap, found: Mapping[int, Sequence[ShardUnit]]
) -> dict[int, StageUnits]:
    """Units as the expansion needs them."""
    expanded = {}
    for stage, units in found.items():
        moved, order = moved_parameters(plan, module_map, stage), unit_order(module_map, plan.bounds, stage)
        expanded[stage] = stage_units(units, plan.stages[stage], order, moved["P"], moved["G"])
    return expanded


def offloaded_parameters(
    plan: Plan, module_map: ModuleMap, stage: int, ratio: float, *, trained: bool
) -> frozenset[str]:
    """Names of the parameters of which a stage moves something: their values, gradients or optimizer state.

    A parameter belongs to the first unit of the whole module that uses it, whatever the stages.

    Args:
        ratio: Share of each unit's bytes that may be offloaded.
    """
    if ratio == 0.0:
        return frozenset()
    degree = plan.stages[stage].mesh.tensor_parallel_degree
    parts = {split.name: split for split in module_map.split(degree).parameters}
    sizes: dict[str, int] = {}
    for use in module_map.parameters:
        shape = parts[use.name].local_shape(use.shape, degree) if use.name in parts else use.shape
        if use.requires_grad or not trained:
            sizes[use.name] = prod(shape) * itemsize(use.dtype)
    found: set[str] = set()
    known: set[str] = set()
    for unit in shard_units(module_map, ((0, len(module_map.blocks)),), 0):
        used = set(unit.names) - known
        owned = [name for name in sizes if name in used]
        known |= used
        found.update(owned[index] for index in moved_of_unit([sizes[name] for name in owned], ratio))
    return frozenset(found)


def moved_parameters(plan: Plan, module_map: ModuleMap, group: int) -> dict[str, frozenset[str]]:
    """Names of what a group moves of optimizer state (``"O"``), parameters (``"P"``), gradients (``"G"``)."""
    ratios = plan.stages[group].offload
    return {
        "O": offloaded_parameters(plan, module_map, group, ratios.optimizer, trained=True),
        "P": offloaded_parameters(plan, module_map, group, ratios.parameters, trained=False),
        "G": offloaded_parameters(plan, module_map, group, ratios.gradients, trained=True),
    }


def updated_units(plan: Plan, module_map: ModuleMap, group: int) -> dict[Key, tuple[str, ...]]:
    """What the ranks of a group update of each unit together; each parameter with its first."""
    known: set[str] = set()
    found: dict[Key, tuple[str, ...]] = {}
    for stage in plan.chunks(group):
        for unit in shard_units(module_map, plan.bounds, stage):
            names = tuple(name for name in unit.reduced if name not in known)
            known.update(names)
            if names:
                found[stage, unit.unit] = names
    return found


def stage_update(plan: Plan, module_map: ModuleMap, group: int) -> tuple[tuple[Action, ...], ...]:
    """The optimizer's step of a group of devices, a row for each unit; none where it moves nothing of it."""
    stage = plan.stages[group]
    if not stage.offload.updates_by_units:
        return ()
    units = updated_units(plan, module_map, group)
    offloaded = {
        kind: [key for key, of_unit in units.items() if not names.isdisjoint(of_unit)]
        for kind, names in moved_parameters(plan, module_map, group).items()
    }
    is_shared = ZeroStage.NONE < stage.zero_stage < ZeroStage.PARAMETERS and stage.mesh.num_peers > 1
    rows = update_rows(list(units), offloaded, gathers=is_shared and defers_update(plan, module_map, group))
    check_update(list(chain.from_iterable(rows)), units, offloaded)
    return rows


_WHOLE_PARAMETERS = {"parameters": False, "gradients": True, "optimizer": True}
"""Kinds of state that move by whole parameters, and whether only trained ones have it."""


def ratio_notes(plan: Plan, module_map: ModuleMap, group: int) -> Iterator[str]:
    """What the ratios of a group of devices do not move of their units, for people; one line for each kind.

    Args:
        group: The group; its chunks agree in their ratios.
    """
    mine = {unit for stage in plan.chunks(group) for unit in unit_order(module_map, plan.bounds, stage)}
    frozen = {use.name for use in module_map.parameters if not use.requires_grad}
    for kind, trained in _WHOLE_PARAMETERS.items():
        ratio = getattr(plan.stages[group].offload, kind)
        offloaded = offloaded_parameters(plan, module_map, group, ratio, trained=trained)
        idle, known = list[int](), frozen if trained else set[str]()
        for unit in shard_units(module_map, ((0, len(module_map.blocks)),), 0):
            owned = set(unit.names) - known
            known = known | owned
            if ratio and owned and unit.unit in mine and owned.isdisjoint(offloaded):
                idle.append(unit.unit)
        if idle:
            yield (
                f"offload.{kind} = {ratio:g} moves nothing of {_named(idle)}: whole parameters move, and each there "
                "is a larger share of its unit"
            )


def _named(units: list[int]) -> str:
    layers = [unit for unit in units if unit not in (HEAD, TAIL)]
    words = ["the head"] * (HEAD in units)
    if layers:
        words.append(f"layer{'s' * (len(layers) > 1)} {ranges(layers)}")
    words += ["the tail"] * (TAIL in units)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
