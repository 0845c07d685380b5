import copy
import gc
import weakref

import pytest
import torch

from lightning_mist.runtime.mesh import make_mesh
from lightning_mist.runtime.pipeline import Microbatch, Neighbours
from tests.integration.parity import assert_equal, collect, make_plan, microbatches, reference
from tests.runtime.test_executor import World
from tests.runtime.test_mesh import make_map


def _microbatch(index, rows):
    return Microbatch(value=None, weight=1.0, owner=0, index=index, batch_rows=rows)


def test_a_tensor_without_batch_dimension_comes_from_one_sender_each():
    plan = make_plan([1, 1], degrees=[3, 2], rows=12)
    senders = [Neighbours(make_mesh(plan, rank, make_map(2))) for rank in range(3)]
    part = _microbatch(0, 12)
    assert [[o.rank for o in sender.after(part, 0)] for sender in senders] == [[3], [3, 4], [4]]
    assert [[o.rank for o in sender.after(part, None)] for sender in senders] == [[3], [4], []]
    receivers = [Neighbours(make_mesh(plan, rank, make_map(2))) for rank in (3, 4)]
    assert [[o.rank for o in receiver.before(part)] for receiver in receivers] == [[0, 1], [1, 2]]


def test_rows_follow_the_size_of_the_batch():
    plan = make_plan([1, 1], degrees=[3, 2], rows=12)
    neighbours = Neighbours(make_mesh(plan, 0, make_map(2)))
    assert [neighbours.rows(_microbatch(0, rows)) for rows in (12, 6, 2, 0)] == [4, 2, 0, 0]
    assert neighbours.rows(_microbatch(0, None)) == 1


def test_a_step_may_change_its_batch():
    """Stages look ahead to learn the shapes they will receive; that must not be seen by the step itself."""
    world = World(make_plan([2, 2]))
    expected = reference(world.module, world.batches)
    world.parts = [
        [copy.deepcopy(part) for part in parts]  # In processes of their own ranks share no tensors.
        for parts in world.parts
    ]

    def step(rank, part):
        y = part.value.pop("y")
        part.value["x"].mul_(2.0)
        return rank.module.training_step({"x": part.value["x"] / 2.0, "y": y}, 0)

    world.run(step)
    losses = [rank.losses(parts) for rank, parts in zip(world.ranks, world.parts, strict=True)]
    assert_equal(collect(losses, [rank.gradients() for rank in world.ranks], []), expected)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_was_sent_is_not_kept(schedule):
    world = World(make_plan([2, 2], parts=2, schedule=schedule))
    executor = world.ranks[0].executor
    forward, arm, sent, alive = executor.stage.forward, executor.reducer.arm, [], []

    def recording(call, received):
        output = forward(call, received)
        sent.extend(weakref.ref(tensor) for tensor in output.tensors)
        return output

    def before_the_last_backward():
        alive.extend(ref for ref in sent if ref() is not None)
        arm()

    executor.stage.forward, executor.reducer.arm = recording, before_the_last_backward
    gc.disable()
    try:
        world.run()
    finally:
        gc.enable()
    assert len(sent) == 4
    assert alive == []


def test_a_part_without_rows_is_skipped():
    world = World(make_plan([2, 2], parts=4), rows=4)
    world.batches = [{key: value[:2] for key, value in batch.items()} for batch in world.batches]
    world.parts = [microbatches(world.plan, rank, world.batches) for rank in range(2)]
    world.run()
    outputs = world.ranks[1].executor.outputs
    assert [output is None for output in outputs] == [True, False, True, False] * 2
    losses = [rank.losses(parts) for rank, parts in zip(world.ranks, world.parts, strict=True)]
    outcome = collect(losses, [rank.gradients() for rank in world.ranks], [])
    assert_equal(outcome, reference(world.module, world.batches))
    assert all(torch.isfinite(loss) for loss in outcome.losses)
