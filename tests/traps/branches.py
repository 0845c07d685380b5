"""Steps that do other things on one rank than on another, or write into weights, or recompute for themselves."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.traps.manual import Manual
from tests.traps.project import LAYERS, VOCABULARY, WIDTH, Block, Project, Trap


class Branching(Project):
    """Takes another way on each rank and at each step; ``at`` counts the batches of a rank."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.way(batch, batch_idx, self.global_rank)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        self.log("train_loss", loss)
        return loss

    def way(self, batch: Any, at: int, rank: int) -> torch.Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.3)


class Heads(Branching):
    """Four tasks, a head each: a batch is of one task, and neither first batch is of the last two."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, VOCABULARY) for _ in range(4)))

    def way(self, batch: Any, at: int, rank: int) -> torch.Tensor:
        return self.parts[2 * ((at + rank) % 2) + (at > 3)](self.hidden(batch))


class Encoder(Branching):
    """One more part, for some batches."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH))

    def is_taken(self, at: int, rank: int) -> bool:
        return (at + rank) % 3 == 1

    def way(self, batch: Any, at: int, rank: int) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        if self.is_taken(at, rank):
            hidden = hidden + self.parts[0](hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) + self.pair(hidden).mean((1, 2), keepdim=True)


class Aside(Encoder):
    """The part works on what is there before the layers; only some batches' loss uses it, the others log it."""

    def way(self, batch: Any, at: int, rank: int) -> torch.Tensor:
        aside, hidden = self.parts[0](self.embed(batch["x"])), self.hidden(batch)
        logits, mean = self.head(hidden) + self.pair(hidden).mean((1, 2), keepdim=True), aside.mean()
        self.log("aside", mean)
        return logits * mean if self.is_taken(at, rank) else logits

    def is_taken(self, at: int, rank: int) -> bool:
        return at == 2 and rank == 0


class LeftOut(Encoder):
    """The part is there for all batches that are looked at, and then missing from one on one rank."""

    def is_taken(self, at: int, rank: int) -> bool:
        return at < 2 or rank == 0


class Moves(Encoder):
    """The part is used between other layers on one rank than on another."""

    def place(self, at: int, rank: int) -> int:
        return 2 * ((at + rank) % 2)

    def way(self, batch: Any, at: int, rank: int) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for position, block in enumerate(self.blocks):
            hidden = block(hidden + self.parts[0](hidden) if position == self.place(at, rank) else hidden)
        return self.head(hidden) + self.pair(hidden).mean((1, 2), keepdim=True)


class MovesLater(Moves):
    """It is in its place in all batches that are looked at."""

    def place(self, at: int, rank: int) -> int:
        return 2 * (at >= 2 and rank == 1)


class Skips(Branching):
    """Layers are left out at random, others on each rank."""

    def way(self, batch: Any, at: int, rank: int) -> torch.Tensor:
        draws = random.Random(100 * at + rank)
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden) if self.is_run(draws, at) else hidden
        return self.head(hidden) + self.pair(hidden).mean((1, 2), keepdim=True)

    def is_run(self, draws: random.Random, at: int) -> bool:
        return draws.random() < 0.6


class SkipsLater(Skips):
    """None is left out at first."""

    def is_run(self, draws: random.Random, at: int) -> bool:
        return at < 2 or draws.random() < 0.6


class Adapted(Block):
    """A block with a part for each task, of which it runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, hidden: torch.Tensor, task: int) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden) + self.adapters[task](hidden)


class Adapters(Branching):
    """Adapters inside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adapted() for _ in range(LAYERS)]).double()

    def way(self, batch: Any, at: int, rank: int) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden, (at + rank) % 2 + (at > 3))
        return self.head(hidden)


class Scaled(Branching):
    """Layers are scaled inside by parameters that lie beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(LAYERS)]).double()
        self.blocks = nn.ModuleList([ScaledBlock() for _ in range(LAYERS)]).double()

    def way(self, batch: Any, at: int, rank: int) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block, scale in zip(self.blocks, self.scales, strict=True):
            hidden = block(hidden, scale)
        return self.head(hidden) + self.pair(hidden).mean((1, 2), keepdim=True)


class ScaledBlock(Block):
    """A block that is given its scale."""

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden) * scale


class ManualHeads(Manual):
    """Heads by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, VOCABULARY) for _ in range(3)]).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.parts[2 * ((batch_idx + self.global_rank) % 2)](self.hidden(batch))
        return self.by_hand(F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()), batch_idx)


