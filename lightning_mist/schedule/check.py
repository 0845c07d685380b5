"""Rules that every schedule obeys, checked before anything runs.

1. Every stage runs the forward and the backward of every microbatch exactly once, the forward first.
2. If the schedule moves tensors at all: each ``F`` of a stage but the first follows its one ``RECV_F``, each ``B`` of
   a stage but the last its one ``RECV_B``; ``SEND_F`` follows its ``F``, ``SEND_B`` its ``B``, ``RECV_B`` the ``F`` of
   its microbatch; neighbours send and receive in the same order, and nothing is sent that nobody receives.
3. ``REDUCE``, ``REDUCE_TIED``, ``STEP``, ``GATHER`` come at most once, in this order, after everything else; all stages
   sum tied gradients or none does. So they cannot wait for each other in a circle.
4. The lists finish: with sends that never wait, there is an order in which every wait is satisfied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from lightning_mist.errors import ScheduleError
from lightning_mist.schedule.action import PER_MICROBATCH, Action, ActionKind, Schedule

_EPILOGUE = (
    ActionKind.REDUCE_GRADIENTS,
    ActionKind.REDUCE_TIED,
    ActionKind.OPTIMIZER_STEP,
    ActionKind.GATHER_PARAMETERS,
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Which actions of a stage must exist, and after which other of the same microbatch they come."""

    kind: ActionKind
    after: ActionKind | None


def check(schedule: Schedule, num_microbatches: int) -> None:
    """Check every rule of the module's list.

    Args:
        schedule: For each stage its actions; either computations only, or lowered.
        num_microbatches: Number of microbatches per batch.

    Raises:
        ScheduleError: At the first broken rule, with the stages' lists and a pointer at the offending action.
    """
    if not schedule:
        raise ScheduleError("a schedule without stages: at least one list of actions is needed")
    for stage, actions in enumerate(schedule):
        _check_membership(schedule, stage, actions, num_microbatches)
        _check_pairs(schedule, stage, actions, num_microbatches)
        _check_epilogue(schedule, stage, actions)
    _check_order_between_stages(schedule)
    _check_finishes(schedule)


def in_flight(schedule: Schedule, stage: int) -> int:
    """Largest number of microbatches of a stage whose forward has begun and whose backward has not ended."""
    return max(in_flight_counts(schedule[stage]), default=0)


def in_flight_counts(actions: Sequence[Action]) -> tuple[int, ...]:
    """During each ``F`` and ``B`` of a list, the number of microbatches in flight, the current one included."""
    counts: list[int] = []
    open_microbatches = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            open_microbatches += 1
            counts.append(open_microbatches)
        elif action.kind is ActionKind.BACKWARD:
            counts.append(open_microbatches)
            open_microbatches -= 1
    return tuple(counts)


def is_lowered(schedule: Schedule) -> bool:
    """Whether the lists hold anything but forwards and backwards."""
    return any(action.kind not in (ActionKind.FORWARD, ActionKind.BACKWARD) for line in schedule for action in line)


def format_grid(schedule: Schedule, pointer: tuple[int, int] | None = None) -> str:
    """The lists as text, one line per stage, aligned by position.

    Args:
        schedule: The lists.
        pointer: Stage and position to mark with carets on the line below.
    """
    columns = max((len(actions) for actions in schedule), default=0)
    texts = [[str(action) for action in actions] for actions in schedule]
    widths = [max(len(line[column]) for line in texts if column < len(line)) for column in range(columns)]
    rows: list[str] = []
    for stage, line in enumerate(texts):
        head = f"stage {stage}: "
        rows.append(head + " ".join(text.ljust(width) for text, width in zip(line, widths, strict=False)).rstrip())
        if pointer is not None and pointer[0] == stage:
            position = pointer[1]
            offset = sum(width + 1 for width in widths[:position])
            rows.append(" " * (len(head) + offset) + "^" * (len(line[position]) if position < len(line) else 1))
    return "\n".join(rows)


def _fail(schedule: Schedule, stage: int, position: int, message: str) -> NoReturn:
    raise ScheduleError(f"{message}\n{format_grid(schedule, (stage, position))}")


def _check_membership(schedule: Schedule, stage: int, actions: tuple[Action, ...], num_microbatches: int) -> None:
    seen: set[Action] = set()
    for position, action in enumerate(actions):
        if action.stage != stage:
            _fail(schedule, stage, position, f"{action} is in the list of stage {stage}: move it to its own stage")
        if action.microbatch is not None and action.microbatch >= num_microbatches:
            _fail(schedule, stage, position, f"{action}: there are {num_microbatches} microbatches, numbered from 0")
        if action in seen:
            _fail(schedule, stage, position, f"{action} comes twice: every action happens once per batch")
        seen.add(action)


