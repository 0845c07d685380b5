import numpy as np
import pytest
import torch

from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.memory.split_backward import SplitBackwardModel
from lightning_mist.model import trace_model
from tests import zoo
from tests.specs import spec


@pytest.fixture(scope="module")
def network():
    module, make_batch = zoo.make("nano")
    return trace_model(module, make_batch(4), call=zoo.step(module), optimizer=torch.optim.AdamW(module.parameters()))


def test_inputs_of_products_and_gradients_of_their_outputs_wait(network):
    found = SplitBackwardModel(network).of(MemoryModel(network).costs(4), 4)
    state = 4 * 12 * 32 * 4  # rows, length, width, bytes
    # Queries, keys and values come of one input, the projection, and the two layers of the perceptron of one each.
    inputs, outputs = (1 + 1 + 1 + 4) * state, (3 + 1 + 4 + 1) * state
    assert found.waiting_R[1:-1].tolist() == [inputs + outputs] * 4
    # An embedding is no product; the tied projection behind the layers is one.
    assert found.waiting_R[0] == 0
    assert found.waiting_R[-1] == state + 4 * 12 * 97 * 4


def test_what_stays_is_never_less_than_where_nothing_does(network):
    costs = MemoryModel(network).costs(4)
    found = SplitBackwardModel(network).of(costs, 4)
    assert (found.recompute_peak_R >= found.peak_R + np.minimum(0.0, costs.saved_R - costs.checkpointed_saved_R)).all()
    # All that waits exists when a layer ends, and what it has saved no longer.
    assert (found.peak_R[1:-1] >= found.waiting_R[1:-1] - costs.saved_R[1:-1]).all()
    assert (found.recompute_peak_R[1:-1] >= costs.recompute_backward_peak_R[1:-1]).all()


def test_networks_whose_allocations_are_not_known_one_by_one_have_none():
    network = spec(3)
    assert SplitBackwardModel(network).of(MemoryModel(network).costs(2), 2) is None


def test_what_is_kept_from_one_number_of_rows_serves_for_others(network):
    memory, kept = MemoryModel(network), SplitBackwardModel(network)
    for rows in (4, 1, 6):
        found, alone = kept.of(memory.costs(rows), rows), SplitBackwardModel(network).of(memory.costs(rows), rows)
        for name in ("peak_R", "recompute_peak_R", "waiting_R"):
            assert getattr(found, name).tolist() == getattr(alone, name).tolist()
    assert found.waiting_R[1] == 6 * kept.of(memory.costs(1), 1).waiting_R[1]
