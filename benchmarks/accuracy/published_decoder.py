"""Decoder-only language models as published runs train them, in plain torch, to be traced."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes and choices of a language model.

    Attributes:
        key_value_heads: As many as of queries if None.
        norm: ``"rms by operators"`` takes root-mean-square norms in float32, operator by operator, as LitGPT does.
        positions: ``"rotary in float32"`` copies keys and values to all heads first and rotates in float32, as LitGPT.
        bias: Linear operations have biases.
        float_loss: Scores are cast to float32 for the loss.
        copies_scores: Scores but those of the last place are copied for the loss, as in transformers before 4.50.
        fused_loss: The loss is one kernel, which keeps scores: ``"apart"`` makes their gradient beside them, as
            flash-attn's, ``"in place"`` in their memory, as unsloth's; ``"with its product"`` makes scores of a part of
            the tokens at a time, and all gradients at once, as Liger's.
        keeps_scores: The step returns the scores too.
        keeps_cache: What queries, keys and values are parts of stays until the loss is there, as a cache.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocabulary: int
    key_value_heads: int | None = None
    feed_forward: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm", "rms by operators"] = "layernorm"
    positions: Literal["learned", "rotary", "rotary in float32"] = "learned"
    bias: bool = False
    tied: bool = False
    dropout: float = 0.0
    float_loss: bool = False
    copies_scores: bool = False
    fused_loss: Literal["no", "apart", "in place", "with its product"] = "no"
    keeps_scores: bool = False
    keeps_cache: bool = False


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

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What the head is given, and the cache of every block that keeps one."""
        hidden: Tensor = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        hidden = self.drop(hidden)
        cache: list[Tensor] = []
        for block in self.blocks:
            hidden = block(hidden)
            if self.sizes.keeps_cache:
                hidden, kept = hidden
                cache.append(kept)
        return self.norm(hidden), cache

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | dict[str, Tensor]:
        """Mean cross entropy of the tokens that follow."""
        tokens, following = batch
        # The cache stays until the loss is there, for the model returns it, and so do scores of which others are made.
        hidden, cache = self(tokens)
        if self.sizes.fused_loss == "with its product":
            shared: Tensor = _FusedProduct.apply(hidden.flatten(0, 1), self.head.weight, following.flatten())
            return shared
        scores = self.head(hidden)
        del hidden
        scores = scores.float() if self.sizes.float_loss else scores
        used, labels = scores, following
        if self.sizes.copies_scores:
            used, labels = scores[..., :-1, :].contiguous(), following[..., 1:].contiguous()
        loss = self._loss(used.flatten(0, 1), labels.flatten())
        del cache
        return {"loss": loss, "scores": scores} if self.sizes.keeps_scores else loss

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        if self.sizes.fused_loss != "no":
            losses: Tensor = _FusedLoss.apply(scores, labels, self.sizes.fused_loss == "in place")
            return losses.mean()
        return F.cross_entropy(scores, labels)


class _FusedLoss(torch.autograd.Function):
    """What a loss of one kernel in either direction keeps and makes, such as flash-attn's and unsloth's."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, is_in_place: bool) -> Tensor:
        """The loss of every token, in float32."""
        with torch.autocast(scores.device.type, enabled=False):  # the kernel reads scores as they are
            sums = torch.logsumexp(scores, dim=-1)
        ctx.save_for_backward(scores, sums, labels)
        ctx.is_in_place = is_in_place
        return (sums - scores.gather(-1, labels[:, None]).squeeze(-1)).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of scores, in one tensor of their size, or in theirs."""
        scores, sums, labels = ctx.saved_tensors
        made = scores.sub_(sums[:, None]).exp_() if ctx.is_in_place else torch.softmax(scores, dim=-1)
        made.scatter_add_(-1, labels[:, None], made.new_full((len(labels), 1), -1.0))
        return made.mul_(gradients[0][:, None].to(made.dtype)), None, None


