import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.time.offload_loads import BEFORE, BEHIND, CopyPlace, CopyStages, loads_of
from lightning_mist.cost.time.overlap import CopyRates
from tests.cost.time.test_offload_seconds import candidates, machine, network, slot
from tests.specs import cluster

RATES = CopyRates(to_device=1e8, to_host=2e8)


def loads(stages, net):
    model, none_K = StageCostModel(net, machine(), cluster(1)), np.zeros(len(stages))
    units = model.beside(slot(), model.region_seconds(4)).sums.loads
    place = CopyPlace(memory=model.memory(slot()), slot=slot(), loads=units, across_nodes=False)
    place_K = np.zeros(len(stages), dtype=int)
    every = CopyStages(
        places=[place], place_K=place_K, candidates=stages, update_K=none_K, reduce_K=none_K, gather_K=none_K
    )
    return loads_of(every, RATES)


def test_everything_that_is_moved_is_fetched_and_what_has_changed_is_written_back():
    net = network()
    found, rows = loads(candidates(parameters=1.0, gradients=1.0, optimizer=1.0), net)
    total = sum(item.bytes for item in net.parameters)
    trained = sum(item.bytes for item in net.parameters if item.trainable)
    state = net.optimizer.state_bytes_per_parameter_byte * trained
    (row,) = rows
    assert found["parameters_in"][row].sum() * RATES.to_device == pytest.approx(total)
    assert found["gradients_in"][row].sum() * RATES.to_device == pytest.approx(trained)
    assert found["gradients_out"][row].sum() * RATES.to_host == pytest.approx(trained)
    assert found["state_in"][row].sum() * RATES.to_device == pytest.approx(state + 2 * trained)
    assert found["frozen_in"][row].sum() * RATES.to_device == pytest.approx(total - trained)
    assert found["state_out"][row].sum() * RATES.to_host == pytest.approx(state + trained)
    assert found["saved_in"][row].sum() == 0


def test_units_that_are_made_up_have_nothing_and_ends_keep_their_activations():
    found, _ = loads(candidates(activations=0.5), network())
    assert not found.seconds_by_name_JR[:, :, :BEFORE].any()
    assert not found.seconds_by_name_JR[:, :, -BEHIND:].any()
    (saved_R,) = found["saved_out"][:, BEFORE:-BEHIND]
    assert saved_R[0] == saved_R[-1] == 0
    assert (saved_R[1:-1] > 0).all()


def test_equal_questions_are_answered_once():
    one = candidates(parameters=0.5)
    found, rows = loads(one.take(np.array([0, 0, 0])), network())
    assert len(found) == 1
    assert list(rows) == [0, 0, 0]


def test_without_ratios_there_is_nothing_to_ask():
    with pytest.raises(ValueError, match=r"candidates.offload = None: nothing is offloaded"):
        loads(dataclasses.replace(candidates(), offload=None), network())
