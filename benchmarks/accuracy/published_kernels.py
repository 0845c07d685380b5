"""Fused operators as CUDA programs have them: what they allocate, keep and return, on meta tensors, without values.

Each names the kernel whose allocations it repeats. They are autograd functions like the originals, so what autograd
keeps, and until when, comes from autograd itself.
"""

from typing import Any

import torch
from torch import Tensor


def _round(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class FlashAttention(torch.autograd.Function):
    """FlashAttention 2 on query, key and value of shape ``[batch, length, heads, head]``, without dropout.

    ``csrc/flash_attn/flash_api.cpp`` of flash-attn 2.3 to 2.6: forward makes the output and the float32 log-sum-exp;
    backward a float32 row sum and a float32 accumulator of the query's gradient over rounded shapes, and for fewer key
    and value heads their gradients at the full number of heads before they are summed.

    A packed input (``packed``: one tensor ``[batch, length, 3, heads, head]``) gets one packed gradient, as in
    ``FlashAttnQKVPackedFunc``.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output, shaped like the query."""
        batch, length, heads, _ = query.shape
        out = query.new_empty(query.shape)
        sums = query.new_empty((batch, heads, length), dtype=torch.float32)
        state = query.new_empty(2, dtype=torch.int64)
        ctx.is_packed = packed is not None
        if packed is not None:
            ctx.save_for_backward(packed, out, sums, state)
        else:
            ctx.save_for_backward(query, key, value, out, sums, state)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of the packed tensor, or of query, key and value."""
        gradient = grads[0].contiguous()
        packed = ctx.saved_tensors[0] if ctx.is_packed else None
        query, key = (packed[:, :, 0], packed[:, :, 1]) if packed is not None else ctx.saved_tensors[:2]
        batch, length, heads, head = query.shape
        made = [packed.new_empty(packed.shape)] if packed is not None else [query.new_empty(query.shape)]
        if packed is None:
            made += [key.new_empty(key.shape), key.new_empty(key.shape)]
        rows = _round(length, 128)
        working = [gradient.new_empty((batch, heads, rows), dtype=torch.float32)]
        working.append(gradient.new_empty((batch, heads, rows, _round(head, 32)), dtype=torch.float32))
        if key.shape[2] != heads:
            working += [gradient.new_empty((batch, key.shape[1], heads, head)) for _ in range(2)]
        del working
        return (made[0], None, None, None) if packed is not None else (None, *made)


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Flash attention on separate tensors."""
    return FlashAttention.apply(None, query, key, value)  # type: ignore[no-any-return,no-untyped-call]


def flash_attention_packed(qkv: Tensor) -> Tensor:
    """Flash attention on ``[batch, length, 3, heads, head]``."""
    with torch.no_grad():
        parts = [qkv[:, :, index] for index in range(3)]
    return FlashAttention.apply(qkv, *parts)  # type: ignore[no-any-return,no-untyped-call]


class FusedNorm(torch.autograd.Function):
    """Layer or root-mean-square norm in one kernel: keeps its input, the weight and float32 statistics per row.

    ``dropout_layer_norm`` of flash-attn (``csrc/layer_norm/ln_api.cpp``) and ``native_layer_norm`` of torch: both make
    two float32 numbers per row, the former for either norm. Its backward sums weight gradients over partial results of
    ``parts`` thread blocks in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
        """The normalised tensor."""
        x = x.contiguous()
        rows = x.numel() // x.shape[-1]
        out = torch.empty_like(x)
        mean, deviation = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
        ctx.save_for_backward(x, weight, mean, deviation)
        ctx.has_bias, ctx.parts = bias is not None, parts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of input, weight and bias."""
        gradient = grads[0].contiguous()
        x, weight, _, _ = ctx.saved_tensors
        made = torch.empty_like(x)
        of_weight = [torch.empty_like(weight) for _ in range(1 + ctx.has_bias)]
        shape = (ctx.parts, weight.numel())
        partial = [weight.new_empty(shape, dtype=torch.float32) for _ in range(2 if ctx.parts else 0)]
        del partial, gradient
        return made, of_weight[0], of_weight[1] if ctx.has_bias else None, None


def fused_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, parts: int = 0) -> Tensor:
    """A norm in one kernel."""
    return FusedNorm.apply(x, weight, bias, parts)  # type: ignore[no-any-return,no-untyped-call]


