"""Where a ratio of offloading cannot bite: whole parameters move, and some units have none that is small enough."""

from collections.abc import Iterator

from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.moved import moved_of_unit
from lightning_mist.plan.render import ranges
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.units import owned_by_units, unit_order

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
    for kind, trained in _WHOLE_PARAMETERS.items():
        ratio = getattr(plan.stages[group].offload, kind)
        if not 0.0 < ratio < 1.0:
            continue  # At 1 everything moves.
        idle, total, moved = list[int](), 0, 0
        for unit, owned in owned_by_units(plan, module_map, group, trained=trained):
            sizes = [size for _, size in owned]
            if unit not in mine or not sum(sizes):
                continue
            here = sum(sizes[index] for index in moved_of_unit(sizes, ratio))
            total, moved = total + sum(sizes), moved + here
            if not here:
                idle.append(unit)
        if idle:
            yield (
                f"offload.{kind} = {ratio:g} moves {moved / total:.0%}: whole parameters move, and all of "
                f"{_named(idle)} are larger than their unit's share"
            )


def _named(units: list[int]) -> str:
    layers = [unit for unit in units if unit not in (HEAD, TAIL)]
    words = ["the head"] * (HEAD in units)
    if layers:
        words.append(f"layer{'s' * (len(layers) > 1)} {ranges(layers)}")
    words += ["the tail"] * (TAIL in units)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
