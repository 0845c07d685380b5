"""What a careless context parallelism would train wrongly: tokens that meet outside of attention, hooks, tails."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.project import LAYERS, LENGTH, VOCABULARY, WIDTH, Block, Project, Trap, loader

HEADS = 4


class Attention(nn.Module):
    """Causal attention with rotary positions and half as many heads of keys as of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both = nn.Linear(WIDTH, WIDTH, bias=False)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10 ** torch.arange(x.shape[-1] // 2)
        first, second = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q = self.query(x).view(rows, length, HEADS, -1).transpose(1, 2)
        k, v = self.both(x).view(rows, length, HEADS, -1).transpose(1, 2).chunk(2, 1)
        mixed = self.attend(self.turned(q), self.turned(k), v)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class Attending(Block):
    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.attention = attention()

    def also(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.also(hidden)
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.down(F.gelu(self.up(hidden)))


class Decoder(Project):
    block: type[nn.Module] = Attending

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(LAYERS)])
        self.double()


def of(block: type[nn.Module]) -> type[Project]:
    """A decoder of other blocks."""
    return type("Decoder", (Decoder,), {"block": block})


class WithWindow(Attention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        near = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().triu(-2)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


class ByHand(Attention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        return ((q @ k.mT) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


class Windowed(Attending):
    def __init__(self) -> None:
        super().__init__(WithWindow)


class HandWritten(Attending):
    def __init__(self) -> None:
        super().__init__(ByHand)


class Convolved(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def also(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.near(hidden.mT).mT


class Shifted(Attending):
    def also(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.pad(hidden, (0, 0, 1, -1))


class Rolled(Attending):
    def also(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.roll(1, 1)


class Summed(Attending):
    def also(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 0.1 * hidden.cumsum(1)


class Averaged(Attending):
    def also(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(1, keepdim=True)


class Normalized(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.over_tokens = nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def also(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.over_tokens(hidden.flatten(0, 1)).view_as(hidden)


class Weighed(Attending):
    """Only gradients meet: every token is scaled by the norm of all of them, without a gradient."""

    def also(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / hidden.detach().norm()


class NextToken(Decoder):
    """Labels are shifted behind the blocks: logits of all tokens meet there."""

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = self.logits(batch)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


class Positions(Decoder):
    """A learned table of positions, and pooling in the tail."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, WIDTH, dtype=torch.float64)

    def hidden(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.embed(batch["x"]) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.hidden(batch)
        pooled = F.cross_entropy(self.pair(hidden.mean(1)), batch["z"])
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten()) + 0.3 * pooled


class Tied(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight


class Clipped(Decoder):
    """The gradient of embeddings is clipped where it passes."""

    def hidden(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Watched(Decoder):
    """A hook of a module reads the gradient of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_full_backward_hook(lambda module, given, got: None)


class Counting(Decoder):
    """A buffer counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros((), dtype=torch.float64))

    def hidden(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self.tokens += batch["x"].numel()
        return super().hidden(batch)


class ReadingGradients(Decoder):
    """A hook reads gradients between backward and step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_after_backward(self) -> None:
        self.seen.append(sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None))


class Logging(Decoder):
    """A block's result is logged, and accuracy over tokens."""

    def training_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.logits(batch)
        self.log("accuracy", (logits.argmax(-1) == batch["y"]).double().mean(), on_step=True, on_epoch=True)
        self.log("largest", logits.detach().abs().max(), on_step=True, reduce_fx="max")
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


PLANS = ("cp2", "cp2zero2")


def _trap(module: type[Project], *, reason: str = "", **options: Any) -> Trap:
    return Trap(module=module, plans=PLANS, reason=reason, equal=() if reason else PLANS, **options)


TRAPS = {
    "attention": _trap(Decoder),
    "mask-of-a-window": _trap(of(Windowed)),
    "labels-shifted-in-the-tail": _trap(NextToken),
    "positions-and-pooling": _trap(Positions),
    "tied": _trap(Tied),
    "clipped-and-accumulated": _trap(Decoder, trainer={"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
    "validated": _trap(Decoder, val=loader),
    "attention-by-hand": _trap(of(HandWritten), reason="meet in matmul"),
    "convolution": _trap(of(Convolved), reason="meet in conv1d"),
    "token-shift": _trap(of(Shifted), reason="meet in pad"),
    "roll": _trap(of(Rolled), reason="meet in roll"),
    "cumulative-sum": _trap(of(Summed), reason="meet in cumsum"),
    "no-attention": _trap(Project, reason="meet in cumsum"),
    "mean-over-tokens": _trap(of(Averaged), reason="meet in mean"),
    "batch-norm-over-tokens": _trap(of(Normalized), reason="meet in batch_norm"),
    "norm-of-all-tokens": _trap(of(Weighed), reason="meet in norm"),
    "logged": _trap(Logging),
    "buffer": _trap(Counting, reason="changes buffer tokens"),
    "gradients-read": _trap(ReadingGradients, reason="may use gradients"),
    "hook-on-a-module": _trap(Watched, reason="has a backward hook"),
    "hook-on-a-tensor": _trap(Clipped, reason="puts a hook on a tensor"),
}
