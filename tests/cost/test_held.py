import numpy as np

from lightning_mist.cost import StageCandidates
from lightning_mist.cost.held import Holdings
from lightning_mist.plan.sharding import assign_owners
from tests.specs import spec


def one(start, end):
    zero = np.array([0])
    return StageCandidates(start_K=np.array([start]), end_K=np.array([end]), checkpointed_K=zero, zero_stage_K=zero)


def loads(sizes, ranks):
    found = [0] * ranks
    for owner, size in zip(assign_owners(sizes, ranks), sizes, strict=True):
        found[owner] += size
    return found


def test_the_largest_share_is_that_of_the_runtime_s_rule():
    holdings = Holdings(spec(3, parameter_bytes=40_000, edge_bytes=100_000))
    sizes = [100_000, *[40_000, 400] * 3, 100_000]
    for ranks in (2, 3, 8):
        assert holdings.largest_share(one(0, 3), ranks)[0] == max(loads(sizes, ranks))
        assert holdings.largest_share(one(1, 3), ranks)[0] == max(loads([40_000, 400, 40_000, 400, 100_000], ranks))


def test_frozen_parameters_are_dealt_out_only_where_asked():
    network = spec(2, parameter_bytes=40_000, edge_bytes=100_000, frozen=("wte.weight",))
    holdings = Holdings(network)
    assert holdings.largest_share(one(0, 2), 2)[0] == max(loads([40_000, 400, 40_000, 400, 100_000], 2))
    assert holdings.largest_share(one(0, 2), 2, frozen=True)[0] == 140_400
    assert holdings.of(one(0, 2)).trained_K[0] == 180_800


def test_what_is_away_is_what_the_poorest_owner_lacks_of_two_neighbours():
    holdings = Holdings(spec(2, parameter_bytes=40_000, edge_bytes=100_000))
    # An embedding has one owner; of two layers each of two ranks owns half.
    assert holdings.away(2).tolist() == [100_000, 100_000, 40_400, 100_000, 100_000]
    assert holdings.away(8).tolist() == [100_000, 140_400, 80_800, 140_400, 100_000]
    assert holdings.away(1).tolist() == [0, 0, 0, 0, 0]
