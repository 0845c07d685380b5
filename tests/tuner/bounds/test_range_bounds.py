import numpy as np

from lightning_mist.cost import StageCostModel
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.bounds.range_bounds import range_bounds, slots_of
from lightning_mist.tuner.candidates.intra_stage import IntraStage
from lightning_mist.tuner.space.applied_space import apply
from tests.specs import cluster, profile, spec


def bounds_of(network, bottleneck=np.inf, devices=4, **search):
    model = StageCostModel(network, profile(), cluster(devices, kind="cuda"))
    maker = IntraStage(model, apply(SearchSpace(**search), network, devices, 4 * devices), 1e12)
    return range_bounds(model, maker.space, slots_of(maker.space, maker.slot, 4), bottleneck)


def test_every_range_is_there_by_devices_and_layers():
    found = bounds_of(spec(4))
    # Of 1, 2 devices; 1 with one kind of ZeRO, 2 with three; so many ways to recompute.
    wanted = [(1, layers) for layers in range(1, 4) for _ in range(layers + 1)]
    wanted += [(2, layers) for layers in range(1, 4) for _ in range(3 * (layers + 1))]
    assert list(zip(found.devices_K, found.layers_K, strict=True)) == wanted


def test_what_computes_for_too_long_is_missing():
    whole = bounds_of(spec(4))
    fewer = bounds_of(spec(4), float(np.median((whole.forward_SK + whole.backward_SK)[1])))
    assert 0 < len(fewer) < len(whole)
    assert not len(bounds_of(spec(4), 0.0).layers_K.ravel())


def test_the_head_and_the_tail_add_to_the_ends():
    found = bounds_of(spec(4))
    for values_SK in (found.forward_SK, found.parameters_SK, found.gradients_SK):
        assert (values_SK[[0, 2]] > values_SK[1]).all()


def test_zero_shares_state_out_but_for_what_is_at_hand():
    found = bounds_of(spec(4), checkpointing=False)
    here = (found.devices_K == 2) & (found.layers_K == 3)
    by_kind = (found.optimizer_SK, [1, 1, 1]), (found.parameters_SK, [1, 1, 0.5]), (found.gradients_SK, [1, 0.5, 0.5])
    for values_SK, wanted in by_kind:
        np.testing.assert_allclose(values_SK[1, here] / values_SK[1, here][0], wanted)
    # Under ZeRO-3 the other half of two of three layers is there, too.
    _, whole, shared = found.always_SK[1, here]
    np.testing.assert_allclose((shared - whole) / found.parameters_SK[1, here][0], 2 * 0.5 / 3)


def test_a_stage_whose_layers_are_all_recomputed_needs_room_for_one_of_them():
    found = bounds_of(spec(4))
    here = (found.devices_K == 1) & (found.layers_K == 3)
    *plain, recomputed = found.always_SK[1, here]
    assert plain == [plain[0]] * 3
    assert recomputed > plain[0]


def test_only_the_first_stage_receives_nothing():
    found = bounds_of(spec(4))
    assert not found.received_SK[0].any()
    assert (found.received_SK[1:] > 0).all()


def test_gradients_that_are_dealt_out_are_under_way_beside_the_next_backward():
    network = spec(4)
    table, found = StageCostModel(network, profile(), cluster(4)).whole.holdings.table, bounds_of(network)
    here = (found.devices_K == 2) & (found.layers_K == 3)
    none, shared, all_shared = np.split(found.always_SK[:, here], 3, axis=1)
    assert (none[0] == none[1]).all()
    # Those of the head under a first stage, of a layer under others; beside what makes them.
    head, layer = table.trained_R[:2]
    assert (shared[0] - shared[1] == head - layer).all()
    assert (shared[1] - none[1] >= layer).all()
    # Under ZeRO-3 others' parameters are there as well.
    assert (all_shared > shared).all()


def test_what_cannot_hide_behind_computing_is_counted():
    found = bounds_of(spec(4), checkpointing=False)
    here = (found.devices_K == 2) & (found.layers_K == 3)
    none, reduced, unsharded = found.exposed_SK[1, here]
    assert none == 0 < reduced <= unsharded
