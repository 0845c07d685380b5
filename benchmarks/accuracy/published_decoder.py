"""Decoder-only language models as published runs train them, in plain torch, to be traced."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes and choices of a language model.

    Attributes:
        key_value_heads: As many as of queries if None.
        bias: Linear operations have biases.
        float_loss: Scores are cast to float32 for the loss.
        copies_scores: Scores but those of the last place are copied for the loss, as in transformers before 4.50.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocabulary: int
    key_value_heads: int | None = None
    feed_forward: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    positions: Literal["learned", "rotary"] = "learned"
    bias: bool = False
    tied: bool = False
    dropout: float = 0.0
    float_loss: bool = False
    copies_scores: bool = False


class Decoder(nn.Module):
    """A language model with a ``training_step`` on pairs of token ids, each ``(rows, length)``.

    Args:
        length: Longest sequence, for the table of positions.
    """

    def __init__(self, sizes: DecoderSizes, length: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(length, sizes.hidden) if sizes.positions == "learned" else None
        self.drop = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.norm = _norm(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of every token at every place."""
        hidden: Tensor = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        hidden = self.drop(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.norm(hidden))
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross entropy of the tokens that follow."""
        tokens, following = batch
        scores = self(tokens)
        scores = scores.float() if self.sizes.float_loss else scores
        if not self.sizes.copies_scores:
            return F.cross_entropy(scores.flatten(0, 1), following.flatten())
        # Scores stay until the loss is there, for the model returns them.
        copied, labels = scores[..., :-1, :].contiguous(), following[..., 1:].contiguous()
        return F.cross_entropy(copied.flatten(0, 1), labels.flatten())


class _Block(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(sizes), _Attention(sizes)
        self.feed_forward_norm, self.feed_forward = _norm(sizes), _FeedForward(sizes)
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden)))
        result: Tensor = hidden + self.drop(self.feed_forward(self.feed_forward_norm(hidden)))
        return result


class _Attention(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.heads, self.groups = sizes.heads, sizes.key_value_heads or sizes.heads
        self.width = sizes.hidden // sizes.heads
        self.is_rotary, self.dropout = sizes.positions == "rotary", sizes.dropout
        narrow = self.groups * self.width
        self.parts = [sizes.hidden, narrow, narrow]
        if self.is_rotary:
            self.query = nn.Linear(sizes.hidden, sizes.hidden, bias=sizes.bias)
            self.key = nn.Linear(sizes.hidden, narrow, bias=sizes.bias)
            self.value = nn.Linear(sizes.hidden, narrow, bias=sizes.bias)
        else:
            self.query_key_value = nn.Linear(sizes.hidden, sum(self.parts), bias=sizes.bias)
        self.output = nn.Linear(sizes.hidden, sizes.hidden, bias=sizes.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        if self.is_rotary:
            made = (self.query(hidden), self.key(hidden), self.value(hidden))
        else:
            made = torch.split(self.query_key_value(hidden), self.parts, dim=-1)
        query, key, value = (part.view(rows, length, -1, self.width).transpose(1, 2) for part in made)
        if self.is_rotary:
            query, key = _rotate(query), _rotate(key)
        if self.groups != self.heads:
            key, value = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (key, value))
        drop = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        result: Tensor = self.output(attended.transpose(1, 2).reshape(rows, length, -1))
        return result


def _rotate(part: Tensor) -> Tensor:
    """Whole heads rotated by position, in two halves."""
    half = part.shape[-1] // 2
    frequency = 10_000.0 ** -(torch.arange(half, device=part.device) / half)  # Su et al., 2021, eq. 15
    angle = torch.arange(part.shape[2], device=part.device)[:, None] * frequency
    cosine, sine = angle.cos().to(part.dtype), angle.sin().to(part.dtype)
    first, second = part[..., :half], part[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class _FeedForward(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        is_gated = sizes.feed_forward == "swiglu"
        self.gate = nn.Linear(sizes.hidden, sizes.ffn, bias=sizes.bias) if is_gated else None
        self.up = nn.Linear(sizes.hidden, sizes.ffn, bias=sizes.bias)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=sizes.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gate is None:
            result: Tensor = self.down(F.gelu(self.up(hidden)))
        else:
            result = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return result


def _norm(sizes: DecoderSizes) -> nn.Module:
    return nn.RMSNorm(sizes.hidden) if sizes.norm == "rmsnorm" else nn.LayerNorm(sizes.hidden)
