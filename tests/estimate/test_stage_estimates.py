from dataclasses import replace

import pytest

from lightning_mist.estimate import Estimator, estimate_plan
from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings
from lightning_mist.estimate.estimate_data import worst_of
from lightning_mist.estimate.replay.rank_replay import replay_plan
from lightning_mist.estimate.stage_estimates import can_replay, what_is_not_run
from lightning_mist.hardware import parse_cluster
from lightning_mist.plan import OffloadRatios, plan_of
from lightning_mist.units import format_bytes
from tests.cost.events import with_events
from tests.specs import spec

GIB = 2**30
FOUR = parse_cluster("1x4xL4")
NETWORK = with_events(spec(8, parameter_bytes=40_000_000, edge_bytes=80_000_000))
PLAN = plan_of(8, world_size=4, global_batch_size=16, pipeline_stages=4)


def estimator(network=NETWORK, cluster=FOUR, limit=22 * GIB):
    return Estimator(network, cluster, limit)


def test_every_allocation_is_replayed_where_it_is_known():
    stages = estimator().stages(PLAN)
    for stage, replay in zip(stages, replay_plan(NETWORK, PLAN), strict=True):
        assert 0 <= stage.allocated.p50 - replay.peak_bytes < 20 * 2**20  # cuBLAS's two workspaces and rounding
        assert stage.term("parameter_bytes") == dict(replay.terms_at_peak())["parameter_bytes"]
        assert sum(value for _, value in stage.terms) == stage.device_total.p50
        assert stage.tensors[0].bytes == replay.alive_at(replay.peak_event)[0].nbytes
        assert stage.phase.split()[0] in ("forward", "backward", "optimizer", "start")
        assert stage.term("communicator_bytes") > 0


def test_only_the_stages_that_need_most_are_replayed_if_asked():
    fast = estimator()
    quick, some, every = (fast.stages(PLAN, replay=which) for which in ("none", "worst", "all"))
    assert [bool(stage.tensors) for stage in quick] == [False] * 4
    assert [bool(stage.tensors) for stage in every] == [True] * 4
    assert worst_of(some).tensors
    assert all(found in (first, second) for found, first, second in zip(some, quick, every, strict=True))
    for first, second in zip(quick, every, strict=True):
        assert first.allocated.p50 == pytest.approx(second.allocated.p50, rel=0.1)


@pytest.mark.parametrize("chunks", [1, 2])
def test_of_groups_alike_but_for_microbatches_in_flight_those_that_need_less_are_not_replayed(chunks):
    cluster, network = parse_cluster("1x5xL4"), with_events(spec(20, parameter_bytes=40_000_000))
    schedule = "1f1b" if chunks == 1 else "interleaved-1f1b"
    plan = plan_of(
        20,
        world_size=5,
        global_batch_size=100_000,
        num_microbatches=20,
        pipeline_stages=5,
        chunks=chunks,
        schedule=schedule,
    )
    some, every = (estimator(network, cluster).stages(plan, replay=which)[:5] for which in ("worst", "all"))
    assert not any(stage.tensors for stage in some[2:4])
    for found, known in zip(some[1:4], every[1:4], strict=True):
        assert found.device_total.p50 == pytest.approx(known.device_total.p50, rel=0.03)
        assert sum(value for _, value in found.terms) == found.device_total.p50
        assert (found.stage, found.devices) == (known.stage, known.devices)
    assert worst_of(some) == worst_of(every)


def test_on_cpus_there_is_nothing_but_tensors():
    stage = worst_of(estimator(cluster=parse_cluster("4xcpu:8GiB")).stages(PLAN))
    assert stage.allocated == stage.reserved == stage.device_total
    assert {name for name, value in stage.terms if value}.isdisjoint(
        {"allocator_bytes", "context_bytes", "communicator_bytes"}
    )


def test_memory_that_is_short_makes_the_allocator_flush():
    plan = plan_of(8, world_size=4, global_batch_size=64, num_microbatches=4)
    plenty = worst_of(estimator().stages(plan))
    assert plenty.flushes == 0
    short = worst_of(estimator(limit=plenty.device_total.p50 - 4 * 2**20).stages(plan))
    assert short.device_total.p50 <= plenty.device_total.p50


def test_chunks_of_one_group_share_its_figures():
    plan = plan_of(8, world_size=2, global_batch_size=16, pipeline_stages=2, chunks=2, schedule="interleaved-1f1b")
    stages = estimator(cluster=parse_cluster("1x2xL4")).stages(plan)
    assert [stage.stage for stage in stages] == [0, 1, 2, 3]
    assert replace(stages[2], stage=0) == stages[0]


