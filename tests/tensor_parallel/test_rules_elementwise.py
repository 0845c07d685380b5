import pytest
import torch
import torch.nn.functional as F

from lightning_mist.errors import TraceError
from lightning_mist.tensor_parallel import CountingGroup, Layout, SplitContext, SplitTensor, run_ranks
from tests.tensor_parallel.rules import check, tensor

X, Y, ROW, BIAS = tensor(3, 8, 4), tensor(3, 8, 4, seed=1), tensor(1, 8, 1), tensor(4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 + 1, lambda x: 1 - x, lambda x: 2 / (x.abs() + 1), lambda x: x**2, lambda x: 2**x, F.gelu,
        F.silu, torch.tanh, F.relu, lambda x: x.clamp(min=-0.1), lambda x: x.float().double(), lambda x: -x,
        lambda x: x.to(torch.float32).type_as(x), lambda x: x.to(x), lambda x: x.contiguous().clone(), F.softplus,
        lambda x: torch.where(x > 0, x, -2 * x), lambda x: x.masked_fill(x > 0, 3.0), lambda x: x.detach() * x,
        lambda x: torch.ones_like(x) + x, lambda x: x.type(torch.float64), lambda x: x * x.new_full((1,), 2.0),
        lambda x: x.relu_(), lambda x: F.leaky_relu(x, 0.2), lambda x: x.data + x, abs, lambda x: (x.detach() // 2) * x,
    ],
)  # fmt: skip
@pytest.mark.parametrize("share", [1, (1, 2), 0 - 1])
def test_one_operand(function, share):
    degrees = (2,) if share == (1, 4) else (2, 4)
    check(lambda x: function(x * 1), (X, share), results=(X.dim() - 1 if share == -1 else 1,), degrees=degrees)


@pytest.mark.parametrize("share", [1, (1, 2)])
def test_operands_shared_alike_and_whole_ones(share):
    check(lambda x, y: x * y + x, (X, share), (Y, share), results=(1,))
    check(lambda x, y: x * y + y, (X, share), (Y, None), results=(1,))
    check(lambda x, y: y / (x * x + 1), (X, share), (Y, None), results=(1,))
    check(lambda x, y: x + y, (X, share), (BIAS, None), results=(1,))
    check(lambda x, y: x + y, (X, share), (ROW, None), results=(1,))
    check(lambda x, y: x + y, (X, share), (tensor(), None), results=(1,))
    check(lambda x, y: y + x, (tensor(8, 1), 0 if share == 1 else (0, 2)), (X, None), results=(1,))


def test_operands_that_do_not_broadcast_are_refused_with_their_shapes():
    x = SplitTensor(torch.ones(3, 4), Layout((3, 8), 1), SplitContext(CountingGroup(2)))
    with pytest.raises(ValueError, match=r"shape \(3, 8\).*shape \(2, 8\)"):
        x + torch.ones(2, 8)


def test_operands_shared_in_other_ways_are_gathered():
    check(lambda x, y: x * y, (X, 1), (Y, 2), gathers=("relayout",))
    check(lambda x, y: x * y, (X, 1), (Y, (1, 2)), gathers=("relayout",))


def test_comparisons():
    check(lambda x, y: ((x > y) & (y != 0) | ~(x <= 1)).double() * x, (X, 1), (Y, None), results=(1,))


def test_in_place():
    def function(x, y):
        x = x * 1
        x += y
        x.mul_(2).masked_fill_(x > 1, 0.5)
        return x

    check(function, (X, 1), (Y, 1), results=(1,))
    check(function, (X, 1), (Y, None), results=(1,))
    check(function, (X, None), (Y, 1), results=(None,), gathers=())


def test_writing_into_a_part_without_a_rule_is_refused():
    def rank(group):
        x = SplitTensor(torch.ones(2), Layout((4,), 0), SplitContext(group))
        x.cumsum_(0)

    with pytest.raises(TraceError, match="cumsum_ writes into a tensor of shape"):
        run_ranks(2, rank)
    with pytest.raises(TraceError, match="add writes into"):
        run_ranks(2, lambda group: torch.add(part(group), 1, out=part(group)))


