import itertools

import numpy as np
import pytest

from lightning_mist.cost import StageCandidates
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.working import Sharding, WorkingSets, range_maxima
from tests.specs import spec


def test_range_maxima():
    values = np.array([3.0, -1.0, 4.0, 1.0])
    table = range_maxima(values)
    for start, end in itertools.combinations_with_replacement(range(5), 2):
        assert table[start, end] == max(values[start:end], default=-np.inf)


NETWORK = spec(5, kinds=(0, 1, 1, 0, 1), widths=(1000, 2500), tied=True, edge_bytes=120_000)


def stages():
    """Every stage of the network with every number of checkpointed layers."""
    return [(start, end, kept) for start in range(5) for end in range(start + 1, 6) for kept in range(end - start + 1)]


def setup(rows):
    model = MemoryModel(NETWORK)
    candidates = StageCandidates(
        start_K=np.array([item[0] for item in stages()]),
        end_K=np.array([item[1] for item in stages()]),
        checkpointed_K=np.array([item[2] for item in stages()]),
        zero_stage_K=np.zeros(len(stages()), dtype=np.int64),
    )
    held = model.holdings.of(candidates)
    working = WorkingSets(model.costs(rows), model.holdings.table.single_R)
    return model.costs(rows), working, model._runs(candidates, held, rows)


def parts(stage):
    """Regions of a stage in order, with whether each is recomputed."""
    start, end, kept = stage
    head, tail = ([(0, False)] if start == 0 else []), ([(6, False)] if end == 5 else [])
    return head + [(layer + 1, layer < start + kept) for layer in range(start, end)] + tail


def gradient_of(region):
    """Bytes that a region's backward makes: a block's own, and the tied embedding's with the projection."""
    kinds = (0, 1, 1, 0, 1)
    if region in (0, 6):
        return 120_000 if region == 6 else 0
    return 40_400 * (1 + kinds[region - 1])


def gradients_of(region):
    """Bytes of the gradients that a region's parameters have, also of those that other regions use."""
    return 120_000 if region in (0, 6) else gradient_of(region)


@pytest.mark.parametrize("rows", [1, 4])
def test_equals_walking_through_the_stage(rows):
    costs, working, runs = setup(rows)
    forward, backward, first = working.forward(runs), working.backward(runs), working.first_backward(runs)
    for index, stage in enumerate(stages()):
        sequence = parts(stage)
        kept = [costs.checkpointed_saved_R[r] if again else costs.saved_R[r] for r, again in sequence]
        peaks = [costs.recompute_backward_peak_R[r] if again else costs.backward_peak_R[r] for r, again in sequence]
        firsts = [
            costs.first_recompute_backward_peak_R[r] if again else costs.first_backward_peak_R[r]
            for r, again in sequence
        ]
        assert forward[index] == max(sum(kept[:k]) + costs.forward_peak_R[r] for k, (r, _) in enumerate(sequence))
        alive = [sum(kept[: k + 1]) for k in range(len(sequence))]
        assert backward[index] == max(a + p for a, p in zip(alive, peaks, strict=True))
        made = [sum(gradient_of(r) for r, _ in sequence[k + 1 :]) for k in range(len(sequence))]
        np.testing.assert_allclose(
            first[index], max(a + p + g for a, p, g in zip(alive, firsts, made, strict=True)), rtol=1e-12
        )


def test_sharding_equals_walking_through_the_stage():
    costs, _, runs = setup(2)
    numbers = np.random.default_rng(0)
    reduced, forward_only, backward_only = (numbers.integers(0, 200_000, 7).astype(float) for _ in range(3))
    reduced[6] = 0.0  # No region lies above the tail.
    sharding = Sharding(kept=0.5, reduced_R=reduced, forward_R=forward_only, backward_R=backward_only)
    working = WorkingSets(costs, MemoryModel(NETWORK).holdings.table.single_R, sharding)
    forward, backward, first = working.forward(runs), working.backward(runs), working.first_backward(runs)
    for index, stage in enumerate(stages()):
        sequence = parts(stage)
        kept = [costs.checkpointed_saved_R[r] if again else costs.saved_R[r] for r, again in sequence]
        assert forward[index] == max(
            sum(kept[:k]) + costs.forward_peak_R[r] + forward_only[r] for k, (r, _) in enumerate(sequence)
        )
        top = len(sequence) - 1
        assert working.pending(runs)[index] == gradients_of(sequence[0][0])
        alive = []
        for k, (r, again) in enumerate(sequence):
            peak = costs.first_recompute_backward_peak_R[r] if again else costs.first_backward_peak_R[r]
            beside = 0.0 if k == top else reduced[r]
            alive.append(sum(kept[: k + 1]) + beside + peak + backward_only[r])
        # Gradients of the first region that an earlier backward made are under way until the top one has run.
        later = [*alive[:top], alive[top] + gradients_of(sequence[0][0])]
        assert backward[index] == pytest.approx(max(later), rel=1e-12)
        made = [0.5 * sum(gradient_of(r) for r, _ in sequence[k + 1 :]) for k in range(len(sequence))]
        assert first[index] == pytest.approx(max(a + g for a, g in zip(alive, made, strict=True)), rel=1e-12)


def test_a_bucket_is_no_larger_than_what_is_final():
    _, working, runs = setup(2)
    total = runs.gradient_bytes_K
    for progressive in (True, False):
        some = working.bucket(runs, np.full(len(total), 1000.0), progressive=progressive)
        all_ = working.bucket(runs, total, progressive=progressive)
        assert (some <= all_).all()
        # When the last bucket is filled all gradients exist, and nothing else.
        assert (all_ >= 2 * total).all()
        assert (some >= total + 1000.0).all()
