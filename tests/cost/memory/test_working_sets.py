import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCandidates
from lightning_mist.cost.memory.memory_model import MemoryModel
from lightning_mist.cost.memory.working_set_tables import Sharding, WorkingSets
from lightning_mist.cost.memory.working_sets import StageWorking
from tests.specs import spec

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
    return model.costs(rows), working, model.runs(candidates, held, 1, None)


def parts(stage):
    """Regions of a stage in order, with whether each is recomputed."""
    start, end, kept = stage
    head, tail = ([(0, False)] if start == 0 else []), ([(6, False)] if end == 5 else [])
    return head + [(layer + 1, layer < start + kept) for layer in range(start, end)] + tail


def kept_of(costs, sequence):
    """What each region keeps; the head of recomputed layers keeps what they are called with."""
    recomputes = any(again for _, again in sequence)
    kept = [again or (region == 0 and recomputes) for region, again in sequence]
    pairs = zip(sequence, kept, strict=True)
    return [costs.checkpointed_saved_R[r] if brief else costs.saved_R[r] for (r, _), brief in pairs]


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
    found = StageWorking(working, runs)
    forward, backward, first = found.forward(), found.backward(), found.first_backward()
    for index, stage in enumerate(stages()):
        sequence = parts(stage)
        kept = kept_of(costs, sequence)
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
    trained = numbers.integers(0, 200_000, 7).astype(float)
    forward_away, backward_away = (numbers.integers(0, 200_000, (4, len(stages()))).astype(float) for _ in range(2))
    several = runs.end_K > runs.start_K + 1
    for away in (forward_away, backward_away):
        away[1] = np.where((runs.start_K == 0) & several, away[1] + away[2], 0.0)
    runs = dataclasses.replace(runs, forward_away_AK=forward_away, backward_away_AK=backward_away)
    working = WorkingSets(
        costs, MemoryModel(NETWORK).holdings.table.single_R, Sharding(gradient_share=0.5, trained_R=trained)
    )
    found = StageWorking(working, runs)
    forward, backward, first = found.forward(), found.backward(), found.first_backward()
    for index, stage in enumerate(stages()):
        sequence = parts(stage)
        kept, top = kept_of(costs, sequence), len(sequence) - 1
        forward_only, backward_only = (
            [away[{0: 0, 1: 1 if several[index] else 2, 6: 3}.get(r, 2), index] for r, _ in sequence]
            for away in (forward_away, backward_away)
        )
        assert forward[index] == max(
            sum(kept[:k]) + costs.forward_peak_R[r] + forward_only[k] for k, (r, _) in enumerate(sequence)
        )
        assert found.pending()[index] == gradients_of(sequence[0][0])
        alive = []
        for k, (r, again) in enumerate(sequence):
            peak = costs.first_recompute_backward_peak_R[r] if again else costs.first_backward_peak_R[r]
            beside = 0.0 if k == top else trained[r + 1]
            alive.append(sum(kept[: k + 1]) + beside + peak + backward_only[k])
        made = [0.5 * sum(gradient_of(r) for r, _ in sequence[k + 1 :]) for k in range(len(sequence))]
        # Gradients of the first region that an earlier backward made are under way until the top one has run. Behind
        # head and tail their gradients are copied to where they are reduced.
        copies = [
            sum(kept[:k]) + 2 * trained[r] + backward_only[k] if r in (0, 6) else 0.0
            for k, (r, _) in enumerate(sequence)
        ]
        later = [*alive[:top], alive[top] + gradients_of(sequence[0][0]), *copies]
        assert backward[index] == pytest.approx(max(later), rel=1e-12)
        ended = [copy + (made[k] if sequence[k][0] == 0 else 0.0) for k, copy in enumerate(copies)]
        expected = max(*(a + g for a, g in zip(alive, made, strict=True)), *ended)
        assert first[index] == pytest.approx(expected, rel=1e-12)


def test_stages_that_are_one_unit_reduce_everything_at_the_end():
    costs, plain, runs = setup(2)
    trained = np.full(7, 1e9)
    working = WorkingSets(
        costs,
        MemoryModel(NETWORK).holdings.table.single_R,
        Sharding(gradient_share=0.5, trained_R=trained, is_one_unit=True),
    )
    total = runs.gradient_bytes_K
    found = StageWorking(working, runs)
    assert (found.pending() == total).all()
    # All gradients stay until the backward has ended, and there are copied.
    assert (found.first_backward() == np.maximum(StageWorking(plain, runs).first_backward(), 2 * total)).all()
    assert (found.weight_backward(total / 2) >= 3 * total).all()


def test_a_bucket_is_no_larger_than_what_is_final():
    _, working, runs = setup(2)
    total = runs.gradient_bytes_K
    for progressive in (True, False):
        some = StageWorking(working, runs).bucket(np.full(len(total), 1000.0), progressive=progressive)
        all_ = StageWorking(working, runs).bucket(total, progressive=progressive)
        assert (some <= all_).all()
        # When the last bucket is filled all gradients exist, and nothing else.
        assert (all_ >= 2 * total).all()
        assert (some >= total + 1000.0).all()
