"""While plans are searched for nobody looks for cycles, of which a search makes none."""

import gc

import pytest

from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner.collection import collection_paused
from tests.specs import cluster, profile, spec


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_the_collector_rests_and_goes_on():
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error_and_rests_on_where_it_rested():
    with pytest.raises(ValueError, match="x"), collection_paused():
        raise ValueError("x")
    assert gc.isenabled()
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


@pytest.mark.thorough
def test_a_search_leaves_no_cycles_behind():
    planner, found = Planner(spec(6, tied=True, measured=True), cluster(4), profile=profile()), []
    search = SearchSpace(offload=("optimizer", "activations"))
    gc.disable()
    gc.collect()
    for limit in (10**9, 10**6):
        found.append(planner.tune(global_batch_size=16, memory_limit=limit, search=search))
        # What sympy keeps of the first search may.
        if limit == 10**9:
            gc.collect()
    assert gc.collect() == 0
    assert len(found) == 2
