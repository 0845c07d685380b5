import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mist.model.device.operator_table import device_operators
from tests.model.fake_steps import fakes, kept_by

CPU, CUDA = device_operators("cpu"), device_operators("cuda", "2.13")
ROWS, WIDTH = 32, 64
SHAPE = (2, 16, WIDTH)
SIZE = ROWS * WIDTH


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_rms_norm_keeps_one_number_per_row(dtype: torch.dtype) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), weight)

    inputs = fakes(SHAPE, (WIDTH,), dtype=dtype)
    kept = kept_by(CUDA, norm, *inputs)
    assert kept.bytes == 4 * ROWS
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]
    # Composed of parts, it keeps the normalised input at least, and the upcast one of a 16-bit input.
    composed = kept_by(CPU, norm, *fakes(SHAPE, (WIDTH,), dtype=dtype))
    assert composed.bytes >= 4 * SIZE
    before = kept_by(device_operators("cuda", "2.8.1+cu126"), norm, *fakes(SHAPE, (WIDTH,), dtype=dtype))
    assert before.bytes == composed.bytes


def test_an_rms_norm_without_weight_and_of_several_dimensions() -> None:
    (x,) = fakes(SHAPE)
    kept = kept_by(CUDA, lambda x: F.rms_norm(x, SHAPE[1:]), x)
    assert (kept.bytes, x.grad.shape) == (4 * 2, x.shape)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_an_rms_norm_with_a_weight_of_another_type_is_composed() -> None:
    weight = fakes((WIDTH,), dtype=torch.float32)
    kept = kept_by(CUDA, lambda x, w: F.rms_norm(x, (WIDTH,), w), *fakes(SHAPE), *weight)
    assert kept.bytes >= 4 * SIZE


def test_a_norm_over_other_sizes_is_refused() -> None:
    with CUDA.installed(), pytest.raises(RuntimeError, match=r"RMS norm over \[63\]"):
        F.rms_norm(fakes(SHAPE)[0], (63,))
    with CUDA.installed(), pytest.raises(RuntimeError, match=r"layer norm over \[63\]"):
        F.layer_norm(fakes(SHAPE)[0], (63,))


@pytest.mark.parametrize(("dtype", "on_cpu"), [(torch.bfloat16, 2 * 2), (torch.float32, 2 * 4)])
def test_a_layer_norm_keeps_two_32_bit_numbers_per_row(dtype: torch.dtype, on_cpu: int) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), weight, bias)

    inputs = fakes(SHAPE, (WIDTH,), (WIDTH,), dtype=dtype)
    assert kept_by(CUDA, norm, *inputs).bytes == 2 * 4 * ROWS
    assert all(x.grad.shape == x.shape for x in inputs)
    assert kept_by(CPU, norm, *fakes(SHAPE, (WIDTH,), (WIDTH,), dtype=dtype)).bytes == on_cpu * ROWS


def test_dropout_keeps_a_byte_per_element() -> None:
    assert kept_by(CUDA, lambda x: F.dropout(x, 0.1), *fakes(SHAPE)).bytes == SIZE
    assert kept_by(CPU, lambda x: F.dropout(x, 0.1), *fakes(SHAPE)).bytes == 2 * SIZE
    assert kept_by(CUDA, lambda x: F.dropout(x, 0.1, training=False) * 1, *fakes(SHAPE)).bytes == 0


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_of_16_bits_in_32_makes_no_copy(function: object) -> None:

    def peak(table: object, dtype: torch.dtype) -> int:
        (x,) = fakes(SHAPE, dtype=dtype)
        kept = kept_by(table, lambda x: function(x, -1, dtype=torch.float32), x)
        assert (kept.bytes, x.grad.dtype) == (0, dtype)
        return kept.backward_peak

    # the gradient comes in 16 bits at once
    assert peak(CUDA, torch.float16) == 2 * SIZE
    assert peak(CPU, torch.float16) == peak(CUDA, torch.bfloat16) == (4 + 2) * SIZE


def test_modules_and_recomputation_go_the_same_way() -> None:
    from torch.utils.checkpoint import checkpoint

    block = nn.Sequential(nn.RMSNorm(WIDTH), nn.Dropout(0.1)).bfloat16()
    for name, parameter in list(block[0].named_parameters()):
        setattr(block[0], name, nn.Parameter(fakes(tuple(parameter.shape))[0]))
    assert kept_by(CUDA, block, *fakes(SHAPE)).bytes == 4 * ROWS + SIZE
    recomputed = kept_by(
        CUDA, lambda x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False), *fakes(SHAPE)
    )
    assert recomputed.bytes == 0
    # input's gradient, and normalised and dropped output, mask and statistics made again
    assert recomputed.backward_peak < 5 * 2 * SIZE
