"""Rules that every schedule obeys, checked before anything runs.

1. Every stage is in the list of its group of devices, and runs the forward and the backward of every microbatch exactly
   once, the forward first. A stage runs whole backwards ``B``, or of every microbatch ``I`` and then ``W``. Evaluation
   has forwards only.
2. If the schedule moves tensors at all: each ``F`` of a stage but the first follows its one ``RECV_F``, each ``B`` or
   ``I`` of a stage but the last its one ``RECV_B``; ``SEND_F`` follows its ``F``, ``SEND_B`` its ``B`` or ``I``,
   ``RECV_B`` the ``F`` of its microbatch; what one group sends another is received in the order in which it is sent,
   over whatever boundary, and nothing is sent that nobody receives.
3. ``REDUCE``, ``REDUCE_TIED``, ``STEP``, ``GATHER`` come at most once per group, in this order, after everything else;
   all groups sum tied gradients or none does. So they cannot wait for each other in a circle.
4. The lists finish: with sends that never wait, there is an order in which every wait is satisfied.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from lightning_mist.errors import ScheduleError
from lightning_mist.schedule.action import (
    COMPUTATIONS,
    INPUT_BACKWARDS,
    PER_MICROBATCH,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    num_stages_of,
    receive_of,
)

_SPLIT = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)

_EPILOGUE = (
    ActionKind.REDUCE_GRADIENTS,
    ActionKind.REDUCE_TIED,
    ActionKind.OPTIMIZER_STEP,
    ActionKind.GATHER_PARAMETERS,
)


class _Kind(NamedTuple):
    """Which actions of a stage must exist, and after which other of the same microbatch they come."""

    kind: ActionKind
    after: ActionKind | None = None


def check(schedule: Schedule, num_microbatches: int, *, is_trained: bool = True) -> None:
    """Check every rule of the module's list.

    Args:
        schedule: For each group of devices its actions; either computations only, or lowered.
        is_trained: Whether there are to be backwards.

    Raises:
        ScheduleError: At the first broken rule, with the groups' lists and a pointer at the offending action.
    """
    if not schedule:
        raise ScheduleError("a schedule without stages: at least one list of actions is needed")
    rules = Rules(schedule, is_trained=is_trained)
    for group, actions in enumerate(schedule):
        _check_membership(schedule, group, actions, num_microbatches)
    for group, actions in enumerate(schedule):
        for stage in range(group, rules.num_stages, len(schedule)):
            _check_pairs(schedule, stage, rules, num_microbatches)
        _check_epilogue(schedule, group, actions)
    _check_order_between_groups(schedule)
    _check_finishes(schedule, rules)


class Rules:
    """What a schedule's own form asks of it.

    Attributes:
        is_lowered: Whether the lists hold anything but computations.
        is_trained: Whether there are to be backwards.
    """

    def __init__(self, schedule: Schedule, *, is_trained: bool = True) -> None:
        self.num_stages = num_stages_of(schedule)
        kinds = {(action.stage, action.kind) for actions in schedule for action in actions}
        self.is_lowered = any(kind not in COMPUTATIONS for _, kind in kinds)
        self.is_trained = is_trained
        self._split = {stage for stage, kind in kinds if kind in _SPLIT}

    def backward(self, stage: int) -> ActionKind:
        """The kind of a stage's backwards that makes the gradients of its input."""
        return ActionKind.BACKWARD_INPUT if stage in self._split else ActionKind.BACKWARD

    def required(self, stage: int) -> Iterator[_Kind]:
        """What each microbatch needs on a stage."""
        receives, backward = self.is_lowered and stage > 0, self.backward(stage)
        yield _Kind(ActionKind.FORWARD, ActionKind.RECV_ACTIVATION if receives else None)
        sends = self.is_lowered and stage < self.num_stages - 1
        if receives:
            yield _Kind(ActionKind.RECV_ACTIVATION)
        if sends:
            yield _Kind(ActionKind.SEND_ACTIVATION, ActionKind.FORWARD)
        if not self.is_trained:
            return
        yield _Kind(backward, ActionKind.FORWARD)
        if stage in self._split:
            yield _Kind(ActionKind.BACKWARD_WEIGHT, ActionKind.BACKWARD_INPUT)
        if receives:
            yield _Kind(ActionKind.SEND_GRADIENT, backward)
        if sends:
            yield _Kind(ActionKind.RECV_GRADIENT, ActionKind.FORWARD)
            yield _Kind(backward, ActionKind.RECV_GRADIENT)

    def waits_for(self, action: Action) -> tuple[Action, ...]:
        """Actions of other stages that must have been reached before ``action`` can end.

        In a lowered schedule a computation waits for the send behind the receive it consumes; in a schedule of
        computations only it waits for the neighbour's computation.
        """
        stage, microbatch = action.stage, action.microbatch
        if action.kind is ActionKind.FORWARD and stage > 0:
            kind = ActionKind.SEND_ACTIVATION if self.is_lowered else ActionKind.FORWARD
            return (Action(stage - 1, kind, microbatch),)
        if action.kind in INPUT_BACKWARDS and stage < self.num_stages - 1:
            kind = ActionKind.SEND_GRADIENT if self.is_lowered else self.backward(stage + 1)
            return (Action(stage + 1, kind, microbatch),)
        return ()


