"""What stages hold of a network's parameters, and who owns how much of them.

Array axes
    K  candidates
    J  distinct layer ranges among them; of owners what ranks have of parameters
    P  parameters
    R  regions, of owners those of a stage; of what is there for a pass only the head, the first layer, others, the tail
    N  ranks
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np

from lightning_mist.cost.inputs import (
    BoolArray,
    FloatArray,
    IntArray,
    ParameterTable,
    StageCandidates,
    covered,
    distinct,
    distinct_codes,
)
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan.sharding import BUCKET_BYTES, assign_owners
from lightning_mist.schedule.flats import ALIGNMENT

# Who owns which of a stage's parameters among its data-parallel ranks, and what that leaves on the fullest of them.
#
# Where ranks have even pieces of what no other stage holds (:mod:`lightning_mist.schedule.flats`) nobody owns that,
# and all of it is fetched. The rest is dealt out whole, by the bytes of the unsplit parameter, so that
# tensor-parallel ranks agree: first what is trained, under ZeRO-3 then the frozen ones
# (:func:`lightning_mist.plan.mesh.held_parameters`). Owners depend on everything that a stage holds, so what a device
# needs of two neighbouring parts beside what it owns is worked out for every range of regions by itself.


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


BUCKETS_IN_FLIGHT = 2
"""Buckets of updated parameters under way at once when ZeRO-1 and ZeRO-2 gather them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What stages hold: parameters and their gradients, in bytes.

    Attributes:
        head_only_K: Trained, and used by no part of the stage but its head.
        tail_K: Trained, and used by its tail.
        shared_K: Trained, and also held by another stage.
        reused_K: Trained, and used by several parts of this stage.
        unit_K: Trained, of the unit that uses most.
        together_K: Trained, with a gradient that is made with those of inputs where weights' are made apart.
        count_K: Number of trained parameters, not bytes.
    """

    all_K: FloatArray
    trained_K: FloatArray
    head_only_K: FloatArray
    tail_K: FloatArray
    shared_K: FloatArray
    reused_K: FloatArray
    largest_K: FloatArray
    unit_K: FloatArray
    together_K: FloatArray
    count_K: FloatArray

    @property
    def bucket_K(self) -> FloatArray:
        """The most that a bucket of gradients, or of updated parameters, holds."""
        return np.minimum(self.trained_K, BUCKET_BYTES + self.largest_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOut:
    """What the fullest rank of stages has where parameters are dealt out, in bytes.

    Attributes:
        every_K: All parameters that it owns where frozen ones are dealt out too, as they lie in flat storages.
        forward_RK: Parameters that are there for a forward only; see
            :class:`Away`.
    """

    trained_K: FloatArray
    every_K: FloatArray
    forward_RK: FloatArray
    backward_RK: FloatArray


class Holdings:
    """Parameters of stages of one network; keeps what it has computed.

    Attributes:
        is_one_unit: Whether a stage's parameters cannot be told apart by layer, so that ZeRO-2 and ZeRO-3 take them for
            one unit.
        is_even: Whether ZeRO gives ranks even pieces of what no other stage of a pipeline holds.
        owners: Who has what of them.
    """

    def __init__(self, spec: ModelSpec, table: ParameterTable | None = None, networks: int = 1) -> None:
        self.spec = spec
        self.table = ParameterTable.of(spec) if table is None else table
        self.is_one_unit = not spec.module_map.blocks or bool(spec.module_map.excludes("shards"))
        self.is_even = spec.module_map.even_shards
        self.owners = Owners(self.table, is_one_unit=self.is_one_unit, is_even=self.is_even)
        self._networks = networks
        self._held = ByRange(self.table.uses_PR.shape[1], len(HeldBytes.__slots__), networks)
        self._shares: dict[int, ByRange] = {}

    def of(self, candidates: StageCandidates) -> HeldBytes:
        """Parameters and gradients of each candidate."""
        ranges = covered(self.spec, candidates.start_K, candidates.end_K)
        figures_K = self._held.of(*ranges, self.held_of, self._network(candidates))
        return HeldBytes(**dict(zip(HeldBytes.__slots__, figures_K, strict=True)))

    def _network(self, candidates: StageCandidates) -> IntArray | None:
        """Which of several networks each candidate is of, if there are several."""
        return None

    def held_of(self, network: int, low_J: IntArray, high_J: IntArray) -> FloatArray:
        """What is held of ranges of regions, in the order of :class:`HeldBytes`; axes figure and ``J``."""
        uses = self.table.uses_PR
        inside_PJ = uses[:, high_J] - uses[:, low_J]
        held_PJ = inside_PJ > 0
        head_PJ = (uses[:, np.minimum(low_J + 1, high_J)] - uses[:, low_J]) * (low_J == 0)
        tail_PJ = (uses[:, -1] - uses[:, -2])[:, None] * (high_J == uses.shape[1] - 1)
        trained_P, ranges = self.table.trainable_P, zip(low_J.tolist(), high_J.tolist(), strict=True)
        of_units = [self.table.trained_R[low:high].max(initial=0.0) for low, high in ranges]

        def trained(chosen_PJ: BoolArray) -> FloatArray:
            return trained_P @ chosen_PJ.astype(np.float64)

        found = HeldBytes(
            all_K=self.table.bytes_P @ held_PJ,
            trained_K=trained(held_PJ),
            head_only_K=trained((head_PJ > 0) & (inside_PJ == head_PJ)),
            tail_K=trained(tail_PJ > 0),
            shared_K=trained((inside_PJ > 0) & (inside_PJ < uses[:, -1:])),
            reused_K=trained(inside_PJ > 1),
            largest_K=(trained_P[:, None] * held_PJ).max(axis=0, initial=0.0),
            unit_K=trained(held_PJ) if self.is_one_unit else np.array(of_units),
            together_K=trained(held_PJ & self.table.together_P[:, None]),
            count_K=(trained_P > 0).astype(np.float64) @ held_PJ,
        )
        return np.stack([getattr(found, name) for name in HeldBytes.__slots__])

    def shares(self, candidates: StageCandidates, ranks: int) -> SharedOut:
        """What the fullest of the data-parallel ranks of each candidate has where they share parameters out."""
        if ranks not in self._shares:
            self._shares[ranks] = ByRange(self.table.uses_PR.shape[1], 10, self._networks)
        ranges = covered(self.spec, candidates.start_K, candidates.end_K)
        figures_K = self._shares[ranks].of(*ranges, partial(self.shared_of, ranks=ranks), self._network(candidates))
        return SharedOut(
            trained_K=figures_K[8], every_K=figures_K[9], forward_RK=figures_K[:4], backward_RK=figures_K[4:8]
        )

    def shared_of(self, network: int, low_J: IntArray, high_J: IntArray, ranks: int) -> FloatArray:
        """Parameters that are there only for a forward, for a backward; those owned that are trained, and all."""
        ranges = zip(low_J.tolist(), high_J.tolist(), strict=True)
        found = [self.owners.of(*item, ranks) for item in ranges]
        each = [(*item.forward, *item.backward, item.trained, item.every) for item in found]
        figures_J: FloatArray = np.array(each, dtype=np.float64).reshape(len(found), 10).T
        return figures_J

    def together(self, stages: Sequence[StageCandidates], ranks: int) -> Together:
        """What the fullest rank of devices that run several stages has, their parameters dealt out together."""
        return self.owners.together([self._range(candidates) for candidates in stages], ranks)

    def doubled(self, stages: Sequence[StageCandidates]) -> tuple[float, float]:
        """Bytes by which the sum over some stages exceeds what they hold together: of all and of trained parameters."""
        uses = self.table.uses_PR
        count_P = np.zeros(len(uses), dtype=np.int64)
        for candidates in stages:
            low, high = self._range(candidates)
            count_P += uses[:, high] > uses[:, low]
        extra_P = np.maximum(count_P - 1, 0)
        return float(self.table.bytes_P @ extra_P), float(self.table.trainable_P @ extra_P)

    def _range(self, candidates: StageCandidates) -> tuple[int, int]:
        """The range of regions of candidates that have the same layers."""
        low_K, high_K = covered(self.spec, candidates.start_K, candidates.end_K)
        return int(low_K[0]), int(high_K[0])


Ranges: TypeAlias = Callable[[int, IntArray, IntArray], FloatArray]
"""Gives the figures of ranges of regions of one network, by their first regions and those past the last; axes figure
and ``J``."""


class ByRange:
    """Figures of ranges of regions, worked out when they are asked for the first time."""

    def __init__(self, width: int, count: int, networks: int = 1) -> None:
        self._width = width
        # The column of every range among those that are known, -1 if it is not one of them.
        self._column = np.full(networks * width * width, -1, dtype=np.int32)
        self._known_figures = np.empty((count, 0))

    def of(self, low_K: IntArray, high_K: IntArray, make: Ranges, network_K: IntArray | None = None) -> FloatArray:
        """The figures of each range; axes figure and ``K``."""
        first_K = low_K if network_K is None else network_K * self._width + low_K
        code_K = first_K * self._width + high_K
        column_K = self._column[code_K]
        if len(column_K) and column_K.min() < 0:
            self._add(code_K[column_K < 0], make)
            column_K = self._column[code_K]
        figures_K: FloatArray = self._known_figures.take(column_K, axis=1)
        return figures_K

    def _add(self, code_K: IntArray, make: Ranges) -> None:
        code_J, _ = distinct_codes(code_K, len(self._column))
        network_J, ranges_J = np.divmod(code_J, self._width**2)
        made = [self._known_figures]
        for network in distinct(network_J).tolist():
            range_J = ranges_J[network_J == network]
            made.append(make(network, range_J // self._width, range_J % self._width))
        # Codes ascend, and networks with them.
        self._column[code_J] = self._known_figures.shape[1] + np.arange(len(code_J))
        self._known_figures = np.concatenate(made, axis=1)


class VariantHoldings(Holdings):
    """Parameters of stages of networks that differ in which of these are trained; keeps what it has computed.

    Args:
        each: The networks; gradients are made and reduced as in the first, wherever they stay afterwards.
        network_by_variant: Which of them each variant is.

    Attributes:
        table: Parameters of the first network, with ``single_R`` and ``trained_R`` of every variant.
    """

    def __init__(self, each: Sequence[Holdings], network_by_variant: IntArray) -> None:
        super().__init__(each[0].spec, each[0].table, len(each))
        self._each, self._network_by_variant = tuple(each), network_by_variant
        tables = [holdings.table for holdings in self._each]
        self.table = replace(
            self.table,
            single_R=np.stack([table.single_R for table in tables])[network_by_variant],
            trained_R=np.repeat(self.table.trained_R[None], len(network_by_variant), axis=0),
        )

    def held_of(self, network: int, low_J: IntArray, high_J: IntArray) -> FloatArray:
        """What is held of ranges of regions of one of the networks."""
        return self._each[network].held_of(0, low_J, high_J)

    def shared_of(self, network: int, low_J: IntArray, high_J: IntArray, ranks: int) -> FloatArray:
        """What the fullest rank has of ranges of regions of one of the networks."""
        return self._each[network].shared_of(0, low_J, high_J, ranks)

    def _network(self, candidates: StageCandidates) -> IntArray:
        if candidates.variant_K is None:
            raise ValueError("candidates.variant_K = None: it says which variant of the network each is of")
        return self._network_by_variant[candidates.variant_K]
