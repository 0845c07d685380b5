"""What every implementation of the protocol gives: shapes, and values where there are any."""

import torch

from lightning_mist.runtime.stage.stage_split import TransportGroup
from lightning_mist.tensor_parallel import CountingGroup, run_ranks
from tests.memory_transport import InMemoryWorld, drive


def results(group):
    mine = torch.arange(3.0) + 10 * group.rank
    pair = torch.stack([mine, -mine])
    before = mine.clone(), pair.clone()
    found = group.all_reduce(mine), group.all_reduce(mine, "max"), group.all_gather(mine), group.reduce_scatter(pair)
    assert torch.equal(mine, before[0])
    assert torch.equal(pair, before[1])
    return found


def check(all_ranks):
    first, second = torch.arange(3.0), torch.arange(3.0) + 10
    for rank, (total, largest, gathered, scattered) in enumerate(all_ranks):
        assert torch.equal(total, first + second)
        assert torch.equal(largest, second)
        assert torch.equal(gathered, torch.stack([first, second]))
        assert torch.equal(scattered, (first + second) * (1 - 2 * rank))


def test_threads():
    check(run_ranks(2, results))


def test_a_transport():
    def run(transport):
        yield from ()
        return results(TransportGroup(transport, (0, 1)))

    check(drive([run(transport) for transport in InMemoryWorld(2).transports]))


def test_one_that_only_counts_gives_the_same_shapes():
    shapes = [tuple(item.shape) for item in results(CountingGroup(2))]
    assert shapes == [tuple(item.shape) for item in run_ranks(2, results)[0]]
