"""Rows of units, folded, are what walking through a stage unit by unit finds."""

import dataclasses

import numpy as np
import pytest

from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.memory.pass_bytes import Accumulated, PassBytes, Sharding, StageRuns, UnitLoads
from lightning_mist.cost.memory.split_backward import SplitBackward
from tests.specs import spec

MOST = 10**6
VARIED = (
    *("saved_R", "checkpointed_saved_R", "forward_peak_R", "recompute_forward_peak_R", "backward_peak_R"),
    *("recompute_backward_peak_R", "first_backward_peak_R", "first_recompute_backward_peak_R", "handed_R"),
)


def network(rng, layers, variants, sharding, factor):
    """Units of a network with unlike layers, of which some in a row are alike, in several variants."""
    width = layers + 2
    kind_R = np.concatenate([[0], 1 + np.sort(rng.integers(0, 3, layers)) % 2, [3]])

    def bytes_of(*shape):
        return rng.integers(0, MOST, (*shape, 4)).astype(float)[..., kind_R]

    costs = MemoryModel(spec(layers)).costs(2)
    # Of what variants change there is a row for each, and one row of the rest.
    costs = dataclasses.replace(
        costs,
        **{name: bytes_of(*([variants] if variants > 1 and rng.random() < 0.7 else [])) for name in VARIED},
        shared_saved_bytes=float(rng.integers(0, MOST)),
    )
    costs = dataclasses.replace(costs, checkpointed_handed_R=costs.handed_R / 2)
    if rng.random() < 0.5:
        costs = dataclasses.replace(costs, below=(bytes_of(), bytes_of()))
    single_R = bytes_of(variants) if variants > 1 else bytes_of()
    split = SplitBackward(peak_R=bytes_of(), recompute_peak_R=bytes_of(), waiting_R=bytes_of())
    shared = None
    if sharding:
        trained_R = np.broadcast_to(bytes_of(), single_R.shape).copy()
        shared = Sharding(gradient_share=0.25, trained_R=trained_R, is_one_unit=sharding == "one unit")
    added = Accumulated(factor=factor, largest_R=bytes_of()) if factor > 1 else None
    assert single_R.shape[-1] == width
    return UnitLoads(costs, single_R, shared, split, added), single_R


def stages(rng, layers, variants, sharding):
    """Every stage with every number of recomputed layers, in random variants, with random gradients."""
    each = [(a, b, a + c) for a in range(layers) for b in range(a + 1, layers + 1) for c in range(b - a + 1)]
    start_K, end_K, middle_K = np.array(each).T

    def bytes_of(*shape):
        return rng.integers(0, MOST, (*shape, len(each))).astype(float)

    away = [bytes_of(4) * (sharding == "away") for _ in range(2)]
    # Only behind the head another layer is the first of several.
    for away_RK in away:
        away_RK[1] *= (start_K == 0) & (end_K > 1)
    head_K, tail_K, rest_K = bytes_of() * (start_K == 0), bytes_of() * (end_K == layers), bytes_of()
    return StageRuns(
        sent_K=np.ones(len(each)),
        start_K=start_K,
        middle_K=middle_K,
        end_K=end_K,
        gradient_bytes_K=head_K + tail_K + rest_K,
        head_gradient_bytes_K=head_K,
        tail_gradient_bytes_K=tail_K,
        last_gradient_bytes_K=bytes_of(),
        together_gradient_bytes_K=rest_K / 2,
        imbalance_K=bytes_of() * bool(sharding),
        forward_away_RK=away[0],
        backward_away_RK=away[1],
        variant_K=rng.integers(0, variants, len(each)) if variants > 1 else None,
    )


