import dataclasses

import numpy as np
import pytest
from hypothesis import given

from lightning_mist.cost.inputs.candidates import StageCandidates, placed_slots_of, slots_of
from lightning_mist.plan import replica_of, replica_ranks, row_slice
from tests.plans import plans
from tests.specs import slot_of


def slot(**changes):
    sizes = {"num_stages": 2, "num_microbatches": 8, "data_parallel_degree": 2, "batch_rows": 4}
    return slot_of(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, 4),  # 8 microbatches of 2 ranks with one row each are the batches of 4 ranks with 4 rows each
        ({"replicas": 2}, 2),
        ({"rows": 4}, 9),  # of 16 ranks: its own batch and the 8 that it computes on
        ({"rows": 4, "replicas": 4}, 4),
    ],
)
def test_batches_held(changes, held):
    assert slot(**changes).batches_held == held


@given(plans())
def test_no_rank_of_a_plan_has_more_batches_than_its_slot_says(plan):
    for index, (found, _) in enumerate(slots_of(plan)):
        for rank in plan.stages[index].mesh.devices:
            owners = {row_slice(plan, rank, part).owner for part in range(plan.num_microbatches)} | {rank}
            assert len(owners) <= found.batches_held <= len(replica_ranks(plan, replica_of(plan, rank)))


@given(plans())
def test_a_plan_s_stages_as_slots(plan):
    slots = slots_of(plan)
    assert [found.stage_index for found, _ in slots] == list(range(plan.num_stages))
    for stage, (found, candidates) in zip(plan.stages, slots, strict=True):
        assert found.rows * found.data_parallel_degree * found.num_microbatches == plan.global_batch_size
        assert found.batch_rows * plan.world_size == plan.global_batch_size
        assert found.schedule == plan.schedule
        assert len(candidates) == 1
        assert (candidates.start_K[0], candidates.end_K[0]) == stage.layers
        assert candidates.checkpointed_K[0] == stage.checkpointing.layers
        assert candidates.zero_stage_K[0] == stage.zero_stage


def test_taking_candidates_keeps_their_columns_together():
    columns = np.arange(4)
    every = StageCandidates(start_K=columns, end_K=columns + 10, checkpointed_K=columns + 20, zero_stage_K=columns % 2)
    some = every.take(np.array([3, 1, 1]))
    assert len(some) == 3
    assert some.start_K.tolist() == [3, 1, 1]
    assert some.end_K.tolist() == [13, 11, 11]
    assert some.checkpointed_K.tolist() == [23, 21, 21]
    assert some.zero_stage_K.tolist() == [1, 1, 1]


@given(plans())
def test_slots_with_places_are_the_same_slots(plan):
    for (slot_, one), (placed, same) in zip(slots_of(plan), placed_slots_of(plan, 2), strict=True):
        assert placed.placement is not None
        assert slot_.placement is None
        assert dataclasses.replace(placed, placement=None) == slot_
        assert one.start_K == same.start_K


def test_devices_that_share_a_sequence_compute_as_much_as_on_a_part_of_the_rows():
    assert slot(rows=4).whole_rows == 4
    assert slot(rows=4, context_parallel_degree=8).whole_rows == 0.5
