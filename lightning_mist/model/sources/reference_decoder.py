"""Language models to plan for without having them: decoder-only transformers in plain torch.

They are traced like anybody's module. Their parameters hold no memory: each is one number seen through zero strides
(:func:`hollow`), so that a model of any size can be built on any machine; they are for tracing, not for training.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_mist.model.presets import LanguageModelShape


class LanguageModel(nn.Module):
    """A decoder-only language model with a ``training_step`` on pairs of token ids, each ``(rows, length)``.

    Args:
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
        self.feed_forward = _FeedForward(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        attended: Tensor = hidden + self.attention(normed)
        second = normed if self.feed_forward_norm is None else self.feed_forward_norm(attended)
        result: Tensor = attended + self.feed_forward(second)
        return result


class _Attention(nn.Module):
    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.width, self.heads = shape.head_width, shape.heads
        self.repeats = shape.heads // (shape.key_value_heads or shape.heads)
        self.rotated = shape.rotated_width
        if shape.key_value_heads is None:
            self.query_key_value = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        else:
            self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
            self.key = nn.Linear(shape.hidden, shape.key_value_width, bias=False)
            self.value = nn.Linear(shape.hidden, shape.key_value_width, bias=False)
        self.is_fused = shape.key_value_heads is None
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        if self.is_fused:
            mixed = self.query_key_value(hidden).view(rows, length, -1, self.width).transpose(1, 2)
            query, key, value = torch.split(mixed, [self.heads] * 3, dim=1)
        else:
            made = (part(hidden) for part in (self.query, self.key, self.value))
            query, key, value = (part.view(rows, length, -1, self.width).transpose(1, 2) for part in made)
        if self.rotated:
            query, key = (torch.cat(self._rotate(part), dim=-1) for part in (query, key))
        if self.repeats > 1:
            key, value = (part.repeat_interleave(self.repeats, dim=1) for part in (key, value))
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


class _FeedForward(nn.Module):
    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False) if shape.feed_forward == "swiglu" else None
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gate is None:
            result: Tensor = self.down(functional.gelu(self.up(hidden), approximate="tanh"))
        else:
            result = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return result


def _norm(shape: LanguageModelShape) -> nn.Module:
    return nn.RMSNorm(shape.hidden) if shape.norm == "rmsnorm" else nn.LayerNorm(shape.hidden)


def hollow(build: Callable[[], nn.Module], *, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a module whose parameters take no memory.

    It is built on torch's meta device; then every parameter becomes a single zero seen through zero strides on the CPU.
    Buffers and tensors kept as attributes become ordinary zeros, because steps may write to them. What was shared stays
    shared.

    Args:
        dtype: Element type that floating-point parameters and buffers shall have; their own if ``None``.
    """
    with torch.device("meta"):
        module = build()
    replaced: dict[int, Tensor] = {}
    for owner in module.modules():
        for slots in (owner._parameters, owner._buffers, vars(owner)):
            for name, tensor in slots.items():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    slots[name] = replaced.setdefault(id(tensor), _substitute(tensor, dtype))  # type: ignore[assignment]
    return module


def _substitute(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(torch.zeros((), dtype=kept).expand(tensor.shape), requires_grad=tensor.requires_grad)
    return torch.zeros(tensor.shape, dtype=kept)
