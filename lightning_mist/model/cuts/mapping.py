"""Where an unmodified module can be cut, found by running its step twice on fake tensors.

The second run sees another batch (a part of the first, if one is given): what differs between the runs depends on the
data, on random numbers or on earlier runs, and what a stage would have to remember from the trace must not. Sizes that
differ as the numbers of rows do tell batch dimensions.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_mist.model.cuts.blocks import find_blocks
from lightning_mist.model.cuts.exclusions import NO_BLOCKS, find_exclusions, structure_problems
from lightning_mist.model.cuts.fake_runs import Runs, run_twice
from lightning_mist.model.cuts.recorder import Record, Value
from lightning_mist.plan.calls import describe_value
from lightning_mist.plan.module_map import Exclusion, Feature, LiveTensor, ModuleMap, ParameterUse

Slots = dict[tuple[str, str], str]


def map_module(
    module: nn.Module,
    call: Callable[[Any], Any],
    batch: Any,
    *,
    step: str = "training_step",
    second_batch: Any = None,
    blocks: str | None = None,
    kept: Callable[[], Any] = tuple,
    may_repeat: bool = False,
) -> ModuleMap:
    """Trace the user's step on fake tensors and say where the module can be cut, and what rules a cut out.

    The module and all random generators are left as they were. Logging is the caller's to silence.

    Args:
        module: The user's module. Parameters may be without storage of their own (expanded from one element).
        call: Runs the step on a batch, for example ``lambda batch: module.training_step(batch, 0)``.
        second_batch: Another batch with fewer rows, to tell batch dimensions. Without it none is known.
        kept: What is needed of the last run once it is over, besides what it returned.
        blocks: Names the repeated blocks instead of finding them; see :func:`find_blocks`.
        may_repeat: Whether a block may be called again behind the last one; the module cannot be cut then.

    Returns:
        The map. If the step cannot be traced it has no blocks, and its exclusions hold the reason.

    Raises:
        TraceError: If ``blocks`` names no modules.
    """
    candidates, names = find_blocks(module, blocks), {id(item): name for name, item in module.named_parameters()}
    slots = {
        (module_name, attribute): names[id(parameter)]
        for module_name, child in module.named_modules()
        for attribute, parameter in child._parameters.items()
        if parameter is not None
    }
    runs = run_twice(module, call, (batch, batch if second_batch is None else second_batch), candidates, kept)
    rows = runs.rows[0] or 1
    if not runs.records:
        reason = f"the step cannot be traced: {runs.failure}"
        return _without_blocks(module, slots, step, rows, _exclude(("pipeline", "checkpointing"), reason), ())
    problems = structure_problems(runs.records, candidates, may_repeat=may_repeat)
    if not candidates or not runs.records[0].order or problems:
        exclusions = _exclude(("pipeline", "checkpointing"), *(problems or (NO_BLOCKS,)))
        exclusions += find_exclusions(module, runs, frozenset())
        return _without_blocks(module, slots, step, rows, exclusions, runs.records)
    first, second = runs.records
    cuts, unclear = _cuts(runs)
    exclusions = find_exclusions(module, runs, frozenset(first.order)) + _exclude(("pipeline",), *unclear)
    return ModuleMap(
        step=step,
        blocks=tuple(first.order),
        outputs=tuple(first.outputs),
        cuts=cuts,
        parameters=_parameter_uses(module, slots, runs.records),
        leaking_blocks=tuple(sorted(first.leaking | second.leaking)),
        exclusions=exclusions,
        batch_rows=rows,
        indexes_by_mask=first.indexes_by_mask or second.indexes_by_mask,
        leaves_out=_leaves_out(module, slots, runs.records),
        writes="seen" if first.written_parameters or second.written_parameters else "",
    )


def _exclude(features: tuple[Feature, ...], *reasons: str) -> tuple[Exclusion, ...]:
    return tuple(Exclusion(feature=feature, reason=reason) for feature in features for reason in reasons)


def _without_blocks(
    module: nn.Module,
    slots: Slots,
    step: str,
    rows: int,
    exclusions: tuple[Exclusion, ...],
    records: tuple[Record, ...],
) -> ModuleMap:
    """A map of a module that is run as a whole. Without records every parameter counts as used."""
    used = Record()
    for slot in {slot for record in records for slot in record.parameter_uses} if records else slots:
        used.parameter_uses[slot].add(-1)
    return ModuleMap(
        step=step,
        blocks=(),
        outputs=(),
        cuts=(),
        parameters=_parameter_uses(module, slots, (used,)),
        exclusions=exclusions,
        batch_rows=rows,
        leaves_out=_leaves_out(module, slots, records),
        writes="seen" if any(record.written_parameters for record in records) else "" if records else "maybe",
    )


def _leaves_out(module: nn.Module, slots: Slots, records: tuple[Record, ...]) -> bool:
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return any(not trained <= {slots[slot] for slot in record.differentiated} for record in records)


def _parameter_uses(module: nn.Module, slots: Slots, records: tuple[Record, ...]) -> tuple[ParameterUse, ...]:
    held: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for slot, name in slots.items():
        regions = {region for record in records for region in record.parameter_uses.get(slot, ())}
        held.setdefault(name, []).append((*slot, tuple(sorted(regions))))
    return tuple(
        ParameterUse(
            name=name,
            slots=tuple(held[name]),
            shape=tuple(parameter.shape),
            dtype=_name_of(parameter.dtype),
            requires_grad=parameter.requires_grad,
        )
        for name, parameter in module.named_parameters()
    )


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _cuts(runs: Runs) -> tuple[tuple[tuple[LiveTensor, ...], ...], tuple[str, ...]]:
    first, second = runs.records
    cuts, unclear = [], []
    for position in range(1, len(first.order)):
        alive, other = (_alive(record, position) for record in (first, second))
        if alive.keys() != other.keys():
            names = [describe_value(key) for key in alive.keys() ^ other.keys()]
            unclear.append(f"the values that cross into layer {position} differ from step to step: {', '.join(names)}")
        cut = []
        for key, value in alive.items():
            if isinstance(key, tuple) and key[0] == "unseen":
                unclear.append(f"a value of unknown origin crosses into layer {position} (first used at {key[3]})")
            shapes = tuple(value.tensor.shape), tuple(other.get(key, value).tensor.shape)
            batch_dim, is_clear = _batch_dim(shapes, runs.rows)
            if not is_clear:
                unclear.append(
                    f"the {describe_value(key)} crosses into layer {position} with shapes {shapes[0]} and {shapes[1]} "
                    f"for {runs.rows[0]} and {runs.rows[1]} rows: no dimension follows the rows"
                )
            cut.append(
                LiveTensor(
                    key=key,
                    shape=shapes[0],
                    dtype=_name_of(value.tensor.dtype),
                    requires_grad=value.requires_grad,
                    batch_dim=batch_dim,
                )
            )
        cuts.append(tuple(cut))
    return tuple(cuts), tuple(unclear[:1])


def _alive(record: Record, position: int) -> dict[Any, Value]:
    return {key: value for key, value in record.values.items() if value.defined < position <= value.last_used}


def _batch_dim(shapes: tuple[tuple[int, ...], ...], rows: tuple[int | None, ...]) -> tuple[int | None, bool]:
    """The dimension whose size follows the rows, and whether the answer is certain."""
    first, second = shapes
    differing = [dim for dim, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
    if not differing and len(first) == len(second):
        return None, True
    one, two = rows
    if len(first) != len(second) or len(differing) != 1 or not one or not two:
        return None, False
    (dim,) = differing
    return (dim, True) if first[dim] * two == second[dim] * one else (None, False)
