from dataclasses import replace

import pytest

from lightning_mist.explain.membership import outside
from lightning_mist.plan import Checkpointing, OffloadRatios, ZeroStage
from lightning_mist.tuner import Planner, SearchSpace
from tests.specs import cluster, profile, spec, with_splits
from tests.tuner.plans import pipeline

NETWORK = with_splits(spec(6, measured=True), (2, False), (2, True))
SEARCH = SearchSpace(offload=("optimizer",), offload_ratios=(0.0, 0.5), schedules=("1f1b",))
MACHINE = replace(profile(), host_to_device_bytes_per_second=2e8, device_to_host_bytes_per_second=1e8)


def planner():
    return Planner(NETWORK, cluster(4, kind="cuda"), profile=MACHINE)


def plan(**changes):
    return pipeline({"layers": 2, "data": 2}, {"layers": 4, "data": 2}, microbatches=4, rows=4, **changes)


def first(made, **changes):
    return replace(made, stages=(replace(made.stages[0], **changes), *made.stages[1:]))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (plan(), ()),
        (first(plan(), zero_stage=ZeroStage(3), checkpointing=Checkpointing(layers=1)), ()),
        (first(plan(), offload=OffloadRatios(optimizer=0.5)), ()),
        (first(plan(), offload=OffloadRatios(optimizer=1.0)), ("100% of optimizer state in host memory on stage 0",)),
        (first(plan(), offload=OffloadRatios(gradients=0.5)), ("50% of gradients in host memory on stage 0",)),
        (replace(plan(), schedule="zb-h1"), ("schedule zb-h1",)),
    ],
)
def test_settings_decide(made, said):
    assert outside(planner(), made, SEARCH) == said


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"num_stages": (1,)}, "2 stages"),
        ({"num_microbatches": (8,)}, "4 microbatches"),
        ({"layer_cuts": (3,)}, "stages that begin at layers 0, 2"),
        ({"zero_stages": (0,)}, "ZeRO-1 on stage 0"),
        ({"checkpointing": False}, "1 recomputed layers on stage 0"),
        ({"checkpointed_shares": (0.0, 1.0)}, "1 recomputed layers on stage 0"),
        ({"tensor_parallel_degrees": (2,)}, "data 2 x tensor 1 and 4 microbatches on stage 0"),
        ({"devices_per_stage": (1, 4)}, "data 2 x tensor 1 and 4 microbatches on stage 0"),
    ],
)
def test_limits_count(limits, said):
    made = first(plan(), zero_stage=ZeroStage(1), checkpointing=Checkpointing(layers=1))
    assert said in outside(planner(), made, replace(SEARCH, **limits))


def test_what_a_search_finds_lies_inside():
    found = planner()
    for memory in (10**9, 600_000):
        result = found.tune(global_batch_size=16, memory_limit=memory, search=SEARCH)
        for item in (result.plan, *(other.plan for other in result.alternatives)):
            assert outside(found, item, SEARCH) == ()