def part(group):
    return SplitTensor(torch.ones(2), Layout((4,), 0), SplitContext(group))


def test_what_would_see_only_a_part_is_refused():
    import copy

    with pytest.raises(TraceError, match="hook"):
        run_ranks(2, lambda group: part(group).register_hook(print))
    with pytest.raises(TraceError, match="copied deeply"):
        run_ranks(2, lambda group: copy.deepcopy(part(group)))

    def replace(group):
        part(group).data = torch.ones(4)

    with pytest.raises(TraceError, match="data of a split tensor"):
        run_ranks(2, replace)


def test_what_is_said_of_the_whole():
    def rank(group):
        x = SplitTensor(torch.ones(3, 2, requires_grad=True), Layout((3, 4), 1), SplitContext(group))
        assert x.shape == (3, 4)
        assert (x.ndim, x.dim(), x.numel(), len(x), x.stride()) == (2, 2, 12, 3, (4, 1))
        assert (x.size(), x.size(-1), x.size(dim=0)) == ((3, 4), 4, 3)
        assert (x.dtype, x.device.type, x.requires_grad, x.is_leaf) == (torch.float32, "cpu", True, True)
        assert x.is_floating_point()
        assert torch.is_floating_point(x)
        assert not x.is_cuda
        assert (x * 2).grad_fn is not None
        assert x.type() == "torch.FloatTensor"
        assert isinstance(x.detach(), SplitTensor)
        assert not x.detach().requires_grad
        assert "SplitTensor" in repr(x)
        x.sum().backward()
        assert x.grad.shape == (3, 4)
        assert torch.equal(x.grad.local, torch.ones(3, 2))
        return x.context.gathered

    assert not run_ranks(2, rank)[0]


def test_a_split_parameter_is_a_parameter():
    from lightning_mist.plan import ParameterSplit
    from lightning_mist.tensor_parallel import present

    split = ParameterSplit(name="w", dim=0, factors=((4, True),))

    def rank(group):
        shown = present(torch.nn.Parameter(torch.ones(2)), split, SplitContext(group))
        return isinstance(shown, torch.nn.Parameter), isinstance(shown * 1, torch.nn.Parameter)

    assert run_ranks(2, rank) == [(True, False)] * 2


def test_dropout_draws_other_numbers_on_every_rank_and_leaves_the_common_stream_common():
    def rank(group):
        torch.manual_seed(1)
        x = SplitTensor(torch.ones(1000), Layout((2000,), 0), SplitContext(group))
        first = F.dropout(x, 0.5, True).local
        common = torch.rand(4)
        second = F.dropout(x, 0.5).local
        torch.manual_seed(1)
        again = F.dropout(x, 0.5, True).local
        idle = torch.get_rng_state()
        assert torch.equal(F.dropout(x, 0.5, False).local, x.local)
        assert torch.equal(torch.nn.Dropout(0.0)(x).local, x.local)
        assert torch.equal(torch.get_rng_state(), idle)
        return first, common, second, again

    one, other = run_ranks(2, rank)
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[0], one[3])
    for first, second in [(one[0], other[0]), (one[0], one[2]), (one[2], other[2])]:
        # independent halves agree in half of the places
        assert 350 < (first == second).sum() < 650
    assert 350 < (one[0] == 0).sum() < 650


def test_parts_may_be_written_into_a_whole():
    index = torch.arange(8).reshape(1, 8, 1).expand(3, 8, 4) // 4
    check(lambda x, y: (y * 1).scatter_add_(1, index, x), (X, 1), (Y, None), gathers=("scatter_add_",), results=(None,))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sums_over_ranks_may_be_written_into(sequence_parallel):
    def function(x, w):
        if isinstance(x, SplitTensor):
            x.context.sequence_layout((3, 8, 4), 1)
        y = F.linear(x, w)
        y += 1
        return y

    check(function, (X, 2), (tensor(4, 4), 1), sequence_parallel=sequence_parallel)
