"""What a step, or a layer, finds made before it runs, and parameters that it uses without a gradient."""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn

from tests.traps.project import LAYERS, Block, Project, Trap


class Adds(Project):
    """Its hook adds weights of rows to the batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch["share"] = batch["index"].double().sin() + 1.5 + batch_idx / 10

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        each = F.cross_entropy(self.logits(batch).transpose(1, 2), batch["y"], reduction="none").mean(1)
        return (each * batch["share"]).mean()


class Adder(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch["scale"] = 0.5 + batch_idx / 10


class Added(Project):
    """A callback adds a number to the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * batch["scale"]


class Sets(Project):
    """Its hook sets what the step multiplies with."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = 0.5 + batch_idx / 10

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.scale


class SetsByEpoch(Sets):
    def on_train_epoch_start(self) -> None:
        self.scale = 1.5 + self.current_epoch

    on_train_batch_start = Project.on_train_batch_start


class SetsFromRows(Sets):
    """Each process has another number, which follows from its rows."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = float(batch["index"].double().mean()) / 10


class Detached(Project):
    """Every parameter takes part, one of them without a gradient."""

    def hidden(self, batch: Any) -> Any:
        hidden = self.embed(batch["x"]).detach()
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def loss(self, batch: Any) -> Any:
        hidden = self.hidden(batch)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        return loss + F.cross_entropy(self.pair(hidden.mean(1)), batch["z"])


class Logged(Project):
    """A head's result is computed and logged, and no part of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch)
        self.log("beside", F.cross_entropy(self.pair(hidden.mean(1)), batch["z"]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())


class Within(Detached):
    """The embedding under ``no_grad``, into TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.jit.script(nn.Linear(16, 16).double())

    def hidden(self, batch: Any) -> Any:
        with torch.no_grad():
            hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        return hidden + self.last(hidden)


@lru_cache(maxsize=4)
def rotation(length: int, width: int) -> torch.Tensor:
    return torch.outer(torch.arange(length).double(), torch.arange(1, width + 1).double()).cos()


@lru_cache(maxsize=None)  # noqa: UP033
def masks(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.tril(torch.ones(length, length, dtype=torch.float64))
    return mask, mask.sum(0)[:, None] / length


@lru_cache(maxsize=4)
def noise(length: int) -> torch.Tensor:
    return torch.rand(length, 1, dtype=torch.float64)


class Rotated(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden * rotation(hidden.shape[1], hidden.shape[2]))


class Masked(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden * masks(hidden.shape[1])[1])


class Noisy(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(hidden, 0.1) + noise(hidden.shape[1]))


class Shared(Block):
    """Reads what a layer before it has kept on the class."""

    table: Any = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if Shared.table is None or len(Shared.table) != hidden.shape[1]:
            Shared.table = torch.arange(hidden.shape[1]).double()[:, None].cos()
        return super().forward(hidden * Shared.table)


class Forces(Project):
    """Forces are the slope of an energy by positions."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        positions = F.one_hot(batch["x"], self.embed.num_embeddings).double().requires_grad_()
        hidden = positions @ self.embed.weight
        for block in self.blocks:
            hidden = block(hidden)
        energy = self.head(hidden).square().mean()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy + forces.square().sum()


def _of(block: type[Block]) -> type[Project]:
    class Made(Project):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([block() for _ in range(LAYERS)]).double()

    return Made


_AUTO = ("auto", "searched")
_HOOKED = ("pp2", *_AUTO, "zero1", "zero3", "cut", "tp2")
_CACHED = ("zero3", "checkpointed", "searched", "pp2")
_OWN = "the step runs a backward of its own"

TRAPS = {
    "adds": Trap(module=Adds, plans=_HOOKED, equal=_HOOKED),
    "added": Trap(module=Added, callbacks=lambda: [Adder()], plans=_HOOKED, equal=_HOOKED),
    "sets": Trap(module=Sets, plans=_HOOKED, equal=_HOOKED),
    "sets by epoch": Trap(module=SetsByEpoch, plans=_HOOKED, equal=_AUTO, reason="no attribute 'scale'"),
    "sets from rows": Trap(module=SetsFromRows, plans=_HOOKED, equal=(*_AUTO, "zero1", "zero3")),
    "detached": Trap(module=Detached, plans=_HOOKED, equal=_HOOKED),
    "logged": Trap(module=Logged, plans=("auto", "zero3", "pp2"), equal=("auto", "zero3", "pp2")),
    "within": Trap(module=Within, plans=(*_AUTO, "zero1"), equal=(*_AUTO, "zero1")),
    "rotated": Trap(module=_of(Rotated), plans=_CACHED, equal=("searched", "pp2"), reason="beforehand.py"),
    "masked": Trap(module=_of(Masked), plans=_CACHED, equal=("searched", "pp2"), reason="beforehand.py"),
    "noisy": Trap(module=_of(Noisy), plans=("zero3", "checkpointed"), reason="beforehand.py"),
    "shared": Trap(module=_of(Shared), plans=("zero3", "checkpointed"), reason="beforehand.py"),
    "forces": Trap(module=Forces, plans=("pp2", "zero3", *_AUTO, "zero1"), equal=(*_AUTO, "zero1"), reason=_OWN),
}
