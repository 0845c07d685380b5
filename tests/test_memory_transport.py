import pytest
import torch

from lightning_mist.errors import ScheduleError
from tests.memory_transport import InMemoryWorld, drive


def test_messages_match_by_tag_and_keep_their_order():
    world = InMemoryWorld(2)
    got = []

    def sender(transport):
        works = [transport.isend(torch.tensor([float(i)]), 1, tag) for i, tag in enumerate([5, 6, 5])]
        yield from works

    def receiver(transport):
        for tag in (6, 5, 5):
            buffer = torch.empty(1)
            yield transport.irecv(buffer, 0, tag)
            got.append(buffer.item())

    drive([sender(world.transports[0]), receiver(world.transports[1])])
    assert got == [1.0, 0.0, 2.0]
    assert world.pending == ()


def test_collectives_and_objects():
    world = InMemoryWorld(3)

    def rank(transport):
        group = (0, 2) if transport.rank != 1 else (1,)
        tensor = torch.full((2,), float(transport.rank + 1))
        yield transport.all_reduce(tensor, group)
        reduced = torch.full((2,), float(transport.rank + 1))
        yield transport.reduce(reduced, group[-1], group)
        sent = torch.full((2,), float(transport.rank + 1))
        yield transport.broadcast(sent, group[0], group)
        objects = transport.all_gather_object({"rank": transport.rank}, (0, 1, 2))
        return tensor[0].item(), reduced[0].item(), sent[0].item(), objects

    results = drive([rank(transport) for transport in world.transports])
    everyone = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert results[0][0] == results[2][0] == 4.0
    assert results[2][1] == 4.0
    assert results[0][1] != 4.0
    assert results[0][2] == results[2][2] == 1.0
    assert results[1] == (2.0, 2.0, 2.0, everyone)


def test_deadlock_names_what_each_rank_waits_for():
    world = InMemoryWorld(2)

    def rank(transport):
        buffer = torch.empty(3)
        yield transport.irecv(buffer, 1 - transport.rank, 7)

    message = r"deadlock.*rank 0: receive of float32\[3\] from rank 1, tag 7; rank 1: receive of"
    with pytest.raises(ScheduleError, match=message):
        drive([rank(transport) for transport in world.transports])


def test_waiting_alone_is_a_deadlock():
    work = InMemoryWorld(2).transports[0].irecv(torch.empty(1), 1, 0)
    with pytest.raises(ScheduleError, match="deadlock: rank 0: receive"):
        work.wait()


def test_two_ends_must_agree():
    world = InMemoryWorld(2)
    world.transports[0].isend(torch.zeros(2), 1, 0)
    with pytest.raises(ScheduleError, match="must agree on elements and dtype"):
        world.transports[1].irecv(torch.zeros(3), 0, 0)
    world.transports[0].all_reduce(torch.zeros(2), (0, 1))
    with pytest.raises(ScheduleError, match="must call the same collectives in one order"):
        world.transports[1].broadcast(torch.zeros(2), 0, (0, 1))


def test_only_contiguous_tensors_travel():
    transport = InMemoryWorld(2).transports[0]
    strided = torch.zeros(4, 4)[:, ::2]
    for call in (
        lambda: transport.isend(strided, 1, 0),
        lambda: transport.irecv(strided, 1, 0),
        lambda: transport.all_reduce(strided, (0, 1)),
    ):
        with pytest.raises(ScheduleError, match="only contiguous tensors travel"):
            call()


def test_groups_are_sorted_and_hold_the_caller():
    world = InMemoryWorld(3)
    with pytest.raises(ScheduleError, match="a group is sorted"):
        world.transports[0].all_reduce(torch.zeros(1), (1, 0))
    with pytest.raises(ScheduleError, match="a group is sorted"):
        world.transports[0].all_reduce(torch.zeros(1), (1, 2))


def test_collectives_with_a_result():
    world = InMemoryWorld(3)

    def rank(transport):
        value = float(transport.rank + 1)
        largest = torch.full((2,), value)
        yield (
            transport.all_reduce(largest, (0, 2), "max") if transport.rank != 1 else transport.all_gather(largest, (1,))
        )
        gathered = transport.all_gather(torch.full((2,), value), (0, 1, 2))
        scattered = transport.reduce_scatter(torch.arange(6.0).reshape(3, 2) * value, (0, 1, 2))
        yield gathered
        return largest.tolist(), gathered.result().tolist(), scattered.result().tolist()

    for index, (largest, gathered, scattered) in enumerate(drive([rank(transport) for transport in world.transports])):
        assert largest == [2.0 if index == 1 else 3.0] * 2
        assert gathered == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert scattered == [12.0 * index, 12.0 * index + 6]
    with pytest.raises(ScheduleError, match="its first dimension must have one entry per rank, 2"):
        world.transports[0].reduce_scatter(torch.zeros(3, 2), (0, 1))


def test_reductions_must_agree():
    world = InMemoryWorld(2)
    world.transports[0].all_reduce(torch.zeros(2), (0, 1), "max")
    with pytest.raises(ScheduleError, match="must call the same collectives in one order"):
        world.transports[1].all_reduce(torch.zeros(2), (0, 1))
