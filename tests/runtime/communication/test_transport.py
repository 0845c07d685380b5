import pytest
import torch

from lightning_mist.errors import PlanError, ScheduleError
from lightning_mist.runtime.communication.transport import DistributedTransport, complete

GROUPS = [(0, 1, 2), (0, 2), (1, 2)]


def _transport():
    return DistributedTransport(GROUPS, torch.device("cpu"))


def _messages():
    """Every rank first sends to all others, then receives in another order of tags."""
    transport = _transport()
    others = [rank for rank in range(3) if rank != transport.rank]
    sends = [
        transport.isend(torch.full((1000,), 10.0 * transport.rank + tag), peer, tag)
        for peer in others
        for tag in (0, 1)
    ]
    got = {}

    def run():
        for tag in (1, 0):
            for peer in others:
                buffer = torch.empty(1000)
                yield transport.irecv(buffer, peer, tag)
                got[peer, tag] = buffer.unique().tolist()
        yield from sends
        return "end"

    assert complete(run()) == "end"
    transport.close()
    return got


def test_messages_arrive_by_tag(gloo_workers):
    for rank, got in enumerate(gloo_workers.run(3, _messages)):
        peers = [peer for peer in range(3) if peer != rank]
        assert got == {(peer, tag): [10.0 * peer + tag] for peer in peers for tag in (0, 1)}


def _collectives():
    transport = _transport()
    value = float(transport.rank + 1)
    result = {}
    for group in GROUPS:
        if transport.rank not in group:
            continue
        tensors = [torch.full((3,), value) for _ in range(3)]
        works = [
            transport.all_reduce(tensors[0], group),
            transport.reduce(tensors[1], group[-1], group),
            transport.broadcast(tensors[2], group[0], group),
        ]
        objects = transport.all_gather_object({"rank": transport.rank, "pad": "x" * transport.rank}, group)
        for work in (*works, objects):
            work.wait()
        assert works[0].is_completed()
        largest = torch.full((3,), value)
        transport.all_reduce(largest, group, "max").wait()
        gathered = transport.all_gather(torch.full((2, 2), value), group).result()
        entries = torch.arange(len(group) * 2.0).reshape(len(group), 2)
        scattered = transport.reduce_scatter(entries * value, group).result()
        result[group] = (
            (tensors[0][0].item(), tensors[1][0].item(), tensors[2][0].item(), objects.result()),
            (largest[0].item(), gathered, scattered),
        )
    alone = torch.ones(2)
    for work in (
        transport.all_reduce(alone, (transport.rank,)),
        transport.reduce(alone, transport.rank, (transport.rank,)),
        transport.broadcast(alone, transport.rank, (transport.rank,)),
    ):
        work.wait()
    assert alone.tolist() == [1.0, 1.0]
    assert transport.all_gather(alone, (transport.rank,)).result().tolist() == [[1.0, 1.0]]
    assert transport.reduce_scatter(alone[None], (transport.rank,)).result().tolist() == [1.0, 1.0]
    assert transport.all_gather_object("me", (transport.rank,)).result() == ["me"]
    return result


def test_collectives_on_overlapping_groups(gloo_workers):
    for rank, result in enumerate(gloo_workers.run(3, _collectives)):
        assert list(result) == [group for group in GROUPS if rank in group]
        for group, ((total, reduced, sent, objects), (largest, gathered, scattered)) in result.items():
            assert largest == group[-1] + 1
            assert torch.equal(gathered, torch.stack([torch.full((2, 2), member + 1.0) for member in group]))
            place = group.index(rank)
            assert scattered.tolist() == [2.0 * place * total, (2.0 * place + 1) * total]
            assert total == sum(member + 1 for member in group)
            assert sent == group[0] + 1
            assert objects == [{"rank": member, "pad": "x" * member} for member in group]
            if rank == group[-1]:
                assert reduced == total


def _refusals():
    transport = _transport()
    strided = torch.zeros(4, 4)[:, ::2]
    with pytest.raises(ScheduleError, match="only contiguous tensors travel"):
        transport.all_reduce(strided, (0, 1, 2))
    with pytest.raises(ScheduleError, match=r"shape \(2, 3\) over 3 ranks: its first dimension must have one entry"):
        transport.reduce_scatter(torch.zeros(2, 3), (0, 1, 2))
    with pytest.raises(PlanError, match=r"no process group of ranks \[0, 1\].*\[0, 2\]"):
        transport.all_reduce(torch.zeros(1), (0, 1))


def test_what_would_go_wrong_silently_is_refused(gloo_workers):
    gloo_workers.run(3, _refusals)
