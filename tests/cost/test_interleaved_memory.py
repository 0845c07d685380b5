import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel, predict, stage_memory
from lightning_mist.cost.interleaved_memory import plan_memory, plans_peaks, stage_peaks
from lightning_mist.cost.memory.held_parameters import Holdings
from lightning_mist.plan import Checkpointing
from tests.plans import plan_of
from tests.specs import candidates_of, cluster, profile, spec
from tests.tuner.plans import pipeline


def interleaved(layers, *, groups=2, degree=1, rows=4, microbatches=4, zero=0):
    stages = [{"layers": count, "data": degree, "zero": zero} for count in layers]
    batch = rows * degree * microbatches
    return plan_of(batch, microbatches, *stages, groups=groups, schedule="interleaved-1f1b")


def test_chunks_of_one_group_have_one_peak():
    first, second, third, last = stage_memory(spec(8), interleaved([2, 2, 2, 2]))
    assert first == third
    assert second == last
    # One has the embedding, the other the projection.
    for memory in (first, second):
        terms = dict(memory.terms)
        assert terms["parameter_bytes"] == 80_000 + 4 * 40_400
        assert terms["optimizer_bytes"] == 2 * terms["parameter_bytes"]
        assert terms["buffer_bytes"] == 64


def test_what_two_chunks_hold_is_one_copy():
    network = spec(4, tied=True)
    holdings = Holdings(network)
    head, middle, tail = (candidates_of(start, end) for start, end in ((0, 1), (1, 3), (3, 4)))
    assert holdings.doubled([head, middle]) == (0.0, 0.0)
    assert holdings.doubled([head, middle, tail]) == (80_000.0, 80_000.0)


def test_chunks_keep_more_microbatches_than_one_stage():
    network = spec(8, parameter_bytes=4000, edge_bytes=4000)
    plan = interleaved([2, 2, 2, 2], microbatches=8)
    plain = dataclasses.replace(plan, stages=_merged(plan), schedule="1f1b")
    activations = [dict(stage_memory(network, item)[0].terms)["activation_bytes"] for item in (plain, plan)]
    # Two microbatches of four layers, one of them at hand; five of two layers, one of them at hand, with the head once.
    assert activations[0] == 4 * (1000 + 4 * 10_000)
    assert activations[1] > activations[0]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharding_helps_chunks_too(zero):
    network = spec(8, parameter_bytes=400_000, edge_bytes=400_000)
    plain, sharded = (
        stage_memory(network, interleaved([2, 2, 2, 2], degree=2, zero=stage))[0].peak_bytes for stage in (0, zero)
    )
    assert sharded < plain


def test_predictions_of_chunks_add_up():
    plan = interleaved([2, 2, 2, 2])
    network = spec(8, measured=True)
    found = predict(network, profile(), cluster(2), plan)
    assert [stage.peak_bytes for stage in found.stages] == [memory.peak_bytes for memory in stage_memory(network, plan)]
    busy = [sum(found.stages[chunk].steady_seconds for chunk in plan.chunks(group)) for group in range(2)]
    assert found.step_seconds > plan.num_microbatches * max(busy)
    plain = dataclasses.replace(plan, stages=_merged(plan), schedule="1f1b")
    fast = profile(latency=0.0, link=1e12)
    seconds = [predict(network, fast, cluster(2), item).step_seconds for item in (plan, plain)]
    assert seconds[0] < seconds[1]


MOVED = {"activations": 0.5, "optimizer": 1.0}
# Weights' gradients stay where they are made.
SAVINGS = [
    (name, zero, moved) for name in ("1f1b", "gpipe", "interleaved-1f1b") for zero in range(4) for moved in ({}, MOVED)
]
SAVINGS += [("zb-h1", 0, {}), ("zb-h1", 1, {})]


@pytest.mark.parametrize(("schedule", "zero", "offload"), SAVINGS)
@pytest.mark.parametrize("microbatches", [2, 8])
def test_peaks_of_all_ways_to_recompute_are_those_of_each(schedule, zero, offload, microbatches):
    network = spec(9, kinds=(0, 1, 0, 0, 1, 1, 0, 0, 0), widths=(1000, 3000), tied=True)
    stages = [{"layers": layers, "data": 2, "zero": zero, "offload": offload} for layers in (3, 2, 2, 2)]
    groups = {"groups": 2} if schedule == "interleaved-1f1b" else {}
    plan = pipeline(*stages, rows=8, microbatches=microbatches, schedule=schedule, **groups)
    model = StageCostModel(network, profile(), cluster(plan.world_size))
    counts_SK = np.array([[0, 1, 3, 2], [0, 1, 2, 0], [0, 1, 2, 1], [0, 1, 2, 2]])
    (found,) = plans_peaks(model.memory, [(plan, counts_SK)])
    for index, counts in enumerate(counts_SK.T.tolist()):
        stages = tuple(
            dataclasses.replace(stage, checkpointing=Checkpointing(layers=count))
            for stage, count in zip(plan.stages, counts, strict=True)
        )
        wanted = plan_memory(model.memory, dataclasses.replace(plan, stages=stages))
        for stage, memory in enumerate(wanted):
            # Their terms are rounded one by one.
            assert abs(found.device_SK[stage, index] - memory.peak_bytes) <= 5
            assert found.host_SK[stage, index] == memory.host_bytes


def _merged(plan):
    """The same layers on as many stages as groups."""
    half = plan.num_layers // 2
    return tuple(
        dataclasses.replace(stage, layers=(index * half, (index + 1) * half))
        for index, stage in enumerate(plan.stages[:2])
    )


@pytest.mark.parametrize("at", [0, -1])
def test_a_stage_by_itself_needs_what_it_needs_among_all(at):
    network, plan = spec(6, widths=(3000,)), pipeline(*[{"layers": 2, "data": 2}] * 3, rows=8, schedule="zb-h1")
    model = StageCostModel(network, profile(), cluster(plan.world_size))
    counts_SK = np.array([[0, 1, 2]] * 3)
    wanted_K = plans_peaks(model.memory, [(plan, counts_SK)])[0].device_SK[at]
    longer = pipeline({"layers": 6, "data": plan.world_size}, schedule=plan.schedule)
    found_K, other_K = stage_peaks(model.memory, [(plan, counts_SK[at]), (longer, np.array([4]))], at)
    assert found_K.tolist() == wanted_K.tolist()
    assert other_K.tolist() == plans_peaks(model.memory, [(longer, np.array([[4]]))])[0].device_SK[at].tolist()
