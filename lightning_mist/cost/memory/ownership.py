"""Who owns which of a stage's parameters among its data-parallel ranks, and what that leaves on the fullest of them.

Where ranks have even pieces of what no other stage holds (:mod:`lightning_mist.schedule.flats`) nobody owns that, and
all of it is fetched. The rest is dealt out whole, by the bytes of the unsplit parameter, so that tensor-parallel ranks
agree: first what is trained, under ZeRO-3 then the frozen ones (:func:`lightning_mist.plan.mesh.held_parameters`).
Owners depend on everything that a stage holds, so what a device needs of two neighbouring parts beside what it owns is
worked out for every range of regions by itself.

Array axes
    P  parameters
    R  regions of a stage, in order
    N  ranks
    J  what ranks have of parameters
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray, ParameterTable
from lightning_mist.plan.sharding import assign_owners
from lightning_mist.schedule.flats import ALIGNMENT

ALIGNMENT_BYTES = 16
"""Multiples at which parameters begin in the flat storages of ZeRO-3, as the runtime lays them out."""

PIECE_BYTES, NOBODY = 4 * ALIGNMENT, -1
"""By less a piece of a flat buffer of 32 bits is rounded up; the owner of what ranks have even pieces of."""

MOST = 1024
"""Stages whose owners are kept: 16 bytes per parameter each, so some megabytes for networks of hundreds."""


class Away(NamedTuple):
    """Bytes that a computation needs of parameters that the device does not own, at most, by where in a stage it is.

    Attributes:
        head: In the stage's first region, if that is the network's head; else 0.
        first: In the layer behind the head; 0 if the stage does not have it, or has only this layer.
        layers: In any of its other layers, or in its only one; 0 if it has none.
        tail: In the network's tail; 0 if the stage does not have it.
    """

    head: float
    first: float
    layers: float
    tail: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """What the fullest rank of a stage has. Bytes; every figure is the largest of any rank.

    Attributes:
        trained: Trained parameters that it owns.
        every: All parameters that it owns where frozen ones are dealt out too, as they lie in flat storages.
        forward: Parameters that are there only for a forward: the region's own and, under way, the next one's.
        backward: The same for a backward, with the region before.
    """

    trained: float
    every: float
    forward: Away
    backward: Away


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What the fullest rank of devices that run several stages has. Bytes; every figure is the largest of any rank.

    Attributes:
        away: Parameters that are there only for a computation, its own and those of the next.
    """

    trained: float
    every: float
    away: float


def owners_of(sizes_P: FloatArray, ranks: int, loads: tuple[int, ...] = ()) -> IntArray:
    """As :func:`~lightning_mist.plan.sharding.assign_owners`, which stages with the same parameters have in common.

    Returns:
        The rank index of each parameter; it cannot be written to.
    """
    if ranks == 1 or not len(sizes_P):
        return np.zeros(len(sizes_P), dtype=np.int64)
    return _owners_of(sizes_P.astype(np.int64).tobytes(), ranks, loads)


@lru_cache(maxsize=MOST)
def _owners_of(sizes: bytes, ranks: int, loads: tuple[int, ...]) -> IntArray:
    owner_P = np.array(assign_owners(np.frombuffer(sizes, dtype=np.int64).tolist(), ranks, loads), dtype=np.int64)
    owner_P.setflags(write=False)  # Everybody gets the same.
    return owner_P


