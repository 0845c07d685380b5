"""A tape of what one rank allocates and frees: written action by action, read as arrays.

Array axes
    E  events, in order: ``+(i + 1)`` allocates ``i``, ``-(i + 1)`` frees it
    K  allocations, by identity
"""

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


_NONE = -1  # no stage, no microbatch


class Label(NamedTuple):
    """What an allocation is and where it comes from.

    Attributes:
        term: One of :data:`~lightning_mist.cost.memory.memory_model.TERMS`.
        name: In words, or the parameter's canonical name.
        part: Region of the network that made it: -1 the head, ``k`` layer ``k``, the number of layers for the tail;
            ``None`` where the runtime did.
        module: Qualified name of the module that made it; empty where the runtime did.
        operator: The operator that made it, for example ``"aten.mm.default"``.
        line: The line of the user's code, as ``"file.py:123"``.
    """

    term: str
    name: str = ""
    part: int | None = None
    module: str = ""
    operator: str = ""
    line: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slots:
    """Allocations that always come together: those of one microbatch in one stage."""

    bytes_K: IntArray
    labels: tuple[Label, ...]


class TapeBlock(NamedTuple):
    """Consecutive identities."""

    first: int
    labels: tuple[Label, ...]
    stage: int  # the stage they belong to; -1 for the whole rank
    microbatch: int  # the microbatch; -1 for none


class Mark(NamedTuple):
    """Where an action begins."""

    event: int  # index of its first event
    action: str  # the action as text, for example ``"2F0"``


class EventTape:
    """Takes down what a rank allocates and frees."""

    def __init__(self) -> None:
        self.blocks: list[TapeBlock] = []
        self.marks: list[Mark] = []
        self._events, self._bytes = array("q"), array("q")

    @property
    def length(self) -> int:
        """Number of events so far."""
        return len(self._events)

    def mark(self, action: str) -> None:
        """An action begins."""
        self.marks.append(Mark(self.length, action))

    def reserve(self, slots: Slots, stage: int, microbatch: int) -> int:
        """Identities for a microbatch's slots, none of which is allocated yet; the first of them."""
        first = len(self._bytes)
        self.blocks.append(TapeBlock(first, slots.labels, stage, microbatch))
        self._bytes.frombytes(slots.bytes_K.tobytes())
        return first

    def play(self, events_E: IntArray, first: int) -> None:
        """Events on slots, signed as identities are, that have identities from ``first`` on."""
        self._events.frombytes((events_E + np.sign(events_E) * first).tobytes())

    def malloc(self, nbytes: int, label: Label, stage: int = _NONE, microbatch: int = _NONE) -> int:
        """Allocate; the new identity."""
        identity = len(self._bytes)
        self.blocks.append(TapeBlock(identity, (label,), stage, microbatch))
        self._bytes.append(nbytes)
        self.allocate(identity)
        return identity

    def allocate(self, identity: int) -> None:
        """Allocate an identity that was reserved."""
        self._events.append(identity + 1)

    def free(self, identity: int) -> None:
        """Free."""
        self._events.append(-(identity + 1))

    def events(self) -> IntArray:
        """All events."""
        return np.array(self._events, dtype=np.int64)

    def bytes(self) -> IntArray:
        """Bytes of every identity."""
        return np.array(self._bytes, dtype=np.int64)
