"""What a stage's ranks have of parameters, gradients or optimizer state of which a share is offloaded to host memory.

Which parameters are offloaded is said in :mod:`lightning_mist.cost.memory.offload_bytes`.

Array axes
    K  candidates; of some stages what one rank has of one unit
    P  parameters
    R  regions
    S  stages
    J  parameters of all of some stages, one stage after another
    N  ranks of all of them, as far as they own anything
    C  ratios
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_mist.cost.inputs import (
    BoolArray,
    FloatArray,
    IntArray,
    ParameterTable,
    StageCandidates,
    covered,
    distinct,
    distinct_rows,
)
from lightning_mist.cost.memory.held_parameters import ByRange, Holdings, padded
from lightning_mist.plan.mesh import itemsize
from lightning_mist.plan.sharding import moved_of_unit
from lightning_mist.schedule.flats import ALIGNMENT

OffloadedBytes: TypeAlias = Literal["parameters", "changed", "trained"]
"""Bytes of parameters that are offloaded, of those among them that are trained, and of what only trained ones have."""


def offloaded_parameters(table: ParameterTable, ratio: float, *, trained: bool) -> BoolArray:
    """Which parameters are offloaded; axis ``P``.

    Args:
        trained: Whether only trained parameters count (for gradients and optimizer state).
    """
    bytes_P = table.trainable_P if trained else table.bytes_P
    unit_P = np.diff(table.uses_PR, axis=1).argmax(axis=1)
    offloaded_P = np.zeros(len(bytes_P), dtype=bool)
    if ratio == 0.0:
        return offloaded_P
    for unit in distinct(unit_P):
        members = np.flatnonzero((unit_P == unit) & (bytes_P > 0))
        offloaded_P[members[list(moved_of_unit(bytes_P[members].tolist(), ratio))]] = True
    return offloaded_P


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a stage's ranks have of one kind of state, in bytes of parameters; the most of any rank.

    Attributes:
        largest_K: The largest offloaded part of one unit: the size of a buffer.
        unit_K: The largest unit, offloaded or not.
        single_K: The largest parameter that is offloaded.
        room_K: As ``largest_K``, where of what belongs to no layer, and to one rank, parts are fetched in turn.
    """

    resident_K: FloatArray
    offloaded_K: FloatArray
    largest_K: FloatArray
    unit_K: FloatArray
    single_K: FloatArray
    room_K: FloatArray

    def passing(self, *, in_parts: bool) -> FloatArray:
        """Bytes of what one of two buffers must hold at once."""
        return self.room_K if in_parts else self.largest_K

    def take(self, index_J: IntArray) -> "Shares":
        """Those of some candidates, or of some with ratios, one after another."""
        return Shares(**{name: getattr(self, name).reshape(-1)[index_J] for name in self.__slots__})


