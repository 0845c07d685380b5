"""What traps are made of: a small network, its data, the plans, and how a trap is described."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_mist import Plan
from tests.fits import ALL, plan

ROWS, WIDTH, LENGTH, VOCABULARY, LAYERS = 4, 16, 6, 17, 4

PLANS: dict[str, Plan | str] = {
    "auto": "auto",
    "searched": "auto",
    "plain": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1),
    "halves": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=2),
    "checkpointed": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, checkpointed=2),
    "zero1": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=1),
    "zero2": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=2),
    "zero3": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=3, checkpointed=1),
    "zero3whole": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=3),
    "cut": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=2, zero=3),
    "pp2": plan([(2, [1]), (2, [0])], rows=ROWS, microbatches=2),
    "pp2cut": plan([(2, [1]), (2, [0])], rows=ROWS, microbatches=4),
    "tp2": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=2, tensor=2),
    "tp2cut": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=4, tensor=2),
    "cp2": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=2, context=2),
    "cp2zero2": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=2, context=2, zero=2, checkpointed=1),
    "moved": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=1, checkpointed=1, offload=ALL),
    "moved3": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=2, zero=3, offload=ALL),
    "movedpp": plan([(2, [1]), (2, [0])], rows=ROWS, microbatches=2, offload=ALL),
    "movedinputs": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=2, checkpointed=2, offload={"checkpoints": 1.0}),
    "moved0": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, offload={"optimizer": 1.0}),
    "tail": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=3, checkpointed=1, tail=4),
    "movedtail": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=2, checkpointed=1, offload=ALL, tail=2),
    "pp2tail": plan([(2, [1]), (2, [0])], rows=ROWS, microbatches=4, tail=2),
    "tokens": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=ROWS, zero=1, tail=3),
    "pp2tokens": plan([(2, [1]), (2, [0])], rows=ROWS, microbatches=4, checkpointed=1, tail=3),
    "zero1w": plan([(0, [0, 1])], rows=ROWS, microbatches=1, zero=1),
    "zero2w": plan([(0, [0, 1])], rows=ROWS, microbatches=1, zero=2),
    "movedw": plan([(0, [0, 1])], rows=ROWS, microbatches=1, zero=1, offload={"optimizer": 1.0}),
    "movedstate": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=1, offload={"optimizer": 1.0}),
}
"""For two ranks. ``pp2``, ``tp2``, ``cp2`` have whole batches as microbatches, ``cut`` and ``pp2cut`` halves of them;
what begins with ``moved`` offloads; what ends with ``tail`` has chunks behind the last layer, with ``tokens`` more than
microbatches have rows, with ``w`` is for modules without layers; under ``searched`` the planner searches however little
there is to gain."""


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Token rows with labels, weights of one, and a class per row."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)
        self.data = {
            "x": tokens[:, :-1],
            "y": tokens[:, 1:].clone(),
            "w": torch.ones(rows, dtype=torch.float64),
            "z": torch.randint(0, 2, (rows,), generator=generator),
            "index": torch.arange(rows),
        }

    def __len__(self) -> int:
        return len(self.data["x"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.data.items()}


class Block(nn.Module):
    """One of the repeated blocks."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Project(pl.LightningModule):
    """A network of blocks in double precision that every plan trains as DDP does; traps override parts of it.

    ``seen`` takes what a trap's own code sees, as numbers; they are compared with those under DDP.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head, self.pair = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, 2)
        self.double()

    def hidden(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.head(self.hidden(batch))

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["y"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def loader(rows: int = 48, *, seed: int = 0, **options: Any) -> DataLoader[Any]:
    """A loader of so many rows over both ranks: six batches for each rank by default."""
    return DataLoader(Rows(rows, seed), batch_size=ROWS, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """A project that a careless plan trains wrongly.

    Attributes:
        module: Makes the module; its attribute ``seen``, a list of numbers, is compared too, if it has one.
        train: Makes what ``fit`` gets as training data.
        val: Makes the validation data, if any.
        callbacks: Makes callbacks; their ``seen`` is compared too.
        trainer: Arguments of the trainer.
        plans: Under which plans it is tried, by name.
        equal: Those of them under which it must train and be equal to DDP: reach that is not to be lost.
        whole: Under which plans every rank must get the whole module for validation; under the others none may.
        reason: What a refusal, or an error that ends training, must name; a part of its text.
        tolerance: Largest difference, relative to the size of what is compared.
        has_masters: Whether it is trained in bfloat16 with master weights, and held against the same arithmetic
            (:class:`tests.traps.plain_masters.PlainMasters`) instead of DDP.
        then: What follows the fit: ``validate``, ``test``, ``predict`` on the validation data, ``save`` a checkpoint,
            ``test saved``, ``test another`` module made alike, ``fit`` again, ``go on`` from what was saved with a
            module made alike; ``alone`` in front means without a fit.
    """

    module: Callable[[], pl.LightningModule] = Project
    train: Callable[[], Any] = loader
    val: Callable[[], Any] | None = None
    callbacks: Callable[[], list[Any]] = list
    trainer: Mapping[str, Any] = field(default_factory=dict)
    plans: tuple[str, ...] = ("zero1", "zero3", "cut", "pp2", "pp2cut", "tp2")
    equal: tuple[str, ...] = ()
    whole: tuple[str, ...] | None = None
    reason: str = ""
    tolerance: float = 1e-9
    has_masters: bool = False
    then: tuple[str, ...] = ()
