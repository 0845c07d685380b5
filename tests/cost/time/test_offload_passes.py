import numpy as np
import pytest

from lightning_mist.cost.inputs.regions import StageRegions
from lightning_mist.cost.time.offload_loads import BEFORE, BEHIND
from lightning_mist.cost.time.offload_passes import Neighbourhoods, Passes
from lightning_mist.cost.time.overlap import FREE, concurrent_seconds
from tests.cost.time.test_offload_loads import loads
from tests.cost.time.test_offload_seconds import candidates
from tests.specs import spec

ALTERNATING = spec(6, kinds=(0, 1) * 3, widths=(1000, 2500), parameter_bytes=40_000, edge_bytes=120_000)


def together(compute, network, copies):
    none = np.zeros(1)
    return concurrent_seconds(compute, network, *(copies or (none, none)), FREE, False)


def test_units_with_equal_neighbours_are_looked_at_once():
    found, _ = loads(candidates((0, 6), parameters=0.5, activations=1.0), ALTERNATING)
    kinds = Neighbourhoods.of(found)
    every = found.table(np.arange(found.width))
    assert len(kinds.place_R) == every.shape[2] - BEFORE - BEHIND == 8
    # Head, tail, their neighbours, and one of either kind between.
    assert len(kinds.places_U) < 8
    for unit, kind in enumerate(kinds.place_R):
        like = kinds.places_U[kind]
        assert (every[:, :, unit : unit + 4] == every[:, :, like : like + 4]).all()


def test_units_differ_where_any_load_does():
    found, _ = loads(candidates((0, 6), activations=1.0), ALTERNATING)
    every = found.table(np.arange(found.width))
    wanted = [(every[:, :, unit] != every[:, :, unit - 1]).any() for unit in range(1, every.shape[2])]
    assert found.differs().tolist() == wanted
    assert not wanted[-1]


@pytest.mark.parametrize("checkpointed", [0, 2, 6])
def test_without_copies_passes_are_what_is_computed(checkpointed):
    some = candidates((0, 6), checkpointed=checkpointed, parameters=1.0, activations=1.0)
    found, rows = loads(some, ALTERNATING)
    passes = Passes(found, rows, StageRegions.of(ALTERNATING, some), together, Neighbourhoods.of(found))
    again = found["forward"][0, BEFORE + 1 : BEFORE + 1 + checkpointed].sum()
    assert passes.forward(copies=False) == pytest.approx(found["forward"].sum())
    assert passes.backward(copies=False) == pytest.approx(found["backward"].sum() + again)
    # All hides but what a batch begins with.
    assert passes.forward(copies=True, edge=True) > passes.forward(copies=True) >= passes.forward(copies=False)
    assert passes.backward(copies=True) >= passes.backward(copies=False)
