import threading

import pytest
import torch

from lightning_mist.errors import ScheduleError
from tests.memory_transport import InMemoryWorld
from tests.turns import drive, wait_in_turn


class _Sum(torch.autograd.Function):
    """Sums over the ranks in forward and in backward."""

    @staticmethod
    def forward(ctx, tensor, transport):
        ctx.transport = transport
        tensor = tensor.clone()
        transport.all_reduce(tensor, (0, 1, 2)).wait()
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        ctx.transport.all_reduce(gradient, (0, 1, 2)).wait()
        return gradient, None


def test_ranks_may_wait_inside_forward_and_backward():
    world = InMemoryWorld(3)

    def rank(transport):
        x = torch.full((2,), float(transport.rank), requires_grad=True)
        y = _Sum.apply(x, transport)
        (y * (transport.rank + 1.0)).sum().backward()
        tensor = torch.ones(1)
        yield transport.all_reduce(tensor, (0, 1, 2))
        return y.tolist(), x.grad.tolist(), tensor.item()

    assert drive([rank(transport) for transport in world.transports]) == [([3.0, 3.0], [6.0, 6.0], 3.0)] * 3
    assert world.pending == ()


def test_one_rank_runs_at_a_time_and_in_one_order():
    world, log = InMemoryWorld(3), []

    def rank(transport):
        for step in range(3):
            log.append((transport.rank, step))
            transport.all_reduce(torch.zeros(1), (0, 1, 2)).wait()
        return
        yield

    drive([rank(transport) for transport in world.transports])
    first = list(log)
    assert sorted(first) == [(rank, step) for rank in range(3) for step in range(3)]
    log.clear()
    drive([rank(transport) for transport in world.transports])
    assert log == first


def test_every_rank_draws_from_a_stream_of_its_own():
    world = InMemoryWorld(2)

    def rank(transport):
        drawn = []
        for _ in range(transport.rank + 2):
            drawn.append(torch.rand(()).item())
            transport.all_gather_object(None, (0, 1)) if len(drawn) < 3 else None
        return drawn
        yield

    torch.manual_seed(3)
    expected = torch.rand(3).tolist()
    torch.manual_seed(3)
    first, second = drive([rank(transport) for transport in world.transports])
    assert first == expected[:2]
    assert second == expected
    assert torch.rand(()).item() == expected[2]


def test_an_error_in_one_rank_ends_all():
    world, left = InMemoryWorld(3), []

    def rank(transport):
        try:
            if transport.rank == 1:
                raise KeyError("rank 1")
            try:
                transport.all_reduce(torch.zeros(1), (0, 1, 2)).wait()
            except Exception:
                left.append("swallowed")
        finally:
            left.append(transport.rank)
        yield

    before = threading.active_count()
    with pytest.raises(KeyError, match="rank 1"):
        drive([rank(transport) for transport in world.transports])
    assert left == [1, 0]
    assert threading.active_count() == before


def test_a_rank_that_has_not_begun_is_not_begun_after_an_error():
    began = []

    def fails():
        raise ValueError("at once")
        yield

    def other():
        began.append(True)
        yield

    with pytest.raises(ValueError, match="at once"):
        drive([fails(), other()])
    assert began == []


def test_generators_are_left_where_they_wait():
    world, closed = InMemoryWorld(2), []

    def rank(transport):
        try:
            yield transport.irecv(torch.empty(1), 1 - transport.rank, 0)
        finally:
            closed.append(transport.rank)

    with pytest.raises(ScheduleError, match="deadlock: every rank waits"):
        drive([rank(transport) for transport in world.transports])
    assert closed == [0, 1]


def test_a_deadlock_of_ranks_that_wait_inside_names_what_each_waits_for():
    world = InMemoryWorld(2)

    def rank(transport):
        transport.irecv(torch.empty(3), 1 - transport.rank, 7).wait()
        yield

    message = r"every rank waits. rank 0: receive of float32\[3\] from rank 1, tag 7; rank 1: receive of"
    with pytest.raises(ScheduleError, match=message):
        drive([rank(transport) for transport in world.transports])


def test_modes_of_the_caller_hold_in_every_rank():
    def rank():
        yield from ()
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    assert drive([rank()]) == [(True, False)]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert drive([rank(), rank()]) == [(False, True)] * 2


def test_casts_of_parameters_end_with_the_autocast_context_of_a_rank():
    weight = torch.ones(2, 2, requires_grad=True)

    def rank():
        yield from ()
        casts = []
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                product = torch.mm(torch.ones(1, 2), weight)
                (cast,) = [node for node, _ in product.grad_fn.next_functions if node is not None]
                casts.append(cast)
        return casts

    ((first, second),) = drive([rank()])
    assert first is not second


def test_outside_of_drive_nobody_else_takes_a_turn():
    work = InMemoryWorld(2).transports[0].irecv(torch.empty(1), 1, 0)
    wait_in_turn(work)
    assert not work.is_completed()


def test_nothing_to_drive():
    assert drive([]) == []
