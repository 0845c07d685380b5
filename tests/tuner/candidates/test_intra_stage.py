import itertools

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.candidates.intra_stage import IntraStage
from lightning_mist.tuner.space.applied_space import ANYWHERE, Shape, apply, layer_classes
from tests.specs import candidates_of, cluster, profile, spec, with_splits
from tests.tuner.searches import frontier, stages_of


def intra(network, *, limit=1e12, devices=4, rows=4, **search):
    model = StageCostModel(network, profile(), cluster(devices))
    return IntraStage(model, apply(SearchSpace(**search), network, devices, rows * devices), limit)


ALIKE = spec(6, measured=True)
MIXED = spec(6, kinds=(0, 1, 1, 0, 1, 1), widths=(1000, 2500), measured=True)


SPLIT = with_splits(ALIKE, (2, False), (2, True), (4, False))


def by_hand(maker, index, stages, microbatches):
    """Every feasible, non-dominated choice, one candidate evaluated at a time."""
    space, model = maker.space, maker.model
    found = {}
    for shape in space.shapes(microbatches):
        slot = maker.slot(index, stages, microbatches, shape)
        others = space.world_size - shape.devices
        if others < stages - 1 or (stages == 1 and others):
            continue
        for start, end in itertools.combinations(range(space.num_layers + 1), 2):
            if (start == 0) != (index == 0) or (end == space.num_layers) != (index == stages - 1):
                continue
            if start < index or end > space.num_layers - (stages - 1 - index):
                continue
            options = found.setdefault((start, end - start, shape.devices), [])
            for kept in range(end - start + 1):
                for zero in space.search.zero_stages if shape.data > 1 else (0,):
                    one = candidates_of(start, end, kept, zero)
                    if model.memory(slot).peaks(slot, one)[0] <= maker.memory_limit:
                        costs = model.seconds(slot, one)
                        options.append((costs.steady_K[0], costs.boundary_K[0]))
    best = {
        key: {(t, d) for t, d in points if not any(u <= t and u + e <= t + d and (u, e) != (t, d) for u, e in points)}
        for key, points in found.items()
    }
    return {key: value for key, value in best.items() if value}


@pytest.mark.parametrize("network", [ALIKE, MIXED, SPLIT])
@pytest.mark.parametrize(("index", "stages"), [(0, 1), (0, 3), (1, 3), (2, 3), (1, 4)])
@pytest.mark.parametrize("limit", [1e12, 1_000_000, 700_000])
def test_equals_evaluating_one_by_one(network, index, stages, limit):
    maker = intra(network, limit=limit, zero_stages=(0, 1, 2, 3), tensor_parallel_degrees=None)
    choices = frontier(maker, index, stages, 4)
    wanted = by_hand(maker, index, stages, 4)
    found = {}
    for place in range(len(choices)):
        starts = [choices.start_K[place]]
        layers, devices = int(choices.layers_K[place]), int(choices.devices_K[place])
        if starts == [ANYWHERE]:
            starts = [start for start, length, count in wanted if (length, count) == (layers, devices)]
            assert starts
        for start in starts:
            costs = (choices.steady_K[place], choices.boundary_K[place])
            found.setdefault((int(start), layers, devices), set()).add(costs)
    assert found.keys() == wanted.keys()
    for key, points in wanted.items():
        np.testing.assert_allclose(sorted(found[key]), sorted(points), rtol=1e-12)


def test_layers_that_cost_the_same_have_one_class():
    assert len(set(layer_classes(ALIKE))) == 1
    assert len(set(layer_classes(spec(6, tied=True)))) == 1
    first, second, third, fourth, fifth, _ = layer_classes(MIXED)
    assert (first, second, third) == (fourth, fifth, third)
    assert len({first, second, third}) >= 2


def test_equal_layer_ranges_are_evaluated_once():
    repeated = spec(12, kinds=(0, 1) * 6, widths=(1000, 2500))
    unique = spec(12, kinds=tuple(range(12)), widths=(1000,) * 12)
    counts = []
    for network in (repeated, unique):
        maker = intra(network)
        frontier(maker, 1, 3, 4)
        counts.append(maker.evaluated)
    assert counts[0] < counts[1] / 2


