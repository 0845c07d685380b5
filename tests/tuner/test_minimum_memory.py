import numpy as np
import pytest

from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner import infeasible as least
from lightning_mist.tuner.infeasible import LateError, LeastMemory
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.space.applied_space import Shape
from tests.specs import cluster, profile, spec

OFFLOAD = {"offload": ("optimizer", "activations"), "offload_ratios": (0.5, 1.0)}


def stages_of(host=None, **limits):
    planner = Planner(spec(4, measured=True), cluster(2), profile=profile())
    return planner.stages(planner.space(4, SearchSpace(**{**OFFLOAD, **limits})), None, host).together


def slot_of(intra):
    return intra.slot(0, 1, 2, Shape(2))


def test_of_every_range_of_layers_the_least_is_kept_whatever_it_moves():
    intra = stages_of()
    plain = LeastMemory().choices(stages_of(offload=()), slot_of(intra))
    look = LeastMemory()
    moving = look.choices(intra, slot_of(intra))
    assert (len(plain), len(moving)) == (1, 1)
    assert moving.peak_K[0] < plain.peak_K[0]
    assert plain.offload_KO.max() == 0
    assert moving.offload_KO[0].max() == 1
    assert not look.is_coarse


def test_host_memory_is_kept_to_left_out_or_what_is_least():
    free = LeastMemory().choices(stages_of(), slot_of(stages_of()))
    intra = stages_of(host=0)
    kept = LeastMemory().choices(intra, slot_of(intra))
    assert kept.offload_KO.max() == 0
    assert LeastMemory(wanted="device without host limit").choices(intra, slot_of(intra)).peak_K == free.peak_K
    host = LeastMemory(wanted="host").choices(intra, slot_of(intra))  # everything fits on the device
    assert host.peak_K.tolist() == [0.0]


def test_with_many_candidates_fewer_shares_are_looked_at(monkeypatch):
    intra, found = stages_of(), []
    for most in (10**6, 4 * 20, 1):
        monkeypatch.setattr(least, "MOST", most)
        look = LeastMemory()
        found.append(look.choices(intra, slot_of(intra)).peak_K[0])
        assert look.is_coarse == (most < 10**6)
    assert found == sorted(found)


def test_time_is_kept_to():
    intra = stages_of()
    with pytest.raises(LateError):
        LeastMemory(deadline=-np.inf).choices(intra, slot_of(intra))
