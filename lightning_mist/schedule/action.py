"""One step of a schedule. A schedule is data: it prints, parses, is checked, simulated and executed as such."""

import re
from dataclasses import dataclass
from enum import Enum

from lightning_mist.errors import ScheduleError


class ActionKind(Enum):
    """What an action does. The value is its text between stage index and microbatch index."""

    FORWARD = "F"
    BACKWARD = "B"
    RECV_ACTIVATION = "RECV_F"
    SEND_ACTIVATION = "SEND_F"
    RECV_GRADIENT = "RECV_B"
    SEND_GRADIENT = "SEND_B"
    REDUCE_GRADIENTS = "REDUCE"
    REDUCE_TIED = "REDUCE_TIED"
    OPTIMIZER_STEP = "STEP"
    GATHER_PARAMETERS = "GATHER"


PER_MICROBATCH = frozenset(
    {
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
        ActionKind.RECV_ACTIVATION,
        ActionKind.SEND_ACTIVATION,
        ActionKind.RECV_GRADIENT,
        ActionKind.SEND_GRADIENT,
    }
)
"""Kinds that carry a microbatch index; the others happen once per batch or once per optimizer step."""

_TEXT = re.compile(r"^(\d+)([A-Z_]+?)(\d+)?$")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one stage: ``Action(2, ActionKind.FORWARD, 0)`` prints as ``2F0``.

    ``RECV`` and ``SEND`` post a transfer with the neighbouring stage; ``F`` and ``B`` wait for what they consume.
    ``REDUCE`` averages gradients over the stage's data-parallel ranks (to the owning rank under ZeRO-1),
    ``REDUCE_TIED`` sums gradients of parameters that several stages hold, ``STEP`` is the optimizer's update and
    ``GATHER`` distributes what the data-parallel ranks updated (ZeRO-1).
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __post_init__(self) -> None:
        """Check that the microbatch index is there exactly where the kind needs one."""
        if (self.kind in PER_MICROBATCH) != (self.microbatch is not None):
            needs = "needs" if self.kind in PER_MICROBATCH else "has no"
            raise ScheduleError(f"action {self.stage}{self.kind.value}{self.microbatch}: this kind {needs} microbatch")

    def __str__(self) -> str:
        """The action as text."""
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that prints as ``text``.

        Raises:
            ScheduleError: If the text is not an action.
        """
        match = _TEXT.match(text.strip())
        kinds = {kind.value: kind for kind in ActionKind}
        if match is None or match[2] not in kinds:
            raise ScheduleError(f"{text!r} is not an action: write stage, one of {', '.join(kinds)}, microbatch: 2F0")
        return cls(int(match[1]), kinds[match[2]], None if match[3] is None else int(match[3]))


Schedule = tuple[tuple[Action, ...], ...]
"""For each stage, its actions in order. Every data-parallel rank of a stage runs the same list."""
