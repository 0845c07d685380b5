"""Kernels that compute shapes only, against torch's own on tensors without values."""

import pytest
import torch

from lightning_mist.model.device.library import fused_operators


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(tensors):
    return [None if t is None else (tuple(t.shape), t.dtype, t.stride()) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_layer_norm_gives_what_torch_s_gives_with_statistics_of_accumulation_type(dtype):
    x, weight, bias = empty(2, 3, 8, dtype=dtype), empty(8, dtype=dtype), empty(8, dtype=dtype)
    found = fused_operators().fused_layer_norm(x, weight, bias, 1)
    expected = torch.native_layer_norm(x, (8,), weight, bias, 1e-5)
    assert [t.shape for t in found] == [t.shape for t in expected]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [t.dtype for t in found] == [dtype, wide, wide]


def test_an_rms_norm_keeps_one_number_per_row_over_all_normalised_dimensions():
    y, scale = fused_operators().fused_rms_norm(empty(2, 3, 4, 8), empty(4, 8), 2)
    assert described([y, scale]) == described([empty(2, 3, 4, 8), empty(2, 3, 1, 1, dtype=torch.float32)])


def test_gradients_are_made_where_they_are_wanted():
    x, weight, statistics = empty(2, 8), empty(8), empty(2, 1, dtype=torch.float32)
    norms = fused_operators()
    for mask in ([True, True], [True, False], [False, True]):
        found = norms.fused_rms_norm_backward(x, x, statistics, weight, mask)
        assert described(found) == described(t if wanted else None for t, wanted in zip((x, weight), mask, strict=True))
    found = norms.fused_layer_norm_backward(x, x, statistics, statistics, weight, None, [True, True, True])
    assert described(found) == described([x, weight, None])


def test_an_output_that_is_a_view_in_another_order_is_made_contiguous():
    y, _ = fused_operators().fused_rms_norm(empty(8, 2).t(), None, 1)
    assert y.is_contiguous()


def test_attention_puts_heads_side_by_side_and_keeps_a_32_bit_sum_per_row():
    query, key, value = empty(2, 4, 10, 16), empty(2, 4, 12, 16), empty(2, 4, 12, 24)
    out, sums, *state = fused_operators().fused_attention(query, key, value, None, 32)
    assert out.shape == (2, 4, 10, 24)
    assert out.transpose(1, 2).is_contiguous()
    assert (sums.shape, sums.dtype) == ((2, 4, 32), torch.float32)
    assert [(t.shape, t.dtype) for t in state] == 2 * [((), torch.long)]


@pytest.mark.parametrize("wanted", [True, False])
def test_attention_s_gradients_are_laid_out_like_projections(wanted):
    query, key, bias = empty(2, 4, 10, 16), empty(2, 4, 12, 16), empty(2, 1, 10, 12)
    sums = empty(2, 4, 32, dtype=torch.float32)
    *gradients, of_bias = fused_operators().fused_attention_backward(query, query, key, key, bias, query, sums, wanted)
    assert [t.shape for t in gradients] == [query.shape, key.shape, key.shape]
    assert all(t.transpose(1, 2).is_contiguous() for t in gradients)
    assert (None if of_bias is None else of_bias.shape) == (bias.shape if wanted else None)