def format_grid(schedule: Schedule, pointer: tuple[int, int] | None = None) -> str:
    """The lists as text, one line per group of devices (``stage`` where each runs one), aligned by position.

    Args:
        pointer: Group and position to mark with carets on the line below.
    """
    noun = "stage" if num_stages_of(schedule) == len(schedule) else "group"
    columns = max((len(actions) for actions in schedule), default=0)
    texts = [[str(action) for action in actions] for actions in schedule]
    widths = [max(len(line[column]) for line in texts if column < len(line)) for column in range(columns)]
    rows: list[str] = []
    for stage, line in enumerate(texts):
        head = f"{noun} {stage}: "
        rows.append(head + " ".join(text.ljust(width) for text, width in zip(line, widths, strict=False)).rstrip())
        if pointer is not None and pointer[0] == stage:
            position = pointer[1]
            offset = sum(width + 1 for width in widths[:position])
            rows.append(" " * (len(head) + offset) + "^" * (len(line[position]) if position < len(line) else 1))
    return "\n".join(rows)


def _fail(schedule: Schedule, stage: int, position: int, message: str) -> NoReturn:
    raise ScheduleError(f"{message}\n{format_grid(schedule, (stage, position))}")


def _check_membership(schedule: Schedule, group: int, actions: tuple[Action, ...], num_microbatches: int) -> None:
    seen: set[Action] = set()
    for position, action in enumerate(actions):
        if action.stage % len(schedule) != group or (action.kind in _EPILOGUE and action.stage != group):
            _fail(schedule, group, position, f"{action} is in the list of stage {group}: move it to its own stage")
        if action.microbatch is not None and action.microbatch >= num_microbatches:
            _fail(schedule, group, position, f"{action}: there are {num_microbatches} microbatches, numbered from 0")
        if action in seen:
            _fail(schedule, group, position, f"{action} comes twice: every action happens once per batch")
        seen.add(action)


def _check_pairs(schedule: Schedule, stage: int, rules: Rules, num_microbatches: int) -> None:
    group = stage % len(schedule)
    actions = schedule[group]
    place = {action: position for position, action in enumerate(actions)}
    required = tuple(rules.required(stage))
    for microbatch in range(num_microbatches):
        for rule in required:
            action = Action(stage, rule.kind, microbatch)
            if action not in place:
                _fail(schedule, group, len(actions), f"{action} is missing: stage {stage} needs it once per batch")
            if rule.after is not None:
                before = Action(stage, rule.after, microbatch)
                if place.get(before, len(actions)) > place[action]:
                    _fail(schedule, group, place[action], f"{action} comes before {before}: it must come after it")
    allowed = {rule.kind for rule in required}
    for position, action in enumerate(actions):
        if action.stage == stage and action.kind in PER_MICROBATCH and action.kind not in allowed:
            why = f"stage {stage} of {rules.num_stages} has no such neighbour"
            if action.kind is ActionKind.BACKWARD:
                why = f"stage {stage} splits its backwards into I and W"
            _fail(schedule, group, position, f"{action}: {why}; remove it")


def _check_epilogue(schedule: Schedule, stage: int, actions: tuple[Action, ...]) -> None:
    reached = -1
    for position, action in enumerate(actions):
        rank = _EPILOGUE.index(action.kind) if action.kind in _EPILOGUE else -1
        if rank < reached:
            _fail(schedule, stage, position, f"{action} comes after {_EPILOGUE[reached].value}: it must come before")
        reached = rank
    kind = ActionKind.REDUCE_TIED
    if any(action.kind is kind for line in schedule for action in line) and Action(stage, kind) not in actions:
        _fail(schedule, stage, len(actions), f"{stage}{kind.value} is missing: all stages have it or none has")


def _check_order_between_groups(schedule: Schedule) -> None:
    for actions in schedule:
        sent_to: defaultdict[int, list[tuple[Action, Action]]] = defaultdict(list)
        for action in actions:
            if action.kind in SENDS:
                receive = receive_of(action)
                sent_to[receive.stage % len(schedule)].append((action, receive))
        for receiver, sent in sent_to.items():
            others = schedule[receiver]
            expected = {receive for _, receive in sent}
            received = [action for action in others if action in expected]
            for (first, wanted), second in zip(sent, received, strict=True):
                if wanted != second:
                    position = others.index(second)
                    message = (
                        f"{second} receives what {first} sends: neighbours must use the same order of microbatches"
                    )
                    _fail(schedule, receiver, position, message)


def _check_finishes(schedule: Schedule, rules: Rules) -> None:
    """Walk all lists at once; the first wait that nothing will ever satisfy is a deadlock."""
    position = [0] * len(schedule)
    done: set[Action] = set()
    advanced = True
    while advanced:
        advanced = False
        for stage, actions in enumerate(schedule):
            while position[stage] < len(actions) and all(
                needed in done for needed in rules.waits_for(actions[position[stage]])
            ):
                done.add(actions[position[stage]])
                position[stage] += 1
                advanced = True
    for stage, actions in enumerate(schedule):
        if position[stage] < len(actions):
            action = actions[position[stage]]
            missing = ", ".join(str(needed) for needed in rules.waits_for(action) if needed not in done)
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
