"""Moves between a device and host memory: when what is kept there is fetched, used and written back.

As with ``UNSHARD``, an action *starts* a copy; what uses the copy waits for it. What is fetched lies in one of two
buffers on the device, which follow each other: a unit's optimizer state is fetched while the unit before is updated,
and written back while the next one is::

    0LOAD_O:0 0LOAD_O:1 0UPDATE:0 0STORE_O:0 0LOAD_O:2 0UPDATE:1 0STORE_O:1 0UPDATE:2 0STORE_O:2

A step may be *deferred* into the first forward of the next batch. There a unit is updated while the one before it
computes, and the last list of all, with nothing to compute, is the one above::

    0LOAD_O:0 0LOAD_O:1 0UPDATE:0 0STORE_O:0 0LOAD_O:2 0UPDATE:1 0STORE_O:1 0F0:0 0UPDATE:2 0STORE_O:2 0F0:1 0F0:2

What a layer keeps for backward begins to leave when its forward has ended, and is freed when that of the next unit has;
behind the last one it is waited for. In backward a layer's arrives while the unit above computes::

    0F0:0 0STORE_A0:0 0F0:1 0STORE_A0:1 0DROP_A0:0 0F0:tail 0DROP_A0:1
    0LOAD_A0:1 0B0:tail 0LOAD_A0:0 0B0:1 0B0:0

A unit's gradients are needed where they are added to: behind its backward, beside which what there is of them is
fetched. They leave when that is done, or, where ranks reduce them first, when those of the next unit are on their way::

    0LOAD_G:1 0B1:1 0STORE_G:1 0LOAD_G:0 0B1:0 0STORE_G:0
    0LOAD_G:1 0B1:1 0REDUCE:1 0LOAD_G:0 0B1:0 0REDUCE:0 0STORE_G:1 0STORE_G:0

Checks raise a ScheduleError at the first broken rule, with the actions up to the offending one.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

from lightning_mist.errors import ScheduleError
from lightning_mist.plan.sharding import moved_of_unit
from lightning_mist.schedule.action import COMPUTATIONS, INPUT_BACKWARDS, Action, ActionKind

NUM_BUFFERS = 2
"""Buffers on the device for each kind of state: for what is used, and for what is fetched ahead or written back."""

USED_UP = ("G",)
"""Kinds of state that an update needs and leaves nothing of: gradients."""

Key = tuple[int, int]
"""Stage and unit."""


def offloaded_names(units: Sequence[Sequence[tuple[str, int]]], ratio: float) -> frozenset[str]:
    """The parameters that a ratio moves.

    Args:
        units: Names and bytes of the parameters that belong to each unit.
    """
    found: set[str] = set()
    for unit in units:
        found.update(unit[index][0] for index in moved_of_unit([size for _, size in unit], ratio))
    return frozenset(found)


def update_actions(
    units: Sequence[Key], offloaded: Mapping[str, Collection[Key]], *, gathers: bool = False
) -> tuple[Action, ...]:
    """The optimizer's step unit by unit, with what is fetched before and written back behind.

    Args:
        offloaded: Units that have optimizer state (``"O"``), parameters (``"P"``) and gradients (``"G"``) in host
            memory.
        gathers: Whether what was updated is then given to other ranks, unit by unit.
    """
    actions: list[Action] = []
    ahead = [unit for unit in units if any(unit in of_kind for of_kind in offloaded.values())]
    movers = frozenset(ahead)
    stored = [(kind, of_kind) for kind, of_kind in offloaded.items() if kind not in USED_UP]

    def fetch() -> None:
        key = ahead.pop(0)
        actions.extend(_of(key, ActionKind(f"LOAD_{kind}")) for kind, of_kind in offloaded.items() if key in of_kind)

    if ahead:
        fetch()
    for unit in units:
        if unit in movers and ahead:
            fetch()
        actions.append(_of(unit, ActionKind.UPDATE))
        actions += [_of(unit, ActionKind.GATHER_PARAMETERS)] * gathers
        actions += [_of(unit, ActionKind(f"STORE_{kind}")) for kind, of_kind in stored if unit in of_kind]
    return tuple(actions)


def with_update(lines: Sequence[Sequence[Action]], update: Sequence[Action]) -> list[list[Action]]:
    """Put the last batch's update into the first forward of a list: every unit's before the unit in front of it."""
    pending = _by_unit(update)
    result: list[list[Action]] = []
    for part in lines:
        forward = [line.unit for line in part if line.kind is ActionKind.FORWARD]
        following = dict(pairwise(forward))
        expanded: list[Action] = []
        for line in part:
            due: set[Key | None] = {(line.stage, line.unit)} if line.unit is not None else set()
            if line.kind is ActionKind.FORWARD and (after := following.get(line.unit)) is not None:
                due.add((line.stage, after))
            if line.kind in (ActionKind.FORWARD, ActionKind.UNSHARD):
                while not due.isdisjoint(pending):
                    expanded += pending.pop(next(iter(pending)))
            expanded.append(line)
        result.append(expanded)
    return result


def _by_unit(update: Sequence[Action]) -> dict[Key, list[Action]]:
    """The part of an update that ends with each unit's; what is fetched ahead is part of the unit before."""
    parts: dict[Key, list[Action]] = {}
    part: list[Action] = []
    for action in update:
        updated = [item for item in part if item.kind is ActionKind.UPDATE]
        if updated and (action.kind is ActionKind.UPDATE or action.kind.value.startswith("LOAD_")):
            parts[updated[0].stage, updated[0].unit or 0] = part
            part = []
        part.append(action)
    if part:
        last = next(item for item in part if item.kind is ActionKind.UPDATE)
        parts[last.stage, last.unit or 0] = part
    return parts


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
            there.update({used: [item for item in there.get(used, ()) if item != key] for used in USED_UP})
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


