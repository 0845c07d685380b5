"""One step of a schedule. A schedule is data: it prints, parses, is checked, simulated and executed as such."""

import re
from dataclasses import dataclass
from enum import Enum

from lightning_mist.errors import ScheduleError


class ActionKind(Enum):
    """What an action does. The value is its text between stage index and microbatch index."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    RECV_ACTIVATION = "RECV_F"
    SEND_ACTIVATION = "SEND_F"
    RECV_GRADIENT = "RECV_B"
    SEND_GRADIENT = "SEND_B"
    REDUCE_GRADIENTS = "REDUCE"
    REDUCE_TIED = "REDUCE_TIED"
    OPTIMIZER_STEP = "STEP"
    GATHER_PARAMETERS = "GATHER"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    LOAD_GRADIENTS = "LOAD_G"
    STORE_GRADIENTS = "STORE_G"
    LOAD_PARAMETERS = "LOAD_P"
    STORE_PARAMETERS = "STORE_P"
    LOAD_OPTIMIZER_STATE = "LOAD_O"
    STORE_OPTIMIZER_STATE = "STORE_O"
    UPDATE = "UPDATE"
    LOAD_ACTIVATIONS = "LOAD_A"
    STORE_ACTIVATIONS = "STORE_A"
    DROP_ACTIVATIONS = "DROP_A"

    # There is one object of each kind, and hashing names, as enumerations do, is most of what making lists would take.
    __hash__ = object.__hash__


COMPUTATIONS = frozenset(
    {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT}
)
"""Kinds that compute on a microbatch."""

INPUT_BACKWARDS = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT})
"""Kinds that need the gradient from the stage after and make the one for the stage before."""

SENDS = frozenset({ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT})
"""Kinds that post tensors for a neighbouring stage."""

RECEIVES = frozenset({ActionKind.RECV_ACTIVATION, ActionKind.RECV_GRADIENT})
"""Kinds that post room for tensors of a neighbouring stage."""

_ACTIVATION_COPIES = frozenset({ActionKind.LOAD_ACTIVATIONS, ActionKind.STORE_ACTIVATIONS, ActionKind.DROP_ACTIVATIONS})

PER_MICROBATCH = COMPUTATIONS | SENDS | RECEIVES | _ACTIVATION_COPIES
"""Kinds that carry a microbatch index; the others happen once per batch or once per optimizer step."""

HEAD = -1
"""Unit of what runs before a module's first layer. Layers are units by their position."""

TAIL = -2
"""Unit of what runs after a module's last layer."""

UNIT_NAMES = {HEAD: "head", TAIL: "tail"}

_OF_UNITS = _ACTIVATION_COPIES | frozenset(
    {
        ActionKind.UNSHARD,
        ActionKind.RESHARD,
        ActionKind.LOAD_GRADIENTS,
        ActionKind.STORE_GRADIENTS,
        ActionKind.LOAD_PARAMETERS,
        ActionKind.STORE_PARAMETERS,
        ActionKind.LOAD_OPTIMIZER_STATE,
        ActionKind.STORE_OPTIMIZER_STATE,
        ActionKind.UPDATE,
    }
)

_WHOLE_STAGE = SENDS | RECEIVES | {ActionKind.REDUCE_TIED, ActionKind.OPTIMIZER_STEP}

_TEXT = re.compile(r"^(\d+)([A-Z_]+?)(\d+)?(?::(\d+|head|tail))?$")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one stage: ``Action(2, ActionKind.FORWARD, 0)`` prints as ``2F0``.

    ``B`` is a whole backward; or ``I`` makes the gradients of the stage's input and ``W``, later, those of its weights.
    ``RECV`` and ``SEND`` post a transfer with the neighbouring stage; ``F``, ``B``, ``I`` wait for what they consume.
    ``REDUCE`` averages gradients over the stage's data-parallel ranks (to the owning rank under ZeRO-1),
    ``REDUCE_TIED`` sums gradients of parameters that several stages hold, ``STEP`` is the optimizer's update and
    ``GATHER`` distributes what the ranks with the same parameters updated (ZeRO-1, ZeRO-2).

    With a *unit* (a layer, the head or the tail; see :mod:`~lightning_mist.schedule.stage_program`) an action is about
    that unit of the stage alone: ``2F0:5`` computes layer 5, ``2REDUCE:5`` sums its gradients to their owners, and
    ``2UNSHARD:5`` and ``2RESHARD:5`` fetch its parameters from their owners, and owners' from host memory, and free
    them again. ``2LOAD_O:5`` and ``2STORE_O:5`` start to copy its optimizer state from host memory and back,
    ``2LOAD_P:5`` and ``2STORE_P:5`` a rank's own parameters, ``2UPDATE:5`` is the optimizer's update of them, and
    ``2GATHER:5`` starts to distribute them; ``2STORE_A3:5``, ``2DROP_A3:5`` and ``2LOAD_A3:5`` copy what it keeps of
    microbatch 3 for backward to host memory, free it on the device, and copy it back.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    unit: int | None = None

    def __post_init__(self) -> None:
        """Check that the microbatch index and the unit are there where the kind needs them, and nowhere else."""
        if (self.kind in PER_MICROBATCH) != (self.microbatch is not None):
            needs = "needs" if self.kind in PER_MICROBATCH else "has no"
            raise ScheduleError(f"action {self.stage}{self.kind.value}{self.microbatch}: this kind {needs} microbatch")
        if (self.kind in _OF_UNITS and self.unit is None) or (self.kind in _WHOLE_STAGE and self.unit is not None):
            needs = "needs a" if self.kind in _OF_UNITS else "has no"
            raise ScheduleError(f"action {self.stage}{self.kind.value} with unit {self.unit}: this kind {needs} unit")

    def __str__(self) -> str:
        """The action as text."""
        unit = "" if self.unit is None else f":{UNIT_NAMES.get(self.unit, self.unit)}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}{unit}"

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
        units = {name: unit for unit, name in UNIT_NAMES.items()}
        unit = None if match[4] is None else units.get(match[4])
        return cls(
            int(match[1]),
            kinds[match[2]],
            None if match[3] is None else int(match[3]),
            int(match[4]) if match[4] is not None and unit is None else unit,
        )


Schedule = tuple[tuple[Action, ...], ...]
"""For each group of devices, its actions in order. Every data-parallel rank of a group runs the same list.

A group of devices runs one stage, or several, its chunks: of ``P`` groups, group ``i`` runs stages ``i``, ``i + P``,
``i + 2 P``.. What happens once per batch bears the index of the group, which is that of its first stage.
"""


def num_stages_of(schedule: Schedule) -> int:
    """Number of stages of a schedule: at least one per group of devices."""
    return max([len(schedule) - 1, *(action.stage for actions in schedule for action in actions)]) + 1


def receive_of(send: Action) -> Action:
    """The action of the neighbouring stage that receives what a send sends."""
    if send.kind is ActionKind.SEND_ACTIVATION:
        return Action(send.stage + 1, ActionKind.RECV_ACTIVATION, send.microbatch)
    return Action(send.stage - 1, ActionKind.RECV_GRADIENT, send.microbatch)
