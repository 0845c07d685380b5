"""The largest number of bytes that one microbatch needs inside a stage, for any stage, in a few table look-ups.

Array axes
    L  layers
    B  layer positions ``0 .. L``: where a run of layers starts or ends; or the length of one
    X  rows of a table: runs of 0, 1, 2, 4, 8 .. layers
    K  candidate stages
    A  where in a stage: the head, the layer behind it (of several), other layers, the tail

A stage of layers ``[start, end)`` with its first ``c`` layers checkpointed is a run of checkpointed layers
``[start, start + c)`` and a run of plain ones ``[start + c, end)``. With prefix sums of what either kind of layer
saves, what is alive in layer ``k`` is the prefix sum at ``k`` plus the peak of ``k`` minus the prefix sum at the start
of its run. So the maximum over a run is the maximum of a fixed array over a range: the larger of two entries of a table
of the maxima of all ranges whose lengths are powers of two.

A first backward makes the gradients on its way from the last layer to the first: with ``P`` the prefix sum of the
layers' gradient bytes, those of the layers above ``k`` exist when the backward of ``k`` begins. Under ZeRO-2 and ZeRO-3
every backward makes them anew, and of those above only what this rank owns stays, and what is being reduced.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_mist.cost.inputs import (
    ArrayRecord,
    BoolArray,
    FloatArray,
    IntArray,
    ParameterTable,
    RegionCosts,
    prefix_sums,
)
from lightning_mist.cost.memory.split_backward import SplitBackward
from lightning_mist.model.spec import OptimizerSpec


def run_levels(count: int) -> tuple[IntArray, IntArray]:
    """Of runs of ``0 .. count`` values: the row of :func:`run_maxima` to look at, and how many values an entry covers.

    The largest value of a run of ``n`` is that of two entries of the row, at the first of its values and at the last
    one that can begin there: ``n`` less the covered number behind the first.
    """
    level_B = np.frexp(np.arange(count + 1))[1].astype(np.int64)
    return level_B, np.where(level_B > 0, 1 << np.maximum(level_B - 1, 0), 0)


def run_maxima(values_L: FloatArray) -> FloatArray:
    """Largest values of runs whose lengths are powers of two, of which those of all others follow.

    Row 0 is -inf, for runs of no values; row ``r`` has at ``i`` the largest of ``values[i:i + 2 ** (r - 1)]``, as far
    as there are so many, and every row has an -inf at its end. So a table grows with the number of layers, and not
    with its square.

    Args:
        values_L: Values, of which there may be several rows.

    Returns:
        The rows, with axes for them, for those of ``values_L`` and for positions.
    """
    count = values_L.shape[-1]
    table_XB = np.full((count.bit_length() + 1, *values_L.shape[:-1], count + 1), -np.inf)
    if count:
        table_XB[1, ..., :-1] = values_L
    for row in range(2, len(table_XB)):
        half, below_B = 1 << (row - 2), table_XB[row - 1]
        np.maximum(below_B[..., :-half], below_B[..., half:], out=table_XB[row, ..., :-half])
    return table_XB


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRuns(ArrayRecord):
    """Candidate stages as runs of layers.

    Attributes:
        head_gradient_bytes_K: Of these, what only its head uses.
        tail_gradient_bytes_K: Of these, what its tail uses.
        last_gradient_bytes_K: Gradient bytes of its first region: the last one whose gradients a backward makes. From
            ZeRO-2 on they are still under way when the next backward begins.
        together_gradient_bytes_K: Of all its gradients, those that are made with gradients of inputs where weights'
            are made split_backward.
        imbalance_K: From ZeRO-2 on, what the fullest rank owns of all gradients beyond an equal share.
        forward_away_AK: Under ZeRO-3 parameters that are there only for a forward, by where it is (axis ``A``).
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
    variant_K: IntArray | None = None

    def edge(self, values_R: FloatArray, at: int) -> FloatArray | float:
        """A value of the head or of the tail: one for all, or of each candidate's variant.

        Args:
            at: 0 for the head, -1 for the tail.
        """
        if values_R.ndim == 1:
            return float(values_R[at])
        return values_R[:, at][self.variant_K]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What ZeRO-2 and ZeRO-3 change about the working sets of a stage.

    Attributes:
        trained_R: Bytes of gradients that are made by, and reduced behind, the backward of each region.
        is_one_unit: Whether the gradients of the whole stage are reduced together, behind its backward.
    """

    gradient_share: float
    trained_R: FloatArray
    is_one_unit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """Gradients that are added up in a larger type than they are made in (master weights).

    Attributes:
        factor: Bytes of a sum per byte of what is added.
        largest_R: Bytes of the largest gradient that each region makes.
    """

    factor: float
    largest_R: FloatArray

    @classmethod
    def of(cls, optimizer: OptimizerSpec, table: ParameterTable) -> "Accumulated | None":
        """What an optimizer has of a network's gradients; None where the type is one."""
        factor = optimizer.gradient_bytes_per_parameter_byte
        if factor == 1.0:
            return None
        used_PR = np.diff(table.uses_PR, axis=1) > 0
        return cls(factor=factor, largest_R=(table.trainable_P[:, None] * used_PR).max(axis=0, initial=0.0))

    def added_to(self, costs: RegionCosts, made_R: FloatArray) -> RegionCosts:
        """Costs with sums that regions make, or with what is added to sums beside its cast."""
        more_R, cast_R = (self.factor - 1) * made_R, self.factor * self.largest_R
        return replace(
            costs,
            first_backward_peak_R=costs.first_backward_peak_R + more_R,
            first_recompute_backward_peak_R=costs.first_recompute_backward_peak_R + more_R,
            backward_peak_R=costs.backward_peak_R + cast_R,
            recompute_backward_peak_R=costs.recompute_backward_peak_R + cast_R,
        )


