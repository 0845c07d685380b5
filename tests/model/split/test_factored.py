"""Large matrices in checks: with factors the same is computed and found as with the matrix, and wrong splits show."""

import resource

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mist.errors import TraceError
from lightning_mist.model import map_module
from lightning_mist.model.sources.reference_decoder import hollow
from lightning_mist.model.split import derive_splits, factored
from lightning_mist.model.split.factored import Factored, FactoredRoom
from lightning_mist.model.split.split_check import BlockCall, prepare
from lightning_mist.plan import ModuleMap
from lightning_mist.plan.tensor_split import ParameterSplit
from tests import zoo
from tests.cost.transformers import Sizes, Transformer, tokens
from tests.model.split.test_splits import derived, of_zoo
from tests.workers import apart

WIDTH = 16


def matrix(*shape: int) -> Factored:
    made = Factored.random(torch.empty(shape), torch.float64, torch.Generator().manual_seed(0))
    return Factored(made.left.requires_grad_(), made.right.requires_grad_(), FactoredRoom())


X = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
INDEX = torch.tensor([[0, 4], [4, 1]])
USES = {
    "linear": ((5, 6), lambda w: F.linear(X, w, X[0, 0, :5])),
    "matmul": ((6, 5), lambda w: X @ w),
    "from the left": ((5, 6), lambda w: w @ X.mT),
    "transposed": ((5, 6), lambda w: torch.matmul(X, w.t()) + X @ w.T + X @ w.transpose(-1, 0)),
    "added": ((6, 5), lambda w: torch.addmm(X[0, 0, :5], X[0], w)),
    "looked up": ((5, 6), lambda w: F.embedding(INDEX, w, 1)),
    "rows": ((5, 6), lambda w: F.linear(X, w[1:3])),
    "columns": ((5, 6), lambda w: F.linear(X[..., 2:], w[:, 2:])),
    "another type": ((5, 6), lambda w: F.linear(X.float(), w.to(torch.float32)).double()),
    "a batch": ((2, 6, 5), lambda w: torch.bmm(X, w)),
    "one of a batch": ((2, 6, 5), lambda w: X @ w[1]),
    "multiplied out": ((5, 6), lambda w: F.linear(X, w / w.norm())),
    "chunks": ((6, 6), lambda w: sum(F.linear(X, part) for part in w.chunk(3))),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_computed_with_factors_is_what_is_computed_with_the_matrix(use):
    shape, compute = USES[use]
    made = matrix(*shape)
    plain = made.left @ made.right.mT
    assert (made.shape, made.dtype, made.requires_grad) == (plain.shape, plain.dtype, True)
    results = []
    for weight in (made, plain):
        result = compute(weight)
        given = torch.randn(result.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        results.append((result, *torch.autograd.grad(result, (made.left, made.right), given, retain_graph=True)))
    tolerance = 1e-6 if use == "another type" else 1e-12
    # A row that is looked up for padding gets no gradient; its factor does, alike wherever the row lies.
    kept = results if use != "looked up" else [pair[:2] for pair in results]
    for found, wanted in zip(*kept, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_a_matrix_that_is_too_large_to_be_multiplied_out_says_so():
    made = Factored.random(torch.empty(2**16, 2**13, device="meta"), torch.float64, torch.Generator())
    with pytest.raises(TraceError, match=r"norm needs a matrix of shape \(65536, 8192\) otherwise than in a product"):
        made.norm()


@pytest.mark.sample
@pytest.mark.parametrize("name", ["nano_even", "encoder", "lora_llama", "llama_even", "gpt2_even", "nano"])
def test_the_same_is_found_with_factors(name, monkeypatch):
    if "llama" in name or "gpt2" in name:
        pytest.importorskip("transformers")
    plain = of_zoo(name)
    monkeypatch.setattr(factored, "LARGE", 0)
    assert of_zoo(name) == plain


class Attention(nn.Module):
    """Attention with fewer key heads and a gated feed-forward part, in layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        sizes = {"q": 16, "k": 8, "v": 8, "gate": 32, "up": 32}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(WIDTH, size, bias=False))
        self.o, self.down = nn.Linear(16, WIDTH, bias=False), nn.Linear(32, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        weights = torch.softmax(q @ k.mT / 2, -1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


RIGHT = {"q": (0, 16), "k": (0, 8), "v": (0, 8), "o": (1, 16), "gate": (0, 32), "up": (0, 32), "down": (1, 32)}


def checked(how):
    block = Attention()
    x = torch.randn(2, 8, WIDTH)
    call = BlockCall(block=block, args=(x,), kwargs={}, depends=(True,), answer=None, hidden=0)
    splits = [
        ParameterSplit(name=f"{name}.weight", dim=dim, factors=((size, True),)) for name, (dim, size) in how.items()
    ]
    return prepare(call, torch.float64)(splits, 2, None).reason


WRONG = {
    "a row-split matrix left whole": {name: how for name, how in RIGHT.items() if name != "down"},
    "key heads left whole": {name: how for name, how in RIGHT.items() if name != "k"},
    "an output matrix split by columns": RIGHT | {"o": (0, 16)},
    "keys split inside of heads": RIGHT | {"k": (1, 16)},
    "heads dealt out differently": RIGHT | {"k": (0, 8), "v": (1, 16)},
}


class Packed(Attention):
    """The same with query, key and value in one matrix."""

    def __init__(self, key_heads: int = 2) -> None:
        super().__init__()
        self.sizes = [16, 4 * key_heads, 4 * key_heads]
        self.q, self.k, self.v = (nn.Identity() for _ in range(3))
        self.qkv = nn.Linear(WIDTH, sum(self.sizes))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(4 // (self.sizes[1] // 4), 1) for part in (k, v))
        return x + self.o((torch.softmax(q @ k.mT / 2, -1) @ v).transpose(1, 2).flatten(2))


def packed_outcome(**how):
    call = BlockCall(
        block=Packed(), args=(torch.randn(2, 8, WIDTH),), kwargs={}, depends=(True,), answer=None, hidden=0
    )
    splits = [ParameterSplit(name=f"qkv.{name}", dim=0, **how) for name in ("weight", "bias")]
    splits.append(ParameterSplit(name="o.weight", dim=1, factors=((16, True),)))
    return prepare(call, torch.float64)(splits, 2, None)


@pytest.mark.parametrize("large", [0, 2**20])
def test_pieces_that_are_not_what_the_code_reads_are_slow_and_never_wrong(large, monkeypatch):
    monkeypatch.setattr(factored, "LARGE", large)
    right = packed_outcome(factors=((32, True),), pieces=(16, 8, 8))
    assert (right.reason, right.gathered) == (None, ())
    for how in ({"pieces": (8, 8, 16)}, {"pieces": (16, 16)}, {"pieces": (4, 12, 16)}, {}):
        outcome = packed_outcome(factors=((32, True),), **how)
        assert outcome.reason is not None or ("split", 1) in outcome.gathered


def test_one_key_head_beside_many_queries_stays_whole():
    class Blocks(zoo.Plain):
        def block(self) -> nn.Module:
            return Rows(Packed(key_heads=1))

    class Rows(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.own = block

        def forward(self, h: Tensor) -> Tensor:
            return h + self.own(h.unsqueeze(1).repeat(1, 8, 1) * torch.arange(1.0, 9.0).unsqueeze(-1)).mean(1)

    (reason,) = derived(Blocks(2), zoo.xy_batch(4), (2,)).excludes("tensor")
    assert reason.startswith("Rows stays whole: no two linear layers")


@pytest.mark.parametrize("large", [0, 2**20])
def test_wrong_splits_are_refused(large, monkeypatch):
    monkeypatch.setattr(factored, "LARGE", large)
    assert checked(RIGHT) is None
    for how in WRONG.values():
        assert checked(how) is not None


def test_numbers_in_the_wrong_place_are_found(monkeypatch):
    class Reversed(Attention):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return self.down(y if type(y) is Tensor else y.flip(-1))

    monkeypatch.setattr(factored, "LARGE", 0)
    block = Reversed()
    call = BlockCall(block=block, args=(torch.randn(2, 8, WIDTH),), kwargs={}, depends=(True,), answer=None, hidden=0)
    splits = [
        ParameterSplit(name="up.weight", dim=0, factors=((32, True),)),
        ParameterSplit(name="down.weight", dim=1, factors=((32, True),)),
    ]
    assert "differs by" in prepare(call, torch.float64)(splits, 2, None).reason


class Scaled(nn.Module):
    """Uses a large weight otherwise than in products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(zoo.WIDTH, 64, bias=False), nn.Linear(64, zoo.WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h))) * self.down.weight.norm()


class ScaledBlocks(zoo.Plain):
    def block(self) -> nn.Module:
        return Scaled()


def test_what_takes_too_much_memory_is_not_silently_left_out(monkeypatch):
    monkeypatch.setattr(factored, "LARGE", 0)
    assert derived(ScaledBlocks(2), zoo.xy_batch(4), (2,)).split(2).parameters
    monkeypatch.setattr("lightning_mist.model.split.split_check.MOST_BYTES", 4 * 4 * 64 * zoo.WIDTH - 1)
    (reason,) = derived(ScaledBlocks(2), zoo.xy_batch(4), (2,)).excludes("tensor")
    assert "otherwise than in a product: trying that takes" in reason


LARGE = {
    "llama 8b": Sizes(hidden=4096, ffn=14336, layers=32, vocabulary=128256, heads=32, groups=8),
    "gpt 175b": Sizes(
        hidden=12288, ffn=49152, layers=1, vocabulary=50304, heads=96, is_gated=False, has_inner_bias=True
    ),
    "phi 14b": Sizes(hidden=5120, ffn=17920, layers=2, vocabulary=32064, heads=40, groups=10, is_packed=True),
    "phi small": Sizes(hidden=4096, ffn=14336, layers=2, vocabulary=100352, heads=32, groups=8, is_packed=True),
}


def split_of(name: str) -> tuple[ModuleMap, int]:
    """How a large model without values can be split over 2, 4 and 8 ranks, and the KiB that this takes."""
    module = hollow(lambda: Transformer(LARGE[name]))
    batch, step = tokens(4, 2048), zoo.step(module)
    found = map_module(module, step, batch, second_batch=tokens(3, 2048), blocks="layers")
    splits = derive_splits(module, step, batch, found, (2, 4, 8))
    return splits, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.thorough
@pytest.mark.parametrize("name", LARGE)
def test_models_of_any_size_are_split_within_4_gib(name):
    found, kib = apart(split_of, name)
    degree = 2 if name == "phi 14b" else 8
    assert [each.degree for each in found.splits] == [2, 4, 8], (found.unsplit, found.exclusions)
    assert all(each.sequence for each in found.splits)
    assert not found.split(degree).notes
    whole = {use.name for use in found.parameters if found.split(degree).of(use.name) is None}
    assert degree == 8 or "10 groups (heads, for example), which 4 does not divide" in found.split(4).notes[0]
    assert not {name for name in whole if "norm" not in name and not name.endswith("bias")}, whole
    assert kib * 1024 < 4 * 2**30
