"""``torch.compile`` of the whole module and of parts of it."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.traps.project import Project, Trap


class Quiet(Project):
    """Logs nothing: torch cannot compile Lightning's logging, under DDP either."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


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


class Blocks(Project):
    """Every block compiled."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            self.blocks[number] = torch.compile(block, backend="aot_eager")


@torch.compile(backend="eager")
def compiled_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Function(Project):
    """A compiled function of the project's file."""

    def loss(self, batch):
        return compiled_loss(self.logits(batch), batch["y"])


REASON = "compiled by torch.compile"

TRAPS = {
    "whole": Trap(
        module=lambda: torch.compile(Quiet(), backend="eager"),
        plans=("zero1", "cut", "pp2"),
        equal=("zero1", "cut"),
        reason=REASON,
    ),
    "inner": Trap(module=Inner, plans=("zero1", "cut", "tp2"), equal=("zero1", "cut"), reason=REASON),
    "blocks": Trap(module=Blocks, plans=("zero1", "cut", "pp2"), equal=("zero1",), reason=REASON),
    "function": Trap(module=Function, plans=("zero1", "pp2"), equal=("zero1",), reason=REASON),
}
