import copy
import gc
import weakref
from collections import defaultdict

import pytest
import torch

from lightning_mist.errors import PlanError
from lightning_mist.runtime.batch_run import _chunks_of
from lightning_mist.runtime.communication import Microbatch
from tests.integration.parity import assert_equal, collect, make_plan, microbatches, reference
from tests.runtime.test_executor import World


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
    stage = executor.stages[0]
    forward, expect, sent, alive = stage.forward, executor.reducer.expect, [], []

    def recording(call, received):
        output = forward(call, received)
        sent.extend(weakref.ref(tensor) for tensor in output.tensors)
        return output

    def before_the_last_backward(names):
        if names:
            alive.extend(ref for ref in sent if ref() is not None)
        expect(names)

    stage.forward, executor.reducer.expect = recording, before_the_last_backward
    gc.disable()
    try:
        world.run()
    finally:
        gc.enable()
    assert len(sent) == 4
    assert alive == []


@pytest.mark.parametrize(("shape", "rows", "what"), [((4, 1), 4, "second .* tokens"), ((4, 8), None, "first .* rows")])
def test_chunks_need_something_to_cut(shape, rows, what):
    whole = Microbatch(value=torch.zeros(shape).long(), weight=1.0, owner=0, index=0, batch_rows=rows)
    with pytest.raises(PlanError, match=f"tail_chunks = 2: .* do not share a {what}"):
        _chunks_of(whole, 2, 1)


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


class Posted:
    """Notes which messages a rank posts to and from each other, in order."""

    def __init__(self, transport, sent, received):
        self._transport, self._sent, self._received = transport, sent, received

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def isend(self, tensor, destination, tag):
        self._sent[self._transport.rank, destination].append((tag, tensor.numel(), tensor.dtype))
        return self._transport.isend(tensor, destination, tag)

    def irecv(self, tensor, source, tag):
        self._received[source, self._transport.rank].append((tag, tensor.numel(), tensor.dtype))
        return self._transport.irecv(tensor, source, tag)


@pytest.mark.parametrize(
    "options",
    [
        {"layers": [2, 2], "degrees": [1, 2], "parts": 2},
        {"layers": [1, 1, 1, 1], "chunks": 2, "schedule": "interleaved-1f1b", "parts": 2},
        {"layers": [1, 1, 1, 1], "chunks": 2, "schedule": "interleaved-1f1b", "degrees": [2, 1], "parts": 2},
        {"layers": [2, 1, 1], "degrees": [1, 2, 1], "schedule": "zb-h1", "parts": 2},
        {"layers": [2, 2], "schedule": "gpipe", "parts": 3},
    ],
)
@pytest.mark.parametrize("name", ["plain", "skips"])
def test_between_two_ranks_messages_are_received_in_the_order_of_sending(name, options):
    """NCCL ignores tags and delivers in order."""
    sent, received = defaultdict(list), defaultdict(list)
    world = World(make_plan(rows=12, **options), name, 12, lambda transport: Posted(transport, sent, received))
    world.run()
    assert sent == received
    assert all(len({tag for tag, *_ in messages}) == len(messages) for messages in sent.values())
