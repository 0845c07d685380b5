"""Candidates of one arrangement of devices, evaluated once for all tables that have them.

What a stage takes depends on the rest of its pipeline in three ways only: through what it exchanges with other stages,
which may lie in another part of the cluster; through the number of microbatches, over which what comes once per batch
is spread; and through the batch that its devices hold. All else is that of the layers, the arrangement, and the rows
that each device sees per microbatch. So candidates are evaluated without these three, and tables of all pipelines and
of batches of all sizes are put together of the same pieces.

Array axes
    E  lines: windows times numbers of recomputed layers
    C  candidates of one arrangement: lines times ZeRO stages, as far as they were evaluated
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np

from lightning_mist.cost import CostModel, StageCandidates, StageSlot
from lightning_mist.cost.inputs import ArrayRecord, BoolArray, FloatArray, IntArray, covered, prefix_sums
from lightning_mist.cost.memory import PeakParts
from lightning_mist.cost.mixed_model import MixedCostModel
from lightning_mist.cost.time import Unsharding
from lightning_mist.model.spec import ModelSpec
from lightning_mist.tuner.space import Space
from lightning_mist.tuner.windows import Windows

MOST = 1 << 18
"""Candidates that are kept; with some 25 numbers each they take 50 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Every run of layers that a stage may have, with every number of layers that it may recompute.

    Attributes:
        window_E: Which run.
        start_E: First layer.
        layers_E: Layers.
        checkpointed_E: Recomputed layers.
        low_E: First region.
        high_E: One past the last region.
        zeros: ZeRO stages that each of them may have on several devices.
    """

    window_E: IntArray
    start_E: IntArray
    layers_E: IntArray
    checkpointed_E: IntArray
    low_E: IntArray
    high_E: IntArray
    zeros: tuple[int, ...]

    @classmethod
    def of(cls, spec: ModelSpec, space: Space, windows: Windows) -> "Lines":
        """Those of a search space.

        Args:
            spec: The network.
            space: The search space.
            windows: The runs of layers.
        """
        window_E, checkpointed_E = space.recomputed(windows.layers_W)
        start_E, layers_E = windows.start_W[window_E], windows.layers_W[window_E]
        low_E, high_E = covered(spec, start_E, start_E + layers_E)
        return cls(
            window_E=window_E,
            start_E=start_E,
            layers_E=layers_E,
            checkpointed_E=checkpointed_E,
            low_E=low_E,
            high_E=high_E,
            zeros=tuple(sorted(set(space.search.zero_stages))),
        )

    def zeros_of(self, slot: StageSlot) -> tuple[int, ...]:
        """ZeRO stages on the devices of a slot: on one device there is nothing to shard."""
        return self.zeros if slot.data_parallel_degree > 1 else (0,)

    def least(self, model: CostModel, slot: StageSlot) -> FloatArray:
        """Seconds that each computes at least per microbatch, recomputation included."""
        seconds = model.region_seconds(slot.whole_rows, slot.tensor_parallel_degree, slot.sequence_parallel)
        forward, both = prefix_sums(seconds.forward_R), prefix_sums(seconds.forward_R + seconds.backward_R)
        first_E = self.start_E + 1
        again_E = forward[first_E + self.checkpointed_E] - forward[first_E]
        result_E: FloatArray = both[self.high_E] - both[self.low_E] + again_E
        return result_E


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures(ArrayRecord):
    """What evaluated candidates are, and cost whatever the rest of the pipeline is.

    Attributes:
        line_C: Which line each candidate is.
        candidates: The candidates.
        alone_C: Steady seconds without exchange with other stages, and without unsharding.
        shards: What unsharding adds.
        own_C: Boundary seconds without those for tied parameters.
        rest_C: What of these neither averages gradients nor gives out parameters.
        parts: What their peaks are made of, without the batch.
    """

    AXIS: ClassVar[str] = "C"

    line_C: IntArray
    candidates: StageCandidates
    alone_C: FloatArray
    shards: Unsharding
    own_C: FloatArray
    rest_C: FloatArray
    parts: PeakParts

    @classmethod
    def none(cls) -> "Figures":
        """Those of no candidates."""
        none_C, number_C = np.empty(0), np.empty(0, dtype=np.int64)
        candidates = StageCandidates(start_K=number_C, end_K=number_C, checkpointed_K=number_C, zero_stage_K=number_C)
        return cls(
            line_C=number_C,
            candidates=candidates,
            alone_C=none_C,
            shards=Unsharding.none(0),
            own_C=none_C,
            rest_C=none_C,
            parts=PeakParts.none(),
        )

    @classmethod
    def of(cls, model: CostModel, slot: StageSlot, candidates: StageCandidates, line_C: IntArray) -> "Figures":
        """Those of some candidates of a slot."""
        seconds, shards = model.parted_seconds(slot, candidates)
        memory, rest_C = model.memory(slot), seconds.update_K + seconds.once_K
        parts = PeakParts.of(memory.needs(slot, candidates))
        return cls(
            line_C=line_C,
            candidates=candidates,
            alone_C=seconds.alone_K,
            shards=shards,
            own_C=seconds.reduce_K + seconds.update_copies_K + seconds.gather_K + rest_C,
            rest_C=rest_C,
            parts=parts.beside(-memory.batch_bytes(slot)),
        )


@dataclass(slots=True, kw_only=True)
class Piece:
    """What is known of the candidates of an arrangement; it grows.

    Attributes:
        least_E: Seconds that each line computes at least.
        done_E: Which lines were evaluated.
        figures: Their candidates.
    """

    least_E: FloatArray
    done_E: BoolArray
    figures: Figures

    def add(self, figures: Figures) -> None:
        """Remember what some lines cost."""
        self.figures = Figures.joined([self.figures, figures])
        self.done_E[figures.line_C] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLines:
    """Lines of a piece that are to be evaluated.

    Attributes:
        piece: The piece.
        slot: A slot of its arrangement.
        lines: All lines.
        new_E: Which to evaluate.
    """

    piece: Piece
    slot: StageSlot
    lines: Lines
    new_E: BoolArray

    def candidates(self) -> tuple[StageCandidates, IntArray]:
        """Their candidates, and which line each is."""
        at_J, zeros, lines = np.flatnonzero(self.new_E), self.lines.zeros_of(self.slot), self.lines
        line_C = np.tile(at_J, len(zeros))
        candidates = StageCandidates(
            start_K=lines.start_E[line_C],
            end_K=lines.start_E[line_C] + lines.layers_E[line_C],
            checkpointed_K=lines.checkpointed_E[line_C],
            zero_stage_K=np.repeat(np.array(zeros), len(at_J)),
        )
        return candidates, line_C


def learn(model: CostModel, wanted: Sequence[NewLines]) -> int:
    """Evaluate lines of pieces of one arrangement, whose runs of layers may differ, together.

    Args:
        model: The cost model.
        wanted: Those lines; of each piece only once.

    Returns:
        How many candidates they are.
    """
    asked = [item.candidates() for item in wanted]
    candidates = StageCandidates.joined([found for found, _ in asked])
    if not len(candidates):
        return 0
    line_C = np.concatenate([line_C for _, line_C in asked])
    figures, begin = Figures.of(model, wanted[0].slot, candidates, line_C), 0
    for item, (found, _) in zip(wanted, asked, strict=True):
        end = begin + len(found)
        if end > begin:
            item.piece.add(figures if len(found) == len(candidates) else figures.take(np.arange(begin, end)))
        begin = end
    return len(candidates)


@dataclass(slots=True, kw_only=True)
class Pieces:
    """Pieces by all that they depend on; those asked for longest ago are forgotten.

    Attributes:
        of: The pieces.
        count: Their candidates.
    """

    of: dict[Hashable, Piece] = field(default_factory=dict)
    count: int = 0

    def piece(self, key: Hashable, model: CostModel, slot: StageSlot, lines: Lines) -> Piece:
        """A piece, of which nothing may be known.

        Args:
            key: All that it depends on.
            model: The cost model.
            slot: A slot of the arrangement.
            lines: All lines.
        """
        piece = self.of.pop(key, None)
        if piece is None:
            least_E = lines.least(model, slot)
            piece = Piece(least_E=least_E, done_E=np.zeros(len(least_E), dtype=bool), figures=Figures.none())
        self.of[key] = piece
        return piece

    def size(self, key: Hashable) -> int:
        """Candidates of a piece that have been evaluated."""
        piece = self.of.get(key)
        return 0 if piece is None else len(piece.figures)

    def forget(self) -> None:
        """Forget what was asked for longest ago, if there is too much."""
        self.count = sum(len(piece.figures) for piece in self.of.values())
        while self.count > MOST and len(self.of) > 1:
            self.count -= len(self.of.pop(next(iter(self.of))).figures)


PieceKey: TypeAlias = tuple[Hashable, ...]
"""What tells pieces from others: the runs of layers, then all else."""


def piece_key(model: CostModel, slot: StageSlot, space: Space, windows: Hashable) -> PieceKey:
    """All that the candidates of a slot depend on, beside the cost model; the runs of layers come first.

    Args:
        model: The cost model.
        slot: The slot.
        space: The search space.
        windows: What tells the runs of layers from others.
    """
    search = space.search
    # Of unlike devices the slowest counts, which is another with every number of microbatches.
    is_one = slot.num_microbatches if isinstance(model, MixedCostModel) else int(slot.num_microbatches == 1)
    return (
        windows,
        (slot.rows, slot.data_parallel_degree, slot.tensor_parallel_degree, slot.sequence_parallel),
        (slot.num_stages == 1, is_one, slot.world_size, slot.schedule, slot.part),
        (search.zero_stages, search.checkpointed_shares, space.checkpointing),
    )
