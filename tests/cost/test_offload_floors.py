"""What copies add is never less than the floor says, and not much more where it counts."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost import StageCandidates, StageCostModel, StageSlot
from lightning_mist.cost.candidates import OffloadCandidates
from lightning_mist.cost.mixed import copy_weights
from lightning_mist.cost.offload_floors import CopyFloors
from lightning_mist.cost.offload_parts import Ratios
from lightning_mist.hardware import catalog_profile, parse_cluster
from lightning_mist.hardware.profile.corrections import Correction
from tests.specs import cluster, profile, spec, with_splits

MACHINES = {
    "cpu": (cluster(4), profile()),
    "L4": (parse_cluster("1x4xL4"), catalog_profile(parse_cluster("1x4xL4"))),
    "nodes": (parse_cluster("2x2xH100"), catalog_profile(parse_cluster("2x2xH100"))),
}
NETWORKS = {
    "tied": spec(4, tied=True),
    "unlike": spec(4, kinds=(0, 1, 1, 0), widths=(1000, 2500)),
    "split": with_splits(spec(4), (2, False)),
}
RATIOS = Ratios(parameters=(0.0, 0.5, 1.0), gradients=(0.0, 1.0), optimizer=(0.0, 1.0), activations=(0.0, 0.5, 1.0))
COMBINATIONS = np.array(list(itertools.product(*(range(count) for count in RATIOS.shape))))


def stages():
    rows = [
        (start, end, kept, zero)
        for start, end in itertools.combinations(range(5), 2)
        for kept in range(end - start + 1)
        for zero in range(4)
    ]
    names = ("start_K", "end_K", "checkpointed_K", "zero_stage_K")
    return StageCandidates(**dict(zip(names, np.array(rows).T, strict=True)))


def compare(model, slot, some):
    """Steady and whole seconds that copies add to stages, with those that the floors say."""
    row, place = np.repeat(np.arange(len(some)), len(COMBINATIONS)), np.tile(COMBINATIONS, (len(some), 1))
    values = [np.array(getattr(RATIOS, name))[place[:, at]] for at, name in enumerate(RATIOS.__slots__)]
    offload = {f"{name}_K": column for name, column in zip(RATIOS.__slots__, values, strict=True)}
    plain = model.seconds(slot, some)
    found = model.seconds(slot, replace(some.take(row), offload=OffloadCandidates(**offload)))
    floor = plain.steady_K + plain.tied_K + plain.update_K + plain.once_K
    floors = model.copy_floors(slot, some, RATIOS)
    added = floors.added(copy_weights(model, slot), row, place[:, :3], values[3])
    taken = found.steady_K - plain.steady_K[row], found.steady_K + found.boundary_K - floor[row]
    return taken, added, found.steady_K


def place_of(data, tensor=1, microbatches=4):
    """A stage between others."""
    return StageSlot(
        stage_index=1,
        num_stages=3,
        num_microbatches=microbatches,
        data_parallel_degree=data,
        rows=1,
        batch_rows=8,
        tensor_parallel_degree=tensor,
    )


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", NETWORKS)
def test_no_less_is_added(network, machine, microbatches):
    devices, rates = MACHINES[machine]
    model = StageCostModel(NETWORKS[network], rates, devices)
    for data, tensor in ((1, 1), (2, 1), (4, 1), (2, 2)):
        if tensor > 1 and network != "split":
            continue
        slot = place_of(data, tensor, microbatches)
        taken, added, steady = compare(model, slot, stages())
        for most, least in zip(taken, added, strict=True):
            assert (least <= most + 1e-9 * steady).all()
        assert (added[0] > 0).any()
        # Where nothing is shared out and every channel has units of about the same size it is nearly all.
        assert np.median((taken[0] - added[0]) / steady) < 0.05


def test_where_seconds_are_corrected_nothing_is_promised():
    devices, rates = MACHINES["cpu"]
    learned = replace(rates, corrections=(Correction(term="update", factor=1.3, spread=0.05, samples=4),))
    model, slot = (
        StageCostModel(NETWORKS["tied"], learned, devices),
        StageSlot(stage_index=0, num_stages=1, num_microbatches=4, data_parallel_degree=2, rows=1, batch_rows=8),
    )
    found, nothing = model.copy_floors(slot, stages(), RATIOS), CopyFloors.nothing(len(stages()), RATIOS)
    for name in CopyFloors.__slots__:
        assert np.array_equal(getattr(found, name), getattr(nothing, name))
    row = np.arange(len(stages()))
    added = nothing.added(copy_weights(model, slot), row, np.ones((len(row), 3), dtype=np.int64), np.ones(len(row)))
    assert not added[0].any()
    assert not added[1].any()
