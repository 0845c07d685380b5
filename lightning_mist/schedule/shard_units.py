"""Shard units: the parts of a stage whose parameters are fetched, and whose gradients are reduced, one after another.

The units of a stage are its layers, the head and the tail. Under ZeRO-2 and ZeRO-3 every computation of a stage is
expanded into that of its units, forward in their order, backward in reverse, with what happens between them::

    0UNSHARD:0 0UNSHARD:1 0F0:0 0RESHARD:0 0UNSHARD:2 0F0:1 0F0:2 0B0:2 0REDUCE:2 ...

``UNSHARD`` starts to fetch a unit's parameters (ZeRO-3), ``RESHARD`` frees them, ``REDUCE`` starts to sum the gradients
of a microbatch to their owners (ZeRO-2, ZeRO-3). During the computation of a unit only its own parameters and those of
the next one in the rank's whole list are there, so that they arrive while the unit before computes, and a unit stays
where the next computation begins with it (the last layer's forward and backward). Where backward is split, gradients
of all units are reduced behind the weights' half, which needs no parameters.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from lightning_mist.schedule.action import INPUT_BACKWARDS, Action, ActionKind
from lightning_mist.schedule.offload_actions import (
    Key,
    check_activations,
    check_deferred,
    check_gradients,
    fail,
    with_activations,
    with_gradients,
    with_update,
)

_USES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
"""Kinds that compute with parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUnits:
    """What the expansion of a stage's computations needs to know.

    Attributes:
        order: Its units in the order of forward.
        reduced: Those of them whose gradients are reduced in every microbatch.
        sharded: Those of them whose parameters are fetched, from other ranks or from host memory.
        activations: Those of them of which something that they keep for backward is offloaded to host memory meanwhile.
        gradients: Those of them whose gradients are added up in host memory.
        is_averaged: Whether ranks average these behind the last backward.
    """

    order: tuple[int, ...]
    reduced: frozenset[int] = frozenset()
    sharded: frozenset[int] = frozenset()
    activations: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    is_averaged: bool = False

    @property
    def is_expanded(self) -> bool:
        """Whether anything comes between the units, the optimizer's update left aside."""
        return bool(self.reduced or self.sharded or self.activations or self.gradients)


def expand(
    actions: Sequence[Action], units: Mapping[int, StageUnits], update: Sequence[Action] = ()
) -> tuple[tuple[Action, ...], ...]:
    """What each action of a rank's list consists of.

    Args:
        units: Units of those of its stages that are expanded, by stage.
        update: The update of the batch before, if it happens in the first forwards of this one.

    Returns:
        For each action its lines: the action itself where nothing is expanded; else the computation of every unit and
        what comes between, behind the last one also what makes room for the next action. One batch begins and ends
        with everything sharded.
    """
    trained = {action.stage for action in actions if action.kind in INPUT_BACKWARDS}
    ends = _ends(actions)
    updated = {action.stage for action in update}
    lines: list[list[Action]] = []
    for action in actions:
        is_first = action.kind is ActionKind.FORWARD and action.stage in updated
        is_expanded = action.stage in units and (units[action.stage].is_expanded or is_first)
        updated -= {action.stage} if is_first else set()
        lines.append(
            _lines(action, units[action.stage], is_trained=action.stage in trained, ends=ends[action.stage])
            if is_expanded
            else [action]
        )
    lines = _with_parameters(lines, units)
    return tuple(tuple(part) for part in (with_update(lines, update) if update else lines))


def check_units(lines: Sequence[Sequence[Action]], units: Mapping[int, StageUnits]) -> None:
    """Check that every unit is there when it computes, and only then or just before, and that gradients are reduced."""
    flat = list(chain.from_iterable(lines))
    _check_parameters(flat, units)
    _check_gradients(flat, units)
    check_activations(flat, {stage: of_stage.activations for stage, of_stage in units.items()})
    without = [action for part in lines for action in part if not any(x.kind is ActionKind.UPDATE for x in part)]
    check_gradients(without, {stage: of_stage.gradients for stage, of_stage in units.items()})
    check_deferred(flat)


def _check_parameters(flat: Sequence[Action], units: Mapping[int, StageUnits]) -> None:
    there: set[Key] = set()
    for position, action in enumerate(flat):
        if action.unit is None or action.unit not in units[action.stage].sharded:
            continue
        key = action.stage, action.unit
        if action.kind is ActionKind.UNSHARD:
            if key in there:
                fail(flat, position, "this unit is unsharded already")
            there.add(key)
            if len(there) > 2:
                message = f"this makes {len(there)} unsharded units, and at most the current and the next may be"
                fail(flat, position, message)
        elif action.kind is ActionKind.RESHARD:
            if key not in there:
                fail(flat, position, "this unit is not unsharded")
            there.remove(key)
        elif action.kind in _USES and key not in there:
            fail(flat, position, "this computes with parameters that are sharded, and UNSHARD must come before")
    for stage, unit in there:
        missing = Action(stage, ActionKind.RESHARD, None, unit)
        fail(flat, len(flat) - 1, f"{missing} is missing at the end of the list")


