import numpy as np
import pytest

from lightning_mist.errors import PlanError
from lightning_mist.model.events.microbatch_events import (
    WAYS,
    EventTape,
    Label,
    Slots,
    Stack,
    StageShape,
    region_events,
    stack,
)
from tests.cost.events import WIDTH, with_events
from tests.specs import spec


@pytest.fixture(scope="module")
def network():
    return with_events(spec(4))


def shape(first, end, *, checkpointed=0, rows=2):
    return StageShape(first=first, end=end, checkpointed=checkpointed, rows=rows)


def timeline(template, runs):
    """Bytes alive after every event of some runs."""
    events_E = np.concatenate([run.events_E for run in runs])
    return np.cumsum(np.sign(events_E) * template.slots.bytes_K[np.abs(events_E) - 1])


def bytes_of(template, slots):
    return [int(template.slots.bytes_K[slot]) for slot in slots]


def test_a_whole_network_frees_what_it_allocates(network):
    template = stack(network, shape(0, 4))
    assert template.parts == (0, 1, 2, 3, 4, 5)
    assert template.outputs == template.left == template.returned[True] == ()
    assert bytes_of(template, template.kept) == [4]
    forward = timeline(template, [template.forward[part] for part in template.parts])
    assert forward[-1] == 2 * (100 + WIDTH + 4 * 10 * WIDTH + 20 * WIDTH) + 4
    for way, left in ((False, 4), (True, 4 + 2 * 80_000 + 4 * 40_400)):
        backward = [template.backward[way][part] for part in reversed(template.parts)]
        whole = timeline(template, [*(template.forward[part] for part in template.parts), *backward])
        assert whole[-1] == left
        assert template.ended[way] == ()


def test_what_leaves_a_stage_is_left_to_the_walk(network):
    template = stack(network, shape(1, 3))
    assert template.parts == (2, 3)
    assert bytes_of(template, template.outputs) == [2 * WIDTH]
    assert bytes_of(template, template.returned[True]) == bytes_of(template, template.returned[False]) == [2 * WIDTH]
    # The mask, which the batch alone determines, is made here too and goes with the first layer's backward.
    assert timeline(template, [template.forward[0]])[-1] == 2 * 100
    forwards = [template.forward[part] for part in (0, 2, 3)]
    assert timeline(template, forwards)[-1] == 2 * (100 + 2 * 10 * WIDTH)
    backward = [template.backward[False][part] for part in (3, 2)]
    # The gradient that came is freed, the output and the gradient of the input are left.
    assert bytes_of(template, template.arriving) == [2 * WIDTH]
    assert timeline(template, [*forwards, *backward])[-1] == 2 * (2 - 1) * WIDTH


def test_recomputed_layers_come_first(network):
    template = stack(network, shape(0, 4, checkpointed=2))
    forward = timeline(template, [template.forward[part] for part in template.parts])
    assert forward[-1] == 2 * (100 + WIDTH + 2 * WIDTH + 2 * 10 * WIDTH + 20 * WIDTH) + 4


def test_gradients_are_accumulated_where_they_are_made(network):
    template = stack(network, shape(0, 4))
    first, later = template.backward[True][2], template.backward[False][2]
    assert [made.name for made in first.made] == ["blocks.1.weight", "blocks.1.bias"]
    assert {made.name for made in later.made} == {"blocks.1.weight", "blocks.1.bias"}
    for run, sign in ((first, 1), (later, -1)):
        for made in run.made:
            assert sign * (made.slot + 1) in run.events_E[: made.event].tolist()


def test_weights_can_be_put_off(network):
    template = stack(network, shape(1, 3))
    weights = template.weights[False]
    assert [item.name for item in weights] == ["blocks.2.weight", "blocks.1.weight"]
    assert all(sorted(bytes_of(template, item.operands)) == [2 * 3 * WIDTH, 2 * 9 * WIDTH] for item in weights)
    assert not any(item.received for item in weights)
    forwards = [template.forward[part] for part in (0, 2, 3)]
    inputs = [template.inputs[False][part] for part in (3, 2)]
    assert timeline(template, [*forwards, *inputs])[-1] == 2 * (WIDTH + 2 * 12 * WIDTH)
    last = stack(network, shape(2, 4)).weights[True]
    assert last[0].name == "head.weight"
    alone = stack(network, shape(3, 4)).weights[True]
    assert [item.name for item in alone] == ["head.weight", "blocks.3.weight"]


