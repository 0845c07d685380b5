"""The search with ZeRO within groups of ranks, where it is asked for."""

from dataclasses import replace

import pytest

from lightning_mist.plan.changes import TECHNIQUES, Ground
from lightning_mist.plan.plan_text import recipe_of
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner.space.usable_memory import USABLE_MEMORY
from tests.cost.time.test_communication import machine
from tests.specs import cluster, spec

# Layers are given out to two nodes of two devices: fast inside, slow between.
NETWORK = spec(4, parameter_bytes=40_000_000)
PLACE = cluster(4, nodes=2, memory=10**12, kind="cuda")
HARDWARE = machine(inside=1e11, across=1e8, latency=1e-6)
SPACE = SearchSpace(zero_stages=(3,), num_stages=(1,), tensor_parallel_degrees=(1,), offload=(), checkpointing=False)


def best(search, **options):
    planner = Planner(NETWORK, PLACE, profile=HARDWARE)
    return planner.tune(global_batch_size=32, search=search, **options)


def test_groups_are_found_where_they_pay_and_are_asked_for():
    whole, hybrid = best(SPACE), best(replace(SPACE, shard_degrees=(2, 3)))
    assert [stage.mesh.shard_degree for stage in whole.plan.stages] == [None]
    assert [stage.mesh.shard_degree for stage in hybrid.plan.stages] == [2]
    assert hybrid.plan.predicted.step_seconds < 0.7 * whole.plan.predicted.step_seconds
    assert "zero 3 hsdp 2 x 2" in recipe_of(hybrid.plan)
    assert hybrid.status == "optimal"


def test_what_the_groups_buy_is_told():
    hybrid = best(replace(SPACE, shard_degrees=(2,)))
    technique = next(item for item in TECHNIQUES if item.name == "hybrid sharding")
    asked = replace(SPACE, shard_degrees=(2,))
    assert technique.use(hybrid.plan) == "groups of 2 ranks on the only stage"
    off = technique.off(hybrid.plan, Ground(cuts_batches=True, search=asked))
    assert [stage.mesh.shard_degree for stage in off.stages] == [None]
    assert technique.without(hybrid.plan, asked) == SPACE
    assert technique.use(off) == ""
    without = [
        item.off(hybrid.plan, Ground(cuts_batches=True, search=asked)) for item in TECHNIQUES if "ZeRO-1" in item.name
    ]
    assert [stage.mesh.shard_degree for plan in without for stage in plan.stages] == [None]


def test_a_group_that_does_not_fit_is_not_chosen():
    search = replace(SPACE, shard_degrees=(2,))
    peaks = [best(asked).plan.predicted.stages[0].peak_bytes for asked in (SPACE, search)]
    tight = best(search, memory_limit=int(sum(peaks) / 2 / USABLE_MEMORY))
    assert peaks[0] < peaks[1]
    assert [stage.mesh.shard_degree for stage in tight.plan.stages] == [None]


def test_what_shards_nothing_has_no_groups():
    found = best(replace(SPACE, zero_stages=(0,), shard_degrees=(2,)))
    assert [(stage.zero_stage, stage.mesh.shard_degree) for stage in found.plan.stages] == [(0, None)]


def test_numbers_that_are_no_groups_are_refused():
    with pytest.raises(ValueError, match=r"shard_degrees=\(1, 2\): one rank has nobody to share with"):
        SearchSpace(shard_degrees=(1, 2))
