"""The language model of litgpt, as its full fine-tuning runs it; see :mod:`benchmarks.accuracy.published_models`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.accuracy.published_kernels import flash_attention
from benchmarks.accuracy.published_models import Arithmetic, Shape, Shapes, Weights

_CHUNK = 128
"""``chunk_size`` of ``chunked_cross_entropy``: the loss is taken of so many tokens at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LitGPT:
    """Llama-like and GPT-NeoX-like models of ``litgpt/model.py``.

    Attributes:
        shape, arithmetic: As in :class:`Model`.
        is_llama: Gated feed-forward and root-mean-square norms; otherwise GELU, layer norms and biases.
        is_gemma: Embeddings scaled, norms with an offset, GELU gates.
        is_parallel: Attention and feed-forward read the same input.
        rotary: Part of a head that is rotated.
        has_bias: Linear operations have biases.
    """

    shape: Shape
    arithmetic: Arithmetic
    is_llama: bool = True
    is_gemma: bool = False
    is_parallel: bool = False
    rotary: float = 1.0
    has_bias: bool = False

    @property
    def root(self) -> Shapes:
        """Embedding, final norm, output layer."""
        table = (self.shape.vocabulary, self.shape.hidden)
        head = {} if self.shape.is_tied else {"head": table}
        return {**head, "embedding": table, **self._norm("norm")}

    @property
    def layer_shapes(self) -> Shapes:
        """One layer."""
        s = self.shape
        joint = (s.heads + 2 * s.kv_heads) * s.head
        wide = {"gate": (s.ffn, s.hidden), "up": (s.ffn, s.hidden)} if self.is_llama else {"up": (s.ffn, s.hidden)}
        matrices = {"qkv": (joint, s.hidden), "o": (s.hidden, s.heads * s.head), **wide, "down": (s.hidden, s.ffn)}
        biases = {f"{name}_bias": shape[:1] for name, shape in matrices.items()} if self.has_bias else {}
        return {**self._norm("norm_1"), **self._norm("norm_2"), **matrices, **biases}

    @property
    def buffer_bytes(self) -> int:
        """None: the rotation table belongs to what layers share."""
        return 0

    def begin(self, weights: Weights, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Embeddings, and the rotation table, which is made in float32 for the longest sequence."""
        x = F.embedding(tokens, weights["embedding"])
        if self.is_gemma:
            x = x * math.sqrt(self.shape.hidden)
        table = torch.empty(tokens.shape[1], int(self.rotary * self.shape.head), dtype=torch.float32, device="meta")
        return x, (table, torch.empty_like(table))

    def layer(self, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """``Block``."""
        normed = self._normalise(x, weights, "norm_1")
        attended = self._attention(weights, normed, shared)
        if self.is_parallel:
            return self._feed_forward(weights, self._normalise(x, weights, "norm_2")) + attended + x, None
        x = attended + x
        del attended, normed
        return self._feed_forward(weights, self._normalise(x, weights, "norm_2")) + x, None

    def end(self, weights: Weights, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Output layer and ``chunked_cross_entropy``; Fabric hands outputs over in float32 (``convert_output``)."""
        x = self._normalise(x, weights, "norm")
        logits = self._linear(weights, x, "embedding" if self.shape.is_tied else "head").float()
        rows = logits[..., :-1, :].reshape(-1, logits.shape[-1])
        targets = tokens[..., 1:].reshape(-1)
        pairs = zip(rows.split(_CHUNK), targets.split(_CHUNK), strict=True)
        losses = [F.cross_entropy(self.arithmetic.full(part), target, reduction="none") for part, target in pairs]
        return torch.cat(losses).sum() / rows.shape[0], logits

    def _norm(self, name: str) -> dict[str, tuple[int, ...]]:
        bias = {} if self.is_llama else {f"{name}_bias": (self.shape.hidden,)}
        return {name: (self.shape.hidden,), **bias}

    def _normalise(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """``RMSNorm``: everything but the product with the weight in float32."""
        if not self.is_llama:
            return self.arithmetic.layer_norm(x, weights[name], weights[f"{name}_bias"])
        dtype, x = x.dtype, x.float()
        x = (x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)).to(dtype)
        return x * (1 + weights[name]) if self.is_gemma else x * weights[name]

    def _linear(self, weights: Weights, x: Tensor, name: str) -> Tensor:
        return self.arithmetic.linear(x, weights[name], weights.get(f"{name}_bias"))

    def _attention(self, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
        """``CausalSelfAttention``: for fewer key and value heads, both are copied to all heads."""
        s = self.shape
        batch, length, _ = x.shape
        times = s.heads // s.kv_heads
        qkv = self._linear(weights, x, "qkv").view(batch, length, s.kv_heads, times + 2, s.head)
        query, key, value = qkv.permute(0, 2, 3, 1, 4).split((times, 1, 1), dim=2)
        if times > 1:
            shape = (batch, s.kv_heads, times, length, s.head)
            key, value = key.expand(shape), value.expand(shape)
        query, key, value = (each.reshape(batch, -1, length, s.head) for each in (query, key, value))
        query, key = self._rotate(query, shared), self._rotate(key, shared)
        del qkv
        query, key, value = (self.arithmetic.half(each) for each in (query, key, value))
        out = flash_attention(*(each.transpose(1, 2) for each in (query, key, value)))
        return self._linear(weights, out.reshape(batch, length, -1), "o")

    def _rotate(self, x: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
        """``apply_rope`` and the concatenation behind it, which copies even where everything is rotated."""
        size = shared[0].shape[-1]
        part = x[..., :size]
        half = size // 2
        rotated = torch.cat((-part[..., half:], part[..., :half]), dim=-1)
        rotated = ((part * shared[0]) + (rotated * shared[1])).to(x.dtype)
        return torch.cat((rotated, x[..., size:]), dim=-1)

    def _feed_forward(self, weights: Weights, x: Tensor) -> Tensor:
        up = self._linear(weights, x, "up")
        if not self.is_llama:
            return self._linear(weights, F.gelu(up), "down")
        gate = self._linear(weights, x, "gate")
        gate = F.gelu(gate, approximate="tanh") if self.is_gemma else F.silu(gate)
        return self._linear(weights, gate * up, "down")
