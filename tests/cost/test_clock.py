import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import clock, step_seconds
from lightning_mist.cost.clock import clocked_seconds
from lightning_mist.cost.stage import StageSeconds
from lightning_mist.plan import Plan, StageMesh, StagePlan

NAMES = [field.name for field in dataclasses.fields(StageSeconds)]


def stage(**seconds):
    return StageSeconds(**{name: np.array([float(seconds.get(name[:-2], 0.0))]) for name in NAMES})


def plan(schedule, groups, *, chunks=1, microbatches=4):
    stages = tuple(
        StagePlan(layers=(index, index + 1), mesh=StageMesh(devices=(index % groups,)), microbatch_size=1)
        for index in range(groups * chunks)
    )
    return Plan(global_batch_size=microbatches, num_microbatches=microbatches, stages=stages, schedule=schedule)


@pytest.mark.parametrize(("groups", "chunks", "microbatches"), [(2, 2, 4), (3, 2, 6), (2, 4, 8), (4, 2, 64)])
def test_interleaving_shortens_the_bubble(groups, chunks, microbatches):
    interleaved = plan("interleaved-1f1b", groups, chunks=chunks, microbatches=microbatches)
    each = [stage(forward=1, backward=2)] * (groups * chunks)
    found = clocked_seconds(interleaved, each)
    assert found == pytest.approx(3 * (chunks * microbatches + groups - 1))
    assert found < step_seconds([3 * chunks] * groups, [0] * groups, microbatches)


@pytest.mark.parametrize("microbatches", [4, 9, 200])
def test_zero_bubble_fills_the_bubble_with_weight_gradients(microbatches):
    each = [stage(forward=1, backward=2, weight=1)] * 4
    found = clocked_seconds(plan("zb-h1", 4, microbatches=microbatches), each)
    assert found == pytest.approx(3 * microbatches + 3 * (1 + 1 - 1))


def test_what_is_waited_for_is_part_of_what_waits():
    plain, waiting = (
        [stage(forward=1, backward=2, weight=1, **more)] * 2
        for more in ({}, {"transfer": 3, "arrival": 1, "unshard": 2, "scatter": 4, "recompute": 1})
    )
    longer = [stage(forward=3, backward=10, weight=1)] * 2
    zero_bubble = plan("zb-h1", 2)
    assert clocked_seconds(zero_bubble, waiting) == clocked_seconds(zero_bubble, longer)
    assert clocked_seconds(zero_bubble, plain) < clocked_seconds(zero_bubble, longer)


def test_chunks_update_together():
    each = [stage(forward=1, backward=2, reduce=1, tied=2, update=3, gather=4)] * 4
    bare = [stage(forward=1, backward=2)] * 4
    interleaved = plan("interleaved-1f1b", 2, chunks=2)
    assert clocked_seconds(interleaved, each) - clocked_seconds(interleaved, bare) == pytest.approx(2 * (1 + 2 + 3 + 4))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1"])
@pytest.mark.parametrize("seed", range(6))
def test_cut_lists_take_as_long_as_whole_ones(monkeypatch, schedule, seed):
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(2, 4))
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    stages = []
    for _ in range(groups * chunks):
        forward, weight, rest = rng.uniform(1, 3, 3)
        stages.append(stage(forward=forward, backward=weight + rest, weight=weight, update=rng.uniform(0, 5)))
    long = plan(schedule, groups, chunks=chunks, microbatches=30 * groups)
    cut = clocked_seconds(long, stages)
    monkeypatch.setattr(clock, "LEAST", 10_000)
    assert cut == pytest.approx(clocked_seconds(long, stages), rel=5e-3)
