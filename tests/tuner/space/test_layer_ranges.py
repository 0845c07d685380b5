import itertools
from dataclasses import replace

import pytest

from lightning_mist.tuner.space.applied_space import ANYWHERE, fixed_range, layer_classes, layer_ranges_of, role_of
from tests.specs import spec

ALIKE, UNLIKE = (0,) * 6, (0, 0, 1, 0, 1, 0)


def places(ranges):
    """Every run of layers, by first layer and number."""
    pairs = zip(ranges.starts, ranges.layers_K.tolist(), strict=True)
    return [(start, layers) for starts, layers in pairs for start in starts.tolist()]


def test_roles_say_who_has_others_before_and_behind():
    assert [role_of(index, 3) for index in range(3)] == ["first", "middle", "last"]
    assert [role_of(index, 2) for index in range(2)] == ["first", "last"]
    assert role_of(0, 1) == "only"


@pytest.mark.parametrize("classes", [ALIKE, UNLIKE])
def test_ends_of_a_pipeline_have_every_number_of_layers_that_leaves_one(classes):
    assert places(layer_ranges_of("only", 6, classes)) == [(0, 6)]
    assert places(layer_ranges_of("first", 6, classes)) == [(0, count) for count in range(1, 6)]
    assert sorted(places(layer_ranges_of("last", 6, classes))) == [(first, 6 - first) for first in range(1, 6)]


def test_middles_of_layers_that_are_alike_are_left_open():
    found = layer_ranges_of("middle", 6, ALIKE)
    assert places(found) == [(ANYWHERE, count) for count in range(1, 5)]
    assert found.start_K.tolist() == [1] * 4  # Where one of them is looked at.


def test_middles_of_unlike_layers_are_all_there_and_those_that_are_alike_together():
    found = layer_ranges_of("middle", 6, UNLIKE)
    wanted = [(first, end - first) for first, end in itertools.combinations(range(1, 6), 2)]
    assert sorted(places(found)) == sorted(wanted)
    for window, starts in enumerate(found.starts):
        layers = int(found.layers_K[window])
        assert found.start_K[window] in starts
        # What lies before tells what is received, so it must be the same too.
        assert len({UNLIKE[start - 1 : start + layers] for start in starts.tolist()}) == 1
    assert len(found) < len(wanted)


def test_a_window_whose_place_is_settled():
    assert places(fixed_range(2, 5)) == [(2, 3)]


def test_layers_that_share_a_parameter_with_another_part_stand_alone():
    assert len(set(layer_classes(spec(4)))) == 1
    assert layer_classes(spec(4, kinds=(0, 1, 0, 1), widths=(1000, 1000))) == (0, 1, 0, 1)
    network = spec(4)
    use = next(item for item in network.module_map.parameters if item.name == "blocks.1.weight")
    shared = replace(use, slots=(*use.slots, ("blocks.2", "weight", (2,))))
    uses = tuple(shared if item is use else item for item in network.module_map.parameters)
    classes = layer_classes(replace(network, module_map=replace(network.module_map, parameters=uses)))
    assert classes[0] == classes[3]
    assert len(set(classes)) == 3


def test_layers_that_hand_on_something_else_differ():
    network = spec(4)
    (first,) = network.boundaries[0]
    wider = replace(first, shape=(first.shape[0], 2 * first.shape[1]))
    changed = replace(network, boundaries=(network.boundaries[0], (wider,), network.boundaries[2]))
    classes = layer_classes(changed)
    assert classes[0] == classes[2]
    assert classes[1] != classes[0]