class Walk:
    """One stage walked through unit by unit, from the last to the first."""

    def __init__(self, loads, single_R, runs, k):
        self.loads, self.runs, self.k, costs = loads, runs, k, loads.costs
        start, middle, end = int(runs.start_K[k]), int(runs.middle_K[k]), int(runs.end_K[k])
        width, self.variant = loads.width, 0 if runs.variant_K is None else int(runs.variant_K[k])
        self.units = [*([0] if start == 0 else []), *range(start + 1, end + 1), *([width - 1] * (end == width - 2))]
        self.last = width - 1
        self.again = {unit: start < unit <= middle and unit <= end for unit in self.units}
        # The tail's peak is as behind a recomputed layer, and the head keeps what such a layer is called with.
        self.behind = self.again | {self.last: middle == end}
        self.is_recomputed = middle > start
        kept = self.again | {0: self.is_recomputed}
        saved, brief = (self.row(item) for item in (costs.saved_R, costs.checkpointed_saved_R))
        self.kept = [brief[unit] if kept[unit] else saved[unit] for unit in self.units]
        self.shared = 0.0 if start == 0 else costs.shared_saved_bytes
        self.first = start + 1 if end > start + 1 and start == 0 else None
        layers, share = self.units if 0 not in self.units else self.units[1:], loads.share
        made = self.row(single_R) * share
        tail = float(runs.tail_gradient_bytes_K[k]) * share
        self.made = [made[u] if u in layers and u != self.last else tail * (u == self.last) for u in self.units]
        self.above_head = share * float(runs.gradient_bytes_K[k] - runs.head_gradient_bytes_K[k])

    def row(self, values):
        return values if values.ndim == 1 else values[self.variant]

    def alive(self, place):
        """What is kept of the units up to one."""
        return self.shared + sum(self.kept[: place + 1])

    def away(self, away_RK, unit):
        where = 0 if unit == 0 else 3 if unit == self.last else 1 if unit == self.first else 2
        return float(away_RK[where, self.k])

    def peak(self, name, unit):
        own = self.row(getattr(self.loads.costs, name.format("recompute_" if self.behind[unit] else "")))[unit]
        return own + self.moved(unit)

    def moved(self, unit):
        """What the unit in front has moved, as it is recomputed or not."""
        place = self.units.index(unit)
        if self.loads.costs.below is None or place == 0:
            return 0.0
        front = self.units[place - 1]
        return self.loads.costs.below[self.again[front] or (front == 0 and self.is_recomputed)][unit]

    def forward(self):
        away_RK = self.runs.forward_away_RK
        for place, unit in enumerate(self.units):
            yield self.alive(place - 1) + self.peak("{}forward_peak_R", unit) + self.away(away_RK, unit)

    def backward(self, name, pending, gradients):
        """Rows of a backward: ``gradients`` are there when the head runs, and before it what is not yet made is not."""
        sharding, factor, k = self.loads.sharding, self.loads.factor, self.k
        for place, unit in reversed(list(enumerate(self.units))):
            there = gradients - sum(self.made[: place + 1]) if gradients else 0.0
            alive = self.alive(place) + there + self.peak(name, unit) + self.away(self.runs.backward_away_RK, unit)
            if sharding is not None and unit == self.units[-1]:
                alive += pending if not sharding.is_one_unit or unit == self.last else 0.0
            elif sharding is not None and not sharding.is_one_unit:
                alive += self.row(sharding.trained_R)[unit + 1]
            yield alive
            if sharding is not None and sharding.is_one_unit:
                yield (1 + factor) * float(self.runs.gradient_bytes_K[k])
            elif sharding is not None and unit in (0, self.last):
                copied = (1 + factor) * self.row(sharding.trained_R)[unit]
                below = gradients if unit == 0 else self.alive(place - 1)
                yield copied + below + self.away(self.runs.backward_away_RK, unit)

    def inputs(self):
        split, waiting = self.loads.split, 0.0
        for place, unit in reversed(list(enumerate(self.units))):
            peak = (split.recompute_peak_R if self.behind[unit] else split.peak_R)[unit] + self.moved(unit)
            yield self.alive(place) + waiting + peak + self.away(self.runs.backward_away_RK, unit)
            waiting += split.waiting_R[unit]
        yield waiting

    def ended(self, times):
        """What is left behind the backward of each layer, its gradients so many times."""
        for place, unit in enumerate(self.units):
            if unit not in (0, self.last):
                yield self.alive(place - 1) + times * (self.above_head - sum(self.made[:place]))


