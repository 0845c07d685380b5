"""Llama's, GPT's and Phi's layers in plain torch, with their sizes as data."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    hidden: int
    ffn: int
    layers: int
    heads: int
    vocabulary: int
    groups: int = 0
    is_gated: bool = True
    has_inner_bias: bool = False
    is_packed: bool = False
    """Whether one linear layer makes queries, keys and values, and one gate and up."""


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, width = sizes.hidden, sizes.hidden // sizes.heads * (sizes.groups or sizes.heads)
        self.sizes, self.widths = sizes, [hidden, width, width]
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])
        outs = [hidden + 2 * width] if sizes.is_packed else self.widths
        self.projections = nn.ModuleList([nn.Linear(hidden, out, bias=False) for out in outs])
        self.output = nn.Linear(hidden, hidden, bias=False)
        inner = sizes.ffn * (2 if sizes.is_packed else 1)
        self.up = nn.Linear(hidden, inner, bias=sizes.has_inner_bias)
        self.gate = nn.Linear(hidden, sizes.ffn, bias=False) if sizes.is_gated and not sizes.is_packed else None
        self.down = nn.Linear(sizes.ffn, hidden, bias=sizes.has_inner_bias)

    def forward(self, x: Tensor) -> Tensor:
        made = [projection(self.norms[0](x)) for projection in self.projections]
        parts = made[0].split(self.widths, dim=2) if self.sizes.is_packed else made
        width = self.sizes.hidden // self.sizes.heads
        query, key, value = (part.view(*x.shape[:2], -1, width).transpose(1, 2) for part in parts)
        times = query.shape[1] // key.shape[1]
        if times > 1:
            key, value = (part.repeat_interleave(times, dim=1) for part in (key, value))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return x + self.down(self.inner(self.norms[1](x)))

    def inner(self, x: Tensor) -> Tensor:
        if self.sizes.is_packed:
            gate, up = self.up(x).chunk(2, -1)
            return F.silu(gate) * up
        return F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)


class Transformer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList([Layer(sizes) for _ in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, targets = batch
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def tokens(rows, length):
    return tuple(torch.zeros(rows, length, dtype=torch.long) for _ in range(2))