class StateShares:
    """Shares of stages of one network; keeps what it has computed.

    Attributes:
        are_even: Whether ranks have even pieces of everything, whatever the stage.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        # By less a piece of a flat buffer is rounded up.
        self._piece = ALIGNMENT * max((itemsize(use.dtype) for use in holdings.spec.module_map.parameters), default=0)
        self._shared_P = holdings.table.uses_PR[:, -1] > 1
        self.are_even = holdings.is_even and not self._shared_P.any()
        self._offloaded: dict[tuple[float, bool], BoolArray] = {}
        # Without frozen parameters those that are trained are all.
        bytes_P = holdings.table.bytes_P
        self._is_trained = bool((holdings.table.trainable_P == bytes_P).all())
        self._is_padded = bool((padded(bytes_P) == bytes_P).all())
        self._ranges: dict[tuple[int, tuple[float, ...], bool], ByRange] = {}
        self._displaces: dict[tuple[float, ...], bool] = {}
        self._units: dict[tuple[float, OffloadedBytes], FloatArray] = {}

    @cached_property
    def _next_PR(self) -> NDArray[np.int32]:
        """The first region from each on that uses a parameter."""
        used_PR = np.diff(self._holdings.table.uses_PR, axis=1) > 0
        regions_R = np.arange(used_PR.shape[1], dtype=np.int32)
        regions_PR = np.where(used_PR, regions_R, np.int32(used_PR.shape[1]))
        return np.minimum.accumulate(regions_PR[:, ::-1], axis=1)[:, ::-1]

    def offloaded(self, ratio: float, *, trained: bool) -> BoolArray:
        """As :func:`offloaded_parameters`."""
        key = (ratio, trained)
        if key not in self._offloaded:
            self._offloaded[key] = offloaded_parameters(self._holdings.table, ratio, trained=trained)
        return self._offloaded[key]

    def displaces(self, ratios: tuple[float, ...]) -> bool:
        """Whether a larger ratio may leave on the device what a smaller one offloads and several units use."""
        if ratios not in self._displaces:
            self._displaces[ratios] = any(
                (self.offloaded(low, trained=trained) & ~self.offloaded(high, trained=trained) & self._shared_P).any()
                for trained in (False, True)
                for low, high in pairwise(ratios)
            )
        return self._displaces[ratios]

    def unit_bytes(self, ratio: float, of: OffloadedBytes) -> FloatArray:
        """Offloaded bytes that every unit uses, those of several units counted in each; axis ``R``.

        Args:
            of: Of all parameters, of those among the same that are trained, or of what only those have.
        """
        key = ratio, of
        if key not in self._units:
            table = self._holdings.table
            bytes_P = table.trainable_P if of == "trained" else table.bytes_P
            if of == "changed":
                bytes_P = bytes_P * (table.trainable_P > 0)
            used_PR = np.diff(table.uses_PR, axis=1).astype(np.float64)
            self._units[key] = (bytes_P * self.offloaded(ratio, trained=of == "trained")) @ used_PR
        return self._units[key]

    def of(
        self,
        candidates: StageCandidates,
        ratio_K: FloatArray,
        ranks: int | IntArray,
        shards_K: BoolArray,
        *,
        trained: bool,
    ) -> Shares:
        """The shares of each candidate.

        Args:
            ranks: Ranks with the same parameters, of all candidates or of each.
            shards_K: Whether they own a part each; otherwise every rank has all.
        """
        low_K, high_K = covered(self._holdings.spec, candidates.start_K, candidates.end_K)
        pairs, pair_K = distinct_rows(np.where(shards_K, ranks, 1), ratio_K)
        found = np.empty((len(Shares.__slots__), len(low_K)))
        for pair, (count, ratio) in enumerate(pairs.tolist()):
            at_J = np.flatnonzero(pair_K == pair)
            found[:, at_J] = self._of_ranks(low_K[at_J], high_K[at_J], int(count), (ratio,), trained)[..., 0]
        return Shares(**dict(zip(Shares.__slots__, found, strict=True)))

    def of_ratios(
        self,
        candidates: StageCandidates,
        values: tuple[float, ...],
        ranks: int,
        shards_K: BoolArray,
        *,
        trained: bool,
    ) -> Shares:
        """The shares of each candidate with every ratio, which are a second axis; other arguments as for :meth:`of`."""
        low_K, high_K = covered(self._holdings.spec, candidates.start_K, candidates.end_K)
        found = np.empty((len(Shares.__slots__), len(low_K), len(values)))
        for count, at_J in ((ranks, np.flatnonzero(shards_K)), (1, np.flatnonzero(~shards_K))):
            found[:, at_J] = self._of_ranks(low_K[at_J], high_K[at_J], count, values, trained)
        return Shares(**dict(zip(Shares.__slots__, found, strict=True)))

    def _of_ranks(
        self, low_K: IntArray, high_K: IntArray, ranks: int, values: tuple[float, ...], trained: bool
    ) -> FloatArray:
        """The figures of :class:`Shares` with every ratio; axes figure, ``K`` and ``C``."""
        # What ranks have a part of each of lies in flat storages.
        trained, count = trained or (self._is_trained and (ranks == 1 or self._is_padded)), len(values)
        figures = len(Shares.__slots__)
        key = ranks, values, trained
        if key not in self._ranges:
            self._ranges[key] = ByRange(self._holdings.table.uses_PR.shape[1], figures * count)

        def make(_: int, low_J: IntArray, high_J: IntArray) -> FloatArray:
            return self._compute(low_J, high_J, ranks, values, trained)

        figures_K = self._ranges[key].of(low_K, high_K, make)
        result: FloatArray = figures_K.reshape(figures, count, -1).transpose(0, 2, 1)
        return result

    def _compute(
        self, low_S: IntArray, high_S: IntArray, ranks: int, values: tuple[float, ...], trained: bool
    ) -> FloatArray:
        """The figures of :class:`Shares` of stages with every ratio; axes figure and ``C``, and ``S``."""
        table = self._holdings.table
        bytes_P = table.trainable_P if trained else table.bytes_P if ranks == 1 else padded(table.bytes_P)
        owners, ranges = self._holdings.owners, zip(low_S.tolist(), high_S.tolist(), strict=True)
        cells = [owners.cells(low, high, ranks) for low, high in ranges]
        stage_J = np.repeat(np.arange(len(cells)), [len(held_J) for held_J, _, _ in cells])
        parameter_J, owner_J, among_J = (np.concatenate(items) for items in zip(*cells, strict=True))
        # Whole numbers of bytes, times the ranks, so that sums are exact.
        bytes_J = bytes_P[parameter_J] * (ranks // among_J)
        # The first unit of this stage that uses it.
        unit_J = self._next_PR[parameter_J, low_S[stage_J]]
        # What one rank has of one unit, as far as there is anything.
        rank_J = stage_J * ranks + owner_J
        code_K, at_J = np.unique(rank_J * table.uses_PR.shape[1] + unit_J, return_inverse=True)
        rank_N, at_K = np.unique(code_K // table.uses_PR.shape[1], return_inverse=True)
        offloaded_CJ = bytes_J * np.stack([self.offloaded(ratio, trained=trained)[parameter_J] for ratio in values])
        all_K, offloaded_CK = _summed(bytes_J[None], at_J, len(code_K)), _summed(offloaded_CJ, at_J, len(code_K))
        resident_CN, offloaded_CN = (
            _summed(cells_CK, at_K, len(rank_N)) for cells_CK in (all_K - offloaded_CK, offloaded_CK)
        )
        regions = table.uses_PR.shape[1]
        is_layer_K = (code_K % regions > 0) & (code_K % regions < regions - 2)
        found = np.zeros((len(Shares.__slots__), len(values), len(cells)))
        stages = (rank_N // ranks,) * 2 + (rank_N[at_K] // ranks,) * 2 + (stage_J, rank_N[at_K] // ranks)
        figures = resident_CN, offloaded_CN, offloaded_CK, all_K, offloaded_CJ, offloaded_CK * is_layer_K
        for figure, (stages_of, each) in enumerate(zip(stages, figures, strict=True)):
            present_J, begin_J = np.unique(stages_of, return_index=True)
            found[figure][:, present_J] = np.maximum.reduceat(each, begin_J, axis=1) / ranks
        found[:2] += self._piece * (high_S - low_S) * [(shares_J > 1).any() for *_, shares_J in cells] * (found[:2] > 0)
        largest_CS, room_CS = found[2], found[5]
        found[5] = np.where((room_CS == 0) | (ranks > 1), largest_CS, np.minimum(room_CS, largest_CS))
        return found.reshape(-1, len(cells))


def _summed(weights_CJ: FloatArray, place_J: IntArray, count: int) -> FloatArray:
    """Sums of what has the same place, in every row; axes ``C`` and place."""
    rows = len(weights_CJ)
    place_CJ = place_J.reshape(-1) + count * np.arange(rows)[:, None]
    found = np.bincount(place_CJ.reshape(-1), weights=weights_CJ.reshape(-1), minlength=rows * count)
    return found.astype(np.float64, copy=False).reshape(rows, count)