def test_slots_share_what_they_can():
    maker = intra(ALIKE)
    frontier(maker, 1, 4, 4)
    evaluated = maker.evaluated
    frontier(maker, 2, 4, 4)
    frontier(maker, 1, 3, 4)
    assert maker.evaluated == evaluated


def test_slots_under_zero_3_do_not_share_what_stages_behind_cost():
    def made():
        slow = StageCostModel(spec(8), profile(link=1e7), cluster(8))
        space = apply(SearchSpace(zero_stages=(3,), data_parallel_degrees=(2, 4)), spec(8), 8, 64)
        return IntraStage(slow, space, 1e12)

    asked, fresh = made(), made()
    before = frontier(asked, 0, 2, 8)
    after, alone = frontier(asked, 0, 3, 8), frontier(fresh, 0, 3, 8)
    assert np.array_equal(after.steady_K, alone.steady_K)
    # The outermost units of stages with more than two are fetched again.
    long_K = after.layers_K > 1
    assert np.all(after.steady_K[long_K] > before.steady_K[: len(after)][long_K])
    assert np.array_equal(after.steady_K[~long_K], before.steady_K[: len(after)][~long_K])
    slot = asked.slot(0, 3, 8, Shape(int(after.devices_K[-1])))
    one = candidates_of(0, after.layers_K[-1], after.checkpointed_K[-1], after.zero_stage_K[-1])
    assert after.steady_K[-1] == pytest.approx(asked.model.seconds(slot, one).steady_K[0], rel=1e-12)


def test_without_checkpointing_nothing_is_recomputed():
    for maker in (intra(ALIKE, checkpointing=False), intra(spec(6, exclusions=[("checkpointing", "x")]))):
        assert set(frontier(maker, 0, 2, 4).checkpointed_K) == {0}


def test_zero_stages_are_those_asked_for():
    slot_choices = frontier(intra(ALIKE, zero_stages=(1,)), 0, 2, 4)
    # On one device there is nothing to shard.
    assert {(z, d > 1) for z, d in zip(slot_choices.zero_stage_K, slot_choices.devices_K, strict=True)} <= {
        (1, True),
        (0, False),
    }


def test_what_places_share_is_kept_for_all_of_them():
    one, two = np.zeros((2, 5, 7), dtype=bool)
    one[1, :], two[2, :] = True, True

    def maker():
        return stages_of(memory=10**12).together

    places = [(0, 2, (), one), (0, 2, (), two)]
    alone = [maker().frontiers([place], 4)[0] for place in places]
    assert all(len(found) for found in alone)
    for first in places:
        stages = maker()
        stages.frontiers([first], 4)
        for found, wanted in zip(stages.frontiers(places, 4), alone, strict=True):
            assert np.array_equal(found.steady_K, wanted.steady_K)
            assert np.array_equal(found.devices_K, wanted.devices_K)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_slot_has_the_rows_of_its_replicas(num_stages):
    maker = stages_of(devices=4, rows=4).together
    slot = maker.slot(0, num_stages, 4, Shape(2))
    assert (slot.stage_index, slot.num_stages, slot.num_microbatches) == (0, num_stages, 4)
    assert slot.data_parallel_degree == 2
    # Sixteen rows in four microbatches, each for two.
    assert slot.rows == 2
    assert slot.batch_rows == 4
    assert slot.replicas == (2 if num_stages == 1 else maker.space.least_replicas(4))


def test_replicas_are_what_all_parts_of_the_cluster_can_have():
    one, other = (stages_of(devices=4, rows=4, data_parallel_degrees=degrees) for degrees in ((2, 4), (1, 2)))
    numbers = {maker.space.least_replicas(8) for maker in (one, other)}
    slot = IntraStage(one.model, one.space, 1e12, elsewhere=(other.space,)).slot(0, 2, 8, Shape(4), (0, 1))
    assert len(numbers) == 2
    assert slot.replicas == min(numbers)
    assert slot.parts == (0, 1)
