"""Steps that change after some batches: what the first batch showed does not hold for ever."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, default_collate

from tests.traps.project import LENGTH, VOCABULARY, WIDTH, Project, Trap, loader

BEGINS = 3


class Penalty(Project):
    """A penalty on weights that begins by step."""

    def weights(self) -> Any:
        return self.parameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_step >= BEGINS:
            loss = loss + 0.1 * sum(weight.pow(2).sum() for weight in self.weights())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class PenaltyOnHead(Penalty):
    def weights(self) -> Any:
        return self.head.parameters()


class PenaltyOnEmbedding(Penalty):
    def weights(self) -> Any:
        return self.embed.parameters()


class PenaltyOnBlock(Penalty):
    def weights(self) -> Any:
        return self.blocks[1].parameters()


class NormsLogged(Project):
    """Logs the norm of all weights from some step on, and trains as before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if self.global_step >= BEGINS:
            with torch.no_grad():
                self.log("norm", torch.stack([weight.norm() for weight in self.parameters()]).norm())
        return loss


class Curriculum(Project):
    """A second loss, on another head, that begins by step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        if self.global_step >= BEGINS:
            loss = loss + F.cross_entropy(self.pair(hidden.mean(1)), batch["z"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class InnerCurriculum(Project):
    """A loss on an inner layer's output that begins by step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.embed(batch["x"])
        inner = hidden
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            inner = hidden if number == 0 else inner
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        if self.global_step >= BEGINS:
            loss = loss + F.cross_entropy(self.pair(inner.mean(1)), batch["z"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Skip(Project):
    """A connection past the blocks that appears by step."""

    def hidden(self, batch: Any) -> torch.Tensor:
        first = hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        return hidden + first if self.global_step >= BEGINS else hidden


class FewerBlocks(Project):
    """Leaves a block out from some step on."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for number, block in enumerate(self.blocks):
            if number != 2 or self.global_step < BEGINS:
                hidden = block(hidden)
        return hidden


class OtherOrder(Project):
    """Runs two blocks in another order from some step on."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        order = (0, 1, 2, 3) if self.global_step < BEGINS else (0, 2, 1, 3)
        for number in order:
            hidden = self.blocks[number](hidden)
        return hidden


class TwiceLater(Project):
    """Runs the last block twice from some step on."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = super().hidden(batch)
        return self.blocks[-1](hidden) if self.global_step >= BEGINS else hidden


class FreezesBlock(Project):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == BEGINS:
            self.blocks[0].requires_grad_(False)


class Unfreezes(Project):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.embed.requires_grad_(True)


class Normalised(Project):
    """Batch norm that is off at first."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH).double()
        self.batch_norm.eval()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch_norm.train(self.global_step >= BEGINS)

    def logits(self, batch: Any) -> torch.Tensor:
        return self.head(self.batch_norm(self.hidden(batch).flatten(0, 1)).view(-1, LENGTH, WIDTH))


class NormalisedBefore(Normalised):
    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        hidden = self.batch_norm(hidden.flatten(0, 1)).view(hidden.shape)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def logits(self, batch: Any) -> torch.Tensor:
        return self.head(self.hidden(batch))


class NormalisedByBranch(Normalised):
    """Batch norm that the step leaves out at first."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch_norm.train()

    def logits(self, batch: Any) -> torch.Tensor:
        if self.global_step < BEGINS:
            return self.head(self.hidden(batch))
        return super().logits(batch)


class Buffered(Project):
    """A buffer that the step begins to write by step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH, dtype=torch.float64))

    def logits(self, batch: Any) -> torch.Tensor:
        hidden = self.hidden(batch)
        if self.global_step >= BEGINS:
            with torch.no_grad():
                self.centre.mul_(0.9).add_(0.1 * hidden.mean((0, 1)))
        return self.head(hidden - self.centre)


class Dropping(Project):
    """Dropout that begins by step."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drop.p = 0.3 if self.global_step >= BEGINS else 0.0

    def logits(self, batch: Any) -> torch.Tensor:
        return self.head(self.drop(self.hidden(batch)))


class ScaledByLog(Project):
    """A loss scaled by what was logged before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        last = self.trainer.callback_metrics.get("train_loss_step")
        if last is not None:
            loss = loss / (1.0 + last.detach())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class ScaledByLogLater(Project):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.global_step >= BEGINS:
            loss = self.scaled(loss)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def scaled(self, loss: Any) -> Any:
        return loss / (1.0 + self.trainer.callback_metrics["train_loss_step"])