class _FusedProduct(torch.autograd.Function):
    """``LigerFusedLinearCrossEntropyFunction``: gradients are made in forward, of a part of the tokens at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The mean loss, in float32. Parts have about as many scores as there are hidden states in all."""
        made, of_weight = [], torch.zeros_like(weight)
        loss = hidden.new_zeros((), dtype=torch.float32)
        parts = -(-weight.shape[0] // weight.shape[1])
        for part, wanted in zip(hidden.chunk(parts), labels.chunk(parts), strict=True):
            scores = part @ weight.t()
            sums = torch.logsumexp(scores, dim=-1)
            loss += (sums - scores.gather(-1, wanted[:, None]).squeeze(-1)).float().sum()
            scores.sub_(sums[:, None]).exp_()
            scores.scatter_add_(-1, wanted[:, None], scores.new_full((len(wanted), 1), -1.0)).div_(len(labels))
            made.append(scores @ weight)
            of_weight.addmm_(scores.t(), part)
        ctx.save_for_backward(torch.cat(made), of_weight)
        return loss / len(labels)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """What forward made, times the gradient."""
        made, of_weight = ctx.saved_tensors
        return made.mul_(gradients[0]), of_weight.mul_(gradients[0]), None


class _Block(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(sizes), _Attention(sizes)
        self.feed_forward_norm, self.feed_forward = _norm(sizes), _FeedForward(sizes)
        self.drop = nn.Dropout(sizes.dropout)
        self.keeps_cache = sizes.keeps_cache

    def forward(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden), kept))
        result: Tensor = hidden + self.drop(self.feed_forward(self.feed_forward_norm(hidden)))
        return (result, kept[0]) if self.keeps_cache else result


class _Attention(nn.Module):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.heads, self.groups = sizes.heads, sizes.key_value_heads or sizes.heads
        self.width = sizes.hidden // sizes.heads
        self.is_rotary, self.dropout = sizes.positions != "learned", sizes.dropout
        self.is_copied_first = sizes.positions == "rotary in float32"
        self.keeps_cache = sizes.keeps_cache
        narrow = self.groups * self.width
        self.parts = [sizes.hidden, narrow, narrow]
        self.is_joint = not self.is_rotary or self.is_copied_first
        if self.is_joint:
            self.query_key_value = nn.Linear(sizes.hidden, sum(self.parts), bias=sizes.bias)
        else:
            self.query = nn.Linear(sizes.hidden, sizes.hidden, bias=sizes.bias)
            self.key = nn.Linear(sizes.hidden, narrow, bias=sizes.bias)
            self.value = nn.Linear(sizes.hidden, narrow, bias=sizes.bias)
        self.output = nn.Linear(sizes.hidden, sizes.hidden, bias=sizes.bias)

    def forward(self, hidden: Tensor, cache: list[Tensor]) -> Tensor:
        """What is attended to; with a cache, what keys and values are parts of goes there."""
        rows, length, _ = hidden.shape
        if self.is_joint:
            made = torch.split(self.query_key_value(hidden), self.parts, dim=-1)
        else:
            made = (self.query(hidden), self.key(hidden), self.value(hidden))
        if self.keeps_cache:
            cache.append(made[1])
        query, key, value = (part.view(rows, length, -1, self.width).transpose(1, 2) for part in made)
        if self.is_rotary and not self.is_copied_first:
            query, key = _rotate(query), _rotate(key)
        if self.groups != self.heads:
            key, value = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (key, value))
        if self.is_copied_first:
            query, key = _rotate_wide(query), _rotate_wide(key)
        drop = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        result: Tensor = self.output(attended.transpose(1, 2).reshape(rows, length, -1))
        return result


def _rotate_wide(part: Tensor) -> Tensor:
    """As :func:`_rotate`, in float32 by products with whole tables, and back."""
    half = part.shape[-1] // 2
    cosine, sine = (table.repeat(1, 2) for table in _tables(part))
    turned = torch.cat((-part[..., half:], part[..., :half]), dim=-1)
    return (part * cosine + turned * sine).to(part.dtype)


def _rotate(part: Tensor) -> Tensor:
    """Whole heads rotated by position, in two halves."""
    half = part.shape[-1] // 2
    cosine, sine = (table.to(part.dtype) for table in _tables(part))
    first, second = part[..., :half], part[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _tables(part: Tensor) -> tuple[Tensor, Tensor]:
    half = part.shape[-1] // 2
    frequency = 10_000.0 ** -(torch.arange(half, device=part.device) / half)  # Su et al., 2021, eq. 15
    angle = torch.arange(part.shape[2], device=part.device)[:, None] * frequency
    return angle.cos(), angle.sin()


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


class _WideNorm(nn.Module):
    """A root-mean-square norm operator by operator, in float32 up to the product with the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return wide.to(hidden.dtype) * self.weight


def _norm(sizes: DecoderSizes) -> nn.Module:
    if sizes.norm == "rms by operators":
        return _WideNorm(sizes.hidden)
    return nn.RMSNorm(sizes.hidden) if sizes.norm == "rmsnorm" else nn.LayerNorm(sizes.hidden)
