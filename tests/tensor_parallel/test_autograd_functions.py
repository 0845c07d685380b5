import pytest
import torch

from lightning_mist.errors import TraceError
from lightning_mist.plan import ParameterSplit
from lightning_mist.tensor_parallel import SplitContext, functions_of_wholes, present, run_ranks, shard, whole

SPLIT = ParameterSplit(name="w", dim=0, factors=((4, True),))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


BOUND = Cube.apply


def unbound(x):
    return Cube.apply(x)


@pytest.mark.parametrize(("call", "name"), [(unbound, "Cube"), (BOUND, "autograd.Function")])
def test_they_get_whole_tensors_and_lose_no_gradient(call, name):
    full = torch.arange(1.0, 5.0)
    original = torch.autograd.Function.__dict__["apply"]

    def rank(group):
        context = SplitContext(group)
        local = shard(full, SPLIT, group.rank, 2).requires_grad_()
        with functions_of_wholes():
            result = call(present(local, SPLIT, context))
            result.sum().backward()
        return result.detach(), local.grad, context.gathered

    results = run_ranks(2, rank)
    for result, _, gathered in results:
        assert torch.equal(result, full**3)
        assert dict(gathered) == {name: 1}
    assert torch.equal(torch.cat([grad for _, grad, _ in results]), 3 * full**2)
    assert torch.autograd.Function.__dict__["apply"] is original


@pytest.mark.parametrize("call", [unbound, BOUND])
def test_they_are_refused_elsewhere(call):
    def rank(group):
        local = torch.ones(2, requires_grad=True)
        call(present(local, SPLIT, SplitContext(group)))

    with pytest.raises(TraceError, match=r"custom autograd.Function"):
        run_ranks(2, rank)


def test_what_does_not_compute_in_python_is_refused():
    def rank(group):
        shown = present(torch.ones(2), SPLIT, SplitContext(group))
        with torch._C.DisableTorchFunctionSubclass():
            torch.add(shown, 1)

    with pytest.raises(TraceError, match="below torch's Python functions"):
        run_ranks(2, rank)


def test_plain_tensors_pass_unchanged():
    x = torch.ones(3, requires_grad=True)
    with functions_of_wholes(), functions_of_wholes():
        Cube.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert whole({"x": x})["x"] is x
