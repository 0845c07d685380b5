"""The transformer that Mist's published runs trained, as a module whose step the tracer counts.

What :mod:`benchmarks.accuracy.published_mist_model` says of it holds here too. There fused kernels make what they
allocate; here they do what costs time: operators with the floating-point operations and with the bytes that the fused
ones read and write. The tracer runs them on tensors without values.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.published_kernels import vocabulary_cross_entropy
from benchmarks.accuracy.published_mist_model import MistDims

_HALF = torch.float16
_EPSILON = 1e-5


@torch.library.custom_op("published::softmax", mutates_args=())
def _softmax(half: Tensor) -> Tensor:
    """Apex's causal softmax reads the lower triangle, given as half of the rows, and writes all."""
    raise NotImplementedError("counted, never computed")


@_softmax.register_fake
def _(half: Tensor) -> Tensor:
    return half.new_empty((half.shape[0], 2 * half.shape[1], half.shape[2]))


@torch.library.custom_op("published::softmax_backward", mutates_args=())
def _softmax_backward(half_gradient: Tensor, half: Tensor) -> Tensor:
    """Two lower triangles read, the gradient of all scores written."""
    raise NotImplementedError("counted, never computed")


@_softmax_backward.register_fake
def _(half_gradient: Tensor, half: Tensor) -> Tensor:
    return half.new_empty((half.shape[0], 2 * half.shape[1], half.shape[2]))


