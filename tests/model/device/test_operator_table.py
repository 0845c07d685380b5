import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mist.model import trace_model
from lightning_mist.model.device import operator_table as device_autocast
from lightning_mist.model.device.operator_table import device_operators
from lightning_mist.model.sources.reference_decoder import hollow
from lightning_mist.model.spec import MICROBATCH, SEQUENCE
from tests.model.fake_steps import fakes, kept_by


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_value_heads * self.head, bias=False)
        self.value = nn.Linear(width, key_value_heads * self.head, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            linear(x).view(rows, length, -1, self.head).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(out.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """A Llama layer of plain torch modules."""

    def __init__(self, width: int, heads: int, key_value_heads: int, ffn: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = Attention(width, heads, key_value_heads)
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, *sizes: int, layers: int = 3, vocabulary: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, sizes[0])
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(layers))
        self.head = nn.Linear(sizes[0], vocabulary, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())


def llama(*sizes: int) -> nn.Module:
    return hollow(lambda: Llama(*sizes), dtype=torch.bfloat16)


BATCH = torch.zeros(2, 32, dtype=torch.long)
ROWS = MICROBATCH * SEQUENCE


@pytest.mark.sample
@pytest.mark.parametrize(
    ("sizes", "units"),
    [
        ((4096, 32, 8, 14336), 41.0),  # Llama 3 8B
        ((4096, 32, 32, 11008), 37.5),  # Llama 2 7B
        ((8192, 64, 8, 28672), 40.5),  # Llama 3 70B
    ],
)
def test_a_layer_of_llama_keeps_what_the_closed_form_says(sizes: tuple[int, ...], units: float) -> None:
    """Fujii et al., arXiv:2411.06465: s b h (12 + 4 k/a + 8 ffn/h) bytes, and 32-bit vectors that they leave out."""
    width, heads = sizes[:2]
    vectors = 4 * heads + 2 * 4  # a log-sum-exp per head, a deviation per norm
    spec = trace_model(llama(*sizes), BATCH, optimizer=torch.optim.SGD, device_kind="cuda")
    seeds = spec.layers[0].saved_bytes.subs({MICROBATCH: 0, SEQUENCE: 0})
    assert 0 <= seeds <= 24
    expected = (sympy.nsimplify(units) * width + vectors) * ROWS + seeds
    assert sympy.expand(spec.layers[0].saved_bytes - expected) == 0
    assert spec.layers[0].checkpointed_saved_bytes == 2 * width * ROWS


@pytest.mark.thorough
def test_on_the_cpu_a_layer_keeps_the_upcast_inputs_of_norms() -> None:
    sizes = (256, 4, 2, 512)
    sgd = torch.optim.SGD
    cpu, cuda = (trace_model(llama(*sizes), BATCH, optimizer=sgd, device_kind=kind) for kind in ("cpu", "cuda"))
    more = sympy.expand(cpu.layers[0].saved_bytes - cuda.layers[0].saved_bytes)
    # the CPU's attention draws no seeds
    assert abs(more - 12 * 256 * ROWS) <= 24
    assert cpu.layers[0].forward_flops == cuda.layers[0].forward_flops
    assert cpu.layers[0].backward_flops == cuda.layers[0].backward_flops
    assert cpu.layers[0].weight_flops == cuda.layers[0].weight_flops
    assert trace_model(llama(*sizes), BATCH, optimizer=sgd) == cpu


class Losses(nn.Module):
    """A head and its loss, computed in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.head = way, nn.Linear(8, 512, bias=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if self.way == "autocast":
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                return F.cross_entropy(self.head(batch[0]).flatten(0, 1), batch[1].flatten())
        if self.way == "plain":
            return F.cross_entropy(self.head(batch[0]).flatten(0, 1), batch[1].flatten())
        if self.way == "float":
            return F.cross_entropy(self.head(batch[0]).float().flatten(0, 1), batch[1].flatten())
        logits = self.head(batch[0])
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten()), "logits": logits}


@pytest.mark.parametrize(
    ("way", "kept", "forward", "backward"),
    [
        ("plain", 2, 4, 6),
        ("float", 4, 8, 12),
        ("held", 6, 10, 14),
        # CUDA's autocast leaves the log-softmax in 16 bits, for whose type cross entropy asks, and casts for the rest.
        ("autocast", 6, 8, 10),
    ],
)
def test_bytes_per_score(way: str, kept: int, forward: int, backward: int) -> None:
    """What every score of a language model's head costs, by how its loss is computed."""
    dtype = torch.float32 if way == "autocast" else torch.bfloat16
    batch = (torch.zeros(2, 32, 8, dtype=dtype), torch.zeros(2, 32, dtype=torch.long))
    spec = trace_model(Losses(way).to(dtype), batch, optimizer=torch.optim.SGD, device_kind="cuda")

    def per_score(*expressions: sympy.Expr) -> int:
        size = sum(expressions).subs({MICROBATCH: 2000, SEQUENCE: 32})
        return round(float(size) / (2000 * 32 * 512))

    assert per_score(spec.head.saved_bytes) == kept
    assert per_score(spec.head.forward_peak_bytes) == forward
    assert per_score(spec.head.saved_bytes, spec.head.backward_peak_bytes) == backward


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device_kind = 'tpu': operators are known for cpu and cuda"):
        device_operators("tpu")


def test_tables_say_what_they_replace() -> None:
    assert device_operators("cpu").kernels == ()
    table = device_operators("cuda", "2.8.0+cu126", capability=(9, 0))
    assert (table.target.torch_version, table.target.capability) == ((2, 8), (9, 0))
    assert {"scaled_dot_product_attention", "rms_norm", "dropout"} <= {kernel.operator for kernel in table.kernels}
    assert device_operators("cuda") == dataclasses.replace(device_operators("cuda"))


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
