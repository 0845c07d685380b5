from dataclasses import replace

import pytest
import torch

from lightning_mist.model import MICROBATCH, trace_model
from lightning_mist.model.spec.allocation_events import Allocation, Moment, PartEvents
from lightning_mist.model.trace.block_kinds import Example
from lightning_mist.model.trace.event_templates import layer_events
from lightning_mist.model.trace.modes import run_ways
from tests import zoo
from tests.model.trace.test_counted_step import Chain
from tests.model.trace.test_layer_costs import BASIS, subject_of

EXAMPLES = (
    Example(part=0, follower=None, label="head", block=""),
    Example(part=1, follower=2, label="block", block="blocks.0"),
    Example(part=3, follower=None, label="tail", block=""),
)


def events_of(module, twins=(None, None)):
    with subject_of(module) as subject:
        ways = run_ways(subject, BASIS, lambda size: torch.ones(size[0], 4), twins, recomputes=True)
    return layer_events(ways, EXAMPLES, is_fake=True)


def brief(allocation: Allocation) -> tuple[object, ...]:
    """What was made, its role, and when it dies."""
    dies = allocation.dies
    place = None if dies is None else (dies.part, dies.direction, dies.position)
    return allocation.operator.split(".")[1], allocation.role, allocation.born.position, place


def test_events_of_a_chain_by_hand():
    head, block, tail = (events.first for events in events_of(Chain()))
    # The product is gone when the block has returned; sigmoid keeps its own result: no other part frees it.
    assert [brief(item) for item in block.forward] == [
        ("mm", "temporary", 1, (0, "forward", 3)),
        ("sigmoid", "activation", 2, (0, "backward", 2)),
    ]
    assert [brief(item) for item in block.backward] == [
        ("sigmoid_backward", "temporary", 1, (0, "backward", 4)),
        ("mm", "gradient", 2, None),
        ("mm", "gradient", 3, (-1, "backward", 2)),
    ]
    assert (block.forward_positions, block.backward_positions) == (2, 3)
    assert [item.slot for item in block.backward] == [None, None, 0]
    # The head's result is handed on, and the block lets go of it with the gradient of its weight.
    assert [(brief(item), item.slot) for item in head.forward] == [(("mm", "activation", 1, (1, "backward", 4)), 0)]
    assert block.entering[0].dies == Moment(direction="backward", position=4)
    assert block.arriving[0].dies == Moment(direction="backward", position=2)
    assert head.entering == tail.arriving == ()
    row = 8 * 4 * MICROBATCH
    assert [item.size.expression for item in block.forward] == [row, row]
    assert [item.dtype for item in block.forward] == ["float32", "float32"]


def test_gradients_that_exist_already_are_added_to_and_die():
    block = events_of(Chain())[1].later
    assert [(item.parameter, item.dies) for item in block.backward if item.parameter] == [
        ("0.weight", Moment(direction="backward", position=5))  # both products, then the addition
    ]


def test_recomputation_comes_first_in_backward_and_says_where_it_comes_from():
    first, again = (getattr(events_of(Chain())[1], way) for way in ("first", "recomputed_first"))
    assert [brief(item)[:2] for item in again.backward[:2]] == [("mm", "temporary"), ("sigmoid", "temporary")]
    assert [(item.module, item.line) for item in again.backward[:2]] == [
        ("0", first.forward[0].line),
        ("1", first.forward[1].line),
    ]
    # What the block hands on is no longer its own to keep.
    assert [(item.slot, item.dies.part) for item in again.forward if item.role == "activation"] == [(0, 1)]


def test_what_gradients_of_weights_are_made_of_is_known():
    head, block, tail = (events.recomputed_first for events in events_of(Chain()))
    assert [item.weights for item in block.backward if item.operator == "aten.sigmoid_backward.default"] == [
        ("0.weight",)
    ]
    assert block.entering[0].weights == ("0.weight",)
    assert head.arriving[0].weights == ("inlet.weight",)
    assert tail.entering[0].weights == ("outlet.weight",)
    assert all(item.weights == () for item in (*head.forward, *block.forward))


def positions_are_within(events: PartEvents) -> bool:
    last = {"forward": events.forward_positions, "backward": events.backward_positions}
    own = [
        item
        for item in (*events.forward, *events.backward)
        if item.dies and (item.dies.part, item.dies.anchor) == (0, "own")
    ]
    return all(item.dies.position <= last[item.dies.direction] + 1 for item in own)


@pytest.mark.thorough
def test_a_real_network_says_where_its_bytes_come_from():
    module, make_batch = zoo.make("llama")
    spec = trace_model(module, make_batch(4), call=zoo.step(module), optimizer=torch.optim.SGD)
    events = spec.layers[0].events.first
    up = next(item for item in events.forward if item.module == "mlp.up_proj")
    assert (up.operator, up.role, up.line.split(":")[0]) == ("aten.mm.default", "activation", "modeling_llama.py")
    product = next(item for item in events.forward if item.module == "mlp" and item.role == "activation")
    assert product.weights == ("mlp.down_proj.weight",)
    gradients = {item.parameter for item in events.backward if item.dies is None}
    assert gradients == {name for name, _ in module.model.model.layers[0].named_parameters()}
    masks = [item for item in spec.head.events.first.forward if item.role == "shared"]
    assert sum(item.size.at(4, 12) for item in masks if item.dies.direction == "backward") == 2 * 4 * 8 * 12
    assert all(positions_are_within(way) for part in (spec.head, *spec.layers, spec.tail) for way in ways_of(part))
    saved = [item.size.expression for item in events.forward if item.dies.direction == "backward"]
    assert sum(saved) == spec.layers[0].saved_bytes


def ways_of(part):
    events = part.events
    return events.first, events.later, events.recomputed_first, events.recomputed_later


def test_the_same_events_come_from_imitated_neighbours():
    class Long(Chain):
        def __init__(self):
            super().__init__()
            self.blocks.extend(Chain().blocks)

    examples = (*EXAMPLES[:2], replace(EXAMPLES[2], part=5))
    found = []
    for twins in ((None,) * 4, (None, None, 0, None)):
        with subject_of(Long()) as subject:
            ways = run_ways(subject, BASIS, lambda size: torch.ones(size[0], 4), twins, recomputes=True)
        found.append(layer_events(ways, examples, is_fake=True))
    assert found[0] == found[1]