@torch.library.custom_op("published::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in one kernel."""
    raise NotImplementedError("counted, never computed")


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("published::swiglu_backward", mutates_args=())
def _swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Both gradients in one kernel."""
    raise NotImplementedError("counted, never computed")


@_swiglu_backward.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


class CausalSoftmax(torch.autograd.Function):
    """Apex's ``ScaledUpperTriangMaskedSoftmax``: half of the scores are never read."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        """Probabilities."""
        result = _softmax(scores[:, : scores.shape[1] // 2])
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The scores' gradient."""
        (result,) = ctx.saved_tensors
        rows = result.shape[1] // 2
        return _softmax_backward(grads[0][:, :rows], result[:, :rows])


class SwiGLU(torch.autograd.Function):
    """The gate of flash-attn."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """The product."""
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of both."""
        return _swiglu_backward(grads[0], *ctx.saved_tensors)


class PackedAttention(torch.autograd.Function):
    """``flash_attn_qkvpacked_func``: torch's kernel of the same source, with one packed gradient."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        """The output, ``[batch, length, heads, head]``."""
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
        out, sums, cumulative_q, cumulative_k, most_q, most_k, seed, offset, _ = kernel(
            query, key, value, is_causal=True
        )
        ctx.save_for_backward(qkv, out, sums, cumulative_q, cumulative_k, seed, offset)
        ctx.most = most_q, most_k
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The packed gradient: the kernel writes into it, so that making it moves nothing."""
        qkv, out, sums, cumulative_q, cumulative_k, seed, offset = ctx.saved_tensors
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
            grads[0].transpose(1, 2),
            query,
            key,
            value,
            out,
            sums,
            cumulative_q,
            cumulative_k,
            *ctx.most,
            0.0,
            True,
            seed,
            offset,
        )
        return qkv.new_empty(qkv.shape)


class HeadsFirst(torch.autograd.Function):
    """``[batch, length, heads, head]`` as ``[batch * heads, length, head]`` without a copy, as a lone row allows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A view, had the batch one row; the tracer's batches have more."""
        ctx.shape = x.shape
        batch, length, heads, head = x.shape
        return x.new_empty((batch * heads, length, head))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """A view again."""
        return grads[0].new_empty(ctx.shape)


class _Flat(nn.Module):
    """A part with one flat parameter, cut into views in every forward."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self._shapes = shapes
        self._numels = [torch.Size(shape).numel() for shape in shapes]
        self.flat = nn.Parameter(torch.empty(sum(self._numels), dtype=_HALF))

    def views(self) -> list[Tensor]:
        """The parameters."""
        pieces = self.flat.split(self._numels)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]


class Block(_Flat):
    """One layer."""

    def __init__(self, dims: MistDims, rows: int) -> None:
        """Make its parameter."""
        super().__init__(dims.block_shapes)
        self._dims, self._rows = dims, rows

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        dims, weights = self._dims, self.views()
        norms = 1 if dims.is_rms else 2
        rest = weights[norms:]
        normed = _norm(x, weights[:norms])
        attended = self._attention(rest[0], rest[1], normed)
        if dims.is_parallel:
            return x + (self._feed_forward(rest[2], rest[3], normed) + attended)
        middle = x + attended
        return middle + self._feed_forward(rest[-2], rest[-1], _norm(middle, rest[2 : 2 + norms]))

    def _attention(self, w_qkv: Tensor, w_out: Tensor, x: Tensor) -> Tensor:
        dims = self._dims
        batch, length, _ = x.shape
        size = dims.hidden // dims.heads
        qkv = nn.functional.linear(x, w_qkv)
        if dims.heads != dims.kv_heads:
            query, both = qkv.split([dims.heads * size, 2 * dims.kv_heads * size], dim=-1)
            key, value = both.view(batch, length, 2, dims.kv_heads, size).transpose(1, 3).unbind(2)
            out = nn.functional.scaled_dot_product_attention(
                query.view(batch, length, dims.heads, size).transpose(1, 2), key, value, is_causal=True, enable_gqa=True
            ).transpose(1, 2)
        else:
            packed = qkv.view(batch, length, 3, dims.heads, size)
            out = PackedAttention.apply(packed) if dims.uses_flash else self._scores(*packed.unbind(2))
        return nn.functional.linear(out.reshape(batch, length, dims.heads * size), w_out)

    def _scores(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Scores in memory; scaling them is part of the product that makes them."""
        b, t, h, d = query.shape
        query, key, value = (self._heads_first(part) for part in (query, key, value))
        scores = CausalSoftmax.apply(torch.bmm(query, key.transpose(1, 2)))
        return torch.bmm(scores, value).view(b, h, t, d).transpose(1, 2).contiguous()

    def _heads_first(self, x: Tensor) -> Tensor:
        b, t, h, d = x.shape
        if self._rows == 1:
            return HeadsFirst.apply(x)  # type: ignore[no-any-return,no-untyped-call]
        return x.transpose(1, 2).reshape(b * h, t, d)

    def _feed_forward(self, w_in: Tensor, w_out: Tensor, x: Tensor) -> Tensor:
        wide = nn.functional.linear(x, w_in)
        if self._dims.is_gated:
            up, gate = wide.chunk(2, dim=-1)
            wide = SwiGLU.apply(gate, up)
        else:
            wide = nn.functional.gelu(wide, approximate="tanh")
        return nn.functional.linear(wide, w_out)


def _norm(x: Tensor, weights: list[Tensor]) -> Tensor:
    """One kernel for either norm: both read and write the same."""
    return nn.functional.layer_norm(x, x.shape[-1:], weights[0], weights[1] if len(weights) > 1 else None, _EPSILON)


class Embedding(_Flat):
    """The first layer's input."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows of the table."""
        return nn.functional.embedding(tokens, self.views()[0])


class Head(_Flat):
    """The loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Mean over all tokens."""
        logits = nn.functional.linear(x, self.views()[0])
        return vocabulary_cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1)).mean()


class MistNetwork(nn.Module):
    """The whole of it.

    Args:
        dims: Its shape.
        rows: Rows of the microbatches that it will see; what a lone row spares is not copied.
    """

    def __init__(self, dims: MistDims, rows: int) -> None:
        """Make its parameters."""
        super().__init__()
        self.embedding = Embedding(dims.vocabulary_shapes)
        self.layers = nn.ModuleList(Block(dims, rows) for _ in range(dims.layers))
        self.head = Head(dims.vocabulary_shapes)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch of tokens and labels."""
        tokens, labels = batch
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x, labels)
        return loss
