"""The largest number of bytes that one microbatch needs inside a stage, for any stage, in a few table look-ups.

Array axes
    L  layers
    S  layer positions ``0 .. L``: where a run of layers starts (first axis) or ends (second axis)
    K  candidate stages
    A  where in a stage: the head, the layer behind it (of several), other layers, the tail

A stage of layers ``[start, end)`` with its first ``c`` layers checkpointed is a run of checkpointed layers
``[start, start + c)`` and a run of plain ones ``[start + c, end)``. With prefix sums of what either kind of layer
saves, what is alive in layer ``k`` is the prefix sum at ``k`` plus the peak of ``k`` minus the prefix sum at the start
of its run. So the maximum over a run is the maximum of a fixed array over a range: a table.

A first backward makes the gradients on its way from the last layer to the first: with ``P`` the prefix sum of the
layers' gradient bytes, those of the layers above ``k`` exist when the backward of ``k`` begins. Under ZeRO-2 and ZeRO-3
every backward makes them anew, and of those above only what this rank owns stays, and what is being reduced.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from lightning_mist.cost.apart import Apart
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.regions import RegionCosts


def range_maxima(values_L: FloatArray) -> FloatArray:
    """Table of shape ``(L + 1, L + 1)``: entry ``[i, j]`` is the largest of ``values[i:j]``, -inf if there is none."""
    count = len(values_L)
    table_SS = np.full((count + 1, count + 1), -np.inf)
    for start in range(count):
        np.maximum.accumulate(values_L[start:], out=table_SS[start, start + 1 :])
    return table_SS


def _at(table_SS: FloatArray, row_K: IntArray, column_K: IntArray) -> FloatArray:
    """Entries of a table; several times faster than by two indices."""
    found_K: FloatArray = table_SS.ravel().take(row_K * table_SS.shape[1] + column_K)
    return found_K


def _prefix(values_L: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(values_L)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRuns:
    """Candidate stages as runs of layers.

    Attributes:
        start_K: First layer.
        middle_K: First layer that is not checkpointed.
        end_K: One past the last layer.
        is_first_K: Whether the head belongs to it.
        is_last_K: Whether the tail belongs to it.
        gradient_bytes_K: Bytes of all its gradients.
        head_gradient_bytes_K: Of these, what only its head uses.
        tail_gradient_bytes_K: Of these, what its tail uses.
        last_gradient_bytes_K: Gradient bytes of its first region: the last one whose gradients a backward makes. From
            ZeRO-2 on they are still under way when the next backward begins.
        together_gradient_bytes_K: Of all its gradients, those that are made with gradients of inputs where weights'
            are made apart.
        imbalance_K: From ZeRO-2 on, what the fullest rank owns of all gradients beyond an equal share.
        forward_away_AK: Under ZeRO-3 parameters that are there only for a forward, by where it is (axis ``A``).
        backward_away_AK: The same for a backward.
    """

    start_K: IntArray
    middle_K: IntArray
    end_K: IntArray
    is_first_K: BoolArray
    is_last_K: BoolArray
    gradient_bytes_K: FloatArray
    head_gradient_bytes_K: FloatArray
    tail_gradient_bytes_K: FloatArray
    last_gradient_bytes_K: FloatArray
    together_gradient_bytes_K: FloatArray
    imbalance_K: FloatArray
    forward_away_AK: FloatArray
    backward_away_AK: FloatArray

    def take(self, index_J: IntArray) -> "StageRuns":
        """The candidates at some indices."""
        return StageRuns(**{field.name: getattr(self, field.name)[..., index_J] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What ZeRO-2 and ZeRO-3 change about the working sets of a stage.

    Attributes:
        kept: Share of the gradients that stay on a rank once they are reduced.
        trained_R: Bytes of gradients that are made by, and reduced behind, the backward of each region.
        is_one_unit: Whether the gradients of the whole stage are reduced together, behind its backward.
    """

    kept: float
    trained_R: FloatArray
    is_one_unit: bool = False


Tables = tuple[FloatArray, FloatArray]
"""Range maxima over recomputed layers, and over the others."""


