import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_mist.plan import ParameterSplit
from lightning_mist.tensor_parallel import Layout, SplitContext, SplitTensor, run_ranks
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
