"""Candidates of all slots with one role and number of microbatches: their seconds and what their memory is made of.

Of a pipeline whose step is to take less than ``G T`` seconds no stage takes more than ``T`` per microbatch. So a table
made for a pace ``T`` leaves out, before anything is evaluated,

* what computes for longer than ``T``, recomputation included, and
* what leaves the other devices too many layers: a run of layers on ``n`` of ``N`` devices leaves ``N - n``, which
  compute all other regions in no less than these take at their least number of device-seconds, divided by ``N - n``.

The steady time of a stage has no negative term, so that both are safe whatever else it does.

Array axes
    K  candidates, by rising steady time
    C  candidates of one arrangement of devices
    W  windows
    R  regions
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost import CostModel, StageCandidates, StageSlot
from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray, covered
from lightning_mist.cost.memory import PeakParts
from lightning_mist.tuner.choices import ANYWHERE, SlotChoices
from lightning_mist.tuner.pieces import Figures, Lines, NewLines, PieceKey, Pieces, learn
from lightning_mist.tuner.space import OFFLOADED, Space
from lightning_mist.tuner.windows import Windows

ROOM = 1 + 1e-9
"""What is left out for being too slow is so by more than rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Candidates by rising steady time.

    Attributes:
        pace: Seconds per microbatch up to which nothing is missing.
        windows: The runs of layers.
        slots: A slot for every arrangement of devices.
        window_K: Which run each candidate has.
        shape_K: Which arrangement.
        checkpointed_K: Recomputed layers.
        zero_stage_K: 0 to 3.
        steady_K: Steady seconds.
        boundary_K: Boundary seconds.
        floor_K: Steady seconds with what of the boundary seconds neither averages gradients nor gives out parameters.
        again_K: What every stage behind adds to the steady seconds.
        parts: What their peaks are made of.
        keys: What tells the candidates of every slot from those of other tables; none if that is not known.
        among_NL: Of which numbers of devices and layers nothing is missing; of all if ``None``.
    """

    pace: float
    windows: Windows
    slots: tuple[StageSlot, ...]
    window_K: IntArray
    shape_K: IntArray
    checkpointed_K: IntArray
    zero_stage_K: IntArray
    steady_K: FloatArray
    boundary_K: FloatArray
    floor_K: FloatArray
    again_K: FloatArray
    parts: PeakParts
    keys: tuple[PieceKey, ...] = ()
    among_NL: BoolArray | None = None

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self.steady_K)

    @property
    def devices_K(self) -> IntArray:
        """Number of devices of each candidate."""
        return _devices(self.slots, self.shape_K)

    def candidates(self, index_J: IntArray) -> StageCandidates:
        """Some candidates as the cost model knows them."""
        window_J = self.window_K[index_J]
        start_J = self.windows.start_W[window_J]
        return StageCandidates(
            start_K=start_J,
            end_K=start_J + self.windows.layers_W[window_J],
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
            index_J: Which.
            peak_J: Their peak bytes.
            seconds: Their steady and boundary seconds, if they are not those of the table.
            offload_JO: What they keep in host memory; by default nothing.
        """
        steady_J, boundary_J = (self.steady_K[index_J], self.boundary_K[index_J]) if seconds is None else seconds
        ratios_JO = np.zeros((len(index_J), len(OFFLOADED))) if offload_JO is None else offload_JO
        lengths = self.windows.count_W
        flat = np.concatenate([*self.windows.starts, np.empty(0, dtype=np.int64)]).astype(np.int64)
        first_W = np.cumsum(lengths) - lengths
        count_J = lengths[self.window_K[index_J]]
        of_K = np.repeat(np.arange(len(index_J)), count_J)
        index_K = index_J[of_K]
        place_K = np.arange(len(index_K)) - np.repeat(np.cumsum(count_J) - count_J, count_J)
        window_K, shape_K = self.window_K[index_K], self.shape_K[index_K]
        tensor_S, sequence_S = (
            np.array([getattr(slot, name) for slot in self.slots], dtype=np.int64)
            for name in ("tensor_parallel_degree", "sequence_parallel")
        )
        return SlotChoices(
            start_K=flat[first_W[window_K] + place_K],
            layers_K=self.windows.layers_W[window_K],
            devices_K=self.devices_K[index_K],
            part_K=np.zeros(len(index_K), dtype=np.int64),
            steady_K=steady_J[of_K],
            boundary_K=boundary_J[of_K],
            peak_K=peak_J[of_K],
            checkpointed_K=self.checkpointed_K[index_K],
            zero_stage_K=self.zero_stage_K[index_K],
            tensor_K=tensor_S[shape_K],
            sequence_K=sequence_S[shape_K],
            offload_KO=ratios_JO[of_K],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A table that is to be made.

    Attributes:
        slots: A slot of the role for every arrangement of devices.
        windows: The runs of layers of the role.
        keys: What tells the pieces of every slot from others; none if nothing is kept.
        among_NL: Which numbers of devices and layers to look at; all if ``None``.
    """

    slots: Sequence[StageSlot]
    windows: Windows
    keys: Sequence[PieceKey] = ()
    among_NL: BoolArray | None = None

    def inside(self, slot: StageSlot) -> BoolArray:
        """Which of the runs to look at on the devices of a slot."""
        if self.among_NL is None:
            return np.ones(len(self.windows), dtype=bool)
        devices = slot.data_parallel_degree * slot.tensor_parallel_degree
        found_W: BoolArray = self.among_NL[devices, self.windows.layers_W]
        return found_W


def make_tables(
    model: CostModel,
    space: Space,
    wanted: Sequence[Wanted],
    pace: float,
    *,
    alone: bool = True,
    pieces: Pieces | None = None,
) -> tuple[list[Table], int]:
    """Evaluate everything that can be part of a pipeline of a pace, of several roles.

    What arrangements of several roles cost is asked about together.

    Args:
        model: The cost model.
        space: The search space.
        wanted: What to look at.
        pace: Seconds per microbatch, possibly infinite.
        alone: Whether all devices of the pipeline are of the search space.
        pieces: What has been evaluated, and is added to; by default nothing has.

    Returns:
        The tables, and how many candidates were evaluated for them.
    """
    known = Pieces() if pieces is None else pieces
    every: list[list[tuple[int, NewLines, BoolArray]]] = []
    alike: dict[Hashable, list[NewLines]] = {}
    for place, item in enumerate(wanted):
        count = len(item.slots)
        outside_WS = _outside(model, space, item.slots, item.windows) if alone else np.zeros((len(item.windows), count))
        lines, looked = Lines.of(model.spec, space, item.windows), []
        names = item.keys or [(place, index) for index in range(count)]
        for index, (slot, name) in enumerate(zip(item.slots, names, strict=True)):
            inside_W = (outside_WS[:, index] <= pace * ROOM) & item.inside(slot)
            if not inside_W.any():
                continue
            piece = known.piece(name, model, slot, lines)
            wanted_E = inside_W[lines.window_E] & (piece.least_E <= pace * ROOM)
            new = NewLines(piece=piece, slot=slot, lines=lines, new_E=wanted_E & ~piece.done_E)
            looked.append((index, new, wanted_E))
            if new.new_E.any():
                alike.setdefault(name[1:] if item.keys else name, []).append(new)
        every.append(looked)
    evaluated = sum(learn(model, group) for group in alike.values())
    tables = [_table(model, item, looked, pace) for item, looked in zip(wanted, every, strict=True)]
    known.forget()
    return tables, evaluated


def _table(model: CostModel, wanted: Wanted, looked: Sequence[tuple[int, NewLines, BoolArray]], pace: float) -> Table:
    """The table of arrangements whose lines have been evaluated.

    Args:
        model: The cost model.
        wanted: What the table is of.
        looked: Arrangements, their pieces, and which lines of each are wanted.
        pace: Seconds per microbatch.
    """
    places, begin = [np.empty(0, dtype=np.int64)], 0
    for _, item, wanted_E in looked:
        places.append(begin + np.flatnonzero(wanted_E[item.piece.figures.line_C]))
        begin += len(item.piece.figures)
    sizes = [len(at_C) for at_C in places[1:]]
    figures = Figures.joined([Figures.none(), *(item.piece.figures for _, item, _ in looked)]).take(
        np.concatenate(places)
    )
    shape_C = np.repeat(np.array([index for index, _, _ in looked], dtype=np.int64), sizes)
    shared_XC = _shared(model, [item.slot for _, item, _ in looked], figures.candidates, sizes)
    window_C = looked[0][1].lines.window_E[figures.line_C] if looked else shape_C
    return _sorted(model, wanted, figures, (window_C, shape_C), shared_XC, pace)


def _shared(
    model: CostModel, slots: Sequence[StageSlot], candidates: StageCandidates, sizes: Sequence[int]
) -> FloatArray:
    """What candidates of arrangements exchange with other stages: per microbatch, and once per batch."""
    shared_XC, begin = np.zeros((2, len(candidates))), 0
    for slot, size in zip(slots, sizes, strict=True):
        if size:
            some = candidates.take(slice(begin, begin + size))
            shared_XC[0, begin : begin + size], shared_XC[1, begin : begin + size] = model.shared_seconds(slot, some)
        begin += size
    return shared_XC


def _sorted(
    model: CostModel,
    wanted: Wanted,
    figures: Figures,
    numbers: tuple[IntArray, IntArray],
    shared_XC: FloatArray,
    pace: float,
) -> Table:
    """The candidates of all arrangements that are fast enough, by rising steady time.

    Args:
        model: The cost model.
        wanted: What the table is of.
        figures: What candidates cost, whatever the rest of the pipeline.
        numbers: Which run of layers and which arrangement each has.
        shared_XC: What it exchanges with other stages, per microbatch and once per batch.
        pace: Seconds per microbatch.
    """
    slots, (transfer_C, tied_C) = tuple(wanted.slots), shared_XC
    # Of a table's slots what they unshard is counted alike: the same microbatches, and as many stages behind.
    unshard_C = figures.shards.seconds(slots[0]) if slots else transfer_C
    again_C = figures.shards.again(slots[0]) if slots else transfer_C
    steady_C = figures.alone_C + transfer_C + unshard_C
    boundary_C, floor_C = figures.own_C + tied_C, steady_C + tied_C + figures.rest_C
    fast_K = np.flatnonzero(steady_C <= pace * ROOM)
    fast_K = fast_K[np.argsort(steady_C[fast_K], kind="stable")]
    batch_S = np.array([model.memory(slot).batch_bytes(slot) for slot in slots], dtype=np.float64)
    window_K, shape_K = (numbers_C[fast_K] for numbers_C in numbers)
    steady_K, boundary_K, candidates = steady_C[fast_K], boundary_C[fast_K], figures.candidates.take(fast_K)
    return Table(
        pace=pace,
        windows=wanted.windows,
        slots=slots,
        window_K=window_K,
        shape_K=shape_K,
        checkpointed_K=candidates.checkpointed_K,
        zero_stage_K=candidates.zero_stage_K,
        steady_K=steady_K,
        boundary_K=boundary_K,
        floor_K=floor_C[fast_K],
        again_K=again_C[fast_K],
        parts=figures.parts.take(fast_K).beside(batch_S[shape_K]),
        keys=tuple(wanted.keys),
        among_NL=wanted.among_NL,
    )


def _devices(slots: Sequence[StageSlot], shape_K: IntArray) -> IntArray:
    """Number of devices of each candidate."""
    devices_S = [slot.data_parallel_degree * slot.tensor_parallel_degree for slot in slots]
    found_K: IntArray = np.array(devices_S, dtype=np.int64)[shape_K]
    return found_K


def _outside(model: CostModel, space: Space, slots: Sequence[StageSlot], windows: Windows) -> FloatArray:
    """Seconds that the other devices take at least for all other regions; axes ``W`` and slot."""
    if not slots:
        return np.zeros((len(windows), 0))
    num_microbatches = slots[0].num_microbatches
    least_R: FloatArray | float = np.inf
    for shape in space.shapes(num_microbatches):
        rows = space.rows(num_microbatches, shape.data)
        seconds = model.region_seconds(rows, shape.tensor, shape.sequence)
        least_R = np.minimum(least_R, (seconds.forward_R + seconds.backward_R) * shape.devices)
    prefix = np.concatenate([[0.0], np.cumsum(least_R)])
    low_W, high_W = covered(model.spec, windows.start_W, windows.start_W + windows.layers_W)
    rest_W1 = (prefix[-1] - (prefix[high_W] - prefix[low_W]))[:, None]
    devices_S = np.array([slot.data_parallel_degree * slot.tensor_parallel_degree for slot in slots])
    others_S = space.world_size - devices_S
    # Where no device is left there is nothing outside either.
    found_WS: FloatArray = np.where(others_S > 0, rest_W1 / np.maximum(others_S, 1), 0.0)
    return found_WS


def within(choices: SlotChoices, stage_index: int, num_stages: int, num_layers: int, most_devices: int) -> BoolArray:
    """Which choices leave every other stage a layer and a device.

    Args:
        choices: Of a role.
        stage_index: Which stage they are for.
        num_stages: Of how many.
        num_layers: Layers of the network.
        most_devices: Devices of the largest stage that leaves the others one each.
    """
    behind = num_stages - stage_index - 1
    start_K, layers_K = choices.start_K, choices.layers_K
    inside_K = (start_K == ANYWHERE) | ((start_K >= stage_index) & (start_K <= num_layers - behind - layers_K))
    # An open start has room somewhere if every other stage can have a layer.
    inside_K &= layers_K <= max(num_layers - num_stages + 1, 0 if num_layers else 1)
    result_K: BoolArray = inside_K & (choices.devices_K <= most_devices)
    return result_K
