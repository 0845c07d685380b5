"""Decoder language models as trainers run them, as functions of their weights.

A model is two units of weights, one for the root (embeddings, final norm, output layer) and one for every layer, with
functions from weights and activations to activations. They repeat what the named library computes, operator by
operator, because what autograd keeps depends on it: where a norm goes to float32, whether rotation copies, how the loss
is taken.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.accuracy.published_kernels import fast_cross_entropy, flash_attention, fused_norm

Weights = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model.

    Attributes:
        hidden, ffn, layers, heads, kv_heads, vocabulary: As usual.
        head: Size of one head.
        is_tied: Whether the output layer is the embedding.
        positions: Rows of a table of positions, where there is one.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head: int
    is_tied: bool
    positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """In which precision operators run.

    Attributes:
        dtype: Of the parameters.
        autocast: Type of matrix products under autocast; None without.
        attention: ``"flash"``, ``"sdpa"`` or ``"eager"``.
        casts: Weights that autocast has cast in this forward.
    """

    dtype: torch.dtype
    autocast: torch.dtype | None = None
    attention: str = "flash"
    casts: dict[int, Tensor] = field(default_factory=dict)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear operation; under autocast the weight is cast once per forward (``autocast_mode.cpp``)."""
        if self.autocast is None:
            return F.linear(x, weight, bias)
        return F.linear(x.to(self.autocast), self._cast(weight), None if bias is None else self._cast(bias))

    def full(self, x: Tensor) -> Tensor:
        """What an operator on autocast's float32 list is given."""
        return x if self.autocast is None else x.float()

    def half(self, x: Tensor) -> Tensor:
        """What a matrix product is given."""
        return x if self.autocast is None else x.to(self.autocast)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``native_layer_norm``, in float32 under autocast."""
        return F.layer_norm(self.full(x), weight.shape, self.full(weight), None if bias is None else self.full(bias))

    def _cast(self, weight: Tensor) -> Tensor:
        if weight.dtype == self.autocast or not (weight.is_leaf and weight.requires_grad):
            return self.half(weight)
        if id(weight) not in self.casts:
            with torch.enable_grad():
                self.casts[id(weight)] = self.half(weight)
        return self.casts[id(weight)]


class Model(Protocol):
    """What a trainer needs."""

    shape: Shape
    arithmetic: Arithmetic

    @property
    def root(self) -> Shapes:
        """Shapes of the root's weights, by name."""
        ...

    @property
    def layer_shapes(self) -> Shapes:
        """Shapes of one layer's weights, by name."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers."""
        ...

    def begin(self, weights: Weights, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The first layer's input, and what all layers are given beside their inputs (rotation tables)."""
        ...

    def layer(self, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """A layer's output, and what the model keeps of it until its forward ends (a cache of keys and values)."""
        ...

    def end(self, weights: Weights, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the logits that the caller is given."""
        ...


def attend(arithmetic: Arithmetic, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of ``[batch, heads, length, head]`` tensors, as ``[batch, length, heads, head]``.

    Flash attention takes fewer key and value heads as they are. ``sdpa`` picks the same kernel where a float16 or
    bfloat16 causal product has no mask, after key and value were copied to all heads (``repeat_kv``); eager attention
    does so too, and keeps scores, their float32 softmax and its cast.
    """
    query, key, value = (arithmetic.half(each) for each in (query, key, value))
    if arithmetic.attention == "flash":
        return flash_attention(*(each.transpose(1, 2) for each in (query, key, value)))
    batch, heads, length, head = query.shape
    if key.shape[1] != heads:
        times = heads // key.shape[1]
        shape = (batch, key.shape[1], times, length, head)
        key, value = (each[:, :, None].expand(shape).reshape(query.shape) for each in (key, value))
    if arithmetic.attention == "sdpa" and query.dtype != torch.float32:
        return flash_attention(*(each.transpose(1, 2) for each in (query, key, value)))
    scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(head)
    mask = scores.detach().new_empty((1, 1, length, length))
    attention = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(attention, value).transpose(1, 2).contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the last dimension."""
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def rms_norm(x: Tensor, weight: Tensor, *, offset: bool = False) -> Tensor:
    """``LlamaRMSNorm``: the norm in float32, the weight in the input's type; Gemma's in float32 throughout, plus 1."""
    dtype = x.dtype
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    if offset:
        return (x * (1.0 + weight.float())).to(dtype)
    return weight * x.to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLike:
    """Llama, Mistral, Qwen2, Gemma and Granite of transformers.

    Attributes:
        shape, arithmetic: As in :class:`Model`.
        has_qkv_bias: Qwen2.
        is_gemma: Norms with an offset, embeddings scaled.
        casts_logits: The library's version turns logits to float32 for the loss.
        copies_shifted: It copies the logits without the last position; later versions shift the labels instead.
        has_fast_kernels: Norms, rotation and loss are those of fms-acceleration's ``foak-fast-kernels``: one kernel
            each, rotation and the loss's backward in place.
    """

    shape: Shape
    arithmetic: Arithmetic
    has_qkv_bias: bool = False
    is_gemma: bool = False
    casts_logits: bool = True
    copies_shifted: bool = True
    has_fast_kernels: bool = False

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
            "up": (s.ffn, s.hidden),
            "down": (s.hidden, s.ffn),
            "norm_1": (s.hidden,),
            "norm_2": (s.hidden,),
        }

    @property
    def buffer_bytes(self) -> int:
        """Frequencies of the rotation."""
        return 2 * self.shape.head

    def begin(self, weights: Weights, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Embeddings and rotation tables."""
        x = F.embedding(tokens, weights["embedding"])
        if self.is_gemma:
            x = x * math.sqrt(self.shape.hidden)
        table = torch.empty(1, tokens.shape[1], self.shape.head, dtype=torch.float32, device="meta")
        return x, (table.cos().to(x.dtype), table.sin().to(x.dtype))

    def layer(self, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Attention and gated feed-forward."""
        cos, sin = (table.unsqueeze(1) for table in shared)
        batch, length, _ = x.shape
        a, get = self.arithmetic, weights.get
        normed = self._norm(x, weights["norm_1"])
        parts = [a.linear(normed, weights[n], get(f"{n}_bias")) for n in ("q", "k", "v")]
        query, key, value = (part.view(batch, length, -1, self.shape.head).transpose(1, 2) for part in parts)
        del parts
        if not self.has_fast_kernels:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        x = x + a.linear(attend(a, query, key, value).reshape(batch, length, -1), weights["o"])
        del query, key, value
        normed = self._norm(x, weights["norm_2"])
        act: Callable[[Tensor], Tensor] = _gelu_tanh if self.is_gemma else F.silu
        return x + a.linear(
            act(a.linear(normed, weights["gate"])) * a.linear(normed, weights["up"]), weights["down"]
        ), None

    def end(self, weights: Weights, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``LlamaForCausalLM``."""
        x = self._norm(x, weights["norm"])
        head = weights["embedding"] if self.shape.is_tied else weights["head"]
        return shifted_loss(
            self.arithmetic,
            lambda: self.arithmetic.linear(x, head),
            tokens,
            casts=self.casts_logits,
            copies=self.copies_shifted,
            entropy=fast_cross_entropy if self.has_fast_kernels else F.cross_entropy,
        )

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return fused_norm(x, weight) if self.has_fast_kernels else rms_norm(x, weight, offset=self.is_gemma)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def shifted_loss(
    arithmetic: Arithmetic,
    make: Callable[[], Tensor],
    tokens: Tensor,
    *,
    casts: bool,
    copies: bool,
    entropy: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of logits with the next token, and the logits that the model gives beside it.

    Before ``copies`` became false, logits were cast for good; since then the loss casts a copy of its own. Logits are
    made here, so that nobody else holds what was cast.
    """
    logits = make()
    if copies:
        logits = logits.float() if casts else logits
        shifted, labels = logits[..., :-1, :].contiguous(), tokens[..., 1:].contiguous()
    else:
        shifted, labels = logits.float() if casts else logits, F.pad(tokens, (0, 1))[..., 1:].contiguous()
    loss = entropy(arithmetic.full(shifted.view(-1, shifted.shape[-1])), labels.view(-1))
    if arithmetic.autocast is not None:
        logits = logits.float()  # accelerate hands outputs over in float32
    return loss, logits


@dataclass(frozen=True, slots=True, kw_only=True)
class BigCode:
    """GPT-BigCode and GPT-2 of transformers: learned positions, layer norms, biases, dropout.

    Attributes:
        shape, arithmetic: As in :class:`Model`.
        dropout: Of embeddings and residuals.
        keeps_cache: Whether the model keeps every layer's keys and values while it trains with recomputation: GPT-
            BigCode before transformers 4.49 does, as views into the whole result of the joint projection.
        casts_logits, copies_shifted: As in :class:`LlamaLike`.
    """

    shape: Shape
    arithmetic: Arithmetic
    dropout: float = 0.1
    keeps_cache: bool = False
    casts_logits: bool = False
    copies_shifted: bool = True

    @property
    def root(self) -> Shapes:
        """Embeddings, final norm, output layer."""
        s = self.shape
        head = {} if s.is_tied else {"head": (s.vocabulary, s.hidden)}
        norm = {"norm": (s.hidden,), "norm_bias": (s.hidden,)}
        return {"embedding": (s.vocabulary, s.hidden), "positions": (s.positions, s.hidden), **norm, **head}

    @property
    def layer_shapes(self) -> Shapes:
        """One layer."""
        s = self.shape
        joint = s.head * (s.heads + 2 * s.kv_heads)
        return {
            "norm_1": (s.hidden,),
            "norm_1_bias": (s.hidden,),
            "qkv": (joint, s.hidden),
            "qkv_bias": (joint,),
            "o": (s.hidden, s.hidden),
            "o_bias": (s.hidden,),
            "norm_2": (s.hidden,),
            "norm_2_bias": (s.hidden,),
            "up": (s.ffn, s.hidden),
            "up_bias": (s.ffn,),
            "down": (s.hidden, s.ffn),
            "down_bias": (s.hidden,),
        }

    @property
    def buffer_bytes(self) -> int:
        """The causal mask, a byte an element."""
        return self.shape.positions**2

    def begin(self, weights: Weights, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Embeddings of tokens and positions."""
        places = torch.empty(tokens.shape, dtype=torch.int64, device="meta")
        x = F.embedding(tokens, weights["embedding"]) + F.embedding(places, weights["positions"])
        return self._drop(x), ()

    def layer(self, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Attention and feed-forward."""
        s, a = self.shape, self.arithmetic
        batch, length, _ = x.shape
        normed = a.layer_norm(x, weights["norm_1"], weights["norm_1_bias"])
        joint = a.linear(normed, weights["qkv"], weights["qkv_bias"])
        sizes = (s.heads * s.head, s.kv_heads * s.head, s.kv_heads * s.head)
        parts = (part.view(batch, length, -1, s.head).transpose(1, 2) for part in joint.split(sizes, dim=-1))
        cache = joint[..., sizes[0] :] if self.keeps_cache else None
        out = attend(a, *parts).reshape(batch, length, -1)
        x = self._drop(a.linear(out, weights["o"], weights["o_bias"])) + x
        normed = a.layer_norm(x, weights["norm_2"], weights["norm_2_bias"])
        wide = _gelu_tanh(a.linear(normed, weights["up"], weights["up_bias"]))
        return x + self._drop(a.linear(wide, weights["down"], weights["down_bias"])), cache

    def end(self, weights: Weights, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``GPTBigCodeForCausalLM``."""
        x = self.arithmetic.layer_norm(x, weights["norm"], weights["norm_bias"])
        head = weights["embedding"] if self.shape.is_tied else weights["head"]
        a, casts, copies = self.arithmetic, self.casts_logits, self.copies_shifted
        return shifted_loss(a, lambda: a.linear(x, head), tokens, casts=casts, copies=copies)

    def _drop(self, x: Tensor) -> Tensor:
        """CUDA's dropout keeps a mask of one byte an element."""
        return torch.native_dropout(x, self.dropout, True)[0] if self.dropout else x