def _required(schedule: Schedule, stage: int) -> Iterator[_Kind]:
    """What each microbatch needs on this stage."""
    lowered, last = is_lowered(schedule), len(schedule) - 1
    receives = lowered and stage > 0
    yield _Kind(ActionKind.FORWARD, ActionKind.RECV_ACTIVATION if receives else None)
    yield _Kind(ActionKind.BACKWARD, ActionKind.FORWARD)
    if receives:
        yield _Kind(ActionKind.RECV_ACTIVATION, None)
        yield _Kind(ActionKind.SEND_GRADIENT, ActionKind.BACKWARD)
    if lowered and stage < last:
        yield _Kind(ActionKind.SEND_ACTIVATION, ActionKind.FORWARD)
        yield _Kind(ActionKind.RECV_GRADIENT, ActionKind.FORWARD)
        yield _Kind(ActionKind.BACKWARD, ActionKind.RECV_GRADIENT)


def _check_pairs(schedule: Schedule, stage: int, actions: tuple[Action, ...], num_microbatches: int) -> None:
    place = {action: position for position, action in enumerate(actions)}
    rules = tuple(_required(schedule, stage))
    for microbatch in range(num_microbatches):
        for rule in rules:
            action = Action(stage, rule.kind, microbatch)
            if action not in place:
                _fail(schedule, stage, len(actions), f"{action} is missing: stage {stage} needs it once per batch")
            if rule.after is not None:
                before = Action(stage, rule.after, microbatch)
                if place.get(before, len(actions)) > place[action]:
                    _fail(schedule, stage, place[action], f"{action} comes before {before}: it must come after it")
    allowed = {rule.kind for rule in rules}
    for position, action in enumerate(actions):
        if action.kind in PER_MICROBATCH and action.kind not in allowed:
            _fail(
                schedule,
                stage,
                position,
                f"{action}: stage {stage} of {len(schedule)} has no such neighbour; remove it",
            )


def _check_epilogue(schedule: Schedule, stage: int, actions: tuple[Action, ...]) -> None:
    reached = -1
    for position, action in enumerate(actions):
        if action.kind in _EPILOGUE:
            rank = _EPILOGUE.index(action.kind)
            if rank < reached:
                _fail(
                    schedule, stage, position, f"{action} comes after {_EPILOGUE[reached].value}: it must come before"
                )
            reached = rank
        elif reached >= 0:
            _fail(schedule, stage, position, f"{action} comes after {_EPILOGUE[reached].value}: it must come before")
    kind = ActionKind.REDUCE_TIED
    if any(action.kind is kind for line in schedule for action in line) and Action(stage, kind) not in actions:
        _fail(schedule, stage, len(actions), f"{stage}{kind.value} is missing: all stages have it or none has")


def _check_order_between_stages(schedule: Schedule) -> None:
    for stage in range(len(schedule) - 1):
        for sender, receiver, send, receive in (
            (stage, stage + 1, ActionKind.SEND_ACTIVATION, ActionKind.RECV_ACTIVATION),
            (stage + 1, stage, ActionKind.SEND_GRADIENT, ActionKind.RECV_GRADIENT),
        ):
            sent = [action for action in schedule[sender] if action.kind is send]
            received = [action for action in schedule[receiver] if action.kind is receive]
            for first, second in zip(sent, received, strict=True):
                if first.microbatch != second.microbatch:
                    position = schedule[receiver].index(second)
                    message = (
                        f"{second} receives what {first} sends: neighbours must use the same order of microbatches"
                    )
                    _fail(schedule, receiver, position, message)


def waits_for(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """Actions of other stages that must have been reached before ``action`` can end.

    In a lowered schedule a computation waits for the send behind the receive it consumes; in a schedule of
    computations only it waits for the neighbour's computation.
    """
    stage, microbatch, last = action.stage, action.microbatch, len(schedule) - 1
    lowered = is_lowered(schedule)
    if action.kind is ActionKind.FORWARD and stage > 0:
        kind = ActionKind.SEND_ACTIVATION if lowered else ActionKind.FORWARD
        return (Action(stage - 1, kind, microbatch),)
    if action.kind is ActionKind.BACKWARD and stage < last:
        kind = ActionKind.SEND_GRADIENT if lowered else ActionKind.BACKWARD
        return (Action(stage + 1, kind, microbatch),)
    return ()


def _check_finishes(schedule: Schedule) -> None:
    """Walk all lists at once; the first wait that nothing will ever satisfy is a deadlock."""
    position = [0] * len(schedule)
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule):
            while position[stage] < len(actions) and all(
                needed in done for needed in waits_for(schedule, actions[position[stage]])
            ):
                done.add(actions[position[stage]])
                position[stage] += 1
                moved = True
    for stage, actions in enumerate(schedule):
        if position[stage] < len(actions):
            action = actions[position[stage]]
            missing = ", ".join(str(needed) for needed in waits_for(schedule, action) if needed not in done)
            others = "; ".join(
                f"stage {other} waits at {line[position[other]]}"
                for other, line in enumerate(schedule)
                if other != stage and position[other] < len(line)
            )
            _fail(
                schedule,
                stage,
                position[stage],
                f"{action} waits for {missing} for ever ({others or 'no other stage is waiting'}): "
                "let the stages run their microbatches in an order that both can follow",
            )
