"""The choices of stages, with and without part of their state in host memory.

Copies add to the steady time and never take from it. Of the boundary time they can hide giving out parameters, which
is then beside a forward and its updates; averaging gradients takes no less beside a backward that takes longer, both
together, but where a machine's corrections multiply one of them. So whatever a candidate offloads, it takes at least
its own ``t`` resident, and its ``t + d`` is at least ``t`` with the rest of ``d`` (:attr:`Table.floor_K`). Where a
choice that fits resident dominates both, no ratio is tried. Of all others every combination of ratios is looked at, its
bytes first; the seconds of those that fit and offload no more than they have to are worked out, and what is not
dominated is a choice.

If a ratio rises, no unit copies less: so neither ``t`` nor ``t + d`` fall, as these are sums of larger ones of what
units take with and without copies. So of the combinations that fit (:func:`feasible`) one is needed only if none with
smaller ratios fits, and none of any but that offloads nothing of a kind. Three things are not compared so:

* Candidates whose update waits for the next forward, which those are that offload parameters, gradients or optimizer
  state, with those whose update does not.
* Different ratios of what ZeRO deals out over ranks as a whole: with a larger ratio other parameters are offloaded, and
  the rank that offloads most may offload less than before.
* Different ratios where parameters are tied and a larger ratio offloads a larger parameter of a unit instead of one
  that several units fetch. Of all others a larger ratio offloads as many bytes of every unit or more: the largest that
  fits comes first, so that what a smaller ratio offloads instead of it is less.

Where a machine's corrections multiply some terms and not others nothing is left out. Elsewhere what copies for too long
is, before its seconds are worked out.

Array axes
    K  candidates of a table, or of a table as stages may have them
    S  those of them that are tried with offload
    C  ratios, or combinations of ratios, nothing offloaded first
    J  candidates with ratios; of choices those too that fit resident and are not dominated
    O  kinds of state, in the order of ``OFFLOAD_KINDS``
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from time import thread_time
from typing import ClassVar, TypeAlias

import numpy as np

from lightning_mist.cost import CostModel, StageCandidates, StageCostModel, StageSlot, profiles_of
from lightning_mist.cost.batched_stages import own_seconds
from lightning_mist.cost.inputs import (
    ArrayRecord,
    BoolArray,
    FloatArray,
    IntArray,
    OffloadCandidates,
    Placed,
    StageRegions,
    distinct,
)
from lightning_mist.cost.memory import OffloadParts, Ratios
from lightning_mist.cost.time import (
    COMPUTE,
    NETWORK,
    TO_DEVICE,
    TO_HOST,
    PassKind,
    copy_rates,
    interference_of,
    shard_nodes,
    weights_of_passes,
)
from lightning_mist.plan import OFFLOAD_KINDS, UPDATED_KINDS, SearchSpace, ZeroStage
from lightning_mist.schedule import ActionKind
from lightning_mist.tuner.candidates.candidate_tables import ROOM, Stage, StagePoints, Table
from lightning_mist.tuner.candidates.choices import SlotChoices, non_dominated, not_beaten

_Place: TypeAlias = tuple[slice | int, ...]
"""Combinations with one ratio of one kind of state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioGrid:
    """Every combination of what may be offloaded.

    Attributes:
        offload_CO: The combinations, the ratios of the last kind running fastest.
        counts: How many ratios each kind of state has.
        each: The ratios of each; of what layers keep those of all kinds together.
        values: All ratios that occur, ascending.
    """

    offload_CO: FloatArray
    counts: tuple[int, ...]
    each: Ratios
    values: tuple[float, ...]

    @classmethod
    def of(cls, search: SearchSpace, offered: Sequence[float]) -> "RatioGrid":
        """The combinations of a search space.

        Where checkpoints are not named the ratio of activations holds for them too.

        Args:
            search: Says which kinds of state may be offloaded.
            offered: The ratios; 0 is always among them.
        """
        ratios = tuple(sorted({0.0, *map(float, offered)}))
        each = {kind: ratios if kind in search.offloaded else (0.0,) for kind in OFFLOAD_KINDS}
        if "checkpoints" not in search.offloaded:
            each["checkpoints"] = (np.nan,)
        offload_CO, counts = np.array(list(product(*each.values())), dtype=np.float64), tuple(map(len, each.values()))
        *_, activations_C, checkpoints_C = offload_CO.T
        np.copyto(checkpoints_C, activations_C, where=np.isnan(checkpoints_C))
        kept = offload_CO[: counts[-2] * counts[-1], len(UPDATED_KINDS) :]
        return cls(
            offload_CO=offload_CO,
            counts=counts,
            each=Ratios(**{kind: each[kind] for kind in UPDATED_KINDS}, kept=tuple(map(tuple, kept.tolist()))),
            values=ratios if search.offloaded else (0.0,),
        )

    def __len__(self) -> int:
        """Number of combinations, nothing offloaded among them."""
        return len(self.offload_CO)

    def minimal(self, fits_SC: BoolArray, ordered: Sequence[str]) -> BoolArray:
        """Of the combinations that fit, those that offload something and no more than they have to.

        Args:
            ordered: Kinds of state of which a larger ratio is never faster.
        """
        defers_C = self.offload_CO[:, : len(UPDATED_KINDS)].max(axis=1) > 0
        offloads_C = self.offload_CO.max(axis=1) > 0
        # Candidates last: what is done to a combination is done to those of all candidates, which lie together.
        fits_CS = np.ascontiguousarray(fits_SC.T)
        found_CS = np.zeros_like(fits_CS)
        for family_C in (offloads_C & ~defers_C, defers_C):
            found_CS |= self._minimal(fits_CS & family_C[:, None], ordered)
        return np.ascontiguousarray(found_CS.T)

    def _minimal(self, fits_CS: BoolArray, ordered: Sequence[str]) -> BoolArray:
        above, kept = (fits_CS.reshape(*self.counts, -1).copy() for _ in range(2))
        steps = [self._steps(place, kind in ordered) for place, kind in enumerate(OFFLOAD_KINDS)]
        for before, behind in (step for some in steps for step in some):
            above[behind] |= above[before]
        for before, behind in (step for some in steps for step in some):
            # One that is dominated along an axis has something that fits at or below its neighbour there.
            kept[behind] &= ~above[before]
        found_CS: BoolArray = kept.reshape(fits_CS.shape)
        return found_CS

    def _steps(self, place: int, is_ordered: bool) -> list[tuple[_Place, _Place]]:
        """Pairs of places along the ratios of a kind of state, of which the second takes at least as long."""
        front: _Place = (slice(None),) * place
        at: list[_Place] = [(*front, ratio) for ratio in range(self.counts[place])]
        # Nothing takes less than offloading nothing.
        return list(pairwise(at)) if is_ordered else [(at[0], behind) for behind in at[1:]]


