"""Working sets of stages: what one microbatch needs inside, from the tables of a network.

Array axes
    K  candidate stages
    A  where in a stage: the head, the layer behind it (of several), other layers, the tail
    X  recomputed layers, and others
    E  ends of a run
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.cost.memory.working_set_tables import RangeTable, StageRuns, WorkingSets


@dataclass(frozen=True, slots=True)
class _Range:
    """Layers of stages up to some layer, recomputed ones before the others.

    Attributes:
        end_K: The layer behind the last of them.
        place_EXK: Where in tables the two values are of which the larger one is that of a run.
        below_XK: What is below its first layer.
        recomputed_K: What the recomputed ones among them keep.
    """

    end_K: IntArray
    place_EXK: IntArray
    below_XK: FloatArray
    recomputed_K: FloatArray


class StageWorking:
    """Working sets of candidate stages; keeps what several of them need.

    Attributes:
        saved_K: What one microbatch leaves behind between its forward and its backward.
    """

    def __init__(self, sets: WorkingSets, runs: StageRuns) -> None:
        self.sets, self._runs = sets, runs
        self._has_head, self._has_tail = bool(runs.is_first_K.any()), bool(runs.is_last_K.any())
        self._is_head_K, self._is_tail_K = runs.is_first_K, runs.is_last_K
        self._is_recomputed_K = runs.middle_K == runs.end_K
        self._variant_K = 0 if runs.variant_K is None else runs.variant_K * sets.width
        self._start_K, self._middle_K, self._end_K = (
            self._placed(at_K) for at_K in (runs.start_K, runs.middle_K, runs.end_K)
        )
        self._checkpointed_K = sets.checkpointed_B[self._start_K]
        self._whole = self._range(runs.end_K)
        costs = sets.costs
        self._head_K: FloatArray | float = costs.shared_saved_bytes
        if self._has_head:
            # A layer that is recomputed keeps what it was called with. Stages behind the first run the head too, as
            # far as the batch alone determines it.
            saved_K = np.where(
                runs.middle_K > runs.start_K, runs.edge(costs.checkpointed_saved_R, 0), runs.edge(costs.saved_R, 0)
            )
            self._head_K = np.where(runs.is_first_K, saved_K, costs.shared_saved_bytes)
        plain_K = sets.saved_B[self._end_K] - sets.saved_B[self._middle_K]
        self._before_tail_K = self._head_K + self._whole.recomputed_K + plain_K
        self.saved_K = self._before_tail_K
        if self._has_tail:
            self.saved_K = self._before_tail_K + runs.edge(costs.saved_R, -1) * runs.is_last_K

    def _placed(self, at_K: IntArray) -> IntArray:
        """Where positions are in the tables of each stage's variant."""
        return at_K if self._runs.variant_K is None else at_K + self._variant_K

    def _range(self, end_K: IntArray) -> _Range:
        """The layers of both runs that lie before ``end``."""
        runs, sets = self._runs, self.sets
        middle_K = np.minimum(runs.middle_K, end_K)
        placed_K = self._placed(middle_K)
        place_EXK, below_XK = np.empty((2, 2, len(end_K)), dtype=np.int64), np.empty((2, len(end_K)))
        place_EXK[:, 0] = sets.places(self._start_K, middle_K - runs.start_K, recomputed=True)
        place_EXK[:, 1] = sets.places(placed_K, end_K - middle_K, recomputed=False)
        below_XK[0], below_XK[1] = self._checkpointed_K, sets.saved_B[placed_K]
        return _Range(end_K, place_EXK, below_XK, sets.checkpointed_B[placed_K] - self._checkpointed_K)

    def _over(self, table: RangeTable, layers: _Range) -> FloatArray:
        """The maximum over layers."""
        found_EXK = table.flat.take(layers.place_EXK)
        recomputed_K, plain_K = np.maximum(found_EXK[0], found_EXK[1]) - layers.below_XK
        result_K: FloatArray = np.maximum(recomputed_K, plain_K + layers.recomputed_K) + self._head_K
        return result_K

    def handed(self) -> FloatArray:
        """The part of ``saved_K`` that the next stage gets: it is gone when it has been sent."""
        runs, costs = self._runs, self.sets.costs
        plain_R, recomputed_R = costs.handed_R, costs.checkpointed_handed_R
        at = runs.end_K if plain_R.ndim == 1 else (runs.variant_K, runs.end_K)
        last_K: FloatArray = np.where(self._is_recomputed_K, recomputed_R[at], plain_R[at])
        return last_K * ~runs.is_last_K if self._has_tail else last_K

    def _tail(self, plain_R: FloatArray, recomputed_R: FloatArray) -> FloatArray | float:
        """A peak of the tail behind a layer that is recomputed or not: what of that layer is under way may differ."""
        plain, recomputed = (self._runs.edge(values_R, -1) for values_R in (plain_R, recomputed_R))
        if isinstance(plain, float) and plain == recomputed:
            return plain
        return np.where(self._is_recomputed_K, recomputed, plain)

    def pending(self) -> FloatArray:
        """Gradients of an earlier backward that are under way until the first unit of the next one has run."""
        sharding = self.sets.sharding
        if sharding is None:
            return np.zeros(len(self._checkpointed_K))
        return self._runs.gradient_bytes_K if sharding.is_one_unit else self._runs.last_gradient_bytes_K

    def _layers_backward(self, tables: tuple[RangeTable, RangeTable], pending_K: FloatArray | float) -> FloatArray:
        top, others = tables
        whole_K = self._over(others, self._whole)
        if top is others:
            return whole_K
        runs = self._runs
        under_K = self._over(others, self._range(np.maximum(runs.end_K - 1, runs.start_K)))
        # Below a tail no layer is the first to run backward.
        last_K = np.where(runs.is_last_K, whole_K, self._last_layer(top) + pending_K) if self._has_tail else None
        return np.maximum(self._last_layer(top) + pending_K if last_K is None else last_K, under_K)

    def _last_layer(self, table: RangeTable) -> FloatArray:
        """The value of the stage's last layer."""
        return self._layer(table, self._runs.end_K)

    def _layer(self, table: RangeTable, end_K: IntArray) -> FloatArray:
        """The value of the layer in front of a position."""
        sets, placed_K = self.sets, self._placed(end_K)
        recomputed_K = table.flat[sets.last_place(placed_K, recomputed=True)] - self._checkpointed_K
        plain_K = table.flat[sets.last_place(placed_K, recomputed=False)] - sets.saved_B[self._middle_K]
        plain_K = plain_K + self._whole.recomputed_K
        return np.where(end_K <= self._runs.middle_K, recomputed_K, plain_K) + self._head_K

    def _first_layer(self, table: RangeTable) -> FloatArray | None:
        """The value of the stage's first layer, if it has several and needs more than the others may."""
        runs = self._runs
        if not (runs.forward_away_AK[1].any() or runs.backward_away_AK[1].any()):
            return None
        first_K = self._over(table, self._range(np.minimum(runs.start_K + 1, runs.end_K)))
        return np.where(runs.end_K > runs.start_K + 1, first_K, -np.inf)

    def _largest(
        self,
        head_K: FloatArray | float,
        first_K: FloatArray | None,
        layers_K: FloatArray,
        tail_K: FloatArray,
        away_AK: FloatArray,
    ) -> FloatArray:
        """The maximum over the regions that each stage has, with the parameters that are there only for them."""
        result_K: FloatArray = layers_K + away_AK[2]
        if first_K is not None:
            result_K = np.maximum(result_K, first_K + away_AK[1])
        if self._has_head:
            result_K = np.maximum(result_K, np.where(self._is_head_K, head_K + away_AK[0], -np.inf))
        if self._has_tail:
            result_K = np.maximum(result_K, np.where(self._is_tail_K, tail_K + away_AK[3], -np.inf))
        return result_K

    def forward(self) -> FloatArray:
        """Largest bytes alive in a forward, beyond what exists when it begins."""
        sets, costs = self.sets, self.sets.costs
        layers_K, first_K = self._over(sets.forward, self._whole), self._first_layer(sets.forward)
        tail_K = self._before_tail_K + self._tail(costs.forward_peak_R, costs.recompute_forward_peak_R)
        head_K = self._runs.edge(costs.forward_peak_R, 0)
        return self._largest(head_K, first_K, layers_K, tail_K, self._runs.forward_away_AK)

    def backward(self) -> FloatArray:
        """Largest bytes alive in a backward with all gradients there, beyond these; its saved bytes included."""
        sets, costs, pending_K = self.sets, self.sets.costs, self.pending()
        layers_K = self._layers_backward(sets.backward, pending_K)
        head_K = self._head_K + (self._runs.edge(costs.backward_peak_R, 0) + self._runs.edge(sets.reduced_R, 0))
        tail_K = self.saved_K + self._tail(costs.backward_peak_R, costs.recompute_backward_peak_R) + pending_K
        first_K = self._first_layer(sets.backward[1])
        result_K = self._largest(head_K, first_K, layers_K, tail_K, self._runs.backward_away_AK)
        return np.maximum(result_K, self._reductions(0.0))

    def _reductions(self, above_head_K: FloatArray | float) -> FloatArray | float:
        """Bytes alive when a region's gradients are copied to where they are reduced, by the largest copy."""
        # Behind layers there is more alive while they run, the gradients of the layer above among it.
        sharding, runs = self.sets.sharding, self._runs
        if sharding is None:
            return 0.0
        copied = 1 + self.sets.gradient_factor
        if sharding.is_one_unit:
            return copied * runs.gradient_bytes_K
        trained_R = sharding.trained_R
        result_K: FloatArray | float = 0.0
        if self._has_head:
            head_K = copied * runs.edge(trained_R, 0) + above_head_K + runs.backward_away_AK[0]
            result_K = np.where(self._is_head_K, head_K, 0.0)
        if self._has_tail:
            tail_K = self._before_tail_K + copied * runs.edge(trained_R, -1) + runs.backward_away_AK[3]
            result_K = np.maximum(result_K, np.where(self._is_tail_K, tail_K, 0.0))
        return np.maximum(result_K, 0.0)

    def first_backward(self) -> FloatArray:
        """Largest bytes alive in the backward that makes the gradients, these and its saved bytes included."""
        sets, costs, runs = self.sets, self.sets.costs, self._runs
        above_head_K = sets.gradient_share * (runs.gradient_bytes_K - runs.head_gradient_bytes_K)
        # Layer k finds all gradients but the head's and those of the layers from the first up to itself. Parameters
        # that several parts use are made by the last of them; if that is no tail, assume the earliest time.
        before_K = above_head_K + sets.made_B[self._start_K]
        layers_K = self._layers_backward(sets.first, 0.0) + before_K
        head_K = (
            self._head_K + (runs.edge(costs.first_backward_peak_R, 0) + runs.edge(sets.reduced_R, 0)) + above_head_K
        )
        peak_K = self._tail(costs.first_backward_peak_R, costs.first_recompute_backward_peak_R)
        tail_K = self.saved_K + self._before_tail_gradients() + peak_K if self._has_tail else self.saved_K
        first_K = self._first_layer(sets.first[1])
        first_K = None if first_K is None else first_K + before_K
        result_K = self._largest(head_K, first_K, layers_K, tail_K, runs.backward_away_AK)
        return np.maximum(result_K, self._reductions(above_head_K)) + self.sets.gradient_factor * runs.imbalance_K

    def _before_tail_gradients(self) -> FloatArray:
        """Gradients that exist before the tail's backward, by the assumption above."""
        sets, runs = self.sets, self._runs
        layers_K = sets.made_B[self._end_K] - sets.made_B[self._start_K]
        edges_K = runs.head_gradient_bytes_K + runs.tail_gradient_bytes_K
        return sets.gradient_share * (runs.gradient_bytes_K - edges_K) - layers_K

    def waiting(self) -> FloatArray:
        """Bytes that one microbatch keeps from its input gradients until its weight gradients."""
        sets, runs = self.sets, self._runs
        weight_R = sets.split_backward.waiting_R
        layers_K = sets.weight_B[self._end_K] - sets.weight_B[self._start_K]
        result_K: FloatArray = layers_K + runs.is_first_K * weight_R[0] + runs.is_last_K * weight_R[-1]
        return result_K

    def input_backward(self) -> FloatArray:
        """Largest bytes alive in a backward that makes input gradients only, its saved bytes included."""
        sets, runs, split_backward = self.sets, self._runs, self.sets.split_backward
        # Layer k finds what the weight gradients of the layers above it need.
        above_K = sets.weight_B[self._end_K] + runs.is_last_K * split_backward.waiting_R[-1]
        layers_K = self._over(sets.split, self._whole) + above_K
        whole_K = self.waiting()
        head_K = self._head_K + runs.edge(split_backward.peak_R, 0) + whole_K - split_backward.waiting_R[0]
        tail_K = self.saved_K + self._tail(split_backward.peak_R, split_backward.recompute_peak_R)
        first_K = self._first_layer(sets.split)
        first_K = None if first_K is None else first_K + above_K
        return np.maximum(self._largest(head_K, first_K, layers_K, tail_K, runs.backward_away_AK), whole_K)

    def weight_backward(self, largest_K: FloatArray) -> FloatArray:
        """Largest bytes alive while gradients of weights are made of what waits for them.

        From ZeRO-2 on all gradients of the stage are made before the first of them is reduced.
        """
        sharding, runs, factor = self.sets.sharding, self._runs, self.sets.gradient_factor
        # What is added up in a larger type is cast, and so is what autocast makes.
        cast_K = largest_K * self.sets.split_backward.before_cast
        largest_K = largest_K * (1.0 if factor == 1.0 else 1 + factor)
        waiting_K = self.waiting() + largest_K + cast_K
        if sharding is None:
            return waiting_K
        copy_K = runs.gradient_bytes_K
        if not sharding.is_one_unit:
            trained_R = sharding.trained_R
            copy_K = np.maximum(runs.is_first_K * runs.edge(trained_R, 0), runs.is_last_K * runs.edge(trained_R, -1))
        made_K = factor * runs.gradient_bytes_K + np.maximum(copy_K, largest_K)
        # Parameters that were there for what was computed before stay for what is computed next.
        away_K: FloatArray = np.maximum(runs.forward_away_AK, runs.backward_away_AK).max(axis=0)
        return np.maximum(waiting_K + factor * runs.together_gradient_bytes_K, made_K) + self.pending() + away_K

    def bucket(self, bucket_K: FloatArray, *, progressive: bool) -> FloatArray:
        """Largest bytes alive when a bucket of gradients is filled in the last backward, gradients included.

        There are none under ZeRO-2 and ZeRO-3.

        A bucket is a copy of gradients that are final, filled when the backward of a part has ended: it holds at most
        its capacity, and at most what the parts from there on have. The smaller of both maxima is a bound.

        Args:
            progressive: Whether the last backward is also the first, so that gradients appear in it.
        """
        sets, runs = self.sets, self._runs
        # A bucket's copy of a gradient is in the smaller type where sums are in a larger one.
        factor, both = sets.gradient_factor, 1 + 1 / sets.gradient_factor
        final_K = factor * (runs.gradient_bytes_K - runs.head_gradient_bytes_K) + sets.made_B[self._start_K]
        full_K = factor * runs.gradient_bytes_K
        once_K = self._over(sets.ended(1), self._whole) + final_K
        if progressive:
            layers_K = np.minimum(once_K + bucket_K, self._over(sets.ended(both), self._whole) + both * final_K)
        else:
            layers_K = full_K + np.minimum(self._over(sets.ended(0), self._whole) + bucket_K, once_K)
        result_K: FloatArray = np.maximum(layers_K, full_K + bucket_K)
        if self._has_tail:
            gradients_K = full_K
            if progressive:
                gradients_K = self._before_tail_gradients() + factor * runs.tail_gradient_bytes_K
            tail_K = self._before_tail_K + gradients_K + np.minimum(bucket_K, runs.tail_gradient_bytes_K)
            result_K = np.maximum(result_K, np.where(runs.is_last_K, tail_K, -np.inf))
        return result_K


