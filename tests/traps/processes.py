"""Steps that know which process they run in, or talk to the others."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as between
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed import get_rank

from tests.traps.project import WIDTH, Project, Trap

HERE = [0]


class Ranked(Project):
    """Scales every loss by which rank's rows these are."""

    def rank(self) -> int:
        return self.global_rank

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (1.0 + 0.5 * self.rank())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class ByTrainer(Ranked):
    def rank(self) -> int:
        return self.trainer.global_rank + self.local_rank + self.trainer.local_rank


class ByZero(Ranked):
    def rank(self) -> int:
        return 0 if self.trainer.is_global_zero else 1


class ByStrategy(Ranked):
    def rank(self) -> int:
        return self.trainer.strategy.global_rank


class ByDist(Ranked):
    def rank(self) -> int:
        return dist.get_rank()


class ByImportedDist(Ranked):
    def rank(self) -> int:
        return get_rank()


class ByDistLater(Ranked):
    def rank(self) -> int:
        return get_rank() if self.global_step >= 3 else 0


class ByEnvironment(Ranked):
    def rank(self) -> int:
        return int(os.environ["RANK"])


class ByRankZeroOnly(Ranked):
    def rank(self) -> int:
        return rank_zero_only.rank


class BySetup(Ranked):
    """Remembers its rank before training."""

    def setup(self, stage: str) -> None:
        self.mine = self.global_rank

    def rank(self) -> int:
        return self.mine


class ByGlobal(Ranked):
    def setup(self, stage: str) -> None:
        HERE[0] = self.global_rank

    def rank(self) -> int:
        return HERE[0]


class ByLaterHook(Ranked):
    mine = 0

    def on_train_epoch_start(self) -> None:
        self.mine = self.global_rank

    def rank(self) -> int:
        return self.mine


class Seeded(Project):
    """Noise from a generator that rank and batch seed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * self.global_rank + batch_idx)
        noise = torch.rand(batch["x"].shape[0], 1, 1, generator=generator, dtype=torch.float64)
        logits = self.head(self.hidden(batch) * (1 + noise))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class OwnGenerator(Project):
    """Noise from a generator of its own that was seeded by rank before training."""

    def setup(self, stage: str) -> None:
        self.generator = torch.Generator().manual_seed(self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.rand(batch["x"].shape[0], 1, 1, generator=self.generator, dtype=torch.float64)
        logits = self.head(self.hidden(batch) * (1 + noise))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Contrastive(Project):
    """Compares rows with those of all ranks, as SimCLR does."""

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        return self.all_gather(rows, sync_grads=True).flatten(0, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one = F.normalize(self.hidden(batch).mean(1), dim=1)
        two = F.normalize(self.hidden({"x": batch["x"].flip(1)}).mean(1), dim=1)
        every = self.gathered(two)
        targets = torch.arange(len(one)) + len(one) * self.global_rank
        loss = F.cross_entropy(one @ every.T / 0.1, targets)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class OneView(Contrastive):
    """Compares rows with those of all ranks, each block running once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one = F.normalize(self.hidden(batch).mean(1), dim=1)
        every = self.gathered(one)
        targets = torch.arange(len(one)) + len(one) * self.global_rank
        loss = F.cross_entropy(one @ every.T / 0.1, targets.roll(1))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class ByFunctional(OneView):
    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(between.all_gather(rows))


class Centred(Project):
    """Keeps a centre over all ranks, as DINO does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        every = self.hidden(batch)
        hidden = every.mean(1)
        with torch.no_grad():
            centre = hidden.detach().mean(0)
            dist.all_reduce(centre)
            self.centre.mul_(0.9).add_(0.1 * centre / dist.get_world_size())
        loss = F.cross_entropy(self.head(every).flatten(0, 1), batch["y"].flatten())
        loss = loss + (hidden - self.centre).pow(2).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Later(OneView):
    """Compares over all ranks from some step on."""

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        return super().gathered(rows) if self.global_step >= 3 else torch.cat([rows.detach(), rows])


class Objects(Project):
    """Gathers numbers of Python, and waits for the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sums: list[Any] = [None, None]
        dist.all_gather_object(sums, int(batch["x"].sum()))
        dist.barrier()
        loss = self.loss(batch) * (1 + max(sums) / 1000)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Tolerant(Project):
    """Goes on without the others where it cannot talk to them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        total = batch["x"].double().sum()
        try:
            dist.all_reduce(total)
        except Exception:
            total = total * 2
        loss = self.loss(batch) * (1 + total / 1000)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class InBackward(Project):
    """Talks to the others in a hook of backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch)
        if hidden.requires_grad:
            hidden.register_hook(self.averaged)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def averaged(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / 2


SHARED = ("zero1", "cut", "pp2", "pp2cut", "tp2")
SOME = ("zero1", "pp2")
OWN = ("auto", "zero1", "zero3", "cut")
ALONE = ("auto", "zero1", "zero3")

TRAPS = {
    "rank": Trap(module=Ranked, plans=("auto", *SHARED), equal=("auto", *SHARED)),
    "rank by trainer": Trap(module=ByTrainer, plans=("pp2", "tp2"), equal=("pp2", "tp2")),
    "rank by zero": Trap(module=ByZero, plans=("pp2cut",), equal=("pp2cut",)),
    "rank by strategy": Trap(module=ByStrategy, plans=("pp2",), equal=("pp2",)),
    "rank by dist": Trap(module=ByDist, plans=("cut", "pp2", "tp2"), equal=OWN, reason="get_rank"),
    "rank by imported dist": Trap(module=ByImportedDist, plans=SOME, equal=OWN, reason="get_rank"),
    "rank by dist later": Trap(module=ByDistLater, plans=("pp2", "tp2"), reason="get_rank"),
    "rank by environment": Trap(module=ByEnvironment, plans=SOME, equal=OWN, reason="RANK"),
    "rank by rank_zero_only": Trap(module=ByRankZeroOnly, plans=("pp2", "tp2"), equal=("pp2", "tp2")),
    "rank by setup": Trap(module=BySetup, plans=("cut", "pp2", "tp2"), equal=OWN, reason="mine"),
    "rank by global": Trap(module=ByGlobal, plans=("pp2",), reason="HERE"),
    "rank by later hook": Trap(module=ByLaterHook, plans=("zero3", "pp2"), equal=OWN, reason="mine"),
    "seeded": Trap(module=Seeded, plans=("zero3", "pp2", "tp2"), equal=("zero3", "pp2")),
    "own generator": Trap(module=OwnGenerator, plans=("zero3", "pp2"), equal=OWN, reason="generator"),
    "contrastive": Trap(module=Contrastive, plans=("auto", "pp2"), equal=("auto",)),
    "one view": Trap(module=OneView, plans=("auto", "zero1", "cut", "pp2", "tp2"), equal=ALONE, reason="processes"),
    "by functional": Trap(module=ByFunctional, plans=SOME, equal=ALONE, reason="processes"),
    "centred": Trap(module=Centred, plans=("auto", "pp2"), equal=ALONE, reason="processes"),
    "later": Trap(module=Later, plans=("auto", "zero1", "cut", "pp2", "tp2"), equal=ALONE, reason="processes"),
    "objects": Trap(module=Objects, plans=("auto", "pp2"), equal=("auto",)),
    "tolerant": Trap(module=Tolerant, plans=("zero1", "pp2"), equal=ALONE, reason="processes"),
    "in backward": Trap(module=InBackward, plans=("zero1", "cut", "pp2", "tp2"), equal=("zero1",), reason="processes"),
}