class WorkingSets:
    """Range tables of a network at one number of rows.

    Args:
        costs: What every region costs.
        single_R: Trained bytes of the parameters that exactly one region uses, by region.
        sharding: What ZeRO-2 or ZeRO-3 changes, if the stage runs under it.
        apart: What regions need where gradients of weights are made apart; without, peaks of whole backwards are taken
            for those of backwards that make gradients of inputs only.
    """

    def __init__(
        self,
        costs: RegionCosts,
        single_R: FloatArray,
        sharding: Sharding | None = None,
        apart: Apart | None = None,
    ) -> None:
        self._apart = apart or Apart(
            peak_R=costs.backward_peak_R,
            recompute_peak_R=costs.recompute_backward_peak_R,
            waiting_R=costs.weight_R,
        )
        reduced_R, self._kept, self._sharding = np.zeros(len(single_R)), 1.0, sharding
        if sharding is not None and not sharding.is_one_unit:
            # While a region runs, those of the region above are under way.
            reduced_R, self._kept = np.concatenate([sharding.trained_R[1:], [0.0]]), sharding.kept
            costs = _making_anew(costs)
        self._costs, self._head_reduced = costs, reduced_R[0]
        layers = slice(1, -1)
        saved_L, kept_L = costs.saved_R[layers], costs.checkpointed_saved_R[layers]
        self._saved_S, self._kept_S = _prefix(saved_L), _prefix(kept_L)
        self._made_S = _prefix(single_R[layers] * self._kept)
        before_saved_L, before_kept_L = self._saved_S[:-1], self._kept_S[:-1]
        after_saved_L, after_kept_L, made_L = self._saved_S[1:], self._kept_S[1:], self._made_S[1:]
        # A recomputed layer keeps less in its forward than a plain one; its plain peak is an upper bound.
        self._forward_SS = range_maxima(before_saved_L + costs.forward_peak_R[layers])
        self._forward_kept_SS = range_maxima(before_kept_L + costs.recompute_forward_peak_R[layers])

        # Where input and weight gradients are apart, what the latter need stays of every layer above.
        self._weight_S, self._head_weight, self._tail_weight = (
            _prefix(self._apart.waiting_R[layers]),
            self._apart.waiting_R[0],
            self._apart.waiting_R[-1],
        )
        after_weight_L = self._weight_S[1:]

        def tables(plain_R: FloatArray, recomputed_R: FloatArray, besides_L: FloatArray) -> tuple[Tables, Tables]:
            """Of a stage's last layer, above which nothing is being reduced, and of the others."""
            lines = (after_kept_L + recomputed_R[layers] + besides_L, after_saved_L + plain_R[layers] + besides_L)
            top = (range_maxima(lines[0]), range_maxima(lines[1]))
            if not reduced_R.any():
                return top, top
            return top, (range_maxima(lines[0] + reduced_R[layers]), range_maxima(lines[1] + reduced_R[layers]))

        self._backward = tables(costs.backward_peak_R, costs.recompute_backward_peak_R, np.zeros_like(made_L))
        self._split = tables(self._apart.peak_R, self._apart.recompute_peak_R, -after_weight_L)[0]
        self._first = tables(costs.first_backward_peak_R, costs.first_recompute_backward_peak_R, -made_L)
        # After the backward of layer k its saved bytes are gone; gradients of layers below it do not count.
        before_made_L = self._made_S[:-1]
        self._ended = tuple(
            (range_maxima(before_kept_L - times * before_made_L), range_maxima(before_saved_L - times * before_made_L))
            for times in (0, 1, 2)
        )

    def saved(self, runs: StageRuns) -> FloatArray:
        """Bytes that one microbatch leaves behind between its forward and its backward."""
        return self._before_tail(runs) + np.where(runs.is_last_K, self._costs.saved_R[-1], 0.0)

    def handed(self, runs: StageRuns) -> FloatArray:
        """The part of :meth:`saved` that the next stage gets: it is gone when it has been sent."""
        last_R = np.where(
            runs.middle_K == runs.end_K,
            self._costs.checkpointed_handed_R[runs.end_K],
            self._costs.handed_R[runs.end_K],
        )
        return np.where(runs.is_last_K, 0.0, last_R)

    def _head(self, runs: StageRuns) -> FloatArray:
        # A layer that is recomputed keeps what it was called with. Stages behind the first run the head too, as far as
        # the batch alone determines it.
        recomputes_K = runs.middle_K > runs.start_K
        kept_K = np.where(recomputes_K, self._costs.checkpointed_saved_R[0], self._costs.saved_R[0])
        return np.where(runs.is_first_K, kept_K, self._costs.shared_saved_bytes)

    def _recomputed(self, runs: StageRuns) -> FloatArray:
        return self._kept_S[runs.middle_K] - self._kept_S[runs.start_K]

    def _before_tail(self, runs: StageRuns) -> FloatArray:
        plain_K = self._saved_S[runs.end_K] - self._saved_S[runs.middle_K]
        return self._head(runs) + self._recomputed(runs) + plain_K

    def _tail(self, runs: StageRuns, plain_R: FloatArray, recomputed_R: FloatArray) -> FloatArray:
        """A peak of the tail behind a layer that is recomputed or not: what of that layer is under way may differ."""
        result_K: FloatArray = np.where(runs.middle_K == runs.end_K, recomputed_R[-1], plain_R[-1])
        return result_K

    def _tail_forward(self, runs: StageRuns) -> FloatArray:
        return self._tail(runs, self._costs.forward_peak_R, self._costs.recompute_forward_peak_R)

    def _tail_backward(self, runs: StageRuns) -> FloatArray:
        return self._tail(runs, self._costs.backward_peak_R, self._costs.recompute_backward_peak_R)

    def _tail_first_backward(self, runs: StageRuns) -> FloatArray:
        return self._tail(runs, self._costs.first_backward_peak_R, self._costs.first_recompute_backward_peak_R)

    def _over_runs(self, runs: StageRuns, end_K: IntArray, kept_SS: FloatArray, plain_SS: FloatArray) -> FloatArray:
        """The maximum over the layers of both runs that lie before ``end``."""
        middle_K = np.minimum(runs.middle_K, end_K)
        kept_bytes_K = self._kept_S[middle_K] - self._kept_S[runs.start_K]
        kept_K = _at(kept_SS, runs.start_K, middle_K) - self._kept_S[runs.start_K]
        plain_K = kept_bytes_K + _at(plain_SS, middle_K, end_K) - self._saved_S[middle_K]
        return self._head(runs) + np.maximum(kept_K, plain_K)

    def pending(self, runs: StageRuns) -> FloatArray:
        """Gradients of an earlier backward that are under way until the first unit of the next one has run."""
        if self._sharding is None:
            return np.zeros_like(runs.last_gradient_bytes_K)
        return runs.gradient_bytes_K if self._sharding.is_one_unit else runs.last_gradient_bytes_K

    def _layers_backward(self, runs: StageRuns, top: Tables, others: Tables, pending_K: FloatArray) -> FloatArray:
        below_K = np.maximum(runs.end_K - 1, runs.start_K)
        under_K = self._over_runs(runs, below_K, *others)
        if top is others:
            return np.maximum(self._over_runs(runs, runs.end_K, *top), under_K)
        # Below a tail no layer is the first to run backward.
        whole_K = self._over_runs(runs, runs.end_K, *others)
        return np.maximum(np.where(runs.is_last_K, whole_K, self._last_layer(runs, *top) + pending_K), under_K)

    def _last_layer(self, runs: StageRuns, kept_SS: FloatArray, plain_SS: FloatArray) -> FloatArray:
        """The value of the stage's last layer."""
        last_K = np.maximum(runs.end_K - 1, 0)
        kept_K = _at(kept_SS, last_K, runs.end_K) - self._kept_S[runs.start_K]
        plain_K = self._recomputed(runs) + _at(plain_SS, last_K, runs.end_K) - self._saved_S[runs.middle_K]
        return self._head(runs) + np.where(runs.middle_K == runs.end_K, kept_K, plain_K)

    def forward(self, runs: StageRuns) -> FloatArray:
        """Largest bytes alive in a forward, beyond what exists when it begins."""
        layers_K = self._over_runs(runs, runs.end_K, self._forward_kept_SS, self._forward_SS)
        first_K = self._first_layer(runs, self._forward_kept_SS, self._forward_SS)
        tail_K = self._before_tail(runs) + self._tail_forward(runs)
        return _largest(runs, (self._costs.forward_peak_R[0], first_K, layers_K, tail_K), runs.forward_away_AK)

    def _first_layer(self, runs: StageRuns, kept_SS: FloatArray, plain_SS: FloatArray) -> FloatArray:
        """The value of the stage's first layer, if it has several and needs more than the others may."""
        if not (runs.forward_away_AK[1].any() or runs.backward_away_AK[1].any()):
            return np.full(len(runs.start_K), -np.inf)
        first_K = self._over_runs(runs, np.minimum(runs.start_K + 1, runs.end_K), kept_SS, plain_SS)
        result_K: FloatArray = np.where(runs.end_K > runs.start_K + 1, first_K, -np.inf)
        return result_K

    def backward(self, runs: StageRuns) -> FloatArray:
        """Largest bytes alive in a backward with all gradients there, beyond these; its saved bytes included."""
        pending_K = self.pending(runs)
        layers_K = self._layers_backward(runs, *self._backward, pending_K)
        head = self._head(runs) + self._costs.backward_peak_R[0] + self._head_reduced
        tail_K = self.saved(runs) + self._tail_backward(runs) + pending_K
        first_K = self._first_layer(runs, *self._backward[1])
        result_K = _largest(runs, (head, first_K, layers_K, tail_K), runs.backward_away_AK)
        return np.maximum(result_K, self._reductions(runs, np.zeros_like(pending_K)))

    def _reductions(self, runs: StageRuns, above_head_K: FloatArray) -> FloatArray:
        """Bytes alive when a region's gradients are copied to where they are reduced, by the largest copy.

        Behind layers there is more alive while they run, the gradients of the layer above among it.

        Args:
            runs: The stages.
            above_head_K: Bytes of gradients that exist when the head's are reduced.
        """
        if self._sharding is None:
            return np.zeros_like(runs.gradient_bytes_K)
        if self._sharding.is_one_unit:
            return 2 * runs.gradient_bytes_K
        trained_R = self._sharding.trained_R
        head_K = np.where(runs.is_first_K, 2 * trained_R[0] + above_head_K + runs.backward_away_AK[0], 0.0)
        tail_K = self._before_tail(runs) + 2 * trained_R[-1] + runs.backward_away_AK[3]
        return np.maximum(head_K, np.where(runs.is_last_K, tail_K, 0.0))

    def waiting(self, runs: StageRuns) -> FloatArray:
        """Bytes that one microbatch keeps from its input gradients until its weight gradients."""
        layers_K = self._weight_S[runs.end_K] - self._weight_S[runs.start_K]
        edges_K = runs.is_first_K * self._head_weight + runs.is_last_K * self._tail_weight
        result_K: FloatArray = layers_K + edges_K
        return result_K

    def input_backward(self, runs: StageRuns) -> FloatArray:
        """Largest bytes alive in a backward that makes input gradients only, its saved bytes included."""
        # Layer k finds what the weight gradients of the layers above it need.
        above_K = self._weight_S[runs.end_K] + runs.is_last_K * self._tail_weight
        layers_K = self._layers_backward(runs, self._split, self._split, np.zeros_like(runs.gradient_bytes_K)) + above_K
        whole_K = self.waiting(runs)
        head_K = self._head(runs) + self._apart.peak_R[0] + whole_K - self._head_weight
        tail_K = self.saved(runs) + self._tail(runs, self._apart.peak_R, self._apart.recompute_peak_R)
        first_K = self._first_layer(runs, *self._split) + above_K
        return np.maximum(_largest(runs, (head_K, first_K, layers_K, tail_K), runs.backward_away_AK), whole_K)

    def weight_backward(self, runs: StageRuns, largest_K: FloatArray) -> FloatArray:
        """Largest bytes alive while gradients of weights are made of what waits for them.

        From ZeRO-2 on all gradients of the stage are made before the first of them is reduced.

        Args:
            runs: The stages.
            largest_K: Bytes of the largest trained parameter.
        """
        waiting_K = self.waiting(runs) + largest_K
        if self._sharding is None:
            return waiting_K
        copy_K = (
            runs.gradient_bytes_K
            if self._sharding.is_one_unit
            else np.maximum(
                runs.is_first_K * self._sharding.trained_R[0], runs.is_last_K * self._sharding.trained_R[-1]
            )
        )
        made_K = runs.gradient_bytes_K + np.maximum(copy_K, largest_K)
        return np.maximum(waiting_K + runs.together_gradient_bytes_K, made_K) + self.pending(runs)

    def first_backward(self, runs: StageRuns) -> FloatArray:
        """Largest bytes alive in the backward that makes the gradients, these and its saved bytes included."""
        above_head_K = self._kept * (runs.gradient_bytes_K - runs.head_gradient_bytes_K)
        # Layer k finds all gradients but the head's and those of the layers from the first up to itself. Parameters
        # that several parts use are made by the last of them; if that is no tail, assume the earliest time.
        inner_K = self._layers_backward(runs, *self._first, np.zeros_like(runs.gradient_bytes_K))
        layers_K = inner_K + above_head_K + self._made_S[runs.start_K]
        head_K = self._head(runs) + self._costs.first_backward_peak_R[0] + self._head_reduced + above_head_K
        tail_K = self.saved(runs) + self._before_tail_gradients(runs) + self._tail_first_backward(runs)
        first_K = self._first_layer(runs, *self._first[1]) + above_head_K + self._made_S[runs.start_K]
        result_K = _largest(runs, (head_K, first_K, layers_K, tail_K), runs.backward_away_AK) + runs.imbalance_K
        return np.maximum(result_K, self._reductions(runs, above_head_K) + runs.imbalance_K)

    def _before_tail_gradients(self, runs: StageRuns) -> FloatArray:
        """Gradients that exist before the tail's backward, by the assumption above."""
        layers_K = self._made_S[runs.end_K] - self._made_S[runs.start_K]
        edges_K = runs.head_gradient_bytes_K + runs.tail_gradient_bytes_K
        return self._kept * (runs.gradient_bytes_K - edges_K) - layers_K

    def bucket(self, runs: StageRuns, bucket_K: FloatArray, *, progressive: bool) -> FloatArray:
        """Largest bytes alive when a bucket of gradients is filled in the last backward, gradients included.

        There are none under ZeRO-2 and ZeRO-3.

        A bucket is a copy of gradients that are final, filled when the backward of a part has ended: it holds at most
        its capacity, and at most what the parts from there on have. The smaller of both maxima is a bound.

        Args:
            runs: The stages.
            bucket_K: Bytes of the largest bucket.
            progressive: Whether the last backward is also the first, so that gradients appear in it.
        """
        final_K = runs.gradient_bytes_K - runs.head_gradient_bytes_K + self._made_S[runs.start_K]
        full_K, none_K, once_K, twice_K = (
            runs.gradient_bytes_K,
            *(self._over_runs(runs, runs.end_K, kept_SS, plain_SS) for kept_SS, plain_SS in self._ended),
        )
        if progressive:
            layers_K = np.minimum(once_K + final_K + bucket_K, twice_K + 2 * final_K)
            tail_gradients_K = self._before_tail_gradients(runs) + runs.tail_gradient_bytes_K
        else:
            layers_K = full_K + np.minimum(none_K + bucket_K, once_K + final_K)
            tail_gradients_K = full_K
        tail_K = self._before_tail(runs) + tail_gradients_K + np.minimum(bucket_K, runs.tail_gradient_bytes_K)
        ends_K = np.maximum(full_K + bucket_K, np.where(runs.is_last_K, tail_K, -np.inf))
        return np.maximum(layers_K, ends_K)


def _largest(
    runs: StageRuns, values: tuple[FloatArray | float, FloatArray, FloatArray, FloatArray], away_AK: FloatArray
) -> FloatArray:
    """The maximum over the regions that each stage has, with the parameters that are there only for them."""
    head_K, first_K, layers_K, tail_K = (value + away_K for value, away_K in zip(values, away_AK, strict=True))
    head_K = np.where(runs.is_first_K, head_K, -np.inf)
    tail_K = np.where(runs.is_last_K, tail_K, -np.inf)
    result_K: FloatArray = np.maximum(np.maximum(first_K, layers_K), np.maximum(head_K, tail_K))
    return result_K


def _making_anew(costs: RegionCosts) -> RegionCosts:
    """Costs whose every backward makes gradients."""
    return replace(
        costs,
        backward_peak_R=costs.first_backward_peak_R,
        recompute_backward_peak_R=costs.first_recompute_backward_peak_R,
    )
