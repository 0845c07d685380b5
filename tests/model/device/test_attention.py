from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_mist.model.device.attention import attention_backend
from lightning_mist.model.device.operator_table import device_operators
from tests.model.fake_steps import fakes, kept_by

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