class FusedLinear(torch.autograd.Function):
    """``FusedDenseFunc`` of flash-attn without bias: the weight's gradient by a cuBLASLt call with a workspace."""

    WORKSPACE_BYTES = 4 << 20
    """``workspaceSize`` of ``linear_bias_wgrad`` before Hopper (flash-attn ``csrc/fused_dense_lib``)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ weight.T``."""
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of input and weight."""
        gradient = grads[0].contiguous()
        x, weight = ctx.saved_tensors
        gradient = gradient.reshape(-1, gradient.shape[-1])
        of_x = torch.nn.functional.linear(gradient, weight.t()).reshape(x.shape) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight)
        workspace = weight.new_empty(FusedLinear.WORKSPACE_BYTES, dtype=torch.uint8)
        del workspace
        return of_x, of_weight


def fused_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A linear operation without bias."""
    return FusedLinear.apply(x, weight)  # type: ignore[no-any-return,no-untyped-call]


class FusedSwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` in one kernel: keeps both inputs; two gradients in one kernel."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """The product."""
        ctx.save_for_backward(gate, up)
        return gate.new_empty(gate.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of both inputs."""
        gate, up = ctx.saved_tensors
        return gate.new_empty(gate.shape), up.new_empty(up.shape)


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return FusedSwiGLU.apply(gate, up)  # type: ignore[no-any-return,no-untyped-call]


class CausalSoftmax(torch.autograd.Function):
    """Apex's ``ScaledUpperTriangMaskedSoftmax``: keeps its result; backward works in place on the gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        """Probabilities."""
        result = torch.empty_like(scores)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient itself."""
        return grads[0].contiguous()


def causal_softmax(scores: Tensor) -> Tensor:
    """Masked softmax of attention scores."""
    return CausalSoftmax.apply(scores)  # type: ignore[no-any-return,no-untyped-call]


class VocabularyCrossEntropy(torch.autograd.Function):
    """Megatron's cross entropy without tensor parallelism: one copy of the logits becomes the probabilities in place.

    ``tensor_parallel/cross_entropy.py``: the difference from the row's maximum is a new tensor, exponentiated and
    divided in place, kept, and turned into the gradient in place.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of every row."""
        most = torch.max(logits, dim=-1)[0]
        probabilities = logits - most.unsqueeze(-1)
        mask = (target < 0) | (target >= logits.shape[-1])
        masked = target.clone()
        sums = probabilities.exp_().sum(dim=-1)
        loss = torch.log(sums)
        probabilities.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(probabilities, mask, masked)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The probabilities' memory, now the gradient of the logits."""
        probabilities, mask, _ = ctx.saved_tensors
        update = 1.0 - mask.view(-1).float()
        del update
        return probabilities.mul_(grads[0].unsqueeze(-1)), None


class FastCrossEntropy(torch.autograd.Function):
    """Cross entropy in one kernel: keeps the logits and their log-sum-exp, and turns the logits into their gradient.

    ``Fast_CrossEntropyLoss`` of unsloth, in fms-acceleration: vocabularies above 65536 are summed in pieces.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """The mean loss."""
        rows, vocabulary = logits.shape
        losses = logits.new_empty(rows, dtype=torch.float32)
        sums = logits.new_empty((rows, -(-vocabulary // 65536)), dtype=torch.float32)
        ctx.save_for_backward(logits, sums, target)
        return losses.sum() / rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The logits' memory."""
        return ctx.saved_tensors[0], None


def fast_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of ``[tokens, vocabulary]`` logits."""
    return FastCrossEntropy.apply(logits, target)  # type: ignore[no-any-return,no-untyped-call]


def vocabulary_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy per row of ``[tokens, vocabulary]`` logits."""
    return VocabularyCrossEntropy.apply(logits, target)  # type: ignore[no-any-return,no-untyped-call]
