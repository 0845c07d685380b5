import numpy as np

from lightning_mist.cost import StageCandidates
from lightning_mist.cost.memory.held_parameters import ByRange, HeldBytes, Holdings
from lightning_mist.plan.sharding import assign_owners
from tests.specs import spec, with_splits


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
        assert holdings.shares(one(0, 3), ranks).trained_K[0] == max(loads(sizes, ranks))
        middle = [40_000, 400, 40_000, 400, 100_000]
        assert holdings.shares(one(1, 3), ranks).trained_K[0] == max(loads(middle, ranks))


def test_frozen_parameters_are_dealt_out_on_top_of_trained_ones():
    network = spec(2, parameter_bytes=40_000, edge_bytes=100_000, frozen=("wte.weight",))
    holdings = Holdings(network)
    shares = holdings.shares(one(0, 2), 2)
    # The trained ones give 100000 and 80800 bytes; the frozen embedding goes to the second rank.
    assert shares.trained_K[0] == max(loads([40_000, 400, 40_000, 400, 100_000], 2)) == 100_000
    assert shares.every_K[0] == 180_800
    assert holdings.of(one(0, 2)).trained_K[0] == 180_800


def test_owners_are_those_of_whole_parameters_and_have_parts():
    network = with_splits(spec(2, parameter_bytes=40_000, edge_bytes=16_000), (2, False)).split(2)
    # Whole: 40000 + 16000 + 400 on either rank, of which a tensor-parallel rank has half of all but the bias.
    assert Holdings(network).shares(one(0, 2), 2).trained_K[0] == 20_000 + 8_000 + 400


def away(holdings, start, end, ranks):
    shares = holdings.shares(one(start, end), ranks)
    return shares.forward_RK[:, 0].tolist(), shares.backward_RK[:, 0].tolist()


def test_what_is_away_is_what_the_poorest_owner_lacks_of_two_neighbours():
    holdings = Holdings(spec(2, parameter_bytes=40_000, edge_bytes=100_000))
    # An embedding has one owner, and so has the tail; of two layers each of two ranks owns a matrix and a bias.
    # A forward finds the parameters of the next region, a backward those of the one before.
    beside = 100_000 + 40_400
    assert away(holdings, 0, 2, 2) == ([beside, 40_400, beside, beside], [beside, beside, 40_400, beside])
    assert away(holdings, 0, 2, 1) == ([0] * 4, [0] * 4)
    # The first of two stages has no tail; behind its last layer comes the next microbatch's head.
    assert away(holdings, 0, 1, 2)[0][2:] == [100_000, 0]


def test_a_module_without_units_needs_all_of_its_parameters_at_once():
    network = spec(2, parameter_bytes=40_000, edge_bytes=100_000, exclusions=[("shards", "used in ways not seen")])
    forward, backward = away(Holdings(network), 0, 2, 2)
    assert forward == backward == [140_400] * 4
    assert Holdings(network).is_one_unit


def test_devices_with_several_stages_deal_out_what_they_hold_together():
    holdings = Holdings(spec(4, parameter_bytes=40_000, edge_bytes=100_000))
    sizes = [100_000, 40_000, 400, 40_000, 400]
    assert holdings.together([one(0, 1), one(2, 3)], 2).trained == max(loads(sizes, 2))


def test_what_is_asked_together_is_what_is_asked_one_by_one():
    network = spec(4, parameter_bytes=40_000, edge_bytes=100_000, tied=True, frozen=("wte.weight",))
    ranges = [(start, end) for start in range(4) for end in range(start + 1, 5)]
    together, later = Holdings(network), Holdings(network)
    start_K, end_K = np.array(ranges * 2).T
    zero_K = np.zeros_like(start_K)
    every = StageCandidates(start_K=start_K, end_K=end_K, checkpointed_K=zero_K, zero_stage_K=zero_K)
    found, shares = together.of(every), together.shares(every, 2)
    for index in np.random.default_rng(0).permutation(len(start_K)):
        alone = later.of(one(start_K[index], end_K[index]))
        for name in HeldBytes.__slots__:
            assert getattr(found, name)[index] == getattr(alone, name)[0]
        part = later.shares(one(start_K[index], end_K[index]), 2)
        assert shares.every_K[index] == part.every_K[0]
        assert shares.backward_RK[:, index].tolist() == part.backward_RK[:, 0].tolist()


def test_figures_of_ranges_are_asked_for_once_for_each_network():
    known, asked = ByRange(5, 2, networks=3), []

    def make(network, low_J, high_J):
        asked.extend((network, *item) for item in zip(low_J.tolist(), high_J.tolist(), strict=True))
        return np.stack([100 * network + 10 * low_J + high_J, -low_J]).astype(float)

    choice = np.random.default_rng(0)
    for _ in range(4):
        network, low, high = choice.integers(0, 3, 20), choice.integers(0, 3, 20), choice.integers(3, 5, 20)
        found = known.of(low, high, make, network)
        assert found.tolist() == [(100 * network + 10 * low + high).tolist(), (-low).tolist()]
    assert len(asked) == len(set(asked)) == 18
    assert known.of(np.array([], dtype=int), np.array([], dtype=int), make).shape == (2, 0)
