"""The transformer that Mist's published runs trained, as their program computes it.

Read from ``mist/model`` and ``mist/modules`` of the artifact: no biases, no dropout, no final norm, no table of
positions (the tracer drops it), no rotation of queries and keys (the layer does not hand its position type on); fused
norms, linears and gates of flash-attn, and either its attention or a batched product with Apex's softmax into a buffer
that all layers share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.accuracy.published_kernels import (
    causal_softmax,
    flash_attention,
    flash_attention_packed,
    fused_linear,
    fused_norm,
    fused_swiglu,
    vocabulary_cross_entropy,
)

# ctas_per_col of dropout_layer_norm's backward is at most the number of multiprocessors; an L4 has 58.
_NORM_PARTS = 58


@dataclass(frozen=True, slots=True, kw_only=True)
class MistDims:
    """Shape of the model.

    Attributes:
        hidden, ffn, layers, heads, vocabulary, length: Sizes; ``length`` is the sequence length.
        kv_heads: Key and value heads.
        is_gated: SwiGLU instead of GELU.
        is_parallel: Attention and feed-forward read the same norm and are added together (Falcon).
        is_rms: Root-mean-square norm, without a bias.
        uses_flash: Flash attention instead of scores in memory.
        tensor_parallel: Ranks that share every layer.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int
    is_gated: bool
    is_parallel: bool
    is_rms: bool
    uses_flash: bool
    tensor_parallel: int = 1

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of one rank's parameters of a layer, in the order of the modules."""
        h, head, share = self.hidden, self.hidden // self.heads, self.tensor_parallel
        norm = ((h,),) if self.is_rms else ((h,), (h,))
        qkv = head * (self.heads + 2 * self.kv_heads) // share
        wide = (2 if self.is_gated else 1) * self.ffn // share
        second = () if self.is_parallel else norm
        return (*norm, (qkv, h), (h, h // share), *second, (wide, h), (h, self.ffn // share))

    @property
    def vocabulary_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of one rank's embedding, and of its output layer."""
        return ((self.vocabulary // self.tensor_parallel, self.hidden),)


class AttentionBuffer:
    """The scores' buffer that all layers share, made when it is first needed."""

    def __init__(self) -> None:
        """There is none yet."""
        self.tensor: Tensor | None = None

    def get(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The buffer."""
        if self.tensor is None:
            self.tensor = like.detach().new_empty(shape)
        return self.tensor


def block(dims: MistDims, buffer: AttentionBuffer, weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """One layer."""
    norms = 1 if dims.is_rms else 2
    rest = weights[norms:]
    normed = _norm(x, weights[:norms])
    attended = _attention(dims, buffer, rest[0], rest[1], normed)
    if dims.is_parallel:
        return x + (_feed_forward(dims, rest[2], rest[3], normed) + attended)
    middle = x + attended
    del attended
    normed = _norm(middle, rest[2 : 2 + norms])
    return middle + _feed_forward(dims, rest[-2], rest[-1], normed)


def embedding(weights: Sequence[Tensor], tokens: Tensor) -> Tensor:
    """The first layer's input."""
    return torch.nn.functional.embedding(tokens, weights[0])


def head(weights: Sequence[Tensor], x: Tensor, labels: Tensor) -> Tensor:
    """The loss."""
    logits = fused_linear(x, weights[0])
    loss = vocabulary_cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
    return loss.mean()


def _norm(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return fused_norm(x, weights[0], weights[1] if len(weights) > 1 else None, _NORM_PARTS)


def _attention(dims: MistDims, buffer: AttentionBuffer, w_qkv: Tensor, w_out: Tensor, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    size = dims.hidden // dims.heads
    heads, kv_heads = dims.heads // dims.tensor_parallel, dims.kv_heads // dims.tensor_parallel
    qkv = fused_linear(x, w_qkv)
    if heads == kv_heads:
        qkv = qkv.view(batch, length, 3, heads, size)
        out = flash_attention_packed(qkv) if dims.uses_flash else _scores(buffer, *qkv.unbind(2))
    else:
        query, rest = qkv[..., : heads * size], qkv[..., heads * size :]
        both = rest.view(batch, length, 2, kv_heads, size)
        out = flash_attention(query.view(batch, length, heads, size), both[:, :, 0], both[:, :, 1])
    return fused_linear(out.reshape(batch, length, heads * size), w_out)


def _scores(buffer: AttentionBuffer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``SelfAttention.forward_fused_softmax``."""
    b, t, h, d = query.shape
    scores = torch.baddbmm(
        buffer.get(query, (b * h, t, t)),
        query.transpose(1, 2).reshape(b * h, t, d),
        key.transpose(1, 2).transpose(2, 3).reshape(b * h, d, t),
        beta=0.0,
    )
    attention = causal_softmax(scores)
    context = torch.bmm(attention, value.transpose(1, 2).reshape(b * h, t, d))
    return context.view(b, h, t, d).transpose(1, 2).contiguous()


def _feed_forward(dims: MistDims, w_in: Tensor, w_out: Tensor, x: Tensor) -> Tensor:
    wide = fused_linear(x, w_in)
    if dims.is_gated:
        up, gate = wide.chunk(2, dim=-1)
        wide = fused_swiglu(gate, up)
    else:
        wide = torch.nn.functional.gelu(wide, approximate="tanh")
    return fused_linear(wide, w_out)
