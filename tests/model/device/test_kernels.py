"""Kernels that compute shapes only, against torch's own on tensors without values."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_mist.model.device.kernels import (
    Kernel,
    KernelRegistry,
    Target,
    attention_backend,
    fused_operators,
    overload_of,
)
from lightning_mist.model.device.operator_table import device_operators
from tests.model.fake_steps import fakes, kept_by

TARGET = Target(torch_version=(2, 13), capability=(8, 0))


def marking(target: Target, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> object:
    return x.new_empty(7) if dim == 0 else NotImplemented


REGISTRY = KernelRegistry([Kernel("softmax.int", marking)])


def test_names_of_operators() -> None:
    assert overload_of("softmax.int") is torch.ops.aten.softmax.int
    assert overload_of("dropout") is torch.ops.aten.dropout.default


def test_kernels_are_for_fakes_and_may_decline() -> None:
    (x,) = fakes((3, 4))
    with REGISTRY.in_force(TARGET):
        assert F.softmax(x, 0).shape == (7,)
        assert torch.softmax(x, 0).shape == x.softmax(0).shape == (7,)
        assert F.softmax(x, 1).shape == (3, 4)
        assert F.softmax(torch.ones(3, 4), 0).shape == (3, 4)
    assert F.softmax(x, 0).shape == (3, 4)


def test_kernels_are_for_threads_that_asked_for_them() -> None:
    (x,) = fakes((3, 4))
    shapes = []

    def other(within: bool) -> None:
        if within:
            with REGISTRY.in_force(TARGET):
                shapes.append(tuple(F.softmax(x, 0).shape))
        shapes.append(tuple(F.softmax(x, 0).shape))

    with REGISTRY.in_force(TARGET):
        for within in (False, True):
            thread = threading.Thread(target=other, args=(within,))
            thread.start()
            thread.join()
        with REGISTRY.in_force(TARGET):
            pass
        shapes.append(tuple(F.softmax(x, 0).shape))
    assert shapes == [(3, 4), (7,), (3, 4), (7,)]


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


CUDA = device_operators("cuda", "2.13")
ROWS, HEADS, LENGTH, WIDTH = 2, 4, 256, 64
SHAPE = (ROWS, HEADS, LENGTH, WIDTH)
SIZE = ROWS * HEADS * LENGTH * WIDTH
PER_ROW = ROWS * HEADS * LENGTH


def chosen(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, capability: Any = (8, 0), **given: Any
) -> str:
    """Which attention runs."""
    query, key, value = fakes(*shapes, dtype=dtype) if len(shapes) == 3 else fakes(*shapes * 3, dtype=dtype)
    options = {"mask": None, "dropout": 0.0, "is_causal": False, "enable_gqa": False, **given}
    table = device_operators("cuda", "2.13", capability=capability)
    return attention_backend(table.target, query, key, value, **options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "flash"),
        ({"is_causal": True, "dropout": 0.1}, "flash"),
        ({"dtype": torch.float32}, "efficient"),
        ({"dtype": torch.float64}, "math"),
        ({"mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool)}, "efficient"),
        ({"capability": (7, 5), "dtype": torch.float16}, "efficient"),
        ({"capability": (7, 5)}, "math"),  # no bfloat16 before Ampere
    ],
)
def test_which_attention_runs(given: dict[str, Any], expected: str) -> None:
    assert chosen(SHAPE, **given) == expected


def test_shapes_decide_which_attention_runs() -> None:
    few = (ROWS, 2, LENGTH, WIDTH)
    assert chosen(SHAPE, few, few) == "math"
    assert chosen(SHAPE, few, few, enable_gqa=True) == "flash"
    assert chosen(SHAPE, few, few, enable_gqa=True, dtype=torch.float32) == "math"
    short = (ROWS, HEADS, 32, WIDTH)
    assert chosen(short, SHAPE, SHAPE) == "flash"
    assert chosen(short, SHAPE, SHAPE, is_causal=True) == "efficient"
    assert chosen((ROWS, HEADS, LENGTH, 264)) == "efficient"
    assert chosen((ROWS, HEADS, LENGTH, 257)) == "math"
    assert chosen((HEADS, LENGTH, WIDTH)) == "math"
    assert chosen((ROWS, HEADS, LENGTH, 200), capability=(8, 9)) == "efficient"
    assert chosen((ROWS, HEADS, LENGTH, 256), capability=(8, 9)) == "flash"
    assert chosen((ROWS, HEADS, LENGTH, 256), capability=(8, 9), dropout=0.1) == "efficient"


def test_a_users_choice_of_attention_is_followed() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert chosen(SHAPE) == "math"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert chosen(SHAPE) == "efficient"


@pytest.mark.parametrize("options", [{"is_causal": True}, {"is_causal": True, "dropout_p": 0.1}])
def test_flash_keeps_a_log_sum_exp(options: dict[str, Any]) -> None:
    kept = kept_by(CUDA, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), *fakes(*[SHAPE] * 3))
    seeds = 24  # state of the generator, of which flash keeps two numbers and one that is unused
    assert 4 * PER_ROW <= kept.bytes <= 4 * PER_ROW + seeds
    products = 2 * ROWS * HEADS * LENGTH**2 * WIDTH
    assert kept.flops == (2 + 5) * products
    # 32-bit sums of query gradients and products, and three gradients, beside what was kept
    assert kept.backward_peak - kept.bytes == 4 * SIZE + 4 * PER_ROW + 3 * 2 * SIZE


def test_flash_expands_gradients_of_shared_heads() -> None:
    few = (ROWS, 1, LENGTH, WIDTH)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    kept = kept_by(CUDA, attend, *fakes(SHAPE, few, few))
    gradients = 2 * SIZE + 2 * 2 * SIZE // HEADS
    assert kept.backward_peak - kept.bytes == 4 * SIZE + 4 * PER_ROW + 2 * 2 * SIZE + gradients
    assert kept.bytes < 5 * PER_ROW
    assert kept.flops == 7 * 2 * ROWS * HEADS * LENGTH**2 * WIDTH


def test_flash_pads_odd_heads() -> None:
    odd = (ROWS, HEADS, LENGTH, 60)
    kept = kept_by(CUDA, F.scaled_dot_product_attention, *fakes(*[odd] * 3))
    assert kept.result.shape == odd
    assert 3 * 2 * SIZE + 4 * PER_ROW <= kept.bytes <= 3 * 2 * SIZE + 4 * PER_ROW + 24


def test_a_mask_is_kept_as_numbers() -> None:
    mask = torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    kept = kept_by(CUDA, attend, *fakes(*[SHAPE] * 3))
    assert kept.bytes == 4 * PER_ROW + 2 * ROWS * LENGTH**2 + 16
    # 32-bit products and sums of query gradients, and three gradients
    assert kept.backward_peak - kept.bytes == 4 * PER_ROW + 4 * SIZE + 3 * 2 * SIZE
    assert kept.flops == 7 * 2 * ROWS * HEADS * LENGTH**2 * WIDTH


@pytest.mark.parametrize(("rounds", "length"), [(True, 64), (False, 60)])
def test_rows_come_in_whole_tiles_where_that_is_asked_for(rounds: bool, length: int) -> None:
    mask = torch.zeros(60, 60)
    shape = (ROWS, HEADS, 60, WIDTH)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    kept = kept_by(CUDA, attend, *fakes(*[shape] * 3, dtype=torch.float32), rounds=rounds)
    # Rows of a mask that start at odd places are copied so that they do not.
    assert kept.bytes == 4 * ROWS * HEADS * length + (4 * 60 * length if rounds else 0) + 16
    size = 4 * ROWS * HEADS * WIDTH
    assert kept.backward_peak - kept.bytes == 4 * ROWS * HEADS * 60 + size * length + 3 * size * 60

    flash = kept_by(CUDA, F.scaled_dot_product_attention, *fakes(*[shape] * 3), rounds=rounds)
    long = 128 if rounds else 60
    assert flash.backward_peak - flash.bytes == 4 * ROWS * HEADS * long + size * long + 3 * size // 2 * 60


def test_a_mask_that_is_learned_gets_a_gradient() -> None:
    *inputs, bias = fakes(SHAPE, SHAPE, SHAPE, (HEADS, LENGTH, LENGTH))
    kept_by(CUDA, lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), *inputs, bias)
    assert [x.grad.shape for x in (*inputs, bias)] == [SHAPE, SHAPE, SHAPE, bias.shape]


def test_wide_values_are_summed_up_in_a_buffer() -> None:
    shape = (ROWS, HEADS, LENGTH, 264)
    kept = kept_by(CUDA, F.scaled_dot_product_attention, *fakes(*[shape] * 3))
    assert kept.forward_peak == (4 + 2) * ROWS * HEADS * LENGTH * 264 + 4 * PER_ROW + 16


def test_where_nothing_fused_runs_scores_are_kept() -> None:
    shape = (ROWS, HEADS, LENGTH, 63)
    kept = kept_by(CUDA, F.scaled_dot_product_attention, *fakes(*[shape] * 3, dtype=torch.float32))
    assert kept.bytes >= 4 * ROWS * HEADS * LENGTH**2


def test_numbers_are_computed_as_always() -> None:
    inputs = [torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
    with CUDA.installed():
        found = F.scaled_dot_product_attention(*inputs, is_causal=True)
    assert torch.equal(found, expected)
    assert type(found.grad_fn) is type(expected.grad_fn)


CPU, NORM_CUDA = device_operators("cpu"), device_operators("cuda", "2.13")
NORM_ROWS, NORM_WIDTH = 32, 64
NORM_SHAPE = (2, 16, NORM_WIDTH)
NORM_SIZE = NORM_ROWS * NORM_WIDTH


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_rms_norm_keeps_one_number_per_row(dtype: torch.dtype) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (NORM_WIDTH,), weight)

    inputs = fakes(NORM_SHAPE, (NORM_WIDTH,), dtype=dtype)
    kept = kept_by(NORM_CUDA, norm, *inputs)
    assert kept.bytes == 4 * NORM_ROWS
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]
    # Composed of parts, it keeps the normalised input at least, and the upcast one of a 16-bit input.
    composed = kept_by(CPU, norm, *fakes(NORM_SHAPE, (NORM_WIDTH,), dtype=dtype))
    assert composed.bytes >= 4 * NORM_SIZE
    before = kept_by(device_operators("cuda", "2.8.1+cu126"), norm, *fakes(NORM_SHAPE, (NORM_WIDTH,), dtype=dtype))
    assert before.bytes == composed.bytes


def test_an_rms_norm_without_weight_and_of_several_dimensions() -> None:
    (x,) = fakes(NORM_SHAPE)
    kept = kept_by(NORM_CUDA, lambda x: F.rms_norm(x, NORM_SHAPE[1:]), x)
    assert (kept.bytes, x.grad.shape) == (4 * 2, x.shape)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_an_rms_norm_with_a_weight_of_another_type_is_composed() -> None:
    weight = fakes((NORM_WIDTH,), dtype=torch.float32)
    kept = kept_by(NORM_CUDA, lambda x, w: F.rms_norm(x, (NORM_WIDTH,), w), *fakes(NORM_SHAPE), *weight)
    assert kept.bytes >= 4 * NORM_SIZE


def test_a_norm_over_other_sizes_is_refused() -> None:
    with NORM_CUDA.installed(), pytest.raises(RuntimeError, match=r"RMS norm over \[63\]"):
        F.rms_norm(fakes(NORM_SHAPE)[0], (63,))
    with NORM_CUDA.installed(), pytest.raises(RuntimeError, match=r"layer norm over \[63\]"):
        F.layer_norm(fakes(NORM_SHAPE)[0], (63,))


@pytest.mark.parametrize(("dtype", "on_cpu"), [(torch.bfloat16, 2 * 2), (torch.float32, 2 * 4)])
def test_a_layer_norm_keeps_two_32_bit_numbers_per_row(dtype: torch.dtype, on_cpu: int) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (NORM_WIDTH,), weight, bias)

    inputs = fakes(NORM_SHAPE, (NORM_WIDTH,), (NORM_WIDTH,), dtype=dtype)
    assert kept_by(NORM_CUDA, norm, *inputs).bytes == 2 * 4 * NORM_ROWS
    assert all(x.grad.shape == x.shape for x in inputs)
    assert kept_by(CPU, norm, *fakes(NORM_SHAPE, (NORM_WIDTH,), (NORM_WIDTH,), dtype=dtype)).bytes == on_cpu * NORM_ROWS


def test_dropout_keeps_a_byte_per_element() -> None:
    assert kept_by(NORM_CUDA, lambda x: F.dropout(x, 0.1), *fakes(NORM_SHAPE)).bytes == NORM_SIZE
    assert kept_by(CPU, lambda x: F.dropout(x, 0.1), *fakes(NORM_SHAPE)).bytes == 2 * NORM_SIZE
    assert kept_by(NORM_CUDA, lambda x: F.dropout(x, 0.1, training=False) * 1, *fakes(NORM_SHAPE)).bytes == 0


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_of_16_bits_in_32_makes_no_copy(function: object) -> None:

    def peak(table: object, dtype: torch.dtype) -> int:
        (x,) = fakes(NORM_SHAPE, dtype=dtype)
        kept = kept_by(table, lambda x: function(x, -1, dtype=torch.float32), x)
        assert (kept.bytes, x.grad.dtype) == (0, dtype)
        return kept.backward_peak

    # the gradient comes in 16 bits at once
    assert peak(NORM_CUDA, torch.float16) == 2 * NORM_SIZE
    assert peak(CPU, torch.float16) == peak(NORM_CUDA, torch.bfloat16) == (4 + 2) * NORM_SIZE


def test_modules_and_recomputation_go_the_same_way() -> None:
    from torch.utils.checkpoint import checkpoint

    block = nn.Sequential(nn.RMSNorm(NORM_WIDTH), nn.Dropout(0.1)).bfloat16()
    for name, parameter in list(block[0].named_parameters()):
        setattr(block[0], name, nn.Parameter(fakes(tuple(parameter.shape))[0]))
    assert kept_by(NORM_CUDA, block, *fakes(NORM_SHAPE)).bytes == 4 * NORM_ROWS + NORM_SIZE
    recomputed = kept_by(
        NORM_CUDA, lambda x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False), *fakes(NORM_SHAPE)
    )
    assert recomputed.bytes == 0
    # input's gradient, and normalised and dropped output, mask and statistics made again
    assert recomputed.backward_peak < 5 * 2 * NORM_SIZE
