import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.least_runs import joined_runs, least_sums, slot_runs, slots_of
from lightning_mist.tuner.space import apply
from tests.specs import cluster, profile, spec


def runs_of(network, pace=np.inf, devices=4, **search):
    model = StageCostModel(network, profile(), cluster(devices, kind="cuda"))
    maker = IntraStage(model, apply(SearchSpace(**search), network, devices, 4 * devices), 1e12)
    slots = slots_of(maker.space, maker.slot, 4)
    return joined_runs(model, 4, [slot_runs(model, maker.space, slot, pace) for slot in slots])


@pytest.mark.parametrize("values", [[3.0, 3.0, 3.0], [5.0, 1.0, 2.0, 0.0, 7.0], [2.0], []])
def test_least_sums_are_those_of_the_best_windows(values):
    wanted = [
        min((sum(values[start : start + length]) for start in range(len(values) - length + 1)), default=0.0)
        for length in range(len(values) + 1)
    ]
    np.testing.assert_allclose(least_sums(np.array(values)), wanted)


def test_every_run_is_there_once():
    runs = runs_of(spec(4))
    keys = list(zip(runs.devices_K, runs.layers_K, runs.recomputed_K, strict=True))
    # Of 1, 2 devices; 1 with one kind of ZeRO, 2 with four.
    wanted = [(1, layers, kept) for layers in range(1, 4) for kept in range(layers + 1)]
    wanted += 4 * [(2, layers, kept) for layers in range(1, 4) for kept in range(layers + 1)]
    assert sorted(keys) == sorted(wanted)


def test_what_computes_for_too_long_is_missing():
    whole = runs_of(spec(4))
    pace = float(np.median((whole.forward_XK + whole.backward_XK)[0][whole.recomputed_K == 0]))
    fewer = runs_of(spec(4), pace)
    assert 0 < len(fewer) < len(whole)
    assert set(fewer.layers_K[fewer.devices_K == 1]) < set(whole.layers_K[whole.devices_K == 1])
    assert len(runs_of(spec(4), 0.0)) == 0


def test_recomputed_layers_are_those_of_the_search_space():
    assert not runs_of(spec(4), checkpointing=False).recomputed_K.any()
    runs = runs_of(spec(4), checkpointed_shares=(0.0, 1.0))
    assert set(zip(runs.layers_K, runs.recomputed_K, strict=True)) == {(n, c) for n in (1, 2, 3) for c in (0, n)}


def test_the_head_and_the_tail_add_to_the_edges():
    runs = runs_of(spec(4))
    assert (runs.forward_XK[1:] > runs.forward_XK[0]).all()
    assert (runs.parameters_XK[1:] > runs.parameters_XK[0]).all()
    assert (runs.working_XK[2] >= runs.working_XK[0]).all()


def test_zero_shares_state_out():
    runs = runs_of(spec(4))
    two = runs.devices_K == 2
    one = (runs.layers_K == 2) & (runs.recomputed_K == 0)
    optimizer = runs.optimizer_XK[0][two & one]
    np.testing.assert_allclose(optimizer / optimizer[0], [1, 0.5, 0.5, 0.5])
    parameters = runs.parameters_XK[0][two & one]
    np.testing.assert_allclose(parameters / parameters[0], [1, 1, 1, 0.5])
