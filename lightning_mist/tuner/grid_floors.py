"""Seconds that plans with equal stages take at least, before anything but their layers and devices is known.

Array axes
    S  stages
    M  cost models
    R  regions
    X  kinds of seconds: of forwards, of forwards and backwards, of adding gradients to those that exist
"""

from collections.abc import Hashable, Sequence

import numpy as np

from lightning_mist.cost import CostModel, MixedCostModel, StageSlot, profiles_of
from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.cost.time import addition_seconds
from lightning_mist.tuner.families import Grid
from lightning_mist.tuner.space import Shape, Space


class GridFloors:
    """Floors of the plans of grids; keeps what several grids share.

    Args:
        model: The cost model.
        space: The network's batch and layers, and numbers of chunks.
        kept: Where floors are kept; by default for this object alone.
    """

    def __init__(self, model: CostModel, space: Space, kept: dict[tuple[Grid, int, int], float] | None = None) -> None:
        self.model, self.space, self._kept = model, space, {} if kept is None else kept
        self._sums: dict[Hashable, FloatArray] = {}

    def of(self, grid: Grid, checkpointed: int = 0) -> float:
        """Seconds on the clock that no plan of a grid goes below, in chunks or not: those of computing.

        Args:
            grid: The grid.
            checkpointed: How many layers every stage recomputes at least.
        """
        # Others may look at other numbers of chunks.
        key = grid, checkpointed, max(self.space.search.chunks)
        if key not in self._kept:
            self._kept[key] = self._find(grid, checkpointed)
        return self._kept[key]

    def _find(self, grid: Grid, checkpointed: int) -> float:
        shape, count = grid.shape, self.space.num_layers // grid.num_stages
        rows = self.space.rows(grid.num_microbatches, shape.data)
        models, model_S = self._models(grid)
        sums_MXR = np.stack([self._sums_of(model, rows, shape) for model in models])
        stage_S: IntArray = np.arange(grid.num_stages)
        first_S: IntArray = 1 + stage_S * count
        end_S: IntArray = first_S + count
        # Head and tail are regions of their own.
        low_S, high_S = np.where(stage_S == 0, 0, first_S), end_S + (stage_S == grid.num_stages - 1)

        def between(kind: int, from_S: IntArray, to_S: IntArray) -> FloatArray:
            found_S: FloatArray = sums_MXR[model_S, kind, to_S] - sums_MXR[model_S, kind, from_S]
            return found_S

        again_S = between(0, first_S, first_S + checkpointed)
        layers_S, busy_S = between(1, first_S, end_S) + again_S, between(1, low_S, high_S) + again_S
        before_S = (np.cumsum(layers_S) - layers_S) / max(self.space.search.chunks)
        # The first microbatch finds no gradients to add to.
        return float((before_S + grid.num_microbatches * busy_S - between(2, low_S, high_S)).max())

    def _models(self, grid: Grid) -> tuple[Sequence[CostModel], IntArray]:
        """Cost models, and which of them is that of every stage's devices."""
        if isinstance(self.model, MixedCostModel) and grid.parts:
            return self.model.parts, np.array(grid.parts)
        return [self.model], np.zeros(grid.num_stages, dtype=np.int64)

    def _sums_of(self, model: CostModel, rows: int, shape: Shape) -> FloatArray:
        """Seconds summed over the regions before each; axes ``X`` and ``R``."""
        key = id(model), rows, shape.tensor, shape.sequence
        if key not in self._sums:
            found = model.region_seconds(rows, shape.tensor, shape.sequence)
            slot = StageSlot(
                stage_index=0,
                num_stages=1,
                num_microbatches=1,
                data_parallel_degree=1,
                rows=rows,
                batch_rows=rows,
                tensor_parallel_degree=shape.tensor,
                sequence_parallel=shape.sequence,
            )
            trained_R = model.memory(slot).holdings.table.trained_R
            added_R = np.maximum.reduce([addition_seconds(model.spec, item, trained_R) for item in profiles_of(model)])
            each_XR = np.stack([found.forward_R, found.forward_R + found.backward_R, added_R])
            self._sums[key] = np.pad(np.cumsum(each_XR, axis=1), ((0, 0), (1, 0)))
        return self._sums[key]
