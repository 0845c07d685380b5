import pytest

from benchmarks.parity.plans import LAYOUTS, ROWS, Group, Layout, layers_of, make_plan
from lightning_mist.plan import row_slice


@pytest.mark.parametrize("layers", [4, 6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_a_plan_for_every_model(name, layers):
    layout = LAYOUTS[name]
    plan = make_plan(layout, layers)
    assert plan.num_layers == layers
    assert plan.num_stages == layout.num_stages
    assert plan.world_size <= 8
    assert plan.global_batch_size == ROWS * (layout.loaders or plan.world_size) == ROWS * plan.num_loaders
    for rank in range(plan.world_size):  # no part mixes two batches, and none is empty
        slices = [row_slice(plan, rank, index) for index in range(plan.num_microbatches)]
        assert all(low < high for low, high in (piece.rows(ROWS) for piece in slices))


def test_what_a_layout_says_is_in_its_plan():
    layout = Layout(groups=(Group(dp=2, tp=2, zero=3, checkpointed=9, sequence=True), Group(dp=4)), uneven=True)
    first, second = make_plan(layout, 5).stages
    assert (first.layers, second.layers) == ((0, 4), (4, 5))
    assert first.devices == (0, 1, 2, 3)
    assert (first.mesh.data_parallel_degree, first.mesh.tensor_parallel_degree) == (2, 2)
    assert (first.mesh.sequence_parallel, first.zero_stage, first.checkpointing.layers) == (True, 3, 4)
    assert second.data_parallel_degree == 4


def test_layers_are_spread_evenly_or_not():
    assert layers_of(7, 3) == [2, 2, 3]
    assert layers_of(7, 3, uneven=True) == [5, 1, 1]
