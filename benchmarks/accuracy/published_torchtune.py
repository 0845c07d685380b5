"""Llama-like models of torchtune, as its recipes run them; see :mod:`benchmarks.accuracy.published_models`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.accuracy.published_kernels import flash_attention
from benchmarks.accuracy.published_models import Arithmetic, Shape, Shapes, Weights

_CHUNKS = 8
"""``num_output_chunks`` of ``CEWithChunkedOutputLoss``: output layer and loss run over so many parts of a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTune:
    """``TransformerDecoder`` of ``torchtune/modules``.

    Attributes:
        shape, arithmetic: As in :class:`Model`.
        has_qkv_bias: Qwen2.
    """

    shape: Shape
    arithmetic: Arithmetic
    has_qkv_bias: bool = False

    @property
    def root(self) -> Shapes:
        """Embedding, final norm, output layer."""
        table = (self.shape.vocabulary, self.shape.hidden)
        head = {} if self.shape.is_tied else {"head": table}
        return {"embedding": table, "norm": (self.shape.hidden,), **head}

    @property
    def layer_shapes(self) -> Shapes:
        """One layer."""
        s = self.shape
        wide, narrow = s.heads * s.head, s.kv_heads * s.head
        bias = {"q_bias": (wide,), "k_bias": (narrow,), "v_bias": (narrow,)} if self.has_qkv_bias else {}
        return {
            "q": (wide, s.hidden),
            "k": (narrow, s.hidden),
            "v": (narrow, s.hidden),
            **bias,
            "o": (s.hidden, wide),
            "gate": (s.ffn, s.hidden),
            "down": (s.hidden, s.ffn),
            "up": (s.ffn, s.hidden),
            "norm_1": (s.hidden,),
            "norm_2": (s.hidden,),
        }

    @property
    def buffer_bytes(self) -> int:
        """None of any size."""
        return 0

    def begin(self, weights: Weights, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Embeddings, and the table of rotations."""
        table = torch.empty(1, tokens.shape[1], 1, self.shape.head // 2, dtype=torch.float32, device="meta")
        return F.embedding(tokens, weights["embedding"]), (table, torch.empty_like(table))

    def layer(self, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """``TransformerSelfAttentionLayer``."""
        x = self._attention(weights, _norm(x, weights["norm_1"]), shared) + x
        normed, linear = _norm(x, weights["norm_2"]), self.arithmetic.linear
        return x + linear(
            F.silu(linear(normed, weights["gate"])) * linear(normed, weights["up"]), weights["down"]
        ), None

    def end(self, weights: Weights, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Output layer and loss, part by part; every part's logits stay until the loss of all is there."""
        x = _norm(x, weights["norm"])
        head = weights["embedding"] if self.shape.is_tied else weights["head"]
        outputs = [self.arithmetic.linear(part, head) for part in x.chunk(_CHUNKS, dim=1)]
        labels = [part.reshape(-1) for part in tokens.chunk(_CHUNKS, dim=1)]
        rows = [part.reshape(-1, part.shape[-1]) for part in outputs]
        losses = [F.cross_entropy(r.float(), target, reduction="sum") for r, target in zip(rows, labels, strict=True)]
        return sum(losses[1:], losses[0]) / tokens.numel(), outputs[0]

    def _attention(self, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
        """``MultiHeadAttention``: keys and values are copied to all heads."""
        s = self.shape
        batch, length, _ = x.shape
        make, get = self.arithmetic.linear, weights.get
        query, key, value = (make(x, weights[n], get(f"{n}_bias")).view(batch, length, -1, s.head) for n in "qkv")
        query, key = _rotate(query, shared), _rotate(key, shared)
        if s.heads != s.kv_heads:
            shape = (batch, length, s.kv_heads, s.heads // s.kv_heads, s.head)
            key, value = (each.unsqueeze(3).expand(shape).reshape(query.shape) for each in (key, value))
        query, key, value = (self.arithmetic.half(each) for each in (query, key, value))
        return make(flash_attention(query, key, value).reshape(batch, length, -1), weights["o"])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """``RMSNorm``."""
    full = x.float()
    return (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * weight


def _rotate(x: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
    """``RotaryPositionalEmbeddings``: pairs of elements, in float32."""
    cos, sin = shared
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    out = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return out.flatten(3).type_as(x)
