import pytest
import torch

from lightning_mist.errors import PlanError
from lightning_mist.tensor_parallel import ThreadGroup, run_ranks


def test_collectives_give_what_they_say():
    def rank(group: ThreadGroup):
        x = torch.arange(4.0).view(2, 2) + 10 * group.rank
        return group.all_reduce(x), group.all_reduce(x, "max"), group.all_gather(x), group.reduce_scatter(x)

    first, second = run_ranks(2, rank)
    for total, largest, gathered, _ in (first, second):
        assert total.tolist() == [[10, 12], [14, 16]]
        assert largest.tolist() == [[10, 11], [12, 13]]
        assert gathered.tolist() == [[[0, 1], [2, 3]], [[10, 11], [12, 13]]]
    assert first[3].tolist() == [10, 12]
    assert second[3].tolist() == [14, 16]


def test_ranks_draw_from_equal_streams_of_their_own_and_leave_the_callers_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()

    def rank(group: ThreadGroup):
        numbers = [torch.rand(3)]
        for _ in range(3):
            group.all_reduce(torch.zeros(1))
            numbers.append(torch.rand(3))
        return torch.stack(numbers)

    results = run_ranks(3, rank)
    assert torch.equal(torch.get_rng_state(), state)
    expected = torch.stack([torch.rand(3) for _ in range(4)])
    assert all(torch.equal(result, expected) for result in results)


def test_collectives_inside_backward():
    def rank(group: ThreadGroup):
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda gradient: group.all_reduce(gradient.contiguous()))
        (x * (group.rank + 1)).sum().backward()
        return x.grad

    assert [grad.tolist() for grad in run_ranks(3, rank)] == [[6, 6]] * 3


def test_the_error_of_one_rank_ends_all():
    def rank(group: ThreadGroup):
        if group.rank == 1:
            raise ValueError("rank 1 cannot")
        group.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="rank 1 cannot"):
        run_ranks(3, rank)


def test_different_collectives_are_refused():
    def rank(group: ThreadGroup):
        return group.all_reduce(torch.zeros(1 + group.rank))

    with pytest.raises(PlanError, match="different collectives"):
        run_ranks(2, rank)


def test_a_rank_that_returns_while_others_wait_is_an_error():
    def rank(group: ThreadGroup):
        return group.all_reduce(torch.zeros(1)) if group.rank else None

    with pytest.raises(PlanError, match=r"ranks \[0\] returned and rank 1 waits"):
        run_ranks(2, rank)


def test_other_devices_are_refused():
    with pytest.raises(PlanError, match="CPU only"):
        run_ranks(2, lambda group: group.all_reduce(torch.zeros(1, device="meta")))


def test_gradients_are_on_or_off_as_for_the_caller():
    with torch.no_grad():
        assert run_ranks(2, lambda group: torch.is_grad_enabled()) == [False, False]
    assert run_ranks(2, lambda group: torch.is_grad_enabled()) == [True, True]


def test_a_tensor_of_another_rank_is_refused():
    shared = {}

    def function(group):
        first = shared.setdefault("group", group)
        group.all_reduce(torch.ones(2))
        return first.all_reduce(torch.ones(2))

    with pytest.raises(PlanError, match="rank 1 computes with a tensor that belongs to rank 0"):
        run_ranks(2, function)


def test_every_rank_has_a_default_type_of_its_own():
    """Steps in true double precision set it while they run, and give way to each other at collectives."""

    def step(group):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if group.rank else torch.float16)
        seen = [torch.zeros(()).dtype]
        group.all_reduce(torch.zeros(1, dtype=torch.float32))
        seen.append(torch.zeros(()).dtype)
        torch.set_default_dtype(before)
        return before, seen

    own = torch.get_default_dtype()
    first, *others = run_ranks(3, step)
    assert torch.get_default_dtype() is own
    assert first == (own, [torch.float16] * 2)
    assert others == [(own, [torch.float64] * 2)] * 2


def test_the_default_type_survives_a_step_that_fails():
    def step(group):
        torch.set_default_dtype(torch.float64)
        group.all_reduce(torch.zeros(1 + group.rank))

    own = torch.get_default_dtype()
    with pytest.raises(PlanError, match="different collectives"):
        run_ranks(2, step)
    assert torch.get_default_dtype() is own
