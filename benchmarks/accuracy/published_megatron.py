"""A rank of Megatron-LM, run again without data: its distributed optimizer, its kernels, its interleaved schedule.

After ``megatron/core`` with Transformer Engine: bfloat16 weights and float32 gradients lie in buffers; masters and both
moments are float32 and shared out over data-parallel ranks; gradients of weights are made one by one and added to the
buffer. Without sequence parallelism, norms and residuals are whole on every tensor-parallel rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.accuracy.published_device import SimulatedDevice
from benchmarks.accuracy.published_kernels import flash_attention, fused_norm

_BRAIN = torch.bfloat16

STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRun:
    """A GPT and how it is laid out.

    Attributes:
        layers, hidden, ffn, heads, kv_heads, length, positions, dropout: The model.
        vocabulary: Rows of the output layer, before padding.
        vocabulary_multiple: What one tensor-parallel rank's part of the vocabulary is padded to a multiple of.
        tensor, pipeline, chunks, world: Degrees; chunks are model parts on one rank.
        microbatch, batch: Rows of a microbatch and of a step.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    length: int
    positions: int
    dropout: float
    vocabulary: int
    vocabulary_multiple: int
    tensor: int
    pipeline: int
    chunks: int
    world: int
    microbatch: int
    batch: int

    @property
    def data_parallel(self) -> int:
        """Ranks that share the optimizer's states."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.batch // (self.microbatch * self.data_parallel)

    @property
    def vocabulary_part(self) -> int:
        """Rows of the vocabulary on one tensor-parallel rank."""
        multiple = self.vocabulary_multiple * self.tensor
        return -(-self.vocabulary // multiple) * multiple // self.tensor


class FullCrossEntropy(torch.autograd.Function):
    """``_VocabParallelCrossEntropy``: the logits in float32 become probabilities, and their gradient, in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of every token."""
        full = logits.float()
        most = torch.max(full, dim=-1)[0]
        full -= most.unsqueeze(-1)
        mask = target < 0
        masked = target.clone()
        sums = full.exp_().sum(dim=-1)
        loss = torch.log(sums)
        full.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(full, mask, masked)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The same memory; autograd casts it to the logits' type."""
        return ctx.saved_tensors[0].mul_(grads[0].unsqueeze(-1)), None


@dataclass(slots=True)
class Part:
    """Consecutive layers on a rank, with the embedding or the output layer if they are there."""

    layers: list[dict[str, nn.Parameter]]
    first: dict[str, nn.Parameter] = field(default_factory=dict)
    last: dict[str, nn.Parameter] = field(default_factory=dict)