def _check_gradients(flat: Sequence[Action], units: Mapping[int, StageUnits]) -> None:
    owed: list[Key] = []
    for position, action in enumerate(flat):
        of_stage = units.get(action.stage)
        if of_stage is None:
            continue
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            owed += [(action.stage, unit) for unit in of_stage.reduced]
        elif action.kind is ActionKind.BACKWARD and action.unit in of_stage.reduced and action.unit is not None:
            owed.append((action.stage, action.unit))
        elif action.kind is ActionKind.REDUCE_GRADIENTS and action.unit is not None:
            if action.unit not in of_stage.reduced:
                continue
            if (action.stage, action.unit) not in owed:
                fail(flat, position, "no backward of this unit has run since its gradients were reduced")
            owed.remove((action.stage, action.unit))
    for stage, unit in owed:
        missing = Action(stage, ActionKind.REDUCE_GRADIENTS, None, unit)
        fail(flat, len(flat) - 1, f"{missing} is missing at the end of the list")


def _ends(actions: Sequence[Action]) -> dict[int, tuple[Action | None, Action | None]]:
    """The first and the last action of every stage that makes gradients of weights."""
    ends: dict[int, tuple[Action | None, Action | None]] = {action.stage: (None, None) for action in actions}
    for action in actions:
        if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            ends[action.stage] = (ends[action.stage][0] or action, action)
    return ends


def _lines(
    action: Action, units: StageUnits, *, is_trained: bool, ends: tuple[Action | None, Action | None]
) -> list[Action]:
    first, last = ends
    is_averaged = units.is_averaged and action == last
    lines = _computations(action, units, units.reduced | units.gradients if is_averaged else units.reduced)
    if units.gradients and action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
        is_reduced = is_averaged or bool(units.reduced)
        lines = with_gradients(lines, units.order, units.gradients, is_first=action == first, is_reduced=is_reduced)
    return with_activations(lines, units.order, units.activations, is_trained=is_trained)


def _computations(action: Action, units: StageUnits, reduced: Collection[int]) -> list[Action]:
    if action.kind is ActionKind.FORWARD:
        return [Action(action.stage, action.kind, action.microbatch, unit) for unit in units.order]
    computes = action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    reduces = action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    lines = [] if computes else [action]
    for unit in reversed(units.order):
        if computes:
            lines.append(Action(action.stage, action.kind, action.microbatch, unit))
        if reduces and unit in reduced:
            lines.append(Action(action.stage, ActionKind.REDUCE_GRADIENTS, None, unit))
    return lines


def _with_parameters(lines: list[list[Action]], units: Mapping[int, StageUnits]) -> list[list[Action]]:
    """Put ``UNSHARD`` and ``RESHARD`` between the computations of units under ZeRO-3."""
    flat = [action for part in lines for action in part]
    uses = [position for position, action in enumerate(flat) if _needs_parameters(action, units)]
    if not uses:
        return lines
    windows = _windows([(flat[position].stage, flat[position].unit or 0) for position in uses])
    behind: dict[int, list[Action]] = {}
    for position, window, following in zip(uses, windows, (*windows[1:], ()), strict=True):
        # Gradients leave before the next unit's parameters come.
        is_reduced = flat[position + 1 : position + 2] == [
            Action(flat[position].stage, ActionKind.REDUCE_GRADIENTS, None, flat[position].unit)
        ]
        behind[position + is_reduced] = _change(window, following)
    result: list[list[Action]] = []
    position = 0
    for part in lines:
        expanded: list[Action] = []
        for action in part:
            expanded += _change((), windows[0]) if position == uses[0] else []
            expanded += [action, *behind.get(position, [])]
            position += 1
        result.append(expanded)
    return result


def _needs_parameters(action: Action, units: Mapping[int, StageUnits]) -> bool:
    return action.kind in _USES and action.unit is not None and action.unit in units[action.stage].sharded


def _windows(keys: Sequence[Key]) -> list[tuple[Key, ...]]:
    """For each computation, what must be unsharded while it runs: its own unit and the next other one."""
    windows: list[tuple[Key, ...]] = []
    following: Key | None = None
    for index in range(len(keys) - 1, -1, -1):
        if index + 1 < len(keys) and keys[index + 1] != keys[index]:
            following = keys[index + 1]
        windows.append((keys[index],) if following is None else (keys[index], following))
    return windows[::-1]


def _change(before: Sequence[Key], after: Sequence[Key]) -> list[Action]:
    return [
        *(Action(stage, ActionKind.RESHARD, None, unit) for stage, unit in before if (stage, unit) not in after),
        *(Action(stage, ActionKind.UNSHARD, None, unit) for stage, unit in after if (stage, unit) not in before),
    ]
