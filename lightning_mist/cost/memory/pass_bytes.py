"""Bytes of passes of many stages at once: rows of units, folded.

In a *row*, the computation of one unit, there is what rows before it left, and at most so much more; behind it there is
more or less than in front of it. Rows after each other are one again, of a change and a peak,

    (a, p) then (b, q) = (a + b, max(p, a + q))                n alike: (n a, p + (n - 1) max(0, a))

so that a pass of a stage is a list of (row, how many units in a row have one like it), as for its seconds
(:mod:`lightning_mist.cost.time.pass_seconds`), and what it needs at most is the largest of what its rows find and need.

A forward leaves what its units keep for backward. A backward finds what was kept up to its unit, and takes that. The
first one makes the gradients on its way; parameters that several units use are made by the last of them, and if that is
no tail, at the earliest time. Under ZeRO-2 and ZeRO-3 every backward makes them anew: those of the unit above are being
reduced while a unit runs, and of those above it only what this rank owns stays. Where gradients of inputs are made by
themselves, what those of weights need stays of every unit above.

Array axes
    K  candidate stages
    J  lines: distinct stages, by the layers that they have and recompute
    R  units, which are regions, or places in their lists of rows; of what is away the head, the layer behind it (of
       several), other layers, the tail
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_mist.cost.inputs import (
    ArrayRecord,
    BoolArray,
    FloatArray,
    IntArray,
    ParameterTable,
    RegionCosts,
    distinct_codes,
    runs_between,
)
from lightning_mist.cost.memory.split_backward import SplitBackward
from lightning_mist.model.spec import OptimizerSpec

MOST_LISTS = 32
"""Sets of lists that are kept: of a thousand stages half a megabyte each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRuns(ArrayRecord):
    """Candidate stages as runs of layers.

    Attributes:
        head_gradient_bytes_K: Of these, what only its head uses.
        tail_gradient_bytes_K: Of these, what its tail uses.
        last_gradient_bytes_K: Gradient bytes of its first region: the last one whose gradients a backward makes. From
            ZeRO-2 on they are still under way when the next backward begins.
        together_gradient_bytes_K: Of all its gradients, those that are made with gradients of inputs where weights'
            are made by themselves.
        imbalance_K: From ZeRO-2 on, what the fullest rank owns of all gradients beyond an equal share.
        sent_K: From ZeRO-2 on, bytes that are there while gradients are reduced to be added, by theirs: pieces lie
            beside the buffer.
        forward_away_RK: Under ZeRO-3 parameters that are there only for a forward, by where it is (axis ``R``).
    """

    start_K: IntArray
    middle_K: IntArray
    end_K: IntArray
    gradient_bytes_K: FloatArray
    head_gradient_bytes_K: FloatArray
    tail_gradient_bytes_K: FloatArray
    last_gradient_bytes_K: FloatArray
    together_gradient_bytes_K: FloatArray
    imbalance_K: FloatArray
    sent_K: FloatArray
    forward_away_RK: FloatArray
    backward_away_RK: FloatArray
    variant_K: IntArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What ZeRO-2 and ZeRO-3 change about the bytes of passes.

    Attributes:
        gradient_share: Share of the gradients of every layer that stay.
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


