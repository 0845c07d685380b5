"""Candidates of all slots with one role and number of microbatches: their seconds and what their memory is made of.

Of a pipeline whose step is to take less than ``G T`` seconds no stage takes more than ``T`` per microbatch. So a table
made for a bottleneck time ``T`` leaves out, before anything is evaluated, what computes for longer than ``T``,
recomputation included. The steady time of a stage has no negative term, so that this is safe whatever else it does.

What a stage takes depends on the rest of its pipeline only through what it exchanges with other stages and, if
parameters are sharded, through how many are behind it. So the candidates of one arrangement of devices are evaluated
without these, for all roles at once.

Stages with the same role differ in their moments, in how many stages are behind them, and in what they can be at
all. They are looked at together (:class:`StagePoints`): whatever is compared within a stage is compared within all of
them at once.

Array axes
    K  candidates, by rising steady time, or as stages may have them, stage after stage; or layer ranges, by themselves
       and with numbers of recomputed layers
    N  numbers of devices
    L  numbers of layers
    R  regions
    S  slots of stages
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_mist.cost import CostModel, StageCandidates, StageSlot
from lightning_mist.cost.batched_stages import StageCosts, evaluate
from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray, covered, prefix_sums
from lightning_mist.cost.memory import Moments, PeakParts
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import OFFLOAD_KINDS, ZeroStage
from lightning_mist.tuner.candidates.choices import SlotChoices
from lightning_mist.tuner.space import LayerRanges, Space

ROOM = 1 + 1e-9
"""What is left out for being too slow is so by more than rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Candidates by rising steady time.

    Attributes:
        bottleneck: Bottleneck time up to which no candidate is missing, in seconds per microbatch.
        among_NL: Of which numbers of devices and layers none is; of all if ``None``.
        slots: A slot for every arrangement of devices.
        range_K: Which layer range each candidate has.
        steady_K: Steady seconds.
        boundary_K: Boundary seconds.
        floor_K: Steady seconds with what of the boundary seconds copies cannot hide.
        again_K: What every stage behind adds to the steady seconds.
        exchanged_times_K: What of steady and of boundary seconds depends on where the neighbours lie.
        parts: What their peaks are made of.
    """

    bottleneck: float
    among_NL: BoolArray | None
    ranges: LayerRanges
    slots: tuple[StageSlot, ...]
    range_K: IntArray
    shape_K: IntArray
    checkpointed_K: IntArray
    zero_stage_K: IntArray
    steady_K: FloatArray
    boundary_K: FloatArray
    floor_K: FloatArray
    again_K: FloatArray
    exchanged_times_K: FloatArray
    parts: PeakParts

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self.steady_K)

    def codes(self, index_J: IntArray) -> IntArray:
        """Numbers for candidates on one arrangement of devices, the same in every table of their role."""
        most = 1 + int(self.ranges.layers_K.max(initial=0))
        line_J = self.range_K[index_J] * most + self.checkpointed_K[index_J]
        codes_J: IntArray = line_J * len(ZeroStage) + self.zero_stage_K[index_J]
        return codes_J

    @property
    def devices_K(self) -> IntArray:
        """Number of devices of each candidate."""
        devices_S = np.array([slot.devices for slot in self.slots], dtype=np.int64)
        found_K: IntArray = devices_S[self.shape_K]
        return found_K

    def candidates(self, index_J: IntArray) -> StageCandidates:
        """Some candidates as the cost model knows them."""
        range_J = self.range_K[index_J]
        start_J = self.ranges.start_K[range_J]
        return StageCandidates(
            start_K=start_J,
            end_K=start_J + self.ranges.layers_K[range_J],
            checkpointed_K=self.checkpointed_K[index_J],
            zero_stage_K=self.zero_stage_K[index_J],
        )

    def choices(
        self,
        index_J: IntArray,
        peak_J: FloatArray,
        seconds: tuple[FloatArray, FloatArray] | None = None,
        offload_JO: FloatArray | None = None,
    ) -> SlotChoices:
        """Some candidates as choices, each at every place where its run of layers occurs.

        Args:
            peak_J: Their peak bytes.
            seconds: Their steady and boundary seconds, if they are not those of the table.
            offload_JO: What they keep in host memory; by default nothing.
        """
        steady_J, boundary_J = (self.steady_K[index_J], self.boundary_K[index_J]) if seconds is None else seconds
        ratios_JO = np.zeros((len(index_J), len(OFFLOAD_KINDS))) if offload_JO is None else offload_JO
        lengths = self.ranges.count_K
        flat = np.concatenate([*self.ranges.starts, np.empty(0, dtype=np.int64)]).astype(np.int64)
        first_K = np.cumsum(lengths) - lengths
        count_J = lengths[self.range_K[index_J]]
        of_K = np.repeat(np.arange(len(index_J)), count_J)
        index_K = index_J[of_K]
        place_K = np.arange(len(index_K)) - np.repeat(np.cumsum(count_J) - count_J, count_J)
        range_K, shape_K = self.range_K[index_K], self.shape_K[index_K]
        tensor_S, sequence_S = (
            np.array([getattr(slot, name) for slot in self.slots], dtype=np.int64)
            for name in ("tensor_parallel_degree", "sequence_parallel")
        )
        return SlotChoices(
            start_K=flat[first_K[range_K] + place_K],
            layers_K=self.ranges.layers_K[range_K],
            devices_K=self.devices_K[index_K],
            part_K=np.zeros(len(index_K), dtype=np.int64),
            seams_K=np.zeros(len(index_K), dtype=np.int64),
            steady_K=steady_J[of_K],
            boundary_K=boundary_J[of_K],
            peak_K=peak_J[of_K],
            checkpointed_K=self.checkpointed_K[index_K],
            zero_stage_K=self.zero_stage_K[index_K],
            shard_K=np.array([slot.shard_group or 0 for slot in self.slots], dtype=np.int64)[shape_K],
            tensor_K=tensor_S[shape_K],
            sequence_K=sequence_S[shape_K],
            method_K=np.array([slot.method.code for slot in self.slots], dtype=np.int64)[shape_K],
            offload_KO=ratios_JO[of_K],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """Every layer range that a stage may have, with every number of layers that it may recompute.

    Attributes:
        zeros: ZeRO stages that each of them may have on several devices.
    """

    range_K: IntArray
    start_K: IntArray
    layers_K: IntArray
    checkpointed_K: IntArray
    low_K: IntArray
    high_K: IntArray
    zeros: tuple[int, ...]

    @classmethod
    def of(cls, spec: ModelSpec, space: Space, ranges: LayerRanges) -> "_Lines":
        range_K, checkpointed_K = space.recomputed(ranges.layers_K)
        start_K, layers_K = ranges.start_K[range_K], ranges.layers_K[range_K]
        low_K, high_K = covered(spec, start_K, start_K + layers_K)
        return cls(
            range_K=range_K,
            start_K=start_K,
            layers_K=layers_K,
            checkpointed_K=checkpointed_K,
            low_K=low_K,
            high_K=high_K,
            zeros=tuple(sorted(set(space.search.zero_stages))),
        )

    def least(self, model: CostModel, slot: StageSlot) -> FloatArray:
        """Seconds that each computes at least per microbatch, recomputation included."""
        first_K, least_K = self.start_K + 1, np.zeros(len(self.start_K))
        # On unlike devices it takes as long as on any of them.
        for own in model.models(slot):
            seconds = own.region_seconds(*slot.computed)
            again, both = prefix_sums(seconds.recompute_R), prefix_sums(seconds.forward_R + seconds.backward_R)
            recomputed_K = again[first_K + self.checkpointed_K] - again[first_K]
            least_K = np.maximum(least_K, both[self.high_K] - both[self.low_K] + recomputed_K)
        return least_K

    def candidates(self, slot: StageSlot, at_J: IntArray) -> tuple[StageCandidates, IntArray]:
        """The candidates of some lines on the devices of a slot, and the layer range of each."""
        # On one device there is nothing to shard, and what shards nothing has no groups.
        zeros = self.zeros if slot.data_parallel_degree > 1 else (0,)
        if slot.shard_group is not None:
            zeros = tuple(level for level in zeros if level)
        line_K = np.tile(at_J, len(zeros))
        candidates = StageCandidates(
            start_K=self.start_K[line_K],
            end_K=self.start_K[line_K] + self.layers_K[line_K],
            checkpointed_K=self.checkpointed_K[line_K],
            zero_stage_K=np.repeat(np.array(zeros), len(at_J)),
        )
        return candidates, self.range_K[line_K]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrangement:
    """What is to be evaluated of a table on one arrangement of devices: its number, and what has which layer range."""

    table: int
    shape: int
    slot: StageSlot
    candidates: StageCandidates
    range_K: IntArray


Request = tuple[Sequence[StageSlot], LayerRanges, BoolArray | None]
"""A table that is to be made: a slot of the role for every arrangement of devices, the layer ranges of the role, and of
which numbers of devices and layers it is (all if ``None``)."""


def make_tables(
    model: CostModel, space: Space, requests: Sequence[Request], bottleneck: float
) -> tuple[list[Table], int]:
    """Evaluate everything that can be part of a pipeline with a bottleneck time, of several roles.

    Args:
        requests: The tables; all slots have the same number of microbatches.
        bottleneck: Bottleneck time in seconds per microbatch, possibly infinite.

    Returns:
        The tables, and how many candidates were evaluated for them.
    """
    asked: list[_Arrangement] = []
    for number, (slots, ranges, among_NL) in enumerate(requests):
        lines = _Lines.of(model.spec, space, ranges)
        for index, slot in enumerate(slots):
            fast_K = lines.least(model, slot) <= bottleneck * ROOM
            if among_NL is not None:
                fast_K &= among_NL[slot.devices, lines.layers_K]
            if slot.method.checkpointing != space.checkpointing_kinds[0]:
                # Without recomputed layers it is that of the first kind.
                fast_K &= lines.checkpointed_K > 0
            at_J = np.flatnonzero(fast_K)
            if len(at_J):
                found, range_K = lines.candidates(slot, at_J)
                asked.append(_Arrangement(table=number, shape=index, slot=slot, candidates=found, range_K=range_K))
    costs = evaluate(model, [(item.slot, item.candidates) for item in asked]) if asked else None
    tables, end = list[Table](), 0
    for number, request in enumerate(requests):
        items = [item for item in asked if item.table == number]
        begin, end = end, end + sum(len(item.candidates) for item in items)
        of_table = costs.take(slice(begin, end)) if costs and items else None
        tables.append(_table(request, items, of_table, bottleneck))
    return tables, end


def _table(request: Request, items: Sequence[_Arrangement], costs: StageCosts | None, bottleneck: float) -> Table:
    """The candidates of all arrangements that are fast enough, by rising steady time."""
    slots, ranges, among_NL = request
    if costs is None:
        return _empty(request, bottleneck)
    steady_K, boundary_K = costs.own_times_K + costs.exchanged_times_K
    fast_K = np.flatnonzero(steady_K <= bottleneck * ROOM)
    fast_K = fast_K[np.argsort(steady_K[fast_K], kind="stable")]
    shape_K = np.repeat([item.shape for item in items], [len(item.candidates) for item in items])[fast_K]
    some = StageCandidates.joined([item.candidates for item in items]).take(fast_K)
    costs = costs.take(fast_K)
    return Table(
        bottleneck=bottleneck,
        among_NL=among_NL,
        ranges=ranges,
        slots=tuple(slots),
        range_K=np.concatenate([item.range_K for item in items])[fast_K],
        shape_K=shape_K,
        checkpointed_K=some.checkpointed_K,
        zero_stage_K=some.zero_stage_K,
        steady_K=steady_K[fast_K],
        boundary_K=boundary_K[fast_K],
        floor_K=steady_K[fast_K] + costs.unhidden_K,
        again_K=costs.again_K,
        exchanged_times_K=costs.exchanged_times_K,
        parts=costs.parts,
    )


def _empty(request: Request, bottleneck: float) -> Table:
    numbers = ("range_K", "shape_K", "checkpointed_K", "zero_stage_K")
    seconds = ("steady_K", "boundary_K", "floor_K", "again_K")
    columns: dict[str, Any] = {name: np.empty(0, dtype=np.int64) for name in numbers} | {
        name: np.empty(0) for name in seconds
    }
    slots, ranges, among_NL = request
    return Table(
        bottleneck=bottleneck,
        among_NL=among_NL,
        ranges=ranges,
        slots=tuple(slots),
        exchanged_times_K=np.empty((2, 0)),
        parts=PeakParts.none(),
        **columns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One of the stages that share a table.

    Attributes:
        behind: Stages behind it, as far as microbatches are in flight between.
        among_NL: Of which numbers of devices and layers it may be; of all if ``None``.
    """

    moments: Moments
    behind: int = 0
    among_NL: BoolArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePoints:
    """The candidates that stages which share a table may be.

    Attributes:
        stage_K: Which stage each is of, ascending.
        index_K: Which candidate each is, ascending within a stage.
        group_K: A number for the stage, the run of layers and the devices of each, ascending with the stage.
        steady_K: Steady seconds, with what the stages behind cost.
        whole_K: Steady and boundary seconds.
        floor_K: What of these copies cannot hide.
    """

    table: Table
    stages: tuple[Stage, ...]
    stage_K: IntArray
    index_K: IntArray
    group_K: IntArray
    steady_K: FloatArray
    whole_K: FloatArray
    floor_K: FloatArray
    later_K: FloatArray

    def __len__(self) -> int:
        """Number of candidates of all stages."""
        return len(self.stage_K)

    @classmethod
    def of(cls, table: Table, stages: Sequence[Stage], slowest: float) -> "StagePoints":
        """Those that are fast enough.

        Args:
            slowest: The most steady seconds, without what the stages behind cost.
        """
        count = int(np.searchsorted(table.steady_K, slowest, side="right"))
        devices_K, range_K = table.devices_K[:count], table.range_K[:count]
        layers_K = table.ranges.layers_K[range_K]
        inside = np.ones((len(stages), count), dtype=bool)
        for row, stage in enumerate(stages):
            if stage.among_NL is not None:
                inside[row] = stage.among_NL[devices_K, layers_K]
        stage_K, index_K = np.nonzero(inside)
        # By how much groups differ from one run of layers to the next, and from one stage to the next.
        size = int(table.devices_K.max(initial=0)) + 1
        places = len(table.ranges) * size
        place_K = range_K * size + devices_K
        later_K = np.array([stage.behind for stage in stages])[stage_K] * table.again_K[index_K]
        steady_K = table.steady_K[index_K] + later_K
        return cls(
            table=table,
            stages=tuple(stages),
            stage_K=stage_K,
            index_K=index_K,
            group_K=stage_K * places + place_K[index_K],
            steady_K=steady_K,
            whole_K=steady_K + table.boundary_K[index_K],
            floor_K=table.floor_K[index_K] + later_K,
            later_K=later_K,
        )

    def ends(self, at_J: IntArray) -> list[int]:
        """Where the candidates of each stage end among some of all, which come stage after stage."""
        found: list[int] = np.searchsorted(self.stage_K[at_J], np.arange(1, len(self.stages) + 1)).tolist()
        return found

    def peaks(self) -> FloatArray:
        """Peak bytes."""
        parts, begin = self.table.parts.take(self.index_K), 0
        found = [np.empty(0)]
        for stage, end in zip(self.stages, self.ends(np.arange(len(self))), strict=True):
            if end > begin:
                found.append(parts.take(slice(begin, end)).peaks(stage.moments))
            begin = end
        return np.concatenate(found)


def either(*every_NL: BoolArray | None) -> BoolArray | None:
    """Numbers of devices and layers of which one or another is of interest; ``None`` stands for all."""
    some = [among_NL for among_NL in every_NL if among_NL is not None]
    if len(some) < len(every_NL):
        return None
    found_NL: BoolArray = np.any(some, axis=0)
    return found_NL


def covers(known_NL: BoolArray | None, asked_NL: BoolArray | None) -> bool:
    """Whether what is known of some numbers of devices and layers is enough for what is asked; ``None`` for all."""
    return known_NL is None or (asked_NL is not None and not (asked_NL & ~known_NL).any())
