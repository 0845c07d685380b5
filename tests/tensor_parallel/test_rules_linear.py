import pytest
import torch
import torch.nn.functional as F

from lightning_mist.plan import ParameterSplit
from lightning_mist.tensor_parallel import SplitContext, SplitTensor, present, run_ranks, split_sequence
from tests.tensor_parallel.rules import check, tensor

X, HIDDEN = tensor(2, 4, 8), tensor(2, 4, 24)
W, B = tensor(24, 8), tensor(24)
V, C = tensor(8, 24), tensor(8)


@pytest.mark.parametrize("outer", [1, 3])
def test_column_parallel(outer):
    share = (0, outer)
    check(F.linear, (X, None), (W, share), (B, share), results=(2,))
    check(F.linear, (X, None), (W, share), (B, None), results=(2,))
    check(F.linear, (X, None), (W, share), results=(2,))
    check(lambda x, w, b: torch.addmm(b, x.view(-1, 8), w.t()), (X, None), (W, share), (B, share), results=(1,))
    check(lambda x, w: x @ w.T, (X, None), (W, share), results=(2,))
    check(lambda x, w, b: F.linear(bias=b, weight=w, input=x), (X, None), (W, share), (B, share), results=(2,))


@pytest.mark.parametrize("outer", [1, 3])
def test_row_parallel(outer):
    for share in ((2, outer), None):
        check(F.linear, (HIDDEN, share), (V, (1, outer)), (C, None), results=(None,))
        check(F.linear, (HIDDEN, share), (V, (1, outer)), results=(None,))
        check(lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.t()), (HIDDEN, share), (V, (1, outer)), (C, None))
        check(lambda x, w: x @ w.mT, (HIDDEN, share), (V, (1, outer)), results=(None,))


def test_a_whole_weight():
    check(F.linear, (X, 1), (W, None), (B, None), results=(1,))
    check(F.linear, (X, (1, 1)), (W, None), results=(1,))
    check(F.linear, (X, 2), (W, None), (B, None), results=(None,))
    check(lambda x, w: x @ w.t(), (X, 1), (W, None), results=(1,))


def test_inputs_that_are_shared_in_another_way():
    check(F.linear, (X, 1), (W, 0), (B, 0), results=(2,))  # along the sequence
    check(F.linear, (HIDDEN, (2, 3)), (V, 1), (C, None), gathers=("relayout",))
    check(F.linear, (X, 2), (W, 0), gathers=("relayout",), results=(2,))
    check(F.linear, (HIDDEN, 1), (V, 1), (C, None), gathers=("relayout",))
    check(F.linear, (X, None), (W, None), (B, 0), gathers=("linear",))
    check(F.linear, (tensor(8), None), (W, 0), (B, 0), results=(0,))


HEADS, KEYS = tensor(2, 4, 5, 6), tensor(2, 4, 6, 5)


def test_products_of_heads():
    check(torch.matmul, (HEADS, 1), (KEYS, 1), results=(1,))
    check(lambda q, k: q @ k, (HEADS, 1), (KEYS, None), results=(1,))
    check(lambda q, k: q @ k, (HEADS, None), (KEYS, 1), results=(1,))
    check(lambda q, k: q @ k, (HEADS, 1), (tensor(6, 3), None), results=(1,))
    check(lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1)), (HEADS, 1), (KEYS, 1), results=(0,))
    check(
        lambda a, q, k: a.baddbmm(q.flatten(0, 1), k.flatten(0, 1), beta=0.5, alpha=2.0),
        (tensor(8, 1, 5), None), (HEADS, 1), (KEYS, 1), results=(0,),
    )  # fmt: skip
    check(
        lambda a, q, k: torch.baddbmm(a, q.flatten(0, 1), k.flatten(0, 1), beta=0, alpha=2.0),
        (tensor(8, 1, 5), None), (HEADS, 1), (KEYS, 1), results=(0,),
    )  # fmt: skip


def test_products_that_do_not_meet_are_gathered():
    check(torch.matmul, (tensor(4, 4, 4, 6), 1), (tensor(4, 4, 6, 5), 0), gathers=("relayout",))
    check(torch.matmul, (tensor(4, 4, 6), 1), (tensor(4, 6, 5), 0), gathers=("matmul",))
    check(torch.matmul, (tensor(8), 0), (V, 0), gathers=("matmul",))


@pytest.mark.parametrize(
    ("equation", "shapes", "shares", "result"),
    [
        ("bhqd,bhkd->bhqk", ((2, 4, 3, 5), (2, 4, 6, 5)), (1, 1), 1),
        ("bqhd,bkhd->bhqk", ((2, 3, 4, 5), (2, 6, 4, 5)), (2, None), 1),
        ("bsi,oi->bso", ((2, 3, 8), (4, 8)), (2, 1), None),
        ("bsi,io->bso", ((2, 3, 8), (8, 4)), (None, 1), 2),
    ],
)
def test_einsum(equation, shapes, shares, result):
    operands = [(tensor(*shape), share) for shape, share in zip(shapes, shares, strict=True)]
    check(lambda *tensors: torch.einsum(equation, *tensors), *operands, results=(result,))


def test_einsum_of_other_forms_is_gathered():
    check(lambda x: torch.einsum("bii->bi", x), (tensor(4, 4, 4), 0), gathers=("einsum",))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_reduction_for_projections_of_one_input(sequence_parallel):
    """Counts collectives of a block with query, key, value, output projections, in forward and backward."""
    split = [ParameterSplit(name="w", dim=dim, factors=((8, True),)) for dim in (0, 1)]

    def rank(group):
        calls = []

        class Counted:
            rank, size, adds_later = group.rank, group.size, False

            def __getattr__(self, name):
                calls.append(name)
                return getattr(group, name)

        context = SplitContext(Counted(), sequence_parallel)
        x = tensor(2, 4, 8).requires_grad_()
        shown = split_sequence(x * 1, 1, context) if sequence_parallel else x * 1
        weights = [present(tensor(4, 8).requires_grad_(), split[0], context) for _ in range(3)]
        out = present(tensor(8, 4).requires_grad_(), split[1], context)
        result = F.linear(sum(F.linear(shown, weight) for weight in weights), out)
        forward = list(calls)
        local = result.local if isinstance(result, SplitTensor) else result
        local.sum().backward()
        return forward, calls[len(forward) :]

    forward, backward = run_ranks(2, rank)[0]
    if sequence_parallel:
        assert forward == ["all_gather", "reduce_scatter"]
        assert backward == ["all_gather", "reduce_scatter", "all_gather"]  # the last for the step that was cut
    else:
        assert forward == ["all_reduce"]
        assert backward == ["all_reduce"]
