"""Candidates of a table that keep a part of their state in host memory, evaluated where they may be of use.

Copies add to the steady time and never take from it, and of the boundary time they can hide no more than averaging
gradients and giving out parameters. So whatever a candidate moves, it takes at least its own ``t`` without copies, and
its ``t + d`` is at least ``t`` with what of ``d`` is neither of these two (:attr:`Table.floor_K`). Where a choice that
fits beats both, no ratio is tried (:func:`worth_moving`).

Of all others every combination of ratios is looked at, its memory first. Of those that fit, one is needed only if it
moves no more than it has to. For if a ratio rises, no unit copies less: so neither ``t`` nor ``t + d`` fall, as these
are sums of larger ones of what units take with and without copies. Three things are not compared so:

* Candidates whose update waits for the next forward, which those are that move parameters, gradients or optimizer
  state, with those whose update does not.
* Different ratios of what ZeRO deals out over ranks: with a larger ratio other parameters are moved, and the rank that
  moves most may move less than before.

* Different ratios where parameters are tied and a larger ratio moves a larger parameter of a unit instead of one that
  several units fetch. Of all others a larger ratio moves as many bytes of every unit or more: the largest that fits
  comes first, so that what a smaller ratio moves instead of it is less.

Where a machine's corrections multiply some terms and not others nothing is left out.

Array axes
    K  candidates of a table
    B  those that are tried with offload
    C  combinations of ratios, nothing moved first
    J  candidates with ratios
    O  kinds of state, in the order of ``OFFLOADED``
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from time import perf_counter

import numpy as np

from lightning_mist.cost import CostModel, StageCandidates, StageSlot, profiles_of
from lightning_mist.cost.candidates import OffloadCandidates
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.offload_parts import OffloadParts
from lightning_mist.cost.offload_parts import Ratios as KindRatios
from lightning_mist.cost.phases import Phase
from lightning_mist.plan import ZeroStage
from lightning_mist.tuner.search_space import OFFLOADED, SearchSpace
from lightning_mist.tuner.tables import ROOM, Table

AT_ONCE = 1 << 14
"""Candidates that are evaluated together: enough to be fast, and few enough to take little memory."""

BASES_AT_ONCE = 1 << 10
"""Candidates whose combinations are looked at together: their peaks take some megabytes."""


Situations = tuple[Phase, ...]
"""The situations of a stage."""


class TimeIsUpError(Exception):
    """The search's time was over before all candidates were evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Every combination of what may be moved.

    Attributes:
        sizes: How many ratios each kind of state may have.
        offload_CO: The combinations, the ratios of the last kind running fastest.
    """

    sizes: tuple[int, ...]
    offload_CO: FloatArray

    @property
    def each(self) -> KindRatios:
        """The ratios of each kind of state."""
        values = (tuple(np.unique(column_C).tolist()) for column_C in self.offload_CO.T)
        return KindRatios(**dict(zip(OFFLOADED, values, strict=True)))

    @classmethod
    def of(cls, search: SearchSpace, offered: Sequence[float]) -> "Ratios":
        """Those of a search space.

        Args:
            search: Says which kinds of state may be moved.
            offered: The ratios; 0 is always among them.
        """
        ratios = sorted({0.0, *offered})
        each = [ratios if name in search.offload else [0.0] for name in OFFLOADED]
        return cls(sizes=tuple(map(len, each)), offload_CO=np.array(list(product(*each)), dtype=np.float64))

    def __len__(self) -> int:
        """Number of combinations, nothing moved among them."""
        return len(self.offload_CO)

    @property
    def pairs(self) -> int:
        """Number of pairs of ratios of activations and of gradients."""
        return self.sizes[OFFLOADED.index("gradients")] * self.sizes[OFFLOADED.index("activations")]

    def least(self, fits_BC: BoolArray, ordered: Sequence[str]) -> BoolArray:
        """Of the combinations that fit, those that move no more than they have to.

        Args:
            fits_BC: Which combinations fit.
            ordered: Kinds of state of which a larger ratio is never faster.
        """
        defers_C = self.offload_CO[:, : OFFLOADED.index("activations")].max(axis=1) > 0
        moves_C = self.offload_CO.max(axis=1) > 0
        found_BC = np.zeros_like(fits_BC)
        for family_C in (moves_C & ~defers_C, defers_C):
            found_BC |= self._minimal(fits_BC & family_C, ordered)
        return found_BC

    def _minimal(self, fits_BC: BoolArray, ordered: Sequence[str]) -> BoolArray:
        grid = fits_BC.reshape(-1, *self.sizes)
        axes = [1 + OFFLOADED.index(name) for name in ordered]
        above = grid
        for axis in axes:
            above = np.logical_or.accumulate(above, axis=axis)
        kept = grid.copy()
        for axis in axes:
            # One that is beaten along an axis has something that fits at or below its neighbour there.
            behind = (slice(None),) * axis + (slice(1, None),)
            before = (slice(None),) * axis + (slice(None, -1),)
            kept[behind] &= ~above[before]
        found_BC: BoolArray = kept.reshape(fits_BC.shape)
        return found_BC


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Candidates with ratios that fit.

    Attributes:
        index_J: Which candidate of the table each is.
        offload_JO: What it moves.
        steady_J: Steady seconds.
        boundary_J: Boundary seconds.
        peak_J: Peak bytes.
    """

    index_J: IntArray
    offload_JO: FloatArray
    steady_J: FloatArray
    boundary_J: FloatArray
    peak_J: FloatArray

    @classmethod
    def joined(cls, items: Sequence["Moved"]) -> "Moved":
        """All of several."""
        return cls(**{name: np.concatenate([getattr(item, name) for item in items]) for name in cls.__slots__})


