import pytest
import torch

from lightning_mist.runtime.stage.stage_split import TransportGroup
from tests.memory_transport import InMemoryWorld, drive


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0, 1)])
def test_results_are_in_the_order_of_tensor_parallel_indices(ranks):
    world = InMemoryWorld(3)

    def rank(transport):
        group = TransportGroup(transport, ranks)
        mine = torch.tensor([float(group.rank), 1.0])
        total = group.all_reduce(mine)
        largest = group.all_reduce(mine, "max")
        gathered = group.all_gather(mine)
        entries = torch.arange(3.0)[:, None].expand(3, 2).contiguous() * (group.rank + 1)
        scattered = group.reduce_scatter(entries)
        return group.rank, group.size, mine, total, largest, gathered, scattered
        yield

    results = drive([rank(transport) for transport in world.transports])
    assert [results[member][0] for member in ranks] == [0, 1, 2]
    for index, size, mine, total, largest, gathered, scattered in results:
        assert size == 3
        assert mine.tolist() == [index, 1.0]
        assert total.tolist() == [3.0, 3.0]
        assert largest.tolist() == [2.0, 1.0]
        assert gathered.tolist() == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
        assert scattered.tolist() == [6.0 * index] * 2


def test_results_have_no_history():
    transport = InMemoryWorld(1).transports[0]
    group = TransportGroup(transport, (0,))
    given = torch.ones(1, 2, requires_grad=True) * 2
    results = group.all_reduce(given), group.all_gather(given), group.reduce_scatter(given)
    assert not any(result.requires_grad for result in results)
    assert [result.shape for result in results] == [(1, 2), (1, 1, 2), (2,)]