class ScaledByEpoch(Project):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if "train_loss_epoch" in self.trainer.logged_metrics:
            loss = loss / (1.0 + self.trainer.logged_metrics["train_loss_epoch"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Experts(Project):
    """Two heads, of which most batches use one; the first batch uses the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, VOCABULARY).double() for _ in range(2)])

    def logits(self, batch: Any) -> torch.Tensor:
        return self.experts[(self.global_step // 3) % 2](self.hidden(batch))


class ExpertsByBatch(Experts):
    """Which head is used depends on the batch, so that ranks differ."""

    def logits(self, batch: Any) -> torch.Tensor:
        return self.experts[int(batch["z"][0])](self.hidden(batch))


class ReplacedFunction(Project):
    """A function that a hook replaces by another while training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == BEGINS:
            self.activation = torch.tanh

    activation: Any = staticmethod(torch.nn.functional.gelu)

    def logits(self, batch: Any) -> torch.Tensor:
        return self.head(self.activation(self.hidden(batch)))


class LateRandom(Project):
    """Draws from Python's generator from some step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        import random

        loss = self.loss(batch)
        if self.global_step >= BEGINS:
            loss = loss * (1.0 + 0.1 * random.random())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class ByHook(Project):
    """A weight that a hook draws for every batch of a rank's own, for the step to use."""

    mixing = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mixing = 1.0 + float(batch["x"].float().mean()) / VOCABULARY

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * self.mixing
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class TensorByHook(Project):
    """A target that a hook makes from a rank's own batch."""

    target: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.target = batch["x"].double().mean(1) / VOCABULARY

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.target is not None:
            loss = loss + (self.hidden(batch).mean((1, 2)) - self.target).pow(2).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class CallbackByHook(Project):
    """A weight that a callback sets on itself, by rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = next(item for item in self.trainer.callbacks if isinstance(item, Weigher)).weight
        loss = self.loss(batch) * weight
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Weigher(pl.Callback):
    def __init__(self) -> None:
        self.weight = 1.0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.weight = 1.0 + 0.5 * trainer.global_rank


class Anneals(Project):
    """A temperature that a callback-like hook anneals alike on all ranks: nothing to be afraid of."""

    temperature = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.temperature = 1.0 + 0.1 * self.global_step
        self.seen_rows = float(batch["x"].sum())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) / self.temperature
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class GrowingTable(Project):
    """A table of positions that grows with the longest batch so far: nothing to be afraid of."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.table = 0, torch.zeros(0, dtype=torch.float64)

    def hidden(self, batch: Any) -> torch.Tensor:
        length = batch["x"].shape[1]
        if length > self.longest:
            self.longest, self.table = length, torch.arange(length, dtype=torch.float64) / LENGTH
        hidden = self.embed(batch["x"]) + self.table[:length, None]
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def growing() -> DataLoader[Any]:
    """Batches that get longer."""

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = default_collate(rows)
        length = LENGTH - 2 if int(batch["index"].min()) % 3 else LENGTH
        return {**batch, "x": batch["x"][:, :length], "y": batch["y"][:, :length]}

    return loader(collate_fn=collate)


ALL = ("zero1", "zero3", "cut", "pp2", "pp2cut", "tp2")
ZERO = ("zero1", "zero3")

TRAPS = {
    "penalty": Trap(module=Penalty, plans=("zero3", "cut", "pp2", "tp2"), equal=("tp2",)),
    "penalty on head": Trap(module=PenaltyOnHead, plans=("cut", "pp2"), equal=("pp2",)),
    "penalty on embedding": Trap(module=PenaltyOnEmbedding, plans=("zero3",), reason="embed.weight"),
    "penalty on block": Trap(module=PenaltyOnBlock, plans=("zero1", "zero3"), equal=("zero1",), reason="blocks.1"),
    "norms logged": Trap(module=NormsLogged, plans=("zero3", "pp2"), reason="parameter"),
    "curriculum": Trap(module=Curriculum, plans=("zero3", "pp2"), equal=("zero3", "pp2")),
    "inner curriculum": Trap(module=InnerCurriculum, plans=("zero3", "pp2"), equal=("zero3",)),
    "skip": Trap(module=Skip, plans=("zero3", "pp2"), equal=("zero3",)),
    "fewer blocks": Trap(module=FewerBlocks, plans=("zero3", "pp2"), equal=("zero3",)),
    "other order": Trap(module=OtherOrder, plans=("zero3", "pp2")),
    "twice later": Trap(module=TwiceLater, plans=("zero3", "pp2")),
    "freezes block": Trap(module=FreezesBlock, plans=("zero1", "zero3"), equal=("zero1",)),
    "unfreezes": Trap(module=Unfreezes, plans=("zero1", "cut"), reason="embed"),
    "normalised": Trap(module=Normalised, plans=("zero1", "zero3", "cut", "pp2"), equal=ZERO, reason="batch_norm"),
    "normalised before": Trap(module=NormalisedBefore, plans=("pp2", "tp2"), reason="batch_norm"),
    "normalised by branch": Trap(module=NormalisedByBranch, plans=("cut", "pp2"), reason="batch_norm"),
    "buffered": Trap(module=Buffered, plans=("zero3", "cut", "pp2", "tp2"), equal=ZERO, reason="centre"),
    "dropping": Trap(module=Dropping, plans=("pp2", "tp2"), equal=("pp2",)),
    "scaled by log": Trap(module=ScaledByLog, plans=("zero3", "cut", "pp2"), equal=ZERO, reason="callback_metrics"),
    "scaled by log later": Trap(module=ScaledByLogLater, plans=("pp2",), reason="callback_metrics"),
    "scaled by epoch": Trap(module=ScaledByEpoch, plans=("zero3", "tp2"), equal=ZERO, reason="logged_metrics"),
    "experts": Trap(module=Experts, plans=("zero3", "pp2"), equal=("zero3", "pp2")),
    "experts by batch": Trap(module=ExpertsByBatch, plans=("zero3", "pp2"), equal=("zero3", "pp2")),
    "replaced function": Trap(module=ReplacedFunction, plans=("pp2", "tp2"), equal=("pp2", "tp2")),
    "late random": Trap(module=LateRandom, plans=("zero3", "cut", "pp2"), equal=ZERO, reason="generator"),
    "by hook": Trap(module=ByHook, plans=("zero3", "pp2"), equal=ZERO, reason="mixing"),
    "tensor by hook": Trap(module=TensorByHook, plans=("pp2",), reason="target"),
    "callback by hook": Trap(
        module=CallbackByHook, callbacks=lambda: [Weigher()], plans=("zero3", "tp2"), equal=ZERO, reason="callbacks"
    ),
    "anneals": Trap(module=Anneals, plans=ALL, equal=ALL),
    "growing table": Trap(module=GrowingTable, train=growing, plans=ALL, equal=ALL),
}
