"""What the microbatches of a list keep at each of its computations, counted from the list itself."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mist.schedule.action import COMPUTATIONS, INPUT_BACKWARDS, Action, ActionKind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What is kept during one computation of a list, its own microbatch included.

    Attributes:
        action: The computation: ``F``, ``B``, ``I`` or ``W``.
        open: For each stage of the list, ascending, ``(stage, microbatches)`` whose forward has begun and whose ``B``
            or ``I`` has not ended: they keep their graph.
        waiting: For each stage of the list, ``(stage, microbatches)`` whose ``I`` has ended and whose ``W`` has not:
            they keep the inputs of their weights and the gradients of their outputs.
    """

    action: Action
    open: tuple[tuple[int, int], ...]
    waiting: tuple[tuple[int, int], ...]


def held_counts(actions: Sequence[Action]) -> tuple[Held, ...]:
    """For each computation of a list, how many microbatches are kept for which reason."""
    stages = sorted({action.stage for action in actions})
    in_flight, waiting = Counter[int](), Counter[int]()
    result: list[Held] = []
    for action in actions:
        if action.kind not in COMPUTATIONS:
            continue
        stage = action.stage
        if action.kind is ActionKind.FORWARD:
            in_flight[stage] += 1
        result.append(
            Held(
                action=action,
                open=tuple((index, in_flight[index]) for index in stages),
                waiting=tuple((index, waiting[index]) for index in stages),
            )
        )
        if action.kind in INPUT_BACKWARDS:
            in_flight[stage] -= 1
        if action.kind is ActionKind.BACKWARD_INPUT:
            waiting[stage] += 1
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            waiting[stage] -= 1
    return tuple(result)


def in_flight_counts(actions: Sequence[Action]) -> tuple[int, ...]:
    """During each ``F``, ``B`` and ``I`` of a list, the microbatches in flight over all its stages, its own included.

    Those that only wait for their ``W`` are not in flight; see :func:`waiting_counts`.
    """
    return tuple(
        sum(count for _, count in held.open)
        for held in held_counts(actions)
        if held.action.kind is not ActionKind.BACKWARD_WEIGHT
    )


def waiting_counts(actions: Sequence[Action]) -> tuple[int, ...]:
    """During each ``W`` of a list, the microbatches over all its stages that wait for theirs, its own included."""
    return tuple(
        sum(count for _, count in held.waiting)
        for held in held_counts(actions)
        if held.action.kind is ActionKind.BACKWARD_WEIGHT
    )


def in_flight(schedule: Schedule, group: int) -> int:
    """Largest number of microbatches of a group whose forward has begun and whose ``B`` or ``I`` has not ended.

    A microbatch counts once for every chunk that it is in.
    """
    return max(in_flight_counts(schedule[group]), default=0)


def waiting(schedule: Schedule, group: int) -> int:
    """Largest number of microbatches of a group that wait for their ``W``."""
    return max(waiting_counts(schedule[group]), default=0)