@dataclass(slots=True, kw_only=True)
class Known:
    """What has been evaluated of a table, which all stages with its role share; bases in the order they came in.

    Attributes:
        table: The table.
        row_K: Of every candidate its place among the bases, -1 where it is not one of them.
        parts: What the peaks of bases are made of; nothing before there are any.
        steady_J: Steady seconds, NaN where they are not known.
        boundary_J: Boundary seconds, likewise.
        looked: The situations of the stages that were looked at.
    """

    table: Table
    row_K: IntArray
    parts: OffloadParts | None
    steady_J: FloatArray
    boundary_J: FloatArray
    looked: set[Situations]

    @classmethod
    def nothing(cls, table: Table) -> "Known":
        """Before anything has been evaluated."""
        none = np.empty(0)
        return cls(
            table=table,
            row_K=np.full(len(table), -1, dtype=np.int64),
            parts=None,
            steady_J=none,
            boundary_J=none,
            looked=set(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """Evaluates candidates with offload; keeps what it has evaluated for one number of microbatches.

    Attributes:
        model: The cost model.
        ratios: What may be moved.
        memory_limit: Bytes that a device may use.
        host_limit: Bytes of host memory that it may use.
        deadline: Value of ``perf_counter()`` at which to stop.
        known: What has been evaluated, by table.
    """

    model: CostModel
    ratios: Ratios
    memory_limit: float
    host_limit: float
    deadline: float = np.inf
    known: dict[int, Known] = field(default_factory=dict)

    def of(
        self, table: Table, index_B: IntArray, phases: Situations, ahead: Sequence[tuple[IntArray, Situations]] = ()
    ) -> tuple[Moved, int]:
        """What some candidates of a table may move, as far as it is of use, and how much has been evaluated.

        Args:
            table: The candidates.
            index_B: Which.
            phases: The situations of their stage.
            ahead: The same of stages that will be asked about next, so that it is all evaluated together.

        Raises:
            TimeIsUpError: If there is no time left to evaluate them.
        """
        known, count = self._known(table), len(self.ratios)
        asked = ((index_B, phases), *ahead)
        every_B = np.unique(np.concatenate([index for index, _ in asked]))
        new_B = every_B[known.row_K[every_B] < 0]
        for at_N in self._together(table, new_B, self.ratios.pairs):
            self._learn_bytes(known, new_B[at_N])
        kept = [self._kept(known, *item) for item in asked]
        place_N, first_N = np.unique(np.concatenate([place for _, place, _ in kept]), return_index=True)
        unknown_N = np.isnan(known.steady_J[place_N])
        of_N = np.concatenate([of for of, _, _ in kept])[first_N][unknown_N]
        place_N = place_N[unknown_N]
        for at_N in self._together(table, of_N, 1):
            self._learn_seconds(known, of_N[at_N], place_N[at_N])
        known.looked |= {item for _, item in asked}
        of_J, place_J, peak_J = kept[0]
        steady_J = known.steady_J[place_J]
        fast_J = np.flatnonzero(steady_J <= table.pace * ROOM)
        moved = Moved(
            index_J=of_J[fast_J],
            offload_JO=self.ratios.offload_CO[place_J[fast_J] % count],
            steady_J=steady_J[fast_J],
            boundary_J=known.boundary_J[place_J[fast_J]],
            peak_J=peak_J[fast_J],
        )
        return moved, len(new_B) * (count - 1)

    def has_looked(self, table: Table, phases: Situations) -> bool:
        """Whether stages in these situations have been looked at, ahead of time or not."""
        return phases in self._known(table).looked

    def _kept(self, known: Known, index_B: IntArray, phases: Situations) -> tuple[IntArray, IntArray, FloatArray]:
        """What fits and moves no more than it has to: its base, its place among what is known, its peak."""
        count, parts = len(self.ratios), known.parts
        if parts is None or not len(index_B):
            none = np.empty(0, dtype=np.int64)
            return none, none, np.empty(0)
        fits_BC, peaks = np.empty((len(index_B), count), dtype=bool), []
        rows_B = known.row_K[index_B]
        for begin in range(0, len(index_B), BASES_AT_ONCE):
            some, block = parts.take(rows_B[begin : begin + BASES_AT_ONCE]), slice(begin, begin + BASES_AT_ONCE)
            peak_BC = some.peaks(phases).reshape(-1, count)
            fits_BC[block] = peak_BC <= self.memory_limit
            if np.isfinite(self.host_limit):
                fits_BC[block] &= some.host_bytes(phases).reshape(-1, count) <= self.host_limit
            fits_BC[block] = self._least(known.table, index_B[block], fits_BC[block])
            peaks.append(peak_BC[fits_BC[block]])
        kept_J = np.flatnonzero(fits_BC)
        of_J = kept_J // count
        return index_B[of_J], rows_B[of_J] * count + kept_J % count, np.concatenate(peaks)

    def _known(self, table: Table) -> Known:
        """What is known of a table; nothing is kept of those with other numbers of microbatches."""
        found = self.known.get(id(table))
        if found is None:
            found = Known.nothing(table)
            for key, other in list(self.known.items()):
                if not other.table.slots or other.table.slots[0].num_microbatches != table.slots[0].num_microbatches:
                    del self.known[key]
            self.known[id(table)] = found
        return found

    def _together(self, table: Table, index_N: IntArray, each: int) -> Iterator[IntArray]:
        """Places of candidates to evaluate together: with the same arrangement, and not too many.

        Args:
            table: The candidates.
            index_N: Which.
            each: How many combinations of each.

        Raises:
            TimeIsUpError: If there is no time left to evaluate them.
        """
        rows, shape_N = max(1, AT_ONCE // each), table.shape_K[index_N]
        for shape in np.unique(shape_N):
            of_shape = np.flatnonzero(shape_N == shape)
            for begin in range(0, len(of_shape), rows):
                if perf_counter() > self.deadline:
                    raise TimeIsUpError
                yield of_shape[begin : begin + rows]

    def _learn_bytes(self, known: Known, index_B: IntArray) -> None:
        """Bytes of all combinations of some bases of one arrangement."""
        table, count = known.table, len(self.ratios)
        slot = table.slots[int(table.shape_K[index_B[0]])]
        parts = OffloadParts.of(self.model.memory(slot), slot, table.candidates(index_B), self.ratios.each)
        before = 0 if known.parts is None else len(known.parts)
        known.row_K[index_B] = before + np.arange(len(index_B))
        known.parts = parts if known.parts is None else OffloadParts.joined([known.parts, parts])
        unknown_J = np.full(len(index_B) * count, np.nan)
        known.steady_J = np.concatenate([known.steady_J, unknown_J])
        known.boundary_J = np.concatenate([known.boundary_J, unknown_J])

    def _learn_seconds(self, known: Known, index_N: IntArray, place_N: IntArray) -> None:
        """Seconds of some candidates of one arrangement: which of the table, and where they are among what is known."""
        table = known.table
        offload_NO = self.ratios.offload_CO[place_N % len(self.ratios)]
        slot = table.slots[int(table.shape_K[index_N[0]])]
        seconds = self.model.seconds(slot, _with(table.candidates(index_N), offload_NO))
        known.steady_J[place_N], known.boundary_J[place_N] = seconds.steady_K, seconds.boundary_K

    def _least(self, table: Table, index_B: IntArray, fits_BC: BoolArray) -> BoolArray:
        """Those that fit and move no more than they have to."""
        kinds = (table.shape_K * (max(ZeroStage) + 1) + table.zero_stage_K)[index_B]
        ordered = {
            int(kind): self._ordered(table.slots[int(kind) // (max(ZeroStage) + 1)], int(kind) % (max(ZeroStage) + 1))
            for kind in np.unique(kinds)
        }
        least_BC = np.zeros_like(fits_BC)
        for names in set(ordered.values()):
            at_B = np.isin(kinds, [kind for kind, of_kind in ordered.items() if of_kind == names])
            least_BC[at_B] = self.ratios.least(fits_BC[at_B], names)
        return least_BC

    def _ordered(self, slot: StageSlot, zero_stage: int) -> tuple[str, ...]:
        """Kinds of state of which a larger ratio is never faster."""
        if any(profile.corrections for profile in profiles_of(self.model)):
            return ()
        if self._displaces(slot):
            return ("activations",)
        if slot.shard_degree == 1 or zero_stage == ZeroStage.NONE:
            return OFFLOADED
        return ("activations",) if zero_stage >= ZeroStage.PARAMETERS else ("parameters", "activations")

    def _displaces(self, slot: StageSlot) -> bool:
        """Whether a larger ratio may leave on the device what a smaller one moves and several units use."""
        memory = self.model.memory(slot)
        shared_P = memory.holdings.table.uses_PR[:, -1] > 1
        ratios = [float(ratio) for ratio in np.unique(self.ratios.offload_CO)]
        for trained in (False, True):
            moved = [memory.states.moved(ratio, trained=trained) & shared_P for ratio in ratios]
            if any(bool((low & ~high).any()) for low, high in pairwise(moved)):
                return True
        return False


def _with(candidates: StageCandidates, offload_JO: FloatArray) -> StageCandidates:
    ratios = {f"{name}_K": offload_JO[:, place] for place, name in enumerate(OFFLOADED)}
    return replace(candidates, offload=OffloadCandidates(**ratios))


def worth_moving(table: Table, count: int, kept_J: IntArray) -> IntArray:
    """Which candidates could beat those that fit if they moved something.

    Args:
        table: The candidates.
        count: How many of the first are asked about.
        kept_J: Those that fit and are not dominated.
    """
    index_J = np.concatenate([kept_J, np.arange(count)])
    fits_J = np.arange(len(index_J)) < len(kept_J)
    steady_J, place_J = table.steady_K[index_J], table.place_K[index_J]
    whole_J = np.where(fits_J, steady_J + table.boundary_K[index_J], table.floor_K[index_J])
    # By place, in each by rising steady time, in each of these what fits first.
    order = np.lexsort((~fits_J, steady_J, place_J))
    beats_J = np.where(fits_J, whole_J, np.inf)[order]
    values, rank_J = np.unique(beats_J, return_inverse=True)
    _, group_J = np.unique(place_J[order], return_inverse=True)
    # Ranks fall from place to place, so that the running minimum begins anew in each.
    least_J = np.minimum.accumulate(rank_J.reshape(-1) - group_J.reshape(-1) * (len(values) + 1))
    least_whole_J = values[least_J + group_J.reshape(-1) * (len(values) + 1)] if count else beats_J
    found: IntArray = np.sort(index_J[order][~fits_J[order] & (whole_J[order] < least_whole_J)])
    return found
