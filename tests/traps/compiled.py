"""``torch.compile`` of the whole module and of parts of it, in every way that users write it."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.project import PLANS, Block, Project, Trap

EVERY = tuple(PLANS)
STAGES = ("pp2", "pp2cut", "tp2")
SHARDED = tuple(plan for plan in PLANS if plan not in STAGES)


def _whole(backend: str):
    return lambda: torch.compile(Project(), backend=backend)


class InPlace(Project):
    """``module.compile()`` of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


class Net(nn.Module):
    """The network apart from its training."""

    def __init__(self, other: Project) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = other.embed, other.blocks, other.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Inner(Project):
    """A compiled network inside."""

    def __init__(self) -> None:
        super().__init__()
        net = Net(self)
        del self.embed, self.blocks, self.head, self.pair
        self.net = torch.compile(net, backend="aot_eager")

    def logits(self, batch):
        return self.net(batch["x"])


class InnerInPlace(Inner):
    """``net.compile()``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = self.net._orig_mod
        self.net.compile(backend="eager")


class Blocks(Project):
    """Every block compiled."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            self.blocks[number] = torch.compile(block, backend="aot_eager")


class BlocksInPlace(Project):
    """``block.compile()``."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


class Inside(Block):
    """A block with a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.compile(self.down, backend="eager")


class InsideBlocks(Project):
    """Parts of blocks compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inside() for _ in self.blocks]).double()


class Function(Project):
    """A compiled function of results."""

    @torch.compile(backend="eager")
    def loss(self, batch):
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["y"].flatten())


@torch.compile(backend="eager")
def compiled_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class FunctionApart(Project):
    """A compiled function of the project's file."""

    def loss(self, batch):
        return compiled_loss(self.logits(batch), batch["y"])


class Forward(Project):
    """A compiled method of this one module."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.compile(self.logits, backend="eager")


def _trap(module, **options) -> Trap:
    return Trap(module=module, plans=EVERY, reason="torch.compile", **options)


TRAPS = {
    "whole": _trap(_whole("eager"), equal=SHARDED),
    "whole by aot": _trap(_whole("aot_eager"), equal=SHARDED),
    "in place": _trap(InPlace, equal=SHARDED),
    "inner": _trap(Inner, equal=SHARDED),
    "inner in place": _trap(InnerInPlace, equal=SHARDED),
    "blocks": _trap(Blocks, equal=SHARDED),
    "blocks in place": _trap(BlocksInPlace, equal=SHARDED),
    "inside blocks": _trap(InsideBlocks, equal=SHARDED),
    "method": _trap(Function, equal=SHARDED),
    "function": _trap(FunctionApart, equal=SHARDED),
    "bound method": _trap(Forward, equal=SHARDED),
}