PAIRS_AT_ONCE = 1 << 14
"""Candidates with pairs of ratios whose bytes are worked out together: fast, and some megabytes."""

PEAKS_AT_ONCE = 1 << 19
"""Peaks of candidates with ratios that are looked at together, of 8 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasible(ArrayRecord):
    """Candidates with ratios that fit: which of the stages' they are of, which combination they have, peak bytes."""

    AXIS: ClassVar[str] = "J"

    point_J: IntArray
    combination_J: IntArray
    peak_J: FloatArray

    @classmethod
    def none(cls) -> "Feasible":
        """No candidates."""
        none_J = np.empty(0, dtype=np.int64)
        return cls(point_J=none_J, combination_J=none_J, peak_J=np.empty(0))


def ordered(model: CostModel, slot: StageSlot, zero_stage: int, grid: RatioGrid) -> tuple[str, ...]:
    """Kinds of state of which a larger ratio is never faster."""
    kept = tuple(kind for kind in OFFLOAD_KINDS if kind not in UPDATED_KINDS)
    if any(profile.corrections for profile in profiles_of(model)):
        return ()
    states = model.memory(slot).states
    if states.displaces(grid.values):
        return kept
    if slot.shard_degree == 1 or zero_stage == ZeroStage.NONE or states.are_even:
        return tuple(OFFLOAD_KINDS)
    return kept if zero_stage >= ZeroStage.PARAMETERS else ("parameters", *kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Floors:
    """Steady seconds that candidates take at least: passes by dual weights of channels instead of the fluid's seconds.

    Attributes:
        alone_by_weights_S: Those of candidates that copy nothing by these weights, and so on of what ratios copy.
    """

    alone_by_weights_S: FloatArray
    parameters_by_weights_SC: FloatArray
    gradients_by_weights_SC: FloatArray
    activations_by_weights_SC: FloatArray

    @classmethod
    def of(
        cls,
        model: CostModel,
        slot: StageSlot,
        candidates: StageCandidates,
        parts: OffloadParts,
        ratios: tuple[float, ...],
        steady_S: FloatArray,
    ) -> "_Floors | None":
        """Those of the candidates of one slot; none of unlike devices, or if corrections multiply some terms only.

        Args:
            ratios: Those of parameters.
            steady_S: Steady seconds with nothing offloaded.
        """
        if not isinstance(model, StageCostModel) or model.profile.corrections:
            return None
        machine, regions = (model.profile, model.cluster), StageRegions.of(model.spec, candidates)
        rates, across = copy_rates(*machine), shard_nodes(model.cluster, slot) > 1
        beside = model.beside(slot, model.region_seconds(*slot.computed))
        passes = beside.passes(candidates.zero_stage_K, regions)
        # What the rank that has most offloads counts as spread over units as all ranks' is.
        unit_CR = np.stack([model.memory(slot).states.unit_bytes(ratio, "parameters") for ratio in ratios])
        part_SC = parts.host_parameters_SC / np.maximum(regions.sums(unit_CR).T, 1.0) / rates.to_device
        alone_by_weights_S, parameters_by_weights_SC = steady_S, np.zeros((1, 1, 1))
        weights = weights_of_passes(interference_of(*machine), across)
        for kind, own_weights in zip((ActionKind.FORWARD, ActionKind.BACKWARD), weights, strict=True):
            compute_S, network_S, beyond_S = passes.sums(PassKind(kind))
            weighed_S = own_weights[:, [COMPUTE, NETWORK]] @ np.stack([compute_S, network_S])
            plain_S = compute_S + beyond_S
            alone_by_weights_S = alone_by_weights_S + np.where(
                own_weights.any(axis=1, keepdims=True), weighed_S - plain_S, 0.0
            )
            fetched_SC = part_SC * PassKind(kind, copies=True).beside("parameters_in", regions).sums(unit_CR).T
            parameters_by_weights_SC = parameters_by_weights_SC + np.multiply.outer(
                own_weights[:, TO_DEVICE], fetched_SC
            )
        weights_in, weights_out = weights[1] / rates.to_device, weights[0] / rates.to_host
        gradients_SC = parts.host_gradients_SC * (slot.num_microbatches > 1)
        activations_SCC = parts.host_activations_K.reshape(*gradients_SC.shape, -1)
        return cls(
            alone_by_weights_S=alone_by_weights_S,
            parameters_by_weights_SC=parameters_by_weights_SC,
            gradients_by_weights_SC=np.multiply.outer(weights_in[:, TO_DEVICE], gradients_SC),
            activations_by_weights_SC=np.multiply.outer(
                weights_in[:, TO_DEVICE] + weights_out[:, TO_HOST], activations_SCC[:, 0]
            ),
        )

    def seconds(self, row_J: IntArray, ratio_OJ: Sequence[IntArray]) -> FloatArray:
        """Those of some candidates with some of the ratios of each kind of state."""
        parameters_J, gradients_J, _, activations_J = ratio_OJ
        weighed_J = self.alone_by_weights_S[:, row_J] + self.parameters_by_weights_SC[:, row_J, parameters_J]
        weighed_J += (
            self.gradients_by_weights_SC[:, row_J, gradients_J]
            + self.activations_by_weights_SC[:, row_J, activations_J]
        )
        least_J: FloatArray = weighed_J.max(axis=0)
        return least_J


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """Candidates of the stages of one table on one arrangement of devices, among those of others.

    Attributes:
        number: Which table.
        distinct_J: The distinct candidates.
        row_S: Where each is among those of all tables.
    """

    number: int
    points: StagePoints
    slot: StageSlot
    point_S: IntArray
    distinct_J: IntArray
    row_S: IntArray


def feasible(
    model: CostModel,
    grid: RatioGrid,
    asked: Sequence[tuple[StagePoints, IntArray]],
    limits: tuple[float, float],
    slowest: float = np.inf,
) -> Iterator[tuple[int, Feasible]]:
    """What some candidates of the stages of tables may offload, block by block, each with the number of its table.

    Args:
        asked: The stages of each table, and which of their candidates are looked at.
        limits: Bytes that a device may use, and of host memory.
        slowest: The most steady seconds, without what the stages behind cost: what takes longer may be left out.
    """
    at_once = max(1, PAIRS_AT_ONCE // (len(grid.each.kept) * len(grid.each.gradients)))
    for some in _alike(asked):
        tables = [item.points.table for item in some]
        every = StageCandidates.joined(
            [table.candidates(item.distinct_J) for table, item in zip(tables, some, strict=True)]
        )
        steady_J = np.concatenate([table.steady_K[item.distinct_J] for table, item in zip(tables, some, strict=True)])
        for begin in range(0, len(every), at_once):
            here, slot = slice(begin, begin + at_once), some[0].slot
            candidates = every.take(here)
            parts = OffloadParts.of(model.memory(slot), slot, candidates, grid.each)
            floors = _Floors.of(model, slot, candidates, parts, grid.each.parameters, steady_J[here])
            for item in some:
                row_S = item.row_S - begin
                inside_S = np.flatnonzero((row_S >= 0) & (row_S < at_once))
                for block in _fast_enough(model, grid, item, (inside_S, row_S), (parts, floors), limits, slowest):
                    yield item.number, block


def _alike(asked: Sequence[tuple[StagePoints, IntArray]]) -> Iterator[list[_Tried]]:
    """Candidates by arrangement of devices: what peaks are made of does not depend on what is in front and behind."""
    found: dict[Hashable, list[_Tried]] = {}
    for number, (points, point_S) in enumerate(asked):
        shape_S = points.table.shape_K[points.index_K[point_S]]
        for shape in distinct(shape_S).tolist():
            slot, some_S = points.table.slots[shape], point_S[shape_S == shape]
            devices = slot.data_parallel_degree, slot.shard_group, *slot.computed
            before = found.setdefault((slot.num_stages == 1, slot.part, slot.rows, devices), [])
            # Stages share candidates, of which what peaks are made of does not depend on the stage either.
            distinct_J, row_S = np.unique(points.index_K[some_S], return_inverse=True)
            row_S += sum(len(item.distinct_J) for item in before)
            before.append(
                _Tried(number=number, points=points, slot=slot, point_S=some_S, distinct_J=distinct_J, row_S=row_S)
            )
    yield from found.values()


def _fast_enough(
    model: CostModel,
    grid: RatioGrid,
    item: _Tried,
    at: tuple[IntArray, IntArray],
    parts: tuple[OffloadParts, _Floors | None],
    limits: tuple[float, float],
    slowest: float,
) -> Iterator[Feasible]:
    """What candidates of one table may offload.

    Args:
        at: Which of them, and where each is among ``parts``.
        parts: What peaks of candidates are made of, and the least seconds that they take.
    """
    points, (inside_S, row_S), most = item.points, at, max(1, PEAKS_AT_ONCE // len(grid))
    for first in range(0, len(inside_S), most):
        at_S = inside_S[first : first + most]
        some_S, rows_S = item.point_S[at_S], row_S[at_S]
        peak_SC, fits_SC = _fitting(points, some_S, parts[0], rows_S, limits)
        fits_SC &= may_offload(item.slot, grid.offload_CO) & _differ(points, some_S, grid.offload_CO)
        fits_SC = _minimal(model, grid, item.slot, fits_SC, points.table.zero_stage_K[points.index_K[some_S]])
        of_J, combination_J = np.nonzero(fits_SC)
        if parts[1] is not None:
            ratio_OJ = np.unravel_index(combination_J, grid.each.shape)
            fast_J = parts[1].seconds(rows_S[of_J], ratio_OJ) <= slowest * ROOM
            of_J, combination_J = of_J[fast_J], combination_J[fast_J]
        yield Feasible(point_J=some_S[of_J], combination_J=combination_J, peak_J=peak_SC[of_J, combination_J])


def may_offload(slot: StageSlot, offload_CO: FloatArray) -> BoolArray:
    """Which combinations a stage may have: what recomputation by operator keeps stays on the device."""
    stays_C: BoolArray = (offload_CO[:, len(UPDATED_KINDS) :] == 0).all(axis=1)
    allowed_C: BoolArray = stays_C | (slot.method.checkpointing == "full")
    return allowed_C


def _differ(points: StagePoints, point_S: IntArray, offload_CO: FloatArray) -> BoolArray:
    """Which combinations of candidates are unlike others: one ratio will do where layers are recomputed all or none."""
    some, (*_, activations_C, checkpoints_C) = points.table.candidates(points.index_K[point_S]), offload_CO.T
    has_own_S = (some.checkpointed_K < some.end_K - some.start_K) | (not activations_C.any())
    differ_SC: BoolArray = (has_own_S & (some.checkpointed_K > 0))[:, None] | (activations_C == checkpoints_C)
    return differ_SC


def _fitting(
    points: StagePoints, point_S: IntArray, parts: OffloadParts, row_S: IntArray, limits: tuple[float, float]
) -> tuple[FloatArray, BoolArray]:
    """Peaks of candidates with every combination of ratios, and whether they fit."""
    peaks, fits, begin = [], [], 0
    for stage, end in zip(points.stages, points.ends(point_S), strict=True):
        if end > begin:
            some = parts.take(row_S[begin:end])
            peak_SC = some.peaks(stage.moments).reshape(end - begin, -1)
            fits_SC = peak_SC <= limits[0]
            if np.isfinite(limits[1]):
                fits_SC &= some.host_bytes(stage.moments).reshape(end - begin, -1) <= limits[1]
            peaks.append(peak_SC)
            fits.append(fits_SC)
        begin = end
    return np.concatenate(peaks), np.concatenate(fits)


def _minimal(model: CostModel, grid: RatioGrid, slot: StageSlot, fits_SC: BoolArray, zero_S: IntArray) -> BoolArray:
    """Of the combinations of candidates at one place that fit, those that offload no more than they have to."""
    found_SC = np.zeros_like(fits_SC)
    for zero_stage in distinct(zero_S).tolist():
        at_S = np.flatnonzero(zero_S == zero_stage)
        found_SC[at_S] = grid.minimal(fits_SC[at_S], ordered(model, slot, zero_stage, grid))
    return found_SC


TIE = 1 + 1e-13
"""Offloaded candidates count as slower by this, which no tolerance sees: of equally fast ones the resident one wins."""

SECONDS_AT_ONCE = 1 << 13
"""Candidates with ratios whose seconds are worked out together: each takes 5 KB meanwhile."""


class TimeIsUpError(Exception):
    """The search's time was over before all candidates were evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSearch:
    """Finds the choices of stages that share tables.

    Attributes:
        memory_limit: Bytes that a device may use.
        host_limit: Bytes of host memory that it may use.
        deadline: Value of ``thread_time()`` at which to stop.
    """

    model: CostModel
    grid: RatioGrid
    memory_limit: float
    host_limit: float
    deadline: float = np.inf

    def frontiers(
        self, asked: Sequence[tuple[Table, Sequence[Stage]]], slowest: float
    ) -> tuple[list[list[SlotChoices]], int]:
        """What each stage of every table may be that is not dominated, and how many candidates were tried offloaded.

        Args:
            asked: The tables, and the stages that share each.
            slowest: The most steady seconds, without what the stages behind cost.

        Raises:
            TimeIsUpError: If there is no time left to evaluate them.
        """
        every = [ResidentPoints.of(table, stages, slowest, self.memory_limit) for table, stages in asked]
        none_S = np.empty(0, dtype=np.int64)
        tried = [(item.points, item.worth_offloading() if len(self.grid) > 1 else none_S) for item in every]
        blocks = [[Feasible.none()] for _ in every]
        for number, block in feasible(self.model, self.grid, tried, (self.memory_limit, self.host_limit), slowest):
            self._check_time()
            blocks[number].append(block)
        found = [item.take(np.lexsort((item.combination_J, item.point_J))) for item in map(Feasible.joined, blocks)]
        count = sum(len(distinct(points.index_K[point_S])) for points, point_S in tried) * (len(self.grid) - 1)
        seconds = self._seconds([(item.points, some) for item, some in zip(every, found, strict=True)])
        return [self._choices(*item, slowest) for item in zip(every, found, seconds, strict=True)], count

    def _check_time(self) -> None:
        if thread_time() > self.deadline:
            raise TimeIsUpError

    def _seconds(self, found: Sequence[tuple[StagePoints, Feasible]]) -> list[FloatArray]:
        """Steady and boundary seconds of candidates with ratios of every table, without what stages behind add."""
        alike: dict[Hashable, list[tuple[int, IntArray]]] = {}
        for number, (points, item) in enumerate(found):
            table, shape_J = points.table, points.table.shape_K[points.index_K[item.point_J]]
            for shape in distinct(shape_J).tolist():
                slot = replace(table.slots[shape], stage_index=0, num_stages=min(2, table.slots[shape].num_stages))
                # Wherever the neighbours of a stage are, it takes as long but for what is exchanged with them.
                key = id(table.ranges), replace(slot, parts=())
                alike.setdefault(key, []).append((number, np.flatnonzero(shape_J == shape)))
        placed: list[Placed] = []
        of_each: list[IntArray] = []
        for places in alike.values():
            more, of_J = self._distinct([(found[number][0], found[number][1].take(at_J)) for number, at_J in places])
            placed += more
            of_each.append(of_J)
        own_times = self._own_seconds(placed)
        seconds, first = [np.empty((2, len(item))) for _, item in found], 0
        for of_J, places in zip(of_each, alike.values(), strict=True):
            own_times_J, begin = own_times[:, first + of_J], 0
            for number, at_J in places:
                points, item = found[number]
                exchanged_times_J = points.table.exchanged_times_K[:, points.index_K[item.point_J[at_J]]]
                seconds[number][:, at_J] = own_times_J[:, begin : begin + len(at_J)] + exchanged_times_J
                seconds[number][0, at_J] *= TIE
                begin += len(at_J)
            first += int(of_J.max(initial=-1)) + 1
        return seconds

    def _distinct(self, some: Sequence[tuple[StagePoints, Feasible]]) -> tuple[list[Placed], IntArray]:
        """The distinct ones of candidates with ratios on one arrangement of devices, and which of them each is."""
        index = [points.index_K[item.point_J] for points, item in some]
        codes = [
            points.table.codes(index_J) * len(self.grid) + item.combination_J
            for index_J, (points, item) in zip(index, some, strict=True)
        ]
        _, firsts, of_J = np.unique(np.concatenate(codes), return_index=True, return_inverse=True)
        every = [points.table.candidates(index_J) for index_J, (points, _) in zip(index, some, strict=True)]
        offload_JO = self.grid.offload_CO[np.concatenate([item.combination_J for _, item in some])]
        table, candidates = some[0][0].table, StageCandidates.joined(every).take(firsts)
        candidates = replace(candidates, offload=OffloadCandidates.of_kinds(offload_JO[firsts]))
        slot, blocks = table.slots[int(table.shape_K[index[0][0]])], range(0, len(firsts), SECONDS_AT_ONCE)
        return [(slot, candidates.take(slice(begin, begin + SECONDS_AT_ONCE))) for begin in blocks], of_J

    def _own_seconds(self, placed: Sequence[Placed]) -> FloatArray:
        """Steady and boundary seconds but for exchange, of some together as long as these are not too many."""
        blocks, count, found = list[list[Placed]](), 0, [np.empty((2, 0))]
        for item in placed:
            if not blocks or count + len(item[1]) > SECONDS_AT_ONCE:
                blocks.append([])
                count = 0
            blocks[-1].append(item)
            count += len(item[1])
        for block in blocks:
            self._check_time()
            found.append(own_seconds(self.model, block).own_times_K)
        return np.concatenate(found, axis=1)

    def _choices(
        self,
        resident: "ResidentPoints",
        offloaded: Feasible,
        seconds: FloatArray,
        slowest: float,
    ) -> list[SlotChoices]:
        """What each stage of a table may be that is not dominated, resident or offloaded."""
        points, frontier_J = resident.points, resident.frontier_J
        fast_J = np.flatnonzero(seconds[0] <= slowest * ROOM)
        more_J = offloaded.point_J[fast_J]
        point_J = np.concatenate([frontier_J, more_J])
        steady_J = np.concatenate([points.steady_K[frontier_J], seconds[0][fast_J] + points.later_K[more_J]])
        boundary_J = np.concatenate([points.table.boundary_K[points.index_K[frontier_J]], seconds[1][fast_J]])
        peak_J = np.concatenate([resident.peak_K[frontier_J], offloaded.peak_J[fast_J]])
        offload_JO = np.zeros((len(point_J), len(OFFLOAD_KINDS)))
        offload_JO[len(frontier_J) :] = self.grid.offload_CO[offloaded.combination_J[fast_J]]
        best_J = non_dominated(points.group_K[point_J], steady_J, steady_J + boundary_J)
        return _by_stage(
            points, point_J[best_J], peak_J[best_J], (steady_J[best_J], boundary_J[best_J]), offload_JO[best_J]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPoints:
    """What the stages that share a table may be without offload.

    Attributes:
        peak_K: Peak bytes.
        frontier_J: Those that fit and are not dominated, stage after stage.
    """

    points: StagePoints
    peak_K: FloatArray
    frontier_J: IntArray

    @classmethod
    def of(cls, table: Table, stages: Sequence[Stage], slowest: float, limit: float) -> "ResidentPoints":
        """What stages may be in at most so many seconds and bytes."""
        points = StagePoints.of(table, stages, slowest)
        peak_K = points.peaks()
        fits_J = np.flatnonzero(peak_K <= limit)
        best_J = non_dominated(points.group_K[fits_J], points.steady_K[fits_J], points.whole_K[fits_J])
        return cls(points=points, peak_K=peak_K, frontier_J=fits_J[best_J])

    def worth_offloading(self) -> IntArray:
        """Which candidates could beat those that fit resident if they offloaded something."""
        points, frontier_J = self.points, self.frontier_J
        others = points.group_K[frontier_J], points.steady_K[frontier_J], points.whole_K[frontier_J]
        point_S: IntArray = np.flatnonzero(not_beaten(points.group_K, points.steady_K, points.floor_K, others))
        return point_S


def _by_stage(
    points: StagePoints,
    point_J: IntArray,
    peak_J: FloatArray,
    seconds: tuple[FloatArray, FloatArray],
    offload_JO: FloatArray,
) -> list[SlotChoices]:
    """Candidates, which come stage after stage, as choices of each stage."""
    table = points.table
    index_J = points.index_K[point_J]
    choices = table.choices(index_J, peak_J, seconds, offload_JO)
    # A candidate is as many choices as there are places where its layer range occurs.
    ends_J = np.cumsum(np.concatenate([[0], table.ranges.count_K[table.range_K[index_J]]]))
    bounds = ends_J[[0, *points.ends(point_J)]].tolist()
    return [choices.take(slice(begin, end)) for begin, end in pairwise(bounds)]