class UnitLoads:
    """What rows bring, take and need, of every unit of a network at one number of rows.

    Attributes:
        factor: Bytes of a sum of gradients per byte of what is added.
        share: Share of the gradients of every layer that stay.
        split: What backwards of inputs need.
        values: Bytes by name, of every unit of all variants, once where it is not recomputed and once where it is.
        size: Units of all variants.
        changes: Units that are not like the one before, or whose neighbours are not.
    """

    def __init__(
        self,
        costs: RegionCosts,
        single_R: FloatArray,
        sharding: Sharding | None = None,
        split: SplitBackward | None = None,
        accumulated: Accumulated | None = None,
    ) -> None:
        self.factor = self.share = 1.0 if accumulated is None else accumulated.factor
        if accumulated is not None:
            costs = accumulated.added_to(costs, single_R if sharding is None else sharding.trained_R)
        backward = costs.backward_peak_R, costs.recompute_backward_peak_R
        first = costs.first_backward_peak_R, costs.first_recompute_backward_peak_R
        self.split = split or SplitBackward(peak_R=backward[0], recompute_peak_R=backward[1], waiting_R=costs.weight_R)
        self.costs, self.sharding = costs, sharding
        self.reduces, self.moves = sharding is not None and not sharding.is_one_unit, costs.below is not None
        trained_R = above_R = np.zeros_like(single_R)
        if sharding is not None and self.reduces:
            self.share *= sharding.gradient_share
            trained_R, backward = sharding.trained_R, first
            above_R = np.concatenate([trained_R[..., 1:], np.zeros_like(trained_R[..., :1])], axis=-1)
        made_R = single_R * self.share
        made_R[..., [0, -1]] = 0.0
        rows = {
            "kept": (costs.saved_R, costs.checkpointed_saved_R),
            "forward": (costs.forward_peak_R, costs.recompute_forward_peak_R),
            "backward": backward,
            "first": first,
            "inputs": (self.split.peak_R, self.split.recompute_peak_R),
            "waiting": (self.split.waiting_R,) * 2,
            "made": (made_R,) * 2,
            "trained": (trained_R,) * 2,
            "above": (above_R,) * 2,
        }
        if costs.below is not None:
            rows["below"] = costs.below
        shape = np.broadcast_shapes(*(item.shape for pair in rows.values() for item in pair))
        each = {name: np.stack([np.broadcast_to(item, shape) for item in pair]) for name, pair in rows.items()}
        every = np.concatenate([pair.reshape(-1, shape[-1]) for pair in each.values()])
        self.values: Mapping[str, FloatArray] = {name: pair.reshape(-1) for name, pair in each.items()}
        self.size, self.width = int(np.prod(shape)), shape[-1]
        self.changes = tuple((np.flatnonzero((every[:, 1:] != every[:, :-1]).any(axis=0)) + 1).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lists:
    """Rows of stages in the order of forward, alike ones as one.

    Attributes:
        count_RJ: How many units in a row have one like it; 0 where a list has come to its end.
        kept_RJ: Where as little is kept as of a recomputed layer.
        behind_RJ: Where the peak is that of a recomputed layer.
        below_RJ: Where there is a unit in front; in ``below_again_RJ``, where it is recomputed, or a head that keeps
            as little.
        where_RJ: Place in the axis of what is away.
        top_RJ: The last unit of each stage.
    """

    unit_RJ: IntArray
    count_RJ: FloatArray
    edge_RJ: BoolArray
    tail_RJ: BoolArray
    top_RJ: BoolArray
    kept_RJ: BoolArray
    behind_RJ: BoolArray
    below_RJ: BoolArray
    below_again_RJ: BoolArray
    where_RJ: IntArray


@lru_cache(maxsize=MOST_LISTS)
def _lists(codes: bytes, width: int, changes: tuple[int, ...], looks: tuple[bool, bool, bool]) -> _Lists:
    """The lists of stages, which are asked about on many devices.

    Args:
        codes: First layers, last ones and first ones that are not recomputed, as numbers.
        changes: Units that differ from the one before.
        looks: Whether what is away for the first of several layers counts, what is reduced at the last unit, and what
            the layer in front has moved.
    """
    code_J = np.frombuffer(codes, dtype=np.int64)
    first_J, end_J, middle_J = 1 + code_J // width**2, 1 + code_J // width % width, 1 + code_J % width
    low_J, high_J = first_J - (first_J == 1), end_J + (end_J == width - 1)
    # Rows are alike between places where units change, or what lies around them.
    away, reduces, moves = looks
    near = [first_J, middle_J, end_J, *([first_J + 1] if away else []), *([high_J - 1] if reduces else [])]
    near += [low_J + 1, middle_J + 1] if moves else []
    unit_RJ, count_RJ = runs_between(low_J, high_J, near, changes)
    head_RJ, tail_RJ = unit_RJ < first_J, unit_RJ >= end_J
    again_RJ = (unit_RJ < middle_J) & ~head_RJ
    return _Lists(
        unit_RJ=unit_RJ,
        count_RJ=count_RJ.astype(np.float64),
        edge_RJ=head_RJ | tail_RJ,
        tail_RJ=tail_RJ,
        top_RJ=unit_RJ == high_J - 1,
        # The head in front of a recomputed layer keeps as little, and the tail's peak is as behind one.
        kept_RJ=again_RJ | (head_RJ & (middle_J > first_J)),
        behind_RJ=again_RJ | (tail_RJ & (middle_J == end_J)),
        below_RJ=unit_RJ > low_J,
        below_again_RJ=(unit_RJ <= middle_J) & (middle_J > first_J),
        where_RJ=np.where(head_RJ, 0, np.where(tail_RJ, 3, 2 - ((unit_RJ == 1) & (first_J == 1) & (end_J > 2)))),
    )


class PassBytes:
    """Bytes of passes of candidate stages; keeps what several of them need.

    Args:
        by_unit: Whether every unit has a row of its own: then stages are to have equally many.

    Attributes:
        saved_K: What one microbatch leaves behind between its forward and its backward.
    """

    def __init__(self, loads: UnitLoads, runs: StageRuns, *, by_unit: bool = False) -> None:
        self.loads, self.runs = loads, runs
        away, width = bool(runs.forward_away_RK.any() or runs.backward_away_RK.any()), loads.width
        code_J, self._line_K = distinct_codes((runs.start_K * width + runs.end_K) * width + runs.middle_K, width**3)
        changes = tuple(range(width)) if by_unit else loads.changes
        lists = self._lists = _lists(code_J.tobytes(), width, changes, (away, loads.reduces, loads.moves))
        self.count_RK, self._unit_RK = self._each(lists.count_RJ), self._each(lists.unit_RJ)
        if runs.variant_K is not None:
            self._unit_RK += runs.variant_K * width
        self._behind_RK = self._unit_RK + self._each(loads.size * lists.behind_RJ)
        # What the layer in front has moved is still on its way to the host, or on its way back.
        self._moved_RK: FloatArray | float = 0.0
        if loads.moves:
            unit_RK = self._unit_RK + self._each(loads.size * lists.below_again_RJ)
            self._moved_RK = loads.values["below"].take(unit_RK) * self._each(lists.below_RJ)
        self._kept_RK = loads.values["kept"].take(self._unit_RK + self._each(loads.size * lists.kept_RJ))
        # Behind the first stage the head is run too, as far as the batch alone determines it.
        self.saved_K: FloatArray = np.where(runs.start_K == 0, 0.0, loads.costs.shared_saved_bytes)
        alive_RK = np.cumsum(self.count_RK * self._kept_RK, axis=0) + self.saved_K
        if len(alive_RK):
            self.saved_K = alive_RK[-1].copy()
        # What is kept up to each unit; a row that no unit has finds nothing.
        if not lists.count_RJ.all():
            alive_RK[self.count_RK == 0] = -np.inf
        self._alive_RK = alive_RK

    def _each(self, value_RJ: NDArray[Any]) -> NDArray[Any]:
        """What every line has, of every candidate."""
        return value_RJ.take(self._line_K, axis=1)

    def _of(self, name: str) -> FloatArray:
        return self.loads.values[name].take(self._unit_RK)

    def _peak(self, name: str, away_RK: FloatArray, *, temporaries: bool) -> FloatArray | float:
        """What rows need while they run, parameters included that are there only for them."""
        if not temporaries:
            return self._away(away_RK)
        peak_RK: FloatArray = self.loads.values[name].take(self._behind_RK) + self._away(away_RK)
        return peak_RK + self._moved_RK

    def _away(self, away_RK: FloatArray) -> FloatArray | float:
        """Parameters that are there only for a unit, by where it is in its stage."""
        if not away_RK.any():
            return 0.0
        return np.take_along_axis(away_RK, self._each(self._lists.where_RJ), 0)

    def _under_way(self, pending_K: FloatArray | float, times_K: FloatArray | float) -> FloatArray | float:
        """Gradients that are being reduced while a unit runs: of the unit above, or of a backward before."""
        is_pending_RJ = self._lists.top_RJ & (self._lists.tail_RJ | self.loads.reduces)
        above_RK = times_K * self._of("above") * self._each(~self._lists.top_RJ)
        return np.where(self._each(is_pending_RJ), pending_K, above_RK)

    def handed(self) -> FloatArray:
        """The part of ``saved_K`` that the next stage gets: it is gone when it has been sent."""
        runs, costs = self.runs, self.loads.costs
        at = runs.end_K if costs.handed_R.ndim == 1 else (runs.variant_K, runs.end_K)
        handed_K = np.where(runs.middle_K == runs.end_K, costs.checkpointed_handed_R[at], costs.handed_R[at])
        return np.where(runs.end_K < self.loads.width - 2, handed_K, 0.0)

    def pending(self) -> FloatArray:
        """Gradients of an earlier backward that are under way until the first unit of the next one has run."""
        runs, sharding = self.runs, self.loads.sharding
        if sharding is None:
            return np.zeros(len(runs))
        return runs.sent_K * (runs.gradient_bytes_K if sharding.is_one_unit else runs.last_gradient_bytes_K)

    def forward_rows(self, *, temporaries: bool = True) -> FloatArray:
        """Bytes alive in the rows of a forward, beyond what exists when it begins; axes ``R`` and ``K``.

        Args:
            temporaries: Whether what is alive only while a unit runs counts too.
        """
        found_RK: FloatArray = self._alive_RK - self._kept_RK
        return found_RK + self._peak("forward", self.runs.forward_away_RK, temporaries=temporaries)

    def backward_rows(self, *, temporaries: bool = True) -> FloatArray:
        """The same of a backward with all gradients there, beyond these; its saved bytes included."""
        found_RK = self._alive_RK + self._peak("backward", self.runs.backward_away_RK, temporaries=temporaries)
        if self.loads.sharding is None:
            return found_RK
        return np.maximum(found_RK + self._under_way(self.pending(), self.runs.sent_K), self._reductions(0.0))

    def first_backward_rows(self, *, temporaries: bool = True) -> FloatArray:
        """The same of the backward that makes the gradients, these included."""
        loads, runs = self.loads, self.runs
        above_head_K = loads.share * (runs.gradient_bytes_K - runs.head_gradient_bytes_K)
        made_RK = self._of("made") + loads.share * runs.tail_gradient_bytes_K * self._each(self._lists.tail_RJ)
        found_RK: FloatArray = self._alive_RK + (above_head_K - np.cumsum(self.count_RK * made_RK, axis=0))
        found_RK += (self.count_RK - 1) * np.maximum(made_RK - self._kept_RK, 0.0)
        found_RK += self._peak("first", runs.backward_away_RK, temporaries=temporaries)
        if loads.sharding is not None:
            found_RK = np.maximum(found_RK + self._under_way(0.0, 1.0), self._reductions(above_head_K))
        result_RK: FloatArray = found_RK + loads.factor * runs.imbalance_K
        return result_RK

    def _reductions(self, above_head_K: FloatArray | float) -> FloatArray:
        """Bytes alive when a unit's gradients are copied to where they are reduced, by the largest copy."""
        # Behind layers there is more alive while they run, the gradients of the layer above among it.
        sharding, runs, copied = self.loads.sharding, self.runs, 1 + self.loads.factor
        if sharding is None or sharding.is_one_unit:
            return np.where(self.count_RK > 0, copied * runs.gradient_bytes_K, -np.inf)
        found_RK = copied * self._of("trained") + self._away(runs.backward_away_RK)
        found_RK += np.where(self._each(self._lists.tail_RJ), self._alive_RK - self._kept_RK, above_head_K)
        return np.where(self._each(self._lists.edge_RJ) & (self.count_RK > 0), found_RK, -np.inf)

    def waiting(self) -> FloatArray:
        """Bytes that one microbatch keeps from its input gradients until its weight gradients."""
        waiting_K: FloatArray = (self.count_RK * self._of("waiting")).sum(axis=0)
        return waiting_K

    def input_backward(self) -> FloatArray:
        """Largest bytes alive in a backward that makes input gradients only, its saved bytes included."""
        waiting_RK, whole_K = self._of("waiting"), self.waiting()
        found_RK = self._alive_RK + (whole_K - np.cumsum(self.count_RK * waiting_RK, axis=0))
        found_RK += (self.count_RK - 1) * np.maximum(waiting_RK - self._kept_RK, 0.0)
        found_RK += self._peak("inputs", self.runs.backward_away_RK, temporaries=True)
        most_K: FloatArray = np.maximum(found_RK.max(axis=0), whole_K)
        return most_K

    def weight_backward(self, largest_K: FloatArray) -> FloatArray:
        """Largest bytes alive while gradients of weights are made of what waits for them.

        From ZeRO-2 on all gradients of the stage are made before the first of them is reduced.
        """
        sharding, runs, factor = self.loads.sharding, self.runs, self.loads.factor
        # What is added up in a larger type is cast, and so is what autocast makes.
        cast_K = largest_K * self.loads.split.before_cast
        largest_K = largest_K * (1.0 if factor == 1.0 else 1 + factor)
        waiting_K = self.waiting() + largest_K + cast_K
        if sharding is None:
            return waiting_K
        copy_K = runs.gradient_bytes_K
        if not sharding.is_one_unit:
            copy_K = np.max(self._each(self._lists.edge_RJ) * self._of("trained"), axis=0, initial=0.0)
        made_K = factor * runs.gradient_bytes_K + np.maximum(copy_K, largest_K)
        # Parameters that were there for what was computed before stay for what is computed next.
        away_K: FloatArray = np.maximum(runs.forward_away_RK, runs.backward_away_RK).max(axis=0)
        return np.maximum(waiting_K + factor * runs.together_gradient_bytes_K, made_K) + self.pending() + away_K

    def bucket(self, bucket_K: FloatArray, *, progressive: bool) -> FloatArray:
        """Largest bytes alive when a bucket of gradients is filled in the last backward, gradients included.

        There are none under ZeRO-2 and ZeRO-3.

        A bucket is a copy of gradients that are final, filled when the backward of a part has ended: it holds at most
        its capacity, and at most what the parts from there on have. The smaller of both maxima is a bound.

        Args:
            progressive: Whether the last backward is also the first, so that gradients appear in it.
        """
        loads, runs, made_RK = self.loads, self.runs, self._of("made")
        # A bucket's copy of a gradient is in the smaller type where sums are in a larger one.
        both, full_K = 1 + 1 / loads.factor, loads.factor * runs.gradient_bytes_K
        above_head_K = full_K - loads.factor * runs.head_gradient_bytes_K
        below_RK = self._alive_RK - self.count_RK * self._kept_RK
        below_RK[self._each(self._lists.edge_RJ)] = -np.inf
        made_below_RK = np.cumsum(self.count_RK * made_RK, axis=0) - self.count_RK * made_RK

        def ended(times: float) -> FloatArray:
            """The most that is left behind the backward of a layer, with gradients so many times."""
            more_RK = (self.count_RK - 1) * np.maximum(self._kept_RK - times * made_RK, 0.0)
            most_K: FloatArray = (below_RK - times * made_below_RK + more_RK).max(axis=0)
            return most_K + times * above_head_K

        if progressive:
            layers_K = np.minimum(ended(1.0) + bucket_K, ended(both))
        else:
            layers_K = full_K + np.minimum(ended(0.0) + bucket_K, ended(1.0))
        # At the tail all layers' gradients are still to come.
        layers_made_K = (self.count_RK * made_RK).sum(axis=0)
        gradients_K = above_head_K - layers_made_K if progressive else full_K
        tail_RK = np.where(self._each(self._lists.tail_RJ), self._alive_RK - self._kept_RK, -np.inf)
        tail_K = tail_RK.max(axis=0) + gradients_K + np.minimum(bucket_K, runs.tail_gradient_bytes_K)
        result_K: FloatArray = np.maximum(np.maximum(layers_K, full_K + bucket_K), tail_K)
        return result_K