def test_what_is_not_run_is_estimated_and_said():
    assert what_is_not_run(PLAN) == ()
    offloading = plan_of(8, world_size=4, global_batch_size=16, offload=OffloadRatios(optimizer=1.0))
    assert can_replay(NETWORK, offloading)
    assert can_replay(replace(NETWORK, master_weights=True), offloading)
    moving = plan_of(8, world_size=4, global_batch_size=16, offload=OffloadRatios(activations=0.5))
    assert can_replay(NETWORK, moving)
    assert worst_of(estimator().stages(moving)).host_bytes > 0
    assert estimator().timelines(moving)
    stage = worst_of(estimator().stages(offloading))
    assert stage.host_bytes > 0
    assert what_is_not_run(offloading) == ()
    ring = plan_of(8, world_size=4, global_batch_size=16, context_parallel_degree=2)
    with_length = replace(NETWORK, sequence_length=8)
    assert worst_of(estimator(with_length).stages(ring)).term("communicator_bytes") > 0
    assert not can_replay(with_length, ring)
    assert what_is_not_run(ring) == ()
    both = plan_of(8, world_size=4, global_batch_size=16, context_parallel_degree=2, tensor_parallel_degree=2)
    assert any("beside tensor parallelism is planned" in note for note in what_is_not_run(both))
    few = plan_of(8, world_size=4, global_batch_size=2, pipeline_stages=4, num_microbatches=2)
    assert (few.num_loaders, what_is_not_run(few)) == (1, ())
    few = replace(few, data_parallel_size=None)
    assert sum("such a plan is not executed" in note for note in what_is_not_run(few)) == 2
    assert worst_of(estimator().stages(few)).term("communicator_bytes") > 0


def test_the_allocator_may_be_set_up_otherwise():
    plain = estimator().stages(PLAN)[0]
    grown = replace(estimator(), allocator=AllocatorSettings(expandable_segments=True)).stages(PLAN)[0]
    # Blocks are cut exactly, and what is free is not kept in pieces; only pages are rounded up.
    assert grown.allocated.p50 <= plain.allocated.p50
    assert grown.reserved.p50 - grown.allocated.p50 < min(plain.reserved.p50 - plain.allocated.p50, 2 * 20 * 2**20)


def test_sums_that_no_replay_replaces_cover_what_replays_say():
    offloaded = replace(PLAN, stages=tuple(replace(s, offload=OffloadRatios(optimizer=0.01)) for s in PLAN.stages))
    described = estimator(spec(8, parameter_bytes=40_000_000, edge_bytes=80_000_000))
    for stage, replayed in zip(described.stages(PLAN), estimator().stages(PLAN), strict=True):
        assert stage.reserved.p95 > replayed.reserved.p50
        assert stage.allocated.p95 >= replayed.allocated.p50
        assert stage.reserved.p95 / stage.reserved.p50 > replayed.reserved.p95 / replayed.reserved.p50
    wide, narrow = (worst_of(described.stages(offloaded, replay=replay)) for replay in ("all", "none"))
    assert wide.reserved.p50 == narrow.reserved.p50
    assert wide.reserved.p95 > narrow.reserved.p95


def test_unlike_devices_are_held_against_their_own_memory():
    mixed = parse_cluster("2xA100-40+2xL4")
    found = estimate_plan(replace(estimator(), cluster=mixed, limit=10**12), PLAN)
    parts = [mixed.parts[mixed.part_of(stage.devices[0])] for stage in PLAN.stages]
    assert [stage.limit for stage in found.stages] == [part.device.memory_bytes for part in parts]
    assert found.cluster == "2 x A100-40 with 39.4 GiB each and 2 x L4 with 22.5 GiB each"
    assert (found.verdict, found.fits()) == ("fits", True)
    small = next(stage for stage, part in zip(found.stages, parts, strict=True) if part is mixed.parts[1])
    # A device with a little less than that stage needs is too small, though others need more of larger ones.
    device = replace(mixed.parts[1].device, memory_bytes=small.device_total.p50 - 2**20)
    less = replace(mixed, parts=(mixed.parts[0], replace(mixed.parts[1], device=device)))
    tight = estimate_plan(replace(estimator(), cluster=less, limit=10**12), PLAN)
    assert less.part_of(tight.worst.devices[0]) == 1
    assert not tight.fits()
    assert tight.changes == ()
    assert f"in {format_bytes(device.memory_bytes)} per device" in tight.headline()