class UnitWorking(StageWorking):
    """Working sets of each unit of one stage, head, layers and tail, of which the stage's are the largest.

    The stage is asked about once for every unit (axis ``K``), and of each time only one unit counts.
    """

    def __init__(self, sets: WorkingSets, runs: StageRuns) -> None:
        start, end = int(runs.start_K[0]), int(runs.end_K[0])
        self._own_K = np.arange(start - int(runs.is_first_K[0]), end + int(runs.is_last_K[0]))
        super().__init__(sets, runs.take(np.zeros(len(self._own_K), dtype=np.int64)))
        self._is_head_K, self._is_tail_K = self._own_K < start, self._own_K == end
        self._is_layer_K = ~(self._is_head_K | self._is_tail_K)

    def _over(self, table: RangeTable, layers: _Range) -> FloatArray:
        is_there_K = self._is_layer_K & (self._own_K < layers.end_K)
        if not is_there_K.any():
            return np.full(len(is_there_K), -np.inf)
        return np.where(is_there_K, self._layer(table, np.minimum(self._own_K + 1, self._runs.end_K)), -np.inf)

    def _last_layer(self, table: RangeTable) -> FloatArray:
        is_last_K = self._is_layer_K & (self._own_K + 1 == self._runs.end_K)
        return np.where(is_last_K, super()._last_layer(table), -np.inf)