class MegatronRank:
    """The last rank of the pipeline.

    Args:
        device: Where.
        run: The model and its layout.
    """

    def __init__(self, device: SimulatedDevice, run: MegatronRun) -> None:
        """Allocate buffers of weights and gradients, masters and moments."""
        self.device, self.run = device, run
        self.kept: list[Tensor] = []
        each = run.layers // (run.pipeline * run.chunks)
        self.parts = [self._part(each, index) for index in range(run.chunks)]

    def step(self) -> None:
        """All microbatches; the optimizer's kernels need nothing beside what is there."""
        if self.run.pipeline == 1:
            for _ in range(self.run.microbatches):
                self._forward(self.parts[0], None).backward()  # type: ignore[no-untyped-call]
        else:
            self._interleaved()

    def _interleaved(self) -> None:
        """1F1B over model parts on the last rank: microbatches in groups as large as the pipeline."""
        run = self.run
        total = run.microbatches * run.chunks
        order = [position % (run.pipeline * run.chunks) // run.pipeline for position in range(total)]
        warmup = min((run.chunks - 1) * run.pipeline, total)
        flights: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.parts]
        for position in range(total + warmup):
            if position < total:
                chunk = order[position]
                x = self._boundary().requires_grad_()
                out = self._forward(self.parts[chunk], x)
                if chunk < run.chunks - 1:
                    out.data = torch.empty(1, dtype=out.dtype, device="meta")
                flights[chunk].append((x, out))
                del x, out
            if position >= warmup:
                chunk = run.chunks - 1 - order[position - warmup]
                x, out = flights[chunk].pop(0)
                gradient = self._boundary() if chunk < run.chunks - 1 else torch.ones_like(out)
                _run_backward(out, gradient)
                del x, out, gradient

    def _boundary(self) -> Tensor:
        return torch.empty(self.run.length, self.run.microbatch, self.run.hidden, dtype=_BRAIN, device="meta")

    def _forward(self, part: Part, x: Tensor | None) -> Tensor:
        run = self.run
        tokens = torch.empty(run.microbatch, run.length, dtype=torch.int64, device="meta")
        if x is None:
            words = F.embedding(tokens, part.first["words"]) + F.embedding(tokens, part.first["positions"])
            x = self._drop(words.transpose(0, 1).contiguous())
            del words
        for layer in part.layers:
            x = self._layer(layer, x)
        if not part.last:
            return x
        x = fused_norm(x, part.last["norm"], part.last["norm_bias"])
        logits = F.linear(x, part.last["head"])
        loss = FullCrossEntropy.apply(logits, tokens.transpose(0, 1).contiguous())  # type: ignore[no-untyped-call]
        return loss.float().mean()  # type: ignore[no-any-return]

    def _layer(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        run = self.run
        length, batch, _ = x.shape
        size, groups = run.hidden // run.heads, run.kv_heads // run.tensor
        times = run.heads // run.kv_heads
        normed = fused_norm(x, weights["norm_1"], weights["norm_1_bias"])
        mixed = F.linear(normed, weights["qkv"], weights["qkv_bias"]).view(length, batch, groups, (times + 2) * size)
        query, key, value = mixed.split((times * size, size, size), dim=3)
        query = query.reshape(length, batch, groups * times, size)
        # Transformer Engine's FlashAttention turns [length, batch, ...] into contiguous [batch, length, ...].
        query, key, value = (each.transpose(0, 1).contiguous() for each in (query, key, value))
        del mixed
        out = flash_attention(query, key, value).transpose(0, 1).reshape(length, batch, -1)
        del query, key, value
        x = x + self._drop(F.linear(out, weights["o"]))
        normed = fused_norm(x, weights["norm_2"], weights["norm_2_bias"])
        wide = F.gelu(F.linear(normed, weights["up"]), approximate="tanh")
        return x + self._drop(F.linear(wide, weights["down"]))

    def _drop(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.run.dropout, True)[0] if self.run.dropout else x

    def _part(self, layers: int, index: int) -> Part:
        run = self.run
        first: dict[str, tuple[int, ...]] = {}
        last: dict[str, tuple[int, ...]] = {}
        if run.pipeline == 1 and index == 0:
            first = {"words": (run.vocabulary_part, run.hidden), "positions": (run.positions, run.hidden)}
        if index == run.chunks - 1:
            last = {"norm": (run.hidden,), "norm_bias": (run.hidden,), "head": (run.vocabulary_part, run.hidden)}
        groups = [first, *([self._layer_shapes()] * layers), last]
        numel = sum(torch.Size(shape).numel() for group in groups for shape in group.values())
        numel = -(-numel // (128 * run.data_parallel)) * 128 * run.data_parallel
        self.kept.append(torch.empty(numel, dtype=_BRAIN, device="meta"))
        self.kept.append(torch.empty(numel, dtype=torch.float32, device="meta"))
        for _ in range(3):
            self.kept.append(torch.empty(numel // run.data_parallel, dtype=torch.float32, device="meta"))
        with self.device.paused():
            made = [{name: _parameter(shape) for name, shape in group.items()} for group in groups]
        return Part(layers=made[1:-1], first=made[0], last=made[-1])

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        run = self.run
        h, t = run.hidden, run.tensor
        joint = h // run.heads * (run.heads + 2 * run.kv_heads) // t
        norms = {f"norm_{index}{name}": (h,) for index in (1, 2) for name in ("", "_bias")}
        return {
            **norms,
            "qkv": (joint, h),
            "qkv_bias": (joint,),
            "o": (h, h // t),
            "up": (run.ffn // t, h),
            "down": (h, run.ffn // t),
        }


def _parameter(shape: tuple[int, ...]) -> nn.Parameter:
    """A view into the buffer; its gradient is added to the other buffer as soon as it is there, and freed."""
    parameter = nn.Parameter(torch.empty(shape, dtype=_BRAIN, device="meta"))
    parameter.register_post_accumulate_grad_hook(_forget)
    return parameter


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _run_backward(output: Tensor, gradient: Tensor) -> None:
    torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        tensors=(output,),
        grad_tensors=(gradient,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
