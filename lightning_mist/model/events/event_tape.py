"""A tape of what one rank allocates and frees: written action by action, read as arrays.

Array axes
    E  events, in order: ``+(i + 1)`` allocates ``i``, ``-(i + 1)`` frees it
    K  allocations, by identity
"""

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Events on a microbatch's slots that happen without interruption."""

    events_E: IntArray  # signed slots, see the top of the file
    signs_E: IntArray

    @classmethod
    def of(cls, events: Sequence[int] | IntArray) -> "Chunk":
        """A chunk of signed slots."""
        events_E = np.asarray(events, dtype=np.int64)
        return cls(events_E=events_E, signs_E=np.sign(events_E))

    def cut(self, start: int, end: int | None = None) -> "Chunk":
        """A part of it."""
        return Chunk(events_E=self.events_E[start:end], signs_E=self.signs_E[start:end])


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
        self._events: list[IntArray] = []
        self._bytes: list[IntArray] = []
        self._pending: list[int] = []
        self._sizes: list[int] = []  # of identities since the last block of slots
        self._count = self._length = 0

    @property
    def length(self) -> int:
        """Number of events so far."""
        return self._length

    def mark(self, action: str) -> None:
        """An action begins."""
        self.marks.append(Mark(self._length, action))

    def reserve(self, slots: Slots, stage: int, microbatch: int) -> int:
        """Identities for a microbatch's slots, none of which is allocated yet; the first of them."""
        first = self._count
        self.blocks.append(TapeBlock(first, slots.labels, stage, microbatch))
        self._flush_sizes()
        self._bytes.append(slots.bytes_K)
        self._count += len(slots.labels)
        return first

    def play(self, chunk: Chunk, first: int) -> None:
        """Events on slots whose identities begin with ``first``."""
        if len(chunk.events_E):
            self._flush()
            self._events.append(chunk.events_E + chunk.signs_E * first)
            self._length += len(chunk.events_E)

    def malloc(self, nbytes: int, label: Label, stage: int = _NONE, microbatch: int = _NONE) -> int:
        """Allocate; the new identity."""
        identity = self._count
        self.blocks.append(TapeBlock(identity, (label,), stage, microbatch))
        self._sizes.append(nbytes)
        self._count += 1
        self.allocate(identity)
        return identity

    def allocate(self, identity: int) -> None:
        """Allocate an identity that was reserved."""
        self._pending.append(identity + 1)
        self._length += 1

    def free(self, identity: int) -> None:
        """Free."""
        self._pending.append(-(identity + 1))
        self._length += 1

    def _flush(self) -> None:
        if self._pending:
            self._events.append(np.array(self._pending, dtype=np.int64))
            self._pending = []

    def _flush_sizes(self) -> None:
        if self._sizes:
            self._bytes.append(np.array(self._sizes, dtype=np.int64))
            self._sizes = []

    def events(self) -> IntArray:
        """All events."""
        self._flush()
        return np.concatenate(self._events) if self._events else np.zeros(0, dtype=np.int64)

    def bytes(self) -> IntArray:
        """Bytes of every identity."""
        self._flush_sizes()
        return np.concatenate(self._bytes) if self._bytes else np.zeros(0, dtype=np.int64)