@dataclass(frozen=True, slots=True)
class RangeTable:
    """Largest values over runs of recomputed layers, and over runs of others.

    Attributes:
        flat: Those of :func:`run_maxima`, of recomputed layers before those of the others; of every row of them all
            variants one after another.
    """

    flat: FloatArray

    @classmethod
    def of(cls, recomputed_L: FloatArray, plain_L: FloatArray) -> "RangeTable":
        """The table of values of layers.

        Args:
            recomputed_L: Of recomputed layers, each on top of everything below it.
        """
        return cls(run_maxima(np.stack([recomputed_L, plain_L])).reshape(-1))


class WorkingSets:
    """Range tables of a network's working sets at one number of rows.

    :class:`~lightning_mist.cost.memory.working_sets.StageWorking` asks them.     Several variants of the network have
    theirs one after another, so that a position in one of them is ``width`` from the same in the next. Of what variants
    differ in, costs and gradients have a row for each.

    Attributes:
        gradient_share: Share of the gradients of every layer that stay.
        reduced_R: Gradients that are being reduced while each region runs backward.
        saved_B: What layers save, summed over those below each position.
        checkpointed_B: The same of recomputed layers.
        made_B: The same of the gradients that stay.
        weight_B: The same of what gradients of weights need.
        backward: Of backwards of a stage's last layer, above which nothing is being reduced, and of the others.
        first: The same of backwards that make the gradients.
    """

    def __init__(
        self,
        costs: RegionCosts,
        single_R: FloatArray,
        sharding: Sharding | None = None,
        split_backward: SplitBackward | None = None,
        accumulated: "Accumulated | None" = None,
    ) -> None:
        self.gradient_factor = 1.0 if accumulated is None else accumulated.factor
        if accumulated is not None:
            costs = accumulated.added_to(costs, single_R if sharding is None else sharding.trained_R)
        self.split_backward = split_backward or SplitBackward(
            peak_R=costs.backward_peak_R,
            recompute_peak_R=costs.recompute_backward_peak_R,
            waiting_R=costs.weight_R,
        )
        reduced_R, self.gradient_share, self.sharding = np.zeros_like(single_R), self.gradient_factor, sharding
        if sharding is not None and not sharding.is_one_unit:
            # While a region runs, those of the region above are under way.
            self.gradient_share = self.gradient_factor * sharding.gradient_share
            reduced_R = np.zeros_like(sharding.trained_R)
            reduced_R[..., :-1] = sharding.trained_R[..., 1:]
            # Every backward makes gradients anew.
            costs = replace(
                costs,
                backward_peak_R=costs.first_backward_peak_R,
                recompute_backward_peak_R=costs.first_recompute_backward_peak_R,
            )
        self.costs, self.reduced_R = costs, reduced_R
        layers = (..., slice(1, -1))
        self._saved, self._checkpointed, self._made, self._weight = (
            prefix_sums(values_R[layers])
            for values_R in (
                costs.saved_R,
                costs.checkpointed_saved_R,
                single_R * self.gradient_share,
                # Where input and weight gradients are apart, what the latter need stays of every layer above.
                np.broadcast_to(self.split_backward.waiting_R, single_R.shape),
            )
        )
        self.saved_B, self.checkpointed_B = self._saved.ravel(), self._checkpointed.ravel()
        self.made_B, self.weight_B = self._made.ravel(), self._weight.ravel()
        # A recomputed layer keeps less in its forward than a plain one; its plain peak is an upper bound.
        self.forward = self._table(costs.forward_peak_R, costs.recompute_forward_peak_R, after=False)
        self.backward = self._tables(costs.backward_peak_R, costs.recompute_backward_peak_R, reduced_R)
        first = costs.first_backward_peak_R, costs.first_recompute_backward_peak_R
        self.first = self._tables(*first, reduced_R, -self._made[..., 1:])
        self._level_B, self._covered_B = run_levels(self.width - 1)
        self._split: RangeTable | None = None
        self._ended: dict[float, RangeTable] = {}

    def without_temporaries(self) -> "WorkingSets":
        """The same where nothing is alive but what stays when a unit has run."""
        made, none_R = copy(self), np.zeros_like(self.costs.saved_R)
        none: dict[str, Any] = dict.fromkeys(_PEAKS, none_R)
        made.costs = replace(self.costs, **none)
        made.forward = self._table(none_R, none_R, after=False)
        made.backward = self._tables(none_R, none_R, self.reduced_R)
        made.first = self._tables(none_R, none_R, self.reduced_R, -self._made[..., 1:])
        return made

    @property
    def split(self) -> RangeTable:
        """Of backwards that make gradients of inputs only."""
        if self._split is None:
            self._split = self._table(
                self.split_backward.peak_R, self.split_backward.recompute_peak_R, -self._weight[..., 1:]
            )
        return self._split

    def ended(self, times: float) -> RangeTable:
        """Of what is left behind the backward of each layer, less the gradients of layers below it so many times."""
        if times not in self._ended:
            # After the backward of layer k its saved bytes are gone; gradients of layers below it do not count.
            none_R = np.zeros(self.width + 1)
            self._ended[times] = self._table(none_R, none_R, -times * self._made[..., :-1], after=False)
        return self._ended[times]

    @property
    def width(self) -> int:
        """Positions where layers begin or end."""
        return int(self._saved.shape[-1])

    def places(self, begin_K: IntArray, count_K: IntArray, *, recomputed: bool) -> tuple[IntArray, IntArray]:
        """Where in a table the two values are of which the larger one is that of a run.

        Args:
            begin_K: Where runs begin, in their variants.
        """
        first_K = self._level_B[count_K] * (2 * len(self.saved_B)) + begin_K
        if not recomputed:
            first_K += len(self.saved_B)
        return first_K, first_K + (count_K - self._covered_B[count_K])

    def last_place(self, end_K: IntArray, *, recomputed: bool) -> IntArray:
        """Where in a table the value of the last layer of stages is, -inf for those without any.

        Args:
            end_K: Where they end, in their variants.
        """
        # What is before the first value of anything is the end of a row.
        return end_K + ((2 if recomputed else 3) * len(self.saved_B) - 1)

    def _table(
        self,
        plain_R: FloatArray,
        recomputed_R: FloatArray,
        besides_L: FloatArray | float = 0.0,
        *,
        after: bool = True,
    ) -> RangeTable:
        """The table of peaks of regions, on top of what all layers below save, and if ``after`` the layer itself."""
        layers, below = (..., slice(1, -1)), (..., slice(1, None) if after else slice(None, -1))
        recomputed_L = self._checkpointed[below] + recomputed_R[layers] + besides_L
        plain_L = self._saved[below] + plain_R[layers] + besides_L
        return RangeTable.of(recomputed_L, plain_L)

    def _tables(
        self, plain_R: FloatArray, recomputed_R: FloatArray, reduced_R: FloatArray, besides_L: FloatArray | float = 0.0
    ) -> tuple[RangeTable, RangeTable]:
        """Of a stage's last layer, above which nothing is being reduced, and of the others."""
        top = self._table(plain_R, recomputed_R, besides_L)
        if not reduced_R.any():
            return top, top
        return top, self._table(plain_R, recomputed_R, besides_L + reduced_R[..., 1:-1])


_PEAKS = tuple(name for name in RegionCosts.__slots__ if name.endswith("_peak_R"))
