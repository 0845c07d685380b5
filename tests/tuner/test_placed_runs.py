import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.least_runs import PLACES, joined_runs, slot_runs, slots_of
from lightning_mist.tuner.placed_runs import placed_runs
from lightning_mist.tuner.space import apply
from tests.specs import cluster, profile, spec


def all_runs(pace=np.inf, devices=4):
    network = spec(4)
    model = StageCostModel(network, profile(), cluster(devices, kind="cuda"))
    maker = IntraStage(model, apply(SearchSpace(), network, devices, 4 * devices), 1e12)
    slots = slots_of(maker.space, maker.slot, 4)
    return joined_runs(model, 4, [slot_runs(model, maker.space, slot, pace) for slot in slots])


@pytest.mark.parametrize("place", PLACES)
def test_all_runs_are_there_by_devices_and_layers(place):
    runs = all_runs()
    placed = placed_runs(runs, place, np.inf)
    assert len(placed) == len(runs)
    pairs = list(zip(placed.devices_V, placed.layers_V, strict=True))
    assert pairs == sorted(set(zip(runs.devices_K, runs.layers_K, strict=True)))
    # Of one device 4 ways to recompute 3 layers, of two as many with each of four ZeRO stages.
    sizes = dict(zip(pairs, np.bincount(placed.cell_R), strict=True))
    assert sizes[1, 3] == 4
    assert sizes[2, 3] == 16
    assert (placed.cell_R[placed.begins_V] == np.arange(len(pairs))).all()


def test_what_is_too_slow_is_missing():
    runs = all_runs()
    every = placed_runs(runs, "middle", np.inf)
    pace = float(np.median(every.steady_R))
    fewer = placed_runs(runs, "middle", pace)
    assert len(fewer) == (every.steady_R <= pace).sum()
    assert sorted(fewer.steady_R) == sorted(every.steady_R[every.steady_R <= pace])
    assert len(placed_runs(runs, "middle", 0.0)) == 0
