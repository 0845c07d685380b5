import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lightning_mist.model.device import autocast as device_autocast
from lightning_mist.model.device.operator_table import device_operators
from tests.model.fake_steps import fakes, kept_by

CUDA = device_operators("cuda")
SHAPE = (2, 8, 16)
SIZE = 256
LABELS = torch.zeros(16, dtype=torch.long)


def listed_in_header(macro: str) -> set[str]:
    """The operators of a list in torch's own header."""
    text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", text, re.DOTALL)
    assert body is not None
    names = re.findall(r"_\((\w+)(?:, *(\w+))?\)", body.group(1))
    return {f"{name}.{overload}" if overload else name for name, overload in names}


def test_the_lists_are_those_of_the_installed_torch() -> None:
    assert listed_in_header("AT_FORALL_FP32") <= device_autocast.FP32
    assert listed_in_header("AT_FORALL_FP32_SET_OPT_DTYPE") <= device_autocast.FP32_RESULT
    assert listed_in_header("AT_FORALL_PROMOTE") <= device_autocast.PROMOTE
    assert listed_in_header("AT_FORALL_LOWER_PRECISION_FP") <= device_autocast.LOWER
    there = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    lists = device_autocast
    known = lists.FP32 | lists.FP32_RESULT | lists.PROMOTE | lists.LOWER | set(lists.APPENDED)
    # CUDA's autocast raises for this one; the CPU's casts it.
    known |= {"binary_cross_entropy"}
    assert {name.removeprefix("aten::") for name in there if name.startswith("aten::")} <= known


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: x.exp(), torch.float32),
        (lambda x: x.pow(2), torch.float32),
        (lambda x: x.sum(), torch.float32),
        (lambda x: x.prod(), torch.float32),
        (lambda x: x.sum(dtype=torch.bfloat16), torch.bfloat16),
        (torch.norm, torch.float32),
        (lambda x: torch.ops.aten.norm.Scalar(x, 2), torch.float32),
        (lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [1], True), torch.float32),
        (torch.linalg.vector_norm, torch.float32),
        (lambda x: F.softmax(x, -1), torch.float32),
        (lambda x: F.layer_norm(x, (16,)), torch.float32),
        (lambda x: F.group_norm(x, 2), torch.float32),
        (lambda x: F.cross_entropy(x.flatten(0, 1), LABELS), torch.float32),
        (lambda x: F.mse_loss(x, x), torch.float32),
        (lambda x: torch.einsum("abc,abc->ab", x.float(), x), torch.bfloat16),
        (lambda x: torch.addcmul(x, x, x.float()), torch.float32),
        (lambda x: torch.addcmul(x, x, x), torch.bfloat16),
        (lambda x: F.linear(x.float(), torch.ones(4, 16)), torch.bfloat16),
        (lambda x: F.max_pool3d(x[None], 2), torch.bfloat16),
        (F.relu, torch.bfloat16),
    ],
)
def test_results_have_the_types_that_cuda_gives_them(function: object, dtype: torch.dtype) -> None:
    (x,) = fakes(SHAPE)
    with CUDA.installed(), torch.autocast("cuda", torch.bfloat16):
        assert function(x).dtype == dtype


def test_a_layer_norm_under_autocast_keeps_its_input_in_32_bits() -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return F.layer_norm(x, (16,), weight, bias)

    kept = kept_by(CUDA, norm, *fakes(SHAPE), *fakes((16,), (16,), dtype=torch.float32))
    assert kept.bytes == 4 * SIZE + 2 * 4 * 16


@pytest.mark.parametrize(("cached", "copies"), [(False, 2), (True, 1)])
def test_cast_weights_are_kept_once_where_autocast_caches(cached: bool, copies: int) -> None:
    def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=cached):
            return F.linear(F.linear(x, weight), weight)

    kept = kept_by(CUDA, twice, *fakes(SHAPE, (16, 16), dtype=torch.float32))
    # the cast input, the result between, and casts of the weight
    assert kept.bytes == 2 * (2 * SIZE + copies * 256)


def test_autocast_by_name_needs_no_such_device() -> None:
    (x,) = fakes(SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with CUDA.installed(), torch.autocast("cuda"):
            assert F.linear(x.float(), torch.ones(4, 16)).dtype == torch.float16
    init = torch.amp.autocast_mode.autocast.__init__
    assert init.__module__ == "torch.amp.autocast_mode"


def test_nothing_is_cast_afterwards_or_elsewhere() -> None:
    import threading

    x = torch.ones(4, 4)
    found: list[torch.dtype] = []

    def other() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            found.append(x.bfloat16().exp().dtype)
            found.append(F.max_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=torch.bfloat16), 2).dtype)
            found.append(x.bfloat16().prod().dtype)

    other()
    with CUDA.installed():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    other()
    assert found == found[:3] * 3
