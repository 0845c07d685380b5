import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.floors import Situation, stage_floors
from lightning_mist.tuner.folded import SHORT, folded
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.known_runs import KnownRuns
from lightning_mist.tuner.least_runs import PLACES, joined_runs, slot_runs, slots_of
from lightning_mist.tuner.placed_runs import Moves
from lightning_mist.tuner.space import apply
from tests.specs import cluster, profile, spec

NOTHING = Moves(kinds=frozenset(), rates=None, num_microbatches=4)

LAYERS = 12


def both(devices=4):
    """All runs of an instance with long stages, and those that stand for others."""
    network = spec(LAYERS)
    model = StageCostModel(network, profile(), cluster(devices, kind="cuda"))
    maker = IntraStage(model, apply(SearchSpace(), network, devices, 4 * devices), 1e12)
    slots = [slot_runs(model, maker.space, slot, np.inf) for slot in slots_of(maker.space, maker.slot, 4)]
    return tuple(KnownRuns(runs=joined_runs(model, LAYERS, slots, is_folded)) for is_folded in (False, True))


def test_of_long_runs_one_stands_for_all():
    every, fewer = both()
    for layers in range(1, LAYERS):
        of_all = every.runs.recomputed_K[every.runs.layers_K == layers]
        found = fewer.runs.recomputed_K[fewer.runs.layers_K == layers]
        assert len(of_all) == len(found) * (1 if layers <= SHORT else layers + 1)
        assert not found.any() or layers <= SHORT


@pytest.mark.parametrize("place", PLACES)
def test_they_take_no_longer_and_hardly_less(place):
    every, fewer = both()
    at = [known.at(place, NOTHING, np.inf) for known in (every, fewer)]
    situations, gaps = [Situation(place=place, others=others, has_gradients=True) for others in (0, 1, 3)], []
    needed = np.sort(at[0].needed_R + at[0].gradients_R)
    for limit in (1e15, *needed[:: len(needed) // 20]):
        for wanted, found in zip(*(stage_floors(runs, limit, situations) for runs in at), strict=True):
            known = dict(zip(zip(found.layers_V, found.devices_V, strict=True), found.steady_V, strict=True))
            for layers, devices, steady in zip(wanted.layers_V, wanted.devices_V, wanted.steady_V, strict=True):
                assert known[layers, devices] <= steady * (1 + 1e-9)
                gaps.append(1 - known[layers, devices] / steady)
    assert max(gaps) > 1e-3
    assert np.mean(gaps) < 0.02


def test_where_recomputing_takes_no_time_every_run_stands_for_itself():
    layers, recomputed = (
        np.array(values) for values in zip(*((n, c) for n in (8, 9) for c in range(n + 1)), strict=True)
    )
    zeros = np.zeros(len(layers))
    of_zero = dict.fromkeys(("saved_K", "whole_K", "top_K", "top_two_K"), zeros)
    of_zero |= {"layers_K": layers, "working_XK": np.zeros((3, len(layers)))}
    (found,) = folded([of_zero], 0.0 * recomputed)
    assert len(found["layers_K"]) == len(layers)
    assert not found["rate_XK"].any()
    (found,) = folded([of_zero], 1.0 * recomputed)
    assert found["layers_K"].tolist() == [8, 9]