def test_tied_gradients_wait_for_each_other():
    network = with_events(spec(4, tied=True), tied=True)
    template = stack(network, shape(0, 4), tied=frozenset({"wte.weight"}))
    for part in (0, 5):
        (made,) = template.backward[False][part].made
        assert made.name == "wte.weight"
        assert -(made.slot + 1) not in template.backward[False][part].events_E.tolist()


def stack_of_parts(network, first=0, end=4, checkpointed=0):
    shaped = StageShape(first=first, end=end, checkpointed=checkpointed, rows=2)
    return Stack(network, shaped, frozenset(), WAYS)


def test_parameters_go_by_their_names_within_a_layer_or_by_their_whole_names(network):
    found = stack_of_parts(network)
    assert found.canonical(2, "weight") == "blocks.1.weight"
    assert found.canonical(0, "wte.weight") == "wte.weight"
    # What runs between two blocks is the first one's; its parameters are no block's.
    assert found.canonical(2, "wte.weight") == "wte.weight"


def test_stages_behind_the_first_run_what_the_batch_alone_determines(network):
    found = stack_of_parts(network, 2, 3)
    assert found.parts == (3,)
    (mask,) = (item for item in found.born if item.part == 0)
    assert mask.nbytes == 200
    # It dies where the first layer's backward lets go of it: here that of the stage's first layer.
    assert found.death(mask, first=True) == (3, True, 6)


def handed_on(found):
    return [item for item in found.born if item.part == 1 and not item.backward and item.allocation.slot == 0]


def test_what_is_handed_on_dies_where_the_next_layer_lets_go_of_it(network):
    found = stack_of_parts(network)
    (output,) = handed_on(found)
    assert found.death(output, first=False) == (2, True, 5)
    alone = stack_of_parts(network, 0, 1)
    assert [alone.death(item, first=False)[0] for item in handed_on(alone)] == [2]


def test_the_way_of_a_region_follows_from_the_plan(network):
    found = stack_of_parts(network, checkpointed=2)
    assert found.way(2, first=True) is region_events(network, 2).recomputed_first
    assert found.way(3, first=False) is region_events(network, 3).later
    assert found.way(0, first=True) is region_events(network, 0).recomputed_first
    assert stack_of_parts(network).way(0, first=True) is region_events(network, 0).first


def test_regions_without_events_are_refused():
    with pytest.raises(PlanError, match="the tail has no list of allocations"):
        region_events(spec(4), 5)


# The tape of a rank.

LABEL = Label("working_bytes", "temporary")


def test_events_of_slots_and_single_events_keep_their_order():
    tape = EventTape()
    first = tape.malloc(10, LABEL)
    slots = Slots(bytes_K=np.array([1, 2]), labels=(LABEL, LABEL))
    one, two = tape.reserve(slots, 0, 0), tape.reserve(slots, 0, 1)
    tape.play(np.array([1, 2, -1]), two)
    tape.free(first)
    tape.play(np.array([2]), one)
    tape.mark("0F1")
    assert (first, one, two) == (0, 1, 3)
    assert tape.events().tolist() == [1, 4, 5, -4, -1, 3]
    assert tape.bytes().tolist() == [10, 1, 2, 1, 2]
    assert tape.length == 6
    assert tape.marks[0].event == 6
    assert [(block.first, block.stage, block.microbatch) for block in tape.blocks] == [
        (0, -1, -1),
        (1, 0, 0),
        (3, 0, 1),
    ]


def test_events_can_be_played_in_pieces():
    events_E, whole, pieces = np.array([1, 2, -1, 3]), EventTape(), EventTape()
    slots = Slots(bytes_K=np.array([1, 2, 3]), labels=(LABEL,) * 3)
    for tape in (whole, pieces):
        assert tape.reserve(slots, 0, 0) == 0
    whole.play(events_E, 0)
    pieces.play(events_E[:2], 0)
    pieces.play(events_E[2:], 0)
    pieces.play(events_E[4:], 0)
    assert whole.events().tolist() == pieces.events().tolist()
    assert EventTape().events().tolist() == EventTape().bytes().tolist() == []
