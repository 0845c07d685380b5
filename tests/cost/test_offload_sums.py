"""What is known of stages beforehand is what their copies are worked out of otherwise."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.candidates import OffloadCandidates
from lightning_mist.cost.offload_ranks import parts_of_ranks
from tests.cost.test_offload_floors import COMBINATIONS, MACHINES, NETWORKS, RATIOS, place_of, stages


def every_combination(some):
    """Stages with every combination of ratios that moves something, which stages they are, and which ratios."""
    place = COMBINATIONS[COMBINATIONS.any(axis=1)]
    row, place = np.repeat(np.arange(len(some)), len(place)), np.tile(place, (len(some), 1))
    ratios = {f"{name}_K": np.array(getattr(RATIOS, name))[place[:, at]] for at, name in enumerate(RATIOS.__slots__)}
    return row, place, OffloadCandidates(**ratios)


@pytest.mark.sample
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", NETWORKS)
def test_copies_add_to_what_is_known_what_they_add_to_what_is_worked_out(network, machine, microbatches):
    devices, rates = MACHINES[machine]
    model, some = StageCostModel(NETWORKS[network], rates, devices), stages()
    row, place, ratios = every_combination(some)
    moved = replace(some.take(row), offload=ratios)
    slots = [place_of(1, microbatches=microbatches), place_of(2, microbatches=microbatches)]
    for index, slot in enumerate(slots):
        floors = model.copy_floors(slot, some, RATIOS)
        before = floors.before(row, place[:, :3])
        found = model.moved_seconds(slots, np.full(len(row), index), moved, before)
        wanted, plain = model.seconds(slot, moved), model.seconds(slot, some)
        assert found.copies_K == pytest.approx(wanted.copies_K, rel=1e-9, abs=1e-15)
        assert found.update_copies_K == pytest.approx(wanted.update_copies_K, rel=1e-9, abs=1e-15)
        reduce_K = np.maximum(plain.reduce_K[row] + found.reduce_K, 0.0)
        assert reduce_K == pytest.approx(wanted.reduce_K, rel=1e-9, abs=1e-15)
        gather_K = np.where(found.is_deferred_K, found.gather_K, plain.gather_K[row])
        assert gather_K == pytest.approx(wanted.gather_K, rel=1e-9, abs=1e-15)
        assert (found.copies_K > 0).any()


@pytest.mark.parametrize("network", NETWORKS)
def test_parts_of_ranks_are_those_of_every_candidate(network):
    devices, rates = MACHINES["L4"]
    model, some = StageCostModel(NETWORKS[network], rates, devices), stages()
    row, place, ratios = every_combination(some)
    moved = replace(some.take(row), offload=ratios)
    for data in (1, 2, 4):
        slot = place_of(data)
        found = model.copy_floors(slot, some, RATIOS).before(row, place[:, :3]).parts
        wanted = parts_of_ranks(model.memory(slot), np.full(len(row), data), moved)
        for name in wanted.__slots__:
            np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-12)