def with_activations(
    lines: Sequence[Action], order: Sequence[int], offloaded: Collection[int], *, is_trained: bool
) -> list[Action]:
    """Put the moves of activations between the lines of one action.

    Args:
        is_trained: Whether the stage has backwards; what is only evaluated keeps nothing.
    """
    if not is_trained or not offloaded:
        return list(lines)
    result: list[Action] = []
    leaving: Action | None = None
    computing = [line for line in lines if line.unit is not None and line.kind in COMPUTATIONS]
    is_forward = bool(computing) and computing[0].kind is ActionKind.FORWARD
    arriving = [] if is_forward else [_activations(line, ActionKind.LOAD_ACTIVATIONS, offloaded) for line in computing]
    result += [arriving[0]] if arriving and arriving[0] is not None else []
    ahead = iter(arriving[1:])
    for line in lines:
        is_computing = line.unit is not None and line.kind in COMPUTATIONS
        if is_computing and not is_forward and (load := next(ahead, None)) is not None:
            result.append(load)
        result.append(line)
        if not is_computing or not is_forward:
            continue
        if store := _activations(line, ActionKind.STORE_ACTIVATIONS, offloaded):
            result.append(store)
        if leaving is not None:
            result.append(leaving)
        leaving = _activations(line, ActionKind.DROP_ACTIVATIONS, offloaded)
        if leaving is not None and line.unit == order[-1]:
            result.append(leaving)
    return result


def with_gradients(
    lines: Sequence[Action], order: Sequence[int], offloaded: Collection[int], *, is_first: bool, is_reduced: bool
) -> list[Action]:
    """Put the moves of gradients between the lines of one action.

    Args:
        is_first: Whether it is the first backward of a batch, before which there is nothing to fetch.
        is_reduced: Whether ranks reduce gradients behind it.
    """
    result: list[Action] = []
    leaving: list[Action] = []
    for line in lines:
        # Where backward is split the weights' half makes the gradients of all units.
        key = line.stage, line.unit or 0
        is_whole = line.kind is ActionKind.BACKWARD_WEIGHT
        is_added = line.kind is (ActionKind.BACKWARD if lines[0].kind is not ActionKind.BACKWARD_WEIGHT else _REDUCE)
        if line.unit in offloaded and is_added and not is_first:
            result.append(_of(key, ActionKind.LOAD_GRADIENTS))
        result.append(line)
        if line.unit in offloaded and line.kind is _REDUCE:
            result += leaving
            leaving = [_of(key, ActionKind.STORE_GRADIENTS)]
        if is_reduced:
            continue
        for unit in reversed(order) if is_whole else [line.unit] if line.kind is ActionKind.BACKWARD else []:
            if unit in offloaded and unit is not None:
                key = line.stage, unit
                result += [_of(key, ActionKind.LOAD_GRADIENTS)] * (is_whole and not is_first)
                result.append(_of(key, ActionKind.STORE_GRADIENTS))
    return result + leaving


_REDUCE = ActionKind.REDUCE_GRADIENTS


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


def _activations(line: Action, kind: ActionKind, offloaded: Collection[int]) -> Action | None:
    return Action(line.stage, kind, line.microbatch, line.unit) if line.unit in offloaded else None


def _of(key: Key, kind: ActionKind) -> Action:
    return Action(key[0], kind, None, key[1])


def fail(actions: Sequence[Action], position: int, message: str) -> NoReturn:
    """Raise what is wrong with an action of a list, with those before it."""
    text = " ".join(map(str, actions[max(0, position - 8) : position + 1]))
    raise ScheduleError(f"{actions[position]}: {message}: ... {text}")
