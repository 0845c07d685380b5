"""Large language models written as ordinary modules, without values: Llama-like, GPT-like, and with packed layers.

``python -m tests.model.split.large_models NAME`` splits one 2, 4 and 8 ways, and tells seconds and peak memory.
"""

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mist.model import map_module
from lightning_mist.model.sources.reference_decoder import hollow
from lightning_mist.model.split import derive_splits
from lightning_mist.plan import ModuleMap
from lightning_mist.tensors import slice_rows


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; ``packed`` puts query, key and value in one matrix, and gate and up in another."""

    hidden: int
    ffn: int
    heads: int
    key_heads: int
    layers: int
    vocabulary: int
    gated: bool = True
    packed: bool = False

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "llama 8b": Shape(4096, 14336, 32, 8, 32, 128256),
    "gpt 175b": Shape(12288, 49152, 96, 96, 1, 50304, gated=False),
    "phi 14b": Shape(5120, 17920, 40, 10, 2, 32064, packed=True),
    "phi small": Shape(4096, 14336, 32, 8, 2, 100352, packed=True),
}


class Attention(nn.Module):
    """Causal attention, its projections side by side in one matrix or not."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.sizes = [count * shape.head_width for count in (shape.heads, shape.key_heads, shape.key_heads)]
        inputs = [sum(self.sizes)] if shape.packed else self.sizes
        self.projections = nn.ModuleList(nn.Linear(shape.hidden, size, bias=False) for size in inputs)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Sequence[Tensor] = [layer(x) for layer in self.projections]
        made = made[0].split(self.sizes, -1) if self.shape.packed else made
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2) for part in made)
        k, v = (part.repeat_interleave(self.shape.heads // self.shape.key_heads, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Gated or not, gate and up side by side in one matrix or not."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        count = 2 if shape.gated else 1
        sizes = [count * shape.ffn] if shape.packed else [shape.ffn] * count
        self.up = nn.ModuleList(nn.Linear(shape.hidden, size, bias=not shape.gated) for size in sizes)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=not shape.gated)

    def forward(self, x: Tensor) -> Tensor:
        made: Sequence[Tensor] = [layer(x) for layer in self.up]
        made = made[0].chunk(2, -1) if self.shape.packed else made
        return self.down(F.silu(made[0]) * made[1] if self.shape.gated else F.gelu(made[0]))


class Block(nn.Module):
    """Attention and feed-forward part behind a norm each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Model(nn.Module):
    """Blocks between a table of tokens and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(shape.vocabulary, shape.hidden), nn.RMSNorm(shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = self.tokens(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[1].flatten())


def split(name: str) -> ModuleMap:
    """How a model can be split over 2, 4 and 8 ranks."""
    module = hollow(lambda: Model(SHAPES[name]))
    batch = (torch.zeros(4, 2048, dtype=torch.long), torch.zeros(4, 2048, dtype=torch.long))
    found = map_module(module, module, batch, second_batch=slice_rows(batch, 0, 3), blocks="blocks")
    return derive_splits(module, module, batch, found, (2, 4, 8))


if __name__ == "__main__":
    start = time.perf_counter()
    result = split(sys.argv[1])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{sys.argv[1]}: {time.perf_counter() - start:.1f} s, {memory:.2f} GiB at most")
    for each in result.splits:
        print(each.degree, len(each.parameters), "parameters", len(each.sequence), "entries", *each.notes)
    print(*result.unsplit, *result.exclusions)