@pytest.mark.parametrize("sharding", [None, "shared", "away", "one unit"])
@pytest.mark.parametrize("seed", range(12))
def test_rows_folded_are_those_of_every_unit(seed, sharding):
    rng = np.random.default_rng([seed, len(sharding or "")])
    layers, variants, factor = int(rng.integers(1, 8)), int(rng.integers(1, 4)), float(rng.integers(1, 3))
    loads, single_R = network(rng, layers, variants, sharding, factor)
    runs = stages(rng, layers, variants, sharding)
    found, kind = PassBytes(loads, runs), "first_{}backward_peak_R" if loads.reduces else "{}backward_peak_R"
    bucket_K = rng.integers(0, MOST, len(runs)).astype(float)
    pending_K, full_K = found.pending(), factor * runs.gradient_bytes_K
    peaks = [rows.max(axis=0) for rows in (found.forward_rows(), found.backward_rows(), found.first_backward_rows())]
    filled = [found.bucket(bucket_K, progressive=is_first) for is_first in (False, True)] if not sharding else []
    for k in range(len(runs)):
        walk, bucket = Walk(loads, single_R, runs, k), bucket_K[k]
        assert found.saved_K[k] == walk.alive(len(walk.units))
        assert peaks[0][k] == max(walk.forward())
        assert peaks[1][k] == max(walk.backward(kind, pending_K[k], 0.0))
        first = max(walk.backward("first_{}backward_peak_R", 0.0, walk.above_head))
        assert peaks[2][k] == first + factor * runs.imbalance_K[k]
        assert found.input_backward()[k] == max(walk.inputs())
        assert found.waiting()[k] == sum(loads.split.waiting_R[unit] for unit in walk.units)
        if filled:
            none, once, twice = (max(walk.ended(times)) for times in (0, 1, 1 + 1 / factor))
            tail, has_tail = walk.alive(len(walk.units) - 2), walk.last in walk.units
            tail += min(bucket, runs.tail_gradient_bytes_K[k])
            layers_made = walk.above_head - sum(
                made for made, u in zip(walk.made, walk.units, strict=True) if u != walk.last
            )
            later = [full_K[k] + min(none + bucket, once), full_K[k] + bucket]
            assert filled[0][k] == max(*later, *([tail + full_K[k]] * has_tail))
            first = [min(once + bucket, twice), full_K[k] + bucket, *([tail + layers_made] * has_tail)]
            assert filled[1][k] == pytest.approx(max(first), rel=1e-12)


def test_weights_are_made_before_any_is_reduced():
    rng = np.random.default_rng(0)
    for sharding in ("shared", "away", "one unit"):
        loads, _ = network(rng, 5, 1, sharding, 1.0)
        runs = stages(rng, 5, 1, sharding)
        found, total = PassBytes(loads, runs), runs.gradient_bytes_K
        away_K = np.maximum(runs.forward_away_RK, runs.backward_away_RK).max(axis=0)
        if sharding == "one unit":
            assert (found.pending() == total).all()
            assert (found.weight_backward(total / 2) >= 3 * total).all()
        assert (found.weight_backward(total / 2) >= found.waiting() + total / 2 + found.pending() + away_K).all()
        assert (found.weight_backward(total / 2) >= 1.5 * total + found.pending() + away_K).all()


def test_units_by_themselves_are_the_rows_of_a_stage():
    rng = np.random.default_rng(1)
    loads, _ = network(rng, 6, 1, "away", 1.0)
    runs = stages(rng, 6, 1, "away")
    whole = PassBytes(loads, runs)
    for k in range(len(runs)):
        alone = PassBytes(loads, runs.take(np.array([k])), by_unit=True)
        count = int(runs.end_K[k] - runs.start_K[k]) + int(runs.start_K[k] == 0) + int(runs.end_K[k] == 6)
        assert alone.count_RK.tolist() == [[1.0]] * count
        for name in ("forward_rows", "backward_rows", "first_backward_rows"):
            rows = getattr(alone, name)()
            assert rows.max() == getattr(whole, name)()[:, k].max()
            assert (getattr(alone, name)(temporaries=False) <= rows).all()
