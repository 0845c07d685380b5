import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.memory.moments import device_moments
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.candidates.candidate_tables import make_tables
from lightning_mist.tuner.candidates.intra_stage import IntraStage
from lightning_mist.tuner.space.applied_space import apply, layer_classes, layer_ranges_of
from tests.specs import cluster, profile, spec

NETWORK = spec(5, kinds=(0, 1, 0, 0, 1), widths=(1000, 2500), measured=True)
STAGES, MICROBATCHES = 3, 4


def table(role="middle", bottleneck=np.inf, *, among=None):
    """Candidates of a role on up to four devices, of all numbers of devices and layers or among some."""
    model = StageCostModel(NETWORK, profile(), cluster(4))
    space = apply(SearchSpace(schedules=("1f1b",), offload=()), NETWORK, 4, 16)
    maker = IntraStage(model, space, 1e12)
    index = {"first": 0, "middle": 1, "last": STAGES - 1}[role]
    slots = [maker.slot(index, STAGES, MICROBATCHES, shape) for shape in space.shapes(MICROBATCHES)]
    ranges = layer_ranges_of(role, NETWORK.num_layers, layer_classes(NETWORK))
    (found,), evaluated = make_tables(model, space, [(slots, ranges, among)], bottleneck)
    assert evaluated >= len(found)
    return model, found


def described(found):
    """What each candidate is."""
    columns = (found.range_K, found.devices_K, found.checkpointed_K, found.zero_stage_K)
    return [*zip(*(column.tolist() for column in columns), strict=True)]


@pytest.mark.parametrize("role", ["first", "middle", "last"])
def test_every_candidate_is_there_once_with_what_it_costs(role):
    model, found = table(role)
    ranges = found.ranges
    wanted = {
        (range_, slot.data_parallel_degree, kept, zero)
        for range_, layers in enumerate(ranges.layers_K.tolist())
        for slot in found.slots
        for kept in range(layers + 1)
        for zero in ((0, 1, 2, 3) if slot.data_parallel_degree > 1 else (0,))
    }
    assert len(found) == len(wanted)
    assert {*described(found)} == wanted
    assert (np.diff(found.steady_K) >= 0).all()
    for index in range(0, len(found), 7):
        one, at = found.candidates(np.array([index])), found.slots[found.shape_K[index]]
        seconds = model.seconds(at, one)
        assert found.steady_K[index] == pytest.approx(seconds.steady_K[0], rel=1e-12)
        assert found.boundary_K[index] == pytest.approx(seconds.boundary_K[0], rel=1e-12)
        assert found.steady_K[index] <= found.floor_K[index] <= found.steady_K[index] + found.boundary_K[index]


def test_what_is_slower_than_the_pace_is_left_out_and_nothing_else():
    _, every = table()
    bottleneck = float(np.median(every.steady_K))
    _, fast = table(bottleneck=bottleneck)
    assert fast.bottleneck == bottleneck
    wanted = [
        item for item, seconds in zip(described(every), every.steady_K.tolist(), strict=True) if seconds <= bottleneck
    ]
    assert 0 < len(wanted) < len(every)
    assert sorted(described(fast)) == sorted(wanted)


def test_choices_are_at_every_place_where_their_layers_occur():
    _, found = table()
    index_J = np.arange(0, len(found), 5)
    choices = found.choices(index_J, np.arange(len(index_J), dtype=float))
    starts = [found.ranges.starts[range_].tolist() for range_ in found.range_K[index_J].tolist()]
    assert choices.start_K.tolist() == [start for each in starts for start in each]
    assert choices.peak_K.tolist() == [float(index) for index, each in enumerate(starts) for _ in each]
    of_K = np.repeat(index_J, [len(each) for each in starts])
    assert (choices.steady_K == found.steady_K[of_K]).all()
    assert (choices.layers_K == found.ranges.layers_K[found.range_K[of_K]]).all()
    assert (choices.zero_stage_K == found.zero_stage_K[of_K]).all()


def test_choices_may_have_other_seconds_and_move_something():
    _, found = table()
    index_J = np.array([0, 3])
    other = np.array([7.0, 8.0])
    ratios_JO = np.array([[0.0, 0.0, 1.0, 0.0], [0.5, 0.0, 0.0, 0.0]])
    choices = found.choices(index_J, other, (other, 2 * other), ratios_JO)
    assert {*choices.steady_K.tolist()} == {7.0, 8.0}
    assert (choices.boundary_K == 2 * choices.steady_K).all()
    assert (choices.offload_KO[choices.steady_K == 7.0] == ratios_JO[0]).all()


def test_of_other_numbers_of_devices_and_layers_nothing_is_evaluated():
    among = np.zeros((5, NETWORK.num_layers + 1), dtype=bool)
    among[2, 1] = among[1, 2] = True
    _, every = table()
    _, found = table(among=among)
    layers_K = every.ranges.layers_K[every.range_K]
    kept_K = among[every.devices_K, layers_K]
    assert 0 < kept_K.sum() < len(every)
    wanted = [item for item, is_kept in zip(described(every), kept_K, strict=True) if is_kept]
    assert sorted(described(found)) == sorted(wanted)


def test_tables_of_several_roles_are_those_of_each_alone():
    model = StageCostModel(NETWORK, profile(), cluster(4))
    maker = IntraStage(model, apply(SearchSpace(offload=()), NETWORK, 4, 16), 1e12)
    classes, shapes = layer_classes(NETWORK), maker.space.shapes(MICROBATCHES)
    requests = [
        ([maker.slot(index, STAGES, MICROBATCHES, shape) for shape in shapes], layer_ranges_of(role, 5, classes), None)
        for index, role in enumerate(("first", "middle", "last"))
    ]
    for bottleneck in (np.inf, 0.0):
        together, evaluated = make_tables(model, maker.space, requests, bottleneck)
        assert evaluated == sum(map(len, together))
        for found, request in zip(together, requests, strict=True):
            (other,), _ = make_tables(model, maker.space, [request], bottleneck)
            for name in ("range_K", "shape_K", "zero_stage_K", "steady_K", "boundary_K", "floor_K", "again_K"):
                np.testing.assert_array_equal(getattr(found, name), getattr(other, name))
            moments = device_moments(1, STAGES, MICROBATCHES)
            np.testing.assert_array_equal(found.parts.peaks(moments), other.parts.peaks(moments))
