import pytest

from lightning_mist.errors import PlanError
from lightning_mist.model.events.part_stack import Stack, StageShape, region_events
from tests.cost.events import WIDTH, with_events
from tests.specs import spec


@pytest.fixture(scope="module")
def network():
    return with_events(spec(4))


def stack(network, first=0, end=4, checkpointed=0):
    return Stack(network, StageShape(first=first, end=end, checkpointed=checkpointed, rows=2))


def test_parameters_go_by_their_names_within_a_layer_or_by_their_whole_names(network):
    found = stack(network)
    assert found.canonical(2, "weight") == "blocks.1.weight"
    assert found.canonical(0, "wte.weight") == "wte.weight"
    # What runs between two blocks is the first one's; its parameters are no block's.
    assert found.canonical(2, "wte.weight") == "wte.weight"


def test_stages_behind_the_first_run_what_the_batch_alone_determines(network):
    found = stack(network, 2, 3)
    assert found.parts == (3,)
    found.add(0, backward=False, first=True)
    (mask,) = found.born
    assert mask.nbytes == 200
    # It dies where the first layer's backward lets go of it: here that of the stage's first layer.
    assert found.death(mask, first=True) == (3, True, 6)


def test_what_is_handed_on_dies_where_the_next_layer_lets_go_of_it(network):
    found = stack(network)
    found.add(1, backward=False, first=True)
    output = next(item for item in found.born if item.nbytes == 2 * WIDTH and item.allocation.slot == 0)
    assert found.death(output, first=False) == (2, True, 5)
    alone = stack(network, 0, 1)
    alone.add(1, backward=False, first=True)
    assert alone.death(alone.born[output.slot], first=False)[0] == 2


def test_the_way_of_a_region_follows_from_the_plan(network):
    found = stack(network, checkpointed=2)
    assert found.way(2, first=True) is region_events(network, 2).recomputed_first
    assert found.way(3, first=False) is region_events(network, 3).later
    assert found.way(0, first=True) is region_events(network, 0).recomputed_first
    assert stack(network).way(0, first=True) is region_events(network, 0).first


def test_regions_without_events_are_refused():
    with pytest.raises(PlanError, match="the tail has no list of allocations"):
        region_events(spec(4), 5)
