import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import PlanError
from lightning_mist.plan import (
    RowSlice,
    feeders,
    loader_of,
    loader_ranks,
    of_whole_batches,
    replica_of,
    replica_ranks,
    row_slice,
)
from tests.plans import plan_of, plans


def rows_of(plan, stage, microbatch, rows):
    """``(owner, row)`` of everything that the ranks of a stage compute on in a microbatch, by replica."""
    found = {}
    width = len(stage.devices) // stage.data_parallel_degree
    for rank in stage.devices[::width]:
        part = row_slice(plan, rank, microbatch)
        first, end = part.rows(rows)
        found.setdefault(replica_of(plan, rank), []).extend((part.owner, row) for row in range(first, end))
    return found


@given(plans(tensor_degrees=(1, 2), fewer_loaders=True), st.integers(0, 3))
def test_every_row_is_computed_once_on_every_stage_and_microbatches_agree_between_stages(plan, missing):
    # An uneven last batch has fewer rows than the plan was made for.
    rows = max(1, plan.global_batch_size // plan.num_loaders - missing)
    feeding = [rank for ranks in feeders(plan) for rank in ranks]
    every_row = sorted((owner, row) for owner in feeding for row in range(rows))
    whole = rows == plan.global_batch_size // plan.num_loaders
    by_stage = []
    for stage in plan.stages:
        microbatches = [rows_of(plan, stage, index, rows) for index in range(plan.num_microbatches)]
        computed = [row for found in microbatches for part in found.values() for row in part]
        assert sorted(computed) == every_row
        for found in microbatches:
            for replica, part in found.items():
                assert {owner for owner, _ in part} <= set(feeders(plan)[replica])
        by_stage.append(microbatches)
        if whole:
            size = stage.microbatch_size * stage.data_parallel_degree // plan.num_replicas
            assert {len(part) for found in microbatches for part in found.values()} == {size}
    assert all(microbatches == by_stage[0] for microbatches in by_stage)


@given(plans(runnable=False))
def test_replicas_divide_the_ranks(plan):
    replicas = [replica_ranks(plan, replica) for replica in range(plan.num_replicas)]
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(plan.world_size))
    assert len({len(ranks) for ranks in replicas}) == 1


@given(plans(max_devices=12, tensor_degrees=(1, 2), fewer_loaders=True))
def test_each_loader_feeds_one_replica_by_a_rank_of_its_group_there(plan):
    by_replica = feeders(plan)
    assert sorted(loader_of(plan, rank) for ranks in by_replica for rank in ranks) == list(range(plan.num_loaders))
    assert len({len(ranks) for ranks in by_replica}) == 1
    for replica, ranks in enumerate(by_replica):
        assert set(ranks) <= set(replica_ranks(plan, replica))
    groups = [loader_ranks(plan, loader) for loader in range(plan.num_loaders)]
    assert [rank for ranks in groups for rank in ranks] == list(range(plan.world_size))
    assert all(loader_of(plan, rank) == loader for loader, ranks in enumerate(groups) for rank in ranks)


def test_a_loader_whose_ranks_are_all_where_others_feed_makes_one_of_these_change():
    plan = plan_of(6, 1, {"devices": (0, 4, 2, 5, 1, 3), "tensor": 2}, data_parallel_size=3)
    # Ranks 4 and 5 find the replicas of ranks 0 and 2 taken, and rank 1 may feed in place of rank 0.
    assert feeders(plan) == ((4,), (2,), (1,))


@given(st.integers(1, 50), st.integers(1, 50))
def test_parts_cover_a_batch_and_differ_by_one_row_at_most(batch_rows, parts):
    ranges = [RowSlice(owner=0, part=part, parts=parts).rows(batch_rows) for part in range(parts)]
    assert [row for first, end in ranges for row in range(first, end)] == list(range(batch_rows))
    lengths = {end - first for first, end in ranges}
    assert max(lengths) - min(lengths) <= 1


def test_two_replicas_by_hand():
    plan = plan_of(8, 4, {"devices": [1, 3]}, {"devices": [0, 2]})
    assert [replica_of(plan, rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [row_slice(plan, 1, index) for index in range(4)] == [
        RowSlice(owner=owner, part=part, parts=2) for owner in (0, 1) for part in (0, 1)
    ]
    assert row_slice(plan, 2, 3) == RowSlice(owner=3, part=1, parts=2)


def test_a_part_never_mixes_the_batches_of_two_ranks():
    plan = plan_of(6, 3, {}, {})
    with pytest.raises(PlanError, match="stage 0: 3 microbatches x 1 data-parallel ranks in a replica = 3 parts"):
        row_slice(plan, 0, 0)


@given(plans())
def test_evaluation_takes_every_batch_once_and_whole(plan):
    whole = of_whole_batches(plan)
    degrees = {stage.data_parallel_degree for stage in plan.stages}
    if whole is None:
        assert len(degrees) > 1 or plan.schedule == "interleaved-1f1b"
        return
    for replica in range(whole.num_replicas):
        ranks = replica_ranks(whole, replica)
        for rank in ranks:
            slices = [row_slice(whole, rank, index) for index in range(whole.num_microbatches)]
            assert [item.owner for item in slices] == list(ranks)
            assert all(item.parts == 1 for item in slices)
