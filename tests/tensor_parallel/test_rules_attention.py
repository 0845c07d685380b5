import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_mist.plan import ParameterSplit
from lightning_mist.tensor_parallel import Layout, SplitContext, SplitTensor, run_ranks
from lightning_mist.tensor_parallel.shard_layout import join_parts, take
from tests.tensor_parallel.rules import check, tensor
from tests.tensor_parallel.splitting import compare

Q, K, V = tensor(2, 4, 5, 6), tensor(2, 4, 7, 6, seed=1), tensor(2, 4, 7, 3, seed=2)
SQUARE = tensor(2, 4, 5, 6, seed=3)
sdpa = F.scaled_dot_product_attention


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (tensor(5, 7), None), (tensor(2, 1, 5, 7), None), (tensor(1, 4, 5, 7), None), (tensor(2, 4, 5, 7), 1),
        (tensor(5, 7) > 0, None),
    ],
)  # fmt: skip
def test_masks(mask, share):
    if mask.dtype == torch.bool:
        mask[:, 0] = True
    check(sdpa, (Q, 1), (K, 1), (V, 1), (mask, share), results=(1,))


def test_keys_and_values_in_all_ways():
    check(sdpa, (Q, 1), (K, 1), (V, 1), results=(1,))
    check(lambda q, k: sdpa(q, k, value=k, is_causal=True), (Q, 1), (SQUARE, 1), results=(1,))
    check(lambda q, k, v: sdpa(q, k, v, scale=0.3), (Q, 1), (K, None), (V, None), results=(1,))
    one_key, one_value = tensor(2, 1, 7, 6), tensor(2, 1, 7, 3)
    check(lambda q, k, v: sdpa(q, k.expand(2, 4, 7, 6), v), (Q, 1), (one_key, None), (V, 1), results=(1,))
    check(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), (Q, 1), (one_key, None), (one_value, None), results=(1,))
    check(sdpa, (Q, 0), (K, 0), (V, None), results=(0,), degrees=(2,))


def test_groups_of_query_heads():
    wide = tensor(2, 8, 5, 6)
    check(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), (wide, 1), (K, 1), (V, 1), results=(1,))
    check(
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True), (wide, 1), (K, None), (V, None),
        gathers=("scaled_dot_product_attention",),
    )  # fmt: skip


def test_dropout_differs_between_ranks_and_follows_the_common_state():
    def rank(group):
        context = SplitContext(group)
        q = SplitTensor(torch.ones(1, 2, 8, 4), Layout((1, 2 * group.size, 8, 4), 1), context)
        torch.manual_seed(2)
        first = sdpa(q, q, q, dropout_p=0.5).local
        torch.manual_seed(2)
        return first, sdpa(q, q, q, dropout_p=0.5).local

    one, other = run_ranks(2, rank)
    assert torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])


PACKED = [
    ParameterSplit(name="in_proj_weight", dim=0, factors=((3, False), (16, True))),
    ParameterSplit(name="in_proj_bias", dim=0, factors=((3, False), (16, True))),
    ParameterSplit(name="out_proj.weight", dim=1, factors=((16, True),)),
]
SEPARATE = [
    *(ParameterSplit(name=f"{x}_proj_weight", dim=0, factors=((16, True),)) for x in "qkv"),
    PACKED[1],
    PACKED[2],
]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both", "heads", "float"])
def test_multi_head_attention(masks, need_weights, degree):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, -2:] = True
    options = {
        "none": {}, "causal": {"attn_mask": causal, "is_causal": True}, "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
        "heads": {"attn_mask": torch.randn(8, 5, 5, dtype=torch.float64)},
        "float": {"attn_mask": torch.randn(5, 5, dtype=torch.float64)},
    }[masks]  # fmt: skip
    compare(module, lambda m, _: m(x, x, x, need_weights=need_weights, **options), PACKED, degree)


@pytest.mark.parametrize("need_weights", [False, True])
def test_cross_attention(need_weights):
    torch.manual_seed(0)
    x, y, z = (torch.randn(5, 2, size, dtype=torch.float64) for size in (16, 12, 10))
    separate = nn.MultiheadAttention(16, 4, kdim=12, vdim=10).double()
    call = {"need_weights": need_weights, "average_attn_weights": False}
    compare(separate, lambda m, _: m(x, y, z, **call), SEPARATE)
    packed = nn.MultiheadAttention(16, 4, bias=False).double()
    splits = [split for split in PACKED if "bias" not in split.name]
    compare(packed, lambda m, _: m(x, 2 * x, 3 * x, **call), splits)


def test_additional_rows_are_left_to_the_whole_computation():
    module = nn.MultiheadAttention(16, 4, add_bias_kv=True).double()
    x = torch.randn(5, 2, 16, dtype=torch.float64)
    compare(module, lambda m, _: m(x, x, x), PACKED, gathers=("multi_head_attention_forward",))


class _Later:
    """A group whose ranks leave gradients of what all hold as summands."""

    adds_later = True

    def __init__(self, group):
        self.rank, self.size = group.rank, group.size
        self.all_reduce, self.all_gather, self.reduce_scatter = group.all_reduce, group.all_gather, group.reduce_scatter


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("outer", [1, 2, 4])
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (4, {"is_causal": True}),
        (2, {"is_causal": True, "enable_gqa": True, "scale": 0.3}),
        (4, {"attn_mask": torch.ones(16, 16, dtype=torch.bool).tril().triu(-3)}),
        (4, {"attn_mask": torch.arange(16.0, dtype=torch.float64).expand(2, 1, 1, 16) / 16}),
        (4, {}),
    ],
)
def test_queries_at_their_positions_attend_to_all_keys(degree, outer, heads, options):
    def leaves():
        generator = torch.Generator().manual_seed(4)
        shapes = [(2, count, 16, 8) for count in (4, heads, heads)]
        return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]

    wholes = leaves()
    expected = F.scaled_dot_product_attention(*wholes, **options)
    cotangent = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    expected.backward(cotangent)

    def rank(group):
        context = SplitContext(_Later(group), sequence_parallel=True)
        layouts = [Layout(tuple(leaf.shape), 2, outer) for leaf in wholes]
        parts = [
            take(leaf.detach(), layout, group.rank, degree).clone().requires_grad_()
            for leaf, layout in zip(leaves(), layouts, strict=True)
        ]
        shown = [SplitTensor(part, layout, context) for part, layout in zip(parts, layouts, strict=True)]
        result = F.scaled_dot_product_attention(*shown, **options)
        assert result.placement == layouts[0]
        assert not context.gathered
        result.local.backward(take(cotangent, layouts[0], group.rank, degree).contiguous())
        return [result.local.detach(), *(part.grad for part in parts)]

    ranks = run_ranks(degree, rank)
    for place, wanted in enumerate([expected.detach(), *(leaf.grad for leaf in wholes)]):
        whole = join_parts(
            torch.stack([found[place] for found in ranks]), Layout(tuple(wanted.shape), 2, outer), degree
        )
        torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-12)
