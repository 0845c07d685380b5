"""Language models to plan for without having them: decoder-only transformers in plain torch.

They are traced like anybody's module. Their parameters hold no memory: each is one number seen through zero strides
(:func:`hollow`), so that a model of any size can be built on any machine; they are for tracing, not for training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelShape:
    """Sizes and choices of a decoder-only language model without biases and dropout.

    Attributes:
        hidden: Width of the residual stream.
        ffn: Inner width of the feed-forward part.
        layers: Number of blocks.
        heads: Number of attention heads.
        vocabulary: Number of tokens.
        key_value_heads: Heads of keys and values, a divisor of ``heads``; ``None`` for as many.
        feed_forward: ``"gelu"`` (two matrices) or ``"swiglu"`` (three; Shazeer, 2020).
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        parallel: Whether attention and feed-forward read the same norm and are added together (Wang and Komatsuzaki,
            2021).
        rotary_fraction: Part of each head that is rotated by position (Su et al., 2021); 0 for a table of learned
            positions.
        tied: Whether the head is the token table.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocabulary: int
    key_value_heads: int | None = None
    feed_forward: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    parallel: bool = False
    rotary_fraction: float = 0.0
    tied: bool = False


class LanguageModel(nn.Module):
    """A decoder-only language model with a ``training_step`` on pairs of token ids, each ``(rows, length)``.

    Args:
        shape: Sizes and choices.
        sequence_length: Longest sequence, for the table of positions.
    """

    def __init__(self, shape: LanguageModelShape, sequence_length: int) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = None if shape.rotary_fraction else nn.Embedding(sequence_length, shape.hidden)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of every token at every place: ``(rows, length)`` ids to ``(rows, length, vocabulary)``."""
        hidden: Tensor = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy of the second member of the batch, the tokens that follow those of the first."""
        tokens, following = batch
        return functional.cross_entropy(self(tokens).flatten(0, 1), following.flatten())


class _Block(nn.Module):
    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = _Attention(shape)
        self.feed_forward_norm = None if shape.parallel else _norm(shape)
        self.feed_forward: nn.Module = _SwiGLU(shape) if shape.feed_forward == "swiglu" else _GELU(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        attended: Tensor = hidden + self.attention(normed)
        second = normed if self.feed_forward_norm is None else self.feed_forward_norm(attended)
        result: Tensor = attended + self.feed_forward(second)
        return result


class _Attention(nn.Module):
    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.width = shape.hidden // shape.heads
        self.heads = shape.heads
        self.key_value_heads = shape.key_value_heads or shape.heads
        self.rotated = int(self.width * shape.rotary_fraction) // 2 * 2
        keys_and_values = self.key_value_heads * self.width
        self.query_key_value = nn.Linear(shape.hidden, shape.hidden + 2 * keys_and_values, bias=False)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        mixed = self.query_key_value(hidden).view(rows, length, -1, self.width).transpose(1, 2)
        query, key, value = torch.split(mixed, [self.heads, self.key_value_heads, self.key_value_heads], dim=1)
        if self.rotated:
            query, key = (torch.cat(self._rotate(part), dim=-1) for part in (query, key))
        repeats = self.heads // self.key_value_heads
        if repeats > 1:
            key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(attended.transpose(1, 2).reshape(rows, length, -1))
        return result

    def _rotate(self, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate the first :attr:`rotated` entries of each head in pairs, by angles that grow with position."""
        half = self.rotated // 2
        frequency = 10_000.0 ** -(torch.arange(half, device=part.device) / half)  # Su et al., 2021, eq. 15
        angle = torch.arange(part.shape[2], device=part.device)[:, None] * frequency
        cosine, sine = angle.cos().to(part.dtype), angle.sin().to(part.dtype)
        first, second, rest = torch.split(part, [half, half, self.width - self.rotated], dim=-1)
        return first * cosine - second * sine, second * cosine + first * sine, rest


class _GELU(nn.Module):
    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down(functional.gelu(self.up(hidden), approximate="tanh"))
        return result


class _SwiGLU(nn.Module):
    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return result


def _norm(shape: LanguageModelShape) -> nn.Module:
    return nn.RMSNorm(shape.hidden) if shape.norm == "rmsnorm" else nn.LayerNorm(shape.hidden)


def hollow(build: Callable[[], nn.Module], *, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a module whose parameters take no memory.

    It is built on torch's meta device; then every parameter becomes a single zero seen through zero strides on the CPU.
    Buffers and tensors kept as attributes become ordinary zeros, because steps may write to them. What was shared stays
    shared.

    Args:
        build: Makes the module.
        dtype: Element type that floating-point parameters and buffers shall have; their own if ``None``.
    """
    with torch.device("meta"):
        module = build()
    replaced: dict[int, Tensor] = {}
    for owner in module.modules():
        for slots in (owner._parameters, owner._buffers, vars(owner)):
            for name, tensor in slots.items():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    slots[name] = replaced.setdefault(id(tensor), _stand_in(tensor, dtype))  # type: ignore[assignment]
    return module


def _stand_in(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(torch.zeros((), dtype=kept).expand(tensor.shape), requires_grad=tensor.requires_grad)
    return torch.zeros(tensor.shape, dtype=kept)
