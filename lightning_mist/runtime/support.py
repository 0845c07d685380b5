"""What this version can run; everything else a plan may say is refused."""

from collections.abc import Sequence

from lightning_mist.errors import PlanError
from lightning_mist.plan import OFFLOADED, ModuleMap, Plan, StagePlan, check_split
from lightning_mist.plan.module_map import OFFLOADS

_IN_FILES = ("parameters", "optimizer")
"""Kinds of state that ``offload_directory`` takes."""


def executed_offload(
    offload: Sequence[str] | None, device_kind: str, *, has_files: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kinds of state that plans to be executed here may offload, and what to say of others, for people.

    Args:
        offload: The kinds that were asked for; None where that was left to the devices.
    """
    possible = tuple(OFFLOADS) if device_kind == "cuda" else _IN_FILES if has_files else ()
    left = tuple(name for name in possible if name in (OFFLOADED if offload is None else offload))
    missing = ", ".join(name for name in offload or () if name not in left)
    why = "a CPU's own memory is the host's, and offload_directory takes parameters and optimizer state to files"
    return left, (f"not offloaded: {missing}; {why}",) if missing else ()


def check_supported(plan: Plan, module_map: ModuleMap) -> None:
    """Raise a PlanError with the nearest setting that runs if a plan asks for something the runtime cannot do."""
    if _is_alone(plan):
        raise PlanError(
            f"schedule = {plan.schedule!r} with {plan.num_stages} stages on one group of devices: chunks are passed "
            "from group to group, so at least 2 are needed; use one stage with all layers"
        )
    if plan.shares_both_ways:
        tensor = max(stage.mesh.tensor_parallel_degree for stage in plan.stages)
        context = max(stage.mesh.context_parallel_degree for stage in plan.stages)
        raise PlanError(
            f"tensor_parallel_degree = {tensor} with context_parallel_degree = {context} in one plan: layers "
            "and rows are not shared out at once yet; use 1 for one of them on every stage"
        )
    for index, stage in enumerate(plan.stages):
        _check_units(index, stage, module_map)
        check_split(index, stage, module_map)


def unsupported(plan: Plan) -> tuple[str, ...]:
    """What the runtime does not execute yet of a plan, for people; empty if it executes all of it.

    How a module can be split is another question: :func:`check_supported` asks it too.
    """
    found = [f"schedule {plan.schedule} with {plan.num_stages} stages on one group of devices"] * _is_alone(plan)
    return (*found, *["context_parallel_degree with tensor_parallel_degree"] * plan.shares_both_ways)


def _is_alone(plan: Plan) -> bool:
    return plan.num_stages > 1 and plan.num_groups == 1


def _check_units(index: int, stage: StagePlan, module_map: ModuleMap) -> None:
    """Refuse to move what the module, its optimizer or its hooks need on the device."""
    for name, ratio in stage.offload.told:
        if ratio > 0.0 and (why := "; ".join(module_map.excludes_offload(name))):
            raise PlanError(f"stages[{index}].offload.{name} = {ratio}: {why}; use offload.{name} = 0")
