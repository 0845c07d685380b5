"""Where a ratio of offloading cannot bite: whole parameters move, and some units have none that is small enough."""

from collections.abc import Iterator

from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.plan_tables import ranges
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.stage_units import moved_parameters, shard_units, unit_order

_WHOLE_PARAMETERS = {"parameters": False, "gradients": True, "optimizer": True}
"""Kinds of state that move by whole parameters, and whether only trained ones have it."""


def ratio_notes(plan: Plan, module_map: ModuleMap, group: int) -> Iterator[str]:
    """What the ratios of a group of devices do not move of their units, for people; one line for each kind.

    Args:
        plan: The plan.
        module_map: Where parameters are used.
        group: The group; its chunks agree in their ratios.
    """
    mine = {unit for stage in plan.chunks(group) for unit in unit_order(module_map, plan.bounds, stage)}
    frozen = {use.name for use in module_map.parameters if not use.requires_grad}
    for kind, trained in _WHOLE_PARAMETERS.items():
        ratio = getattr(plan.stages[group].offload, kind)
        moved = moved_parameters(plan, module_map, group, ratio, trained=trained)
        idle, known = list[int](), frozen if trained else set[str]()
        for unit in shard_units(module_map, ((0, len(module_map.blocks)),), 0):
            owned = set(unit.names) - known
            known = known | owned
            if ratio and owned and unit.unit in mine and owned.isdisjoint(moved):
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