# Weights that are written ------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """Writes its weights by what it sees, in one batch."""

    def __init__(self, at: int, way: str) -> None:
        super().__init__()
        self.at, self.way, self.count = at, way, 0
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.count == self.at:
            self.write(hidden.detach().flatten(0, -2))
        self.count += 1
        return (hidden + self.shift) * self.scale

    def write(self, seen: torch.Tensor) -> None:
        if self.way == "data":
            self.shift.data, self.scale.data = -seen.mean(0), 1 / (seen.std(0) + 1e-3)
        elif self.way == "data in place":
            self.shift.data.copy_(-seen.mean(0))
        else:
            with torch.no_grad():
                self.shift.copy_(-seen.mean(0))
                self.scale[: WIDTH // 2].mul_(0.5)


class Written(Branching):
    """A layer before the head initialises itself from a batch."""

    def __init__(self, at: int = 0, way: str = "in place") -> None:
        super().__init__(Norm(at, way))

    def way(self, batch: Any, at: int, rank: int) -> torch.Tensor:
        return self.head(self.parts[0](self.hidden(batch)))


class Bounded(Branching):
    """Keeps a weight within bounds in every step, on all ranks alike."""

    def way(self, batch: Any, at: int, rank: int) -> torch.Tensor:
        self.head.weight.data.clamp_(-0.15, 0.15)
        return self.head(self.hidden(batch))


class Writes(Callback):
    """Writes into a weight between steps."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            with torch.no_grad():
                pl_module.head.bias.add_(0.1 + self.factor * trainer.global_rank)


# Recomputation of the user's own -----------------------------------------------------------------------------------


class Counted(nn.Module):
    """A layer that counts its forwards, and computes with the count."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.number = Block(), how, 0
        self.register_buffer("calls", torch.zeros(()))
        self.norm = nn.BatchNorm1d(WIDTH) if how == "norm" else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.how == "buffer":
            self.calls += 1
        elif self.how == "number":
            self.number += 1
        elif self.how == "random":
            return self.inner(hidden) * (1 + 0.01 * random.random())
        elif self.norm is not None:
            hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return self.inner(hidden) * (1 + 0.01 * float(self.calls) + 0.01 * self.number)


class Recomputes(Project):
    """Recomputes its layers itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counted(how) for _ in range(LAYERS)]).double()

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden

    def logits(self, batch: Any) -> torch.Tensor:
        hidden = self.hidden(batch)
        return self.head(hidden) + self.pair(hidden).mean((1, 2), keepdim=True)


_SHARDED = ("zero2", "zero1", "zero3whole", "movedstate", "moved3")
_EVERY = ("zero2", "auto", "zero1", "movedstate", "zero3whole", "moved3", "pp2", "tp2")
_ALIKE: dict[str, Any] = {"plans": _EVERY, "equal": _EVERY}
_PARTS: dict[str, Any] = {"plans": _EVERY, "equal": ("auto", *_SHARDED[:4]), "reason": "other branches"}
_WRITTEN: dict[str, Any] = {"plans": _EVERY, "equal": ("auto",), "reason": "writes into"}
_RECOMPUTED: dict[str, Any] = {"plans": _EVERY, "equal": ("auto",), "reason": "recomputes itself"}

TRAPS = {
    "heads": Trap(module=Heads, plans=_EVERY, equal=("auto", *_SHARDED), reason="every step must"),
    "aside": Trap(module=Aside, plans=("pp2", "movedpp"), equal=("pp2", "movedpp")),
    "scaled": Trap(module=Scaled, plans=("zero2", "zero3", "moved3"), equal=("zero2", "zero3"), reason="lies outside"),
    "left out": Trap(module=LeftOut, plans=_EVERY, equal=_SHARDED, reason="find_unused_parameters=True"),
    "initialised": Trap(module=Written, **_WRITTEN),
    "counted": Trap(module=lambda: Recomputes("buffer"), **_RECOMPUTED),
    "encoder": Trap(module=Encoder, **_ALIKE),
    "moves": Trap(module=Moves, **_PARTS),
    "moves later": Trap(module=MovesLater, plans=_EVERY, equal=("auto", "zero1", "zero2", "movedstate")),
    "skips": Trap(module=Skips, plans=("auto", "zero1", "zero3whole"), equal=("auto",)),
    "skips later": Trap(module=SkipsLater, plans=_EVERY, equal=("zero1",)),
    "adapters": Trap(module=Adapters, plans=_EVERY, equal=("auto", *_SHARDED)),
    "by hand": Trap(module=ManualHeads, plans=("auto", "zero1", "zero2"), equal=("auto", "zero1", "zero2")),
    "initialised by data": Trap(module=lambda: Written(0, "data"), **_WRITTEN),
    "initialised in data": Trap(module=lambda: Written(0, "data in place"), **_WRITTEN),
    # It counts its calls, so that plans that cut batches, as moved3, are refused before it can write.
    "initialised later": Trap(
        module=lambda: Written(3), plans=("auto", *_SHARDED[:4]), equal=("auto",), reason="wrote"
    ),
    "by data later": Trap(module=lambda: Written(3, "data"), plans=("auto", "zero1", "zero2", "movedstate")),
    "in data later": Trap(module=lambda: Written(3, "data in place"), plans=("auto", "zero1", "zero2", "movedstate")),
    "bounded": Trap(module=Bounded, **(_WRITTEN | {"equal": ("auto", "zero1", "zero2")})),
    "written between": Trap(callbacks=lambda: [Writes(0.1)], **(_WRITTEN | {"reason": "head.bias"})),
    "alike between": Trap(
        callbacks=lambda: [Writes(0.0)], **(_WRITTEN | {"reason": "head.bias", "equal": ("auto", "zero1", "zero2")})
    ),
    "counted by number": Trap(module=lambda: Recomputes("number"), **_RECOMPUTED),
    "draws": Trap(module=lambda: Recomputes("random"), **_RECOMPUTED),
    "normalised": Trap(module=lambda: Recomputes("norm"), **_RECOMPUTED),
    "recomputed": Trap(module=lambda: Recomputes(""), **_ALIKE),
}
