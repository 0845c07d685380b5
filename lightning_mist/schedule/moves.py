"""Moves between a device and host memory: when what is kept there is fetched, used and written back.

As with ``UNSHARD``, an action *starts* a copy; what uses the copy waits for it. What is fetched lies in one of two
rooms on the device, which follow each other: a unit's optimizer state is fetched while the unit before is updated, and
written back while the next one is::

    0LOAD_O:0 0LOAD_O:1 0UPDATE:0 0STORE_O:0 0LOAD_O:2 0UPDATE:1 0STORE_O:1 0UPDATE:2 0STORE_O:2
"""

from collections.abc import Collection, Sequence
from typing import NoReturn

from lightning_mist.errors import ScheduleError
from lightning_mist.plan.moved import moved_of_unit
from lightning_mist.schedule.action import Action, ActionKind

ROOMS = 2
"""Rooms on the device for each kind of state: for what is used, and for what is fetched ahead or written back."""

Key = tuple[int, int]
"""Stage and unit."""


def moved_names(units: Sequence[Sequence[tuple[str, int]]], ratio: float) -> frozenset[str]:
    """The parameters that a ratio moves.

    Args:
        units: Names and bytes of the parameters that belong to each unit.
        ratio: Share of every unit's bytes that may be moved.
    """
    found: set[str] = set()
    for unit in units:
        found.update(unit[index][0] for index in moved_of_unit([size for _, size in unit], ratio))
    return frozenset(found)


def update_actions(units: Sequence[Key], moved: Collection[Key]) -> tuple[Action, ...]:
    """The optimizer's step unit by unit, with what is fetched before and written back behind.

    Args:
        units: Units that have something to update, in their order.
        moved: Those of them that have state in host memory.
    """
    actions: list[Action] = []
    ahead = [unit for unit in units if unit in moved]
    if ahead:
        actions.append(_of(ahead.pop(0), ActionKind.LOAD_OPTIMIZER_STATE))
    for unit in units:
        if unit in moved and ahead:
            actions.append(_of(ahead.pop(0), ActionKind.LOAD_OPTIMIZER_STATE))
        actions.append(_of(unit, ActionKind.UPDATE))
        if unit in moved:
            actions.append(_of(unit, ActionKind.STORE_OPTIMIZER_STATE))
    return tuple(actions)


def check_update(actions: Sequence[Action], units: Collection[Key], moved: Collection[Key]) -> None:
    """Check that every unit is updated once, with its state on the device, in a room that is free, and back at the end.

    Raises:
        ScheduleError: At the first broken rule, with the actions up to the offending one.
    """
    there: list[Key] = []
    updated: set[Key] = set()
    for position, action in enumerate(actions):
        assert action.unit is not None
        key = action.stage, action.unit
        if action.kind is ActionKind.LOAD_OPTIMIZER_STATE:
            if key in there or key in updated:
                _fail(actions, position, "this unit's state was fetched already")
            there.append(key)
            if len(there) > ROOMS:
                _fail(actions, position, f"there are {ROOMS} rooms, and none is free")
        elif action.kind is ActionKind.UPDATE:
            if key in updated:
                _fail(actions, position, "this unit was updated already")
            if key in moved and key not in there:
                _fail(actions, position, "this unit's state is in host memory")
            updated.add(key)
        elif key not in there or key not in updated:
            _fail(actions, position, "there is nothing new to write back")
        else:
            there.remove(key)
    for key in [*there, *(unit for unit in units if unit not in updated)]:
        missing = ActionKind.STORE_OPTIMIZER_STATE if key in there else ActionKind.UPDATE
        _fail(actions, len(actions) - 1, f"{_of(key, missing)} is missing at the end")


def _of(key: Key, kind: ActionKind) -> Action:
    return Action(key[0], kind, None, key[1])


def _fail(actions: Sequence[Action], position: int, message: str) -> NoReturn:
    text = " ".join(map(str, actions[max(0, position - 8) : position + 1]))
    raise ScheduleError(f"{actions[position]}: {message}: ... {text}")
