"""What must hold in lists of unit actions, whoever made them.

Every unit is there when it computes, and only then or just before; gradients are reduced and home at last; what is kept
for backward leaves and comes back in the order of things; everything is updated once, with all that it needs.

Checks raise a ScheduleError at the first broken rule, with the actions up to the offending one.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import NoReturn

from lightning_mist.errors import ScheduleError
from lightning_mist.schedule.action import INPUT_BACKWARDS, Action, ActionKind
from lightning_mist.schedule.stage_program import NUM_BUFFERS, Key, StageUnits

_USES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
"""Kinds that compute with parameters."""

_USED_UP = ("G",)
"""Kinds of state that an update needs and leaves nothing of: gradients."""


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


def check_deferred(flat: Sequence[Action]) -> None:
    """Check that nothing is computed with, or given out, that is still to be updated."""
    used: set[Key] = set()
    for position, action in enumerate(flat):
        if action.unit is None:
            continue
        key = action.stage, action.unit
        if action.kind is ActionKind.UPDATE and key in used:
            fail(flat, position, "this unit was used before it was updated")
        if action.kind in (ActionKind.FORWARD, ActionKind.UNSHARD):
            used.add(key)


def check_update(actions: Sequence[Action], units: Collection[Key], offloaded: Mapping[str, Collection[Key]]) -> None:
    """Check that every unit is updated once, with all it needs in free buffers on the device, and is back at last."""
    there: dict[str, list[Key]] = {kind: [] for kind in offloaded}
    updated: set[Key] = set()
    for position, action in enumerate(actions):
        assert action.unit is not None
        key, (what, _, kind) = (action.stage, action.unit), action.kind.value.partition("_")
        broken = _broken_rule(what, kind, key, there, updated, offloaded)
        if broken:
            fail(actions, position, broken)
        if what == "LOAD":
            there[kind].append(key)
        elif what == "STORE":
            there[kind].remove(key)
        elif what == "UPDATE":
            updated.add(key)
            there.update({used: [item for item in there.get(used, ()) if item != key] for used in _USED_UP})
    for kind, left in there.items():
        for key in left:
            fail(actions, len(actions) - 1, f"{_of(key, ActionKind(f'STORE_{kind}'))} is missing at the end")
    for key in (unit for unit in units if unit not in updated):
        fail(actions, len(actions) - 1, f"{_of(key, ActionKind.UPDATE)} is missing at the end")


def _broken_rule(
    what: str,
    kind: str,
    key: Key,
    there: Mapping[str, Sequence[Key]],
    updated: Collection[Key],
    offloaded: Mapping[str, Collection[Key]],
) -> str:
    """What of a unit's update must not happen now, if so."""
    if what == "LOAD":
        if key in there[kind] or key in updated:
            return "this was fetched already"
        return f"there are {NUM_BUFFERS} buffers, and none is free" if len(there[kind]) == NUM_BUFFERS else ""
    if what == "UPDATE":
        if key in updated:
            return "this unit was updated already"
        is_here = all(key in there[name] for name, of_kind in offloaded.items() if key in of_kind)
        return "" if is_here else "what this needs is in host memory"
    if what == "GATHER":
        return "" if key in updated else "there is nothing new to give out"
    return "" if key in there[kind] and key in updated else "there is nothing new to write back"


def check_gradients(flat: Sequence[Action], offloaded: Mapping[int, Collection[int]]) -> None:
    """Check that sums of gradients are fetched into free buffers before they are added to, and are home at last.

    Args:
        flat: A rank's expanded list, without updates.
    """
    there: set[Key] = set()
    owed: set[Key] = set()
    known: set[Key] = set()
    for position, action in enumerate(flat):
        unit, stage = action.unit, action.stage
        units = offloaded.get(stage, ())
        made = (
            {unit} if action.kind is ActionKind.BACKWARD else units if action.kind is ActionKind.BACKWARD_WEIGHT else ()
        )
        for key in ((stage, item) for item in made if item is not None and item in units):
            if key in owed:
                fail(flat, position, "gradients of an earlier backward of this unit have not left")
            owed.add(key)
        if unit is None or unit not in units:
            continue
        key = stage, unit
        if action.kind is ActionKind.LOAD_GRADIENTS:
            there.add(key)
            if len(there) > NUM_BUFFERS:
                fail(flat, position, f"there are {NUM_BUFFERS} buffers, and none is free")
        elif action.kind is ActionKind.STORE_GRADIENTS:
            if key not in owed or (key in known) != (key in there):
                fail(flat, position, "these gradients are not there to leave")
            owed.remove(key)
            there.discard(key)
            known.add(key)
    for key in owed:
        fail(flat, len(flat) - 1, f"{_of(key, ActionKind.STORE_GRADIENTS)} is missing at the end of the list")


def check_activations(flat: Sequence[Action], offloaded: Mapping[int, Collection[int]]) -> None:
    """Check that what is kept for backward is there when backward needs it, and leaves in the order of things."""
    trained = {action.stage for action in flat if action.kind in INPUT_BACKWARDS}
    where: dict[tuple[int, int | None, int], str] = {}
    for position, action in enumerate(flat):
        unit, stage = action.unit, action.stage
        if unit is None or stage not in trained or unit not in offloaded.get(stage, ()):
            continue
        key = stage, action.microbatch, unit
        rule = _NEXT.get(action.kind)
        if rule is None:
            continue
        before, after = rule
        if where.get(key, "nowhere") != before:
            what = f"what this unit keeps is {where.get(key, 'nowhere')}, and must be {before}"
            fail(flat, position, what)
        where[key] = after
    for key, place in where.items():
        if place != "used":
            fail(flat, len(flat) - 1, f"what unit {key[2]} of stage {key[0]} keeps is {place} at the end of the list")


_NEXT = {
    ActionKind.FORWARD: ("nowhere", "on the device"),
    ActionKind.STORE_ACTIVATIONS: ("on the device", "leaving"),
    ActionKind.DROP_ACTIVATIONS: ("leaving", "in host memory"),
    ActionKind.LOAD_ACTIVATIONS: ("in host memory", "back on the device"),
    ActionKind.BACKWARD: ("back on the device", "used"),
    ActionKind.BACKWARD_INPUT: ("back on the device", "used"),
}
"""Where what a unit keeps must be when something is done with it, and is then."""


def _of(key: Key, kind: ActionKind) -> Action:
    return Action(key[0], kind, None, key[1])


def fail(actions: Sequence[Action], position: int, message: str) -> NoReturn:
    """Raise what is wrong with an action of a list, with those before it."""
    text = " ".join(map(str, actions[max(0, position - 8) : position + 1]))
    raise ScheduleError(f"{actions[position]}: {message}: ... {text}")
