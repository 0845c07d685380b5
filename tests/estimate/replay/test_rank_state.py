import pytest
import torch

from lightning_mist.estimate.replay.rank_state import ALIGNMENT_BYTES, ReplayedRank, padded
from lightning_mist.model import trace_model
from lightning_mist.runtime import host_memory
from lightning_mist.runtime.parameters import unit_shards as shards
from tests import zoo
from tests.cost.events import with_events
from tests.integration.parity import Rank, make_plan, map_of
from tests.memory_transport import InMemoryWorld
from tests.specs import spec
from tests.tiers import tiered


@pytest.fixture(scope="module")
def traced():
    """A tied model with its costs."""
    torch.manual_seed(0)
    module, make_batch = zoo.make("llama_tied")
    batch = make_batch(4)
    return module, trace_model(module, batch, call=zoo.step(module), module_map=map_of(module, batch))


PLANS = {
    "ZeRO-0": make_plan([4], degrees=[2], parts=2),
    "ZeRO-1": make_plan([2, 2], degrees=[2, 2], parts=2, zero=1),
    "ZeRO-2": make_plan([4], degrees=[3], parts=2, zero=2),
    "ZeRO-3": make_plan([2, 2], degrees=[2, 2], parts=2, zero=3),
    "chunks": make_plan([1, 1, 1, 1], degrees=[2, 2], chunks=2, parts=2, zero=3, schedule="interleaved-1f1b"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", tiered(PLANS, ("ZeRO-1", "chunks")))
def test_a_rank_holds_what_the_runtime_gives_it(traced, name):
    module, network = traced
    plan, world = PLANS[name], InMemoryWorld(PLANS[name].world_size)
    for rank in range(plan.world_size):
        executor = Rank.make(module, network.module_map, plan, rank, world.transports[rank]).executor
        view = ReplayedRank(network, network, plan, rank)
        assert {item.name: item.bytes for item in view.held} == {
            name: p.numel() * p.element_size() for name, p in executor.parameters.items()
        }
        assert view.owned == {item.name for item in executor.mesh.owned}
        buckets = executor.reducer.buckets
        assert [(flat.names, flat.owner) for flat in view.buckets] == [(item.names, item.owner) for item in buckets]
        assert [flat.bytes for flat in view.buckets] == [item.numel * 4 for item in buckets]
        walk = executor._runner
        assert bool(view.units) == bool(walk._lines)
        if walk.gradients is not None:
            flats = {key: [(item.names, item.owner) for item in found] for key, found in walk.gradients._of.items()}
            assert {k: [(f.names, f.owner) for f in found] for k, found in view.unit_gradients.items()} == flats
        if walk.shards is not None:
            assert [flat.names for flat, _ in view.shards] == [item.bucket.names for item in walk.shards._shards]
            for key, found in walk.shards._of.items():
                mine = [flat.names for flat, keys in view.shards if key in keys]
                assert mine == [item.bucket.names for item in found]


def test_parameters_begin_where_the_runtime_lets_them_begin():
    assert ALIGNMENT_BYTES == shards._ALIGNMENT_BYTES
    assert all(padded(size) == host_memory.padded(size) for size in (1, 64, 65))


def test_rows_that_several_ranks_have_come_in_portions():
    network = with_events(spec(4))
    plan = make_plan([2, 2], degrees=[2, 1], parts=2)
    view = ReplayedRank(network, network, plan, plan.stages[1].devices[0])
    (tensor,) = view.crossing(1, 0, 0)
    rows = plan.stages[1].microbatch_size
    assert tensor.bytes == 1000 * rows
    assert tensor.portions == (500 * rows, 500 * rows)
    assert not tensor.is_copied
    back = ReplayedRank(network, network, plan, plan.stages[0].devices[0])
    assert [item.shares for item in back.crossing(0, 1, 0)] == [(1.0,)]


def test_every_rank_has_its_own_batch_and_those_it_computes_on():
    network = with_events(spec(4))
    plan = make_plan([2, 2], parts=2)
    assert [ReplayedRank(network, network, plan, rank).batches for rank in range(2)] == [2, 2]
    alone = make_plan([4], degrees=[2], parts=2)
    assert [ReplayedRank(network, network, alone, rank).batches for rank in range(2)] == [1, 1]


@pytest.mark.thorough
def test_parameters_are_known_by_the_regions_that_use_them(traced):
    _, network = traced
    plan = make_plan([2, 2])
    first, last = (ReplayedRank(network, network, plan, rank) for rank in range(2))
    tied = "model.model.embed_tokens.weight"
    assert first.regions_of[tied] == {0: (0,)}
    assert last.regions_of[tied] == {1: (5,)}
    whole = ReplayedRank(network, network, make_plan([4]), 0)
    assert whole.regions_of[tied] == {0: (0, 5)}
    assert first.regions_of["model.model.layers.1.mlp.up_proj.weight"] == {0: (2,)}