class Owners:
    """Owners in stages of one network; keeps what it has computed.

    Args:
        is_one_unit: Whether a stage's parameters cannot be told apart by layer, so that all are there at once.
        is_even: Whether ranks have even pieces of what no other stage holds.
    """

    def __init__(self, table: ParameterTable, *, is_one_unit: bool, is_even: bool = False) -> None:
        self._table, self._is_one_unit, self._is_even = table, is_one_unit, is_even
        self._used_PR = np.diff(table.uses_PR, axis=1) > 0
        self._known: dict[tuple[bytes, ...], Ownership] = {}

    def of(self, low: int, high: int, ranks: int) -> Ownership:
        """Ownership in a stage of the regions ``[low, high)``."""
        uses_PR, table = self._table.uses_PR, self._table
        held_P: BoolArray = uses_PR[:, high] > uses_PR[:, low]
        even_P, used_PR = self.even(low, high)[held_P], self._used_PR[held_P, low:high]
        # Stages of equal layers are alike wherever they lie, but for the ends of the network.
        key = (
            bytes([low == 0, high == self._used_PR.shape[1]]),
            ranks.to_bytes(8, "little"),
            even_P.tobytes(),
            *(item[held_P].tobytes() for item in (table.dealt_P, table.is_first_P, table.bytes_P, table.trainable_P)),
            used_PR.tobytes(),
        )
        if key not in self._known:
            owner_P, has_tail = self.owner(held_P, ranks, even_P), high == self._used_PR.shape[1]
            self._known[key] = self._ownership(held_P, owner_P, used_PR, ranks, low == 0, has_tail)
        return self._known[key]

    def even(self, low: int, high: int) -> BoolArray:
        """Of which parameters ranks of a stage of the regions ``[low, high)`` have even pieces; axis ``P``."""
        uses_PR = self._table.uses_PR
        even_P: BoolArray = (uses_PR[:, high] - uses_PR[:, low] == uses_PR[:, -1]) & self._is_even
        return even_P

    def together(self, ranges: Sequence[tuple[int, int]], ranks: int) -> Together:
        """What the fullest rank has of several stages whose parameters are dealt out together."""
        used_PR = np.concatenate([self._used_PR[:, low:high] for low, high in ranges], axis=1)
        held_P: BoolArray = np.any(used_PR, axis=1)
        even_P = (used_PR.sum(axis=1) == self._table.uses_PR[:, -1])[held_P] & self._is_even
        owner_P = self.owner(held_P, ranks, even_P)
        trained, every = self._shares(held_P, owner_P, ranks, sum(high - low for low, high in ranges))
        # What follows a region of a stage is a neighbour there; or, at a stage's ends, an end of any of them.
        ends = [at for low, high in ranges for at in (low, high - 1)]
        pairs = [(at, at + 1) for low, high in ranges for at in range(low, high - 1)]
        pairs += [(one, other) for one in ends for other in ends]
        used_PR = self._used_PR[held_P]
        there_PR = np.stack([used_PR[:, one] | used_PR[:, other] for one, other in pairs], axis=1)
        if self._is_one_unit:
            there_PR = np.ones_like(there_PR)
        lacks_R = _most_elsewhere(padded(self._table.bytes_P[held_P]), owner_P, ranks, there_PR)
        return Together(trained=trained, every=every, away=float(lacks_R.max(initial=0.0)))

    def _shares(self, held_P: BoolArray, owner_P: IntArray, ranks: int, units: int) -> tuple[float, float]:
        """What the fullest rank has of some parameters, of so many units: of those that are trained, and of all."""
        bytes_P, even_P = self._table.bytes_P[held_P], owner_P == NOBODY
        trained_P, rounding = self._table.trainable_P[held_P] > 0, PIECE_BYTES * units * bool(even_P.any())

        def share(weights_P: FloatArray) -> float:
            dealt_N = np.bincount(owner_P[~even_P], weights=weights_P[~even_P], minlength=ranks)
            return float(dealt_N.max(initial=0.0) + weights_P[even_P].sum() / ranks) + rounding

        return share(bytes_P * trained_P), share(padded(bytes_P))

    def owner(self, held_P: BoolArray | IntArray, ranks: int, even_P: BoolArray | None = None) -> IntArray:
        """The rank that owns each of some parameters, if any, where those that are not trained are dealt out too."""
        if even_P is not None and even_P.any():
            owner_P = np.full(len(even_P), NOBODY, dtype=np.int64)
            owner_P[~even_P] = self.owner(np.arange(len(self._table.bytes_P))[held_P][~even_P], ranks)
            return owner_P
        sizes_P, trained_P = self._table.dealt_P[held_P], self._table.is_first_P[held_P]
        if trained_P.all():
            return owners_of(sizes_P, ranks)
        owner_P = np.empty(len(sizes_P), dtype=np.int64)
        owner_P[trained_P] = owners_of(sizes_P[trained_P], ranks)
        loads_N = np.bincount(owner_P[trained_P], weights=sizes_P[trained_P], minlength=ranks)
        owner_P[~trained_P] = owners_of(sizes_P[~trained_P], ranks, tuple(map(int, loads_N.tolist())))
        return owner_P

    def cells(self, low: int, high: int, ranks: int) -> tuple[IntArray, IntArray, IntArray]:
        """Parameters of a stage, each with a rank that has of it and the ranks among which it is; axis ``J``.

        Of even pieces all have as much: they count for who owns anything beside, or for one.
        """
        held_J = np.flatnonzero(self._table.uses_PR[:, high] > self._table.uses_PR[:, low])
        even_J = self.even(low, high)[held_J] & (ranks > 1)
        owner_J = self.owner(held_J, ranks, even_J)
        has_JN = even_J[:, None] | (owner_J[:, None] == np.arange(owner_J.max(initial=0) + 1))
        of_J, rank_J = np.nonzero(has_JN)
        return held_J[of_J], rank_J, np.where(even_J, ranks, 1)[of_J]

    def _ownership(
        self, held_P: BoolArray, owner_P: IntArray, used_PR: BoolArray, ranks: int, has_head: bool, has_tail: bool
    ) -> Ownership:
        padded_P = padded(self._table.bytes_P[held_P])
        trained, every = self._shares(held_P, owner_P, ranks, used_PR.shape[1])
        if used_PR.shape[1] == 1:
            used_PR = np.repeat(used_PR, 2, axis=1)

        def away(neighbours_PR: BoolArray) -> Away:
            there_PR = np.ones_like(used_PR) if self._is_one_unit else used_PR | neighbours_PR
            most_R = _most_elsewhere(padded_P, owner_P, ranks, there_PR)
            has_first = has_head and len(most_R) > 2 + has_tail
            layers_R = most_R[has_head + has_first : len(most_R) - has_tail]
            return Away(
                head=float(most_R[0]) if has_head else 0.0,
                first=float(most_R[1]) if has_first else 0.0,
                layers=float(layers_R.max(initial=0.0)),
                tail=float(most_R[-1]) if has_tail else 0.0,
            )

        # Behind a stage's last region its backward comes, and before its first one another forward; but in a pipeline
        # also the first region of the next microbatch, and the last one of the next backward.
        wraps = not (has_head and has_tail)
        after_PR = np.concatenate([used_PR[:, 1:], used_PR[:, -2:-1] | (used_PR[:, :1] & wraps)], axis=1)
        before_PR = np.concatenate([used_PR[:, 1:2] | (used_PR[:, -1:] & wraps), used_PR[:, :-1]], axis=1)
        return Ownership(trained=trained, every=every, forward=away(after_PR), backward=away(before_PR))


def _most_elsewhere(bytes_P: FloatArray, owner_P: IntArray, ranks: int, there_PR: BoolArray) -> FloatArray:
    """The most bytes that a rank needs of parameters that others own, of several sets of parameters; axis ``R``."""
    all_R: FloatArray = bytes_P @ there_PR
    dealt_P = owner_P != NOBODY
    bytes_P, owner_P, there_PR = bytes_P[dealt_P], owner_P[dealt_P], there_PR[dealt_P]
    if ranks > there_PR.sum(axis=0).max(initial=0):
        # Some rank owns none of them.
        return all_R
    owned_NP = bytes_P * (owner_P == np.arange(ranks)[:, None])
    result_R: FloatArray = all_R - (owned_NP @ there_PR).min(axis=0)
    return result_R


def padded(bytes_P: FloatArray) -> FloatArray:
    """Bytes of parameters as they lie in flat storages."""
    return np.ceil(bytes_P / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
