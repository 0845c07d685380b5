"""Projects whose batches may not be cut as if every row counted alike."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.traps.project import LENGTH, ROWS, Project, Rows, Trap

CUT, TAIL = ("cut", "pp2cut"), ("tail", "pp2tail", "movedtail")
IGNORED = -100


class Padded(Rows):
    """Rows whose labels end early from one row on; some rows have none that count."""

    def __init__(self, rows: int, *, begin: int = 0, seed: int = 0) -> None:
        super().__init__(rows, seed)
        generator = torch.Generator().manual_seed(5)
        for row in range(begin, rows):
            length = int(torch.randint(0, LENGTH + 1, (), generator=generator))
            self.data["y"][row, length:] = IGNORED
        self.data["y"][::ROWS, 0] = 1  # every batch counts something
        self.data["w"][begin:] = torch.rand(rows - begin, generator=generator, dtype=torch.float64) + 0.1
        self.data["mask"] = (self.data["y"] != IGNORED).long()
        self.data["flag"] = (torch.arange(rows) >= begin) * self.data["w"] if begin else torch.zeros(rows)


def padded(rows: int = 48, *, begin: int = 0) -> DataLoader[Any]:
    return DataLoader(Padded(rows, begin=begin), batch_size=ROWS)


def later() -> DataLoader[Any]:
    """From the third batch of each rank on."""
    return padded(begin=4 * ROWS)


def uneven() -> DataLoader[Any]:
    """Batches of four rows and, at the end, of three."""
    return padded(46)


def flat(project: Project, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return project.logits(batch).flatten(0, 1), batch["y"].flatten()


def each(project: Project, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of every token; those that do not count have one too."""
    logits, labels = flat(project, batch)
    return F.cross_entropy(logits, labels.clamp(min=0), reduction="none").view_as(batch["y"])


def with_loss(function: Any) -> type[Project]:
    class Made(Project):
        def loss(self, batch: Any) -> torch.Tensor:
            return function(self, batch)

    Made.__name__ = Made.__qualname__ = function.__name__
    return Made


def normalised_weights(project, batch):
    return (each(project, batch).mean(1) * batch["w"] / batch["w"].mean()).mean()


def two_terms(project, batch):
    hidden = project.hidden(batch)
    tokens = F.cross_entropy(project.head(hidden).flatten(0, 1), batch["y"].flatten())
    mask = batch["mask"].unsqueeze(-1)
    pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
    return tokens + 0.3 * F.cross_entropy(project.pair(pooled), batch["z"]) + 1e-3 * pooled.square().mean()


def selected(project, batch):
    kept = batch["y"] != IGNORED
    return F.cross_entropy(project.logits(batch)[kept], batch["y"][kept])


def number_of_items(project, batch):
    items = (batch["y"] != IGNORED).sum().item()
    return F.cross_entropy(*flat(project, batch), reduction="sum") / max(items, 1)


def summed(project, batch):
    return F.cross_entropy(*flat(project, batch), reduction="sum") * 0.1


def hinge(project, batch):
    losses = each(project, batch).mean(1)
    return losses.mean() + F.relu(losses.max() - 50.0)


def contrastive(project, batch):
    hidden = F.normalize(project.hidden(batch).mean(1), dim=-1)
    return Project.loss(project, batch) + 1e-6 * (hidden @ hidden.T).logsumexp(1).mean()


def noisy(project, batch):
    hidden = project.hidden(batch)
    return F.cross_entropy(project.head(hidden + 0.1 * torch.randn_like(hidden)).flatten(0, 1), batch["y"].flatten())


def flagged_maximum(project, batch):
    hidden = project.hidden(batch)
    tokens = F.cross_entropy(project.head(hidden).flatten(0, 1), batch["y"].flatten())
    return tokens + (hidden.mean(1).square().mean(1) * batch["flag"]).max()


def flagged_mean(project, batch):
    hidden = project.hidden(batch)
    tokens = F.cross_entropy(project.head(hidden).flatten(0, 1), batch["y"].flatten())
    sizes = hidden.square().mean((1, 2)) * batch["flag"]
    return tokens + sizes.sum() / batch["flag"].sum().clamp(min=0.1) * (1 + batch["flag"].max())


EXACT = (normalised_weights, two_terms, selected, number_of_items, summed, flagged_mean)
REFUSED = (hinge, contrastive, noisy, flagged_maximum)


class Annealed(Project):
    """A sum and a mean whose weights, a number and a buffer, begin small and grow by step."""

    begin = 0.0

    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.full((), self.begin, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        hidden = self.hidden(batch)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        loss = loss + (self.begin + self.global_step / 4) * hidden.square().mean()
        loss = loss + self.share * F.mse_loss(hidden.mean(1), torch.zeros_like(hidden[:, 0]))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.share += 0.1


class AnnealedSingle(Annealed):
    begin = 1e-4

    def __init__(self):
        super().__init__()
        self.float()


class AddedLater(Project):
    """A mean that is there from the first step on, and added from the third on; or logged in the place of a mean."""

    name = "loss"

    def training_step(self, batch, batch_idx):
        hidden = self.hidden(batch)
        size, loss = hidden.square().mean(), F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        more = loss + 0.1 * batch_idx * size if batch_idx >= 2 else loss
        self.log("train_loss", more if self.name == "log" else loss, on_step=True, on_epoch=True)
        self.log("size", size, on_step=True, on_epoch=False)
        return more if self.name == "loss" else loss


class LoggedLater(AddedLater):
    name = "log"


class Later(Project):
    """Another term of the loss from the third batch on."""

    def training_step(self, batch, batch_idx):
        hidden = self.hidden(batch)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        if batch_idx >= 2:
            loss = loss + hidden.mean(1).square().mean(1).max()
        return loss


class Logs(Project):
    """Logs sums, numbers and means of what counts; returns numbers, lists and text."""

    def training_step(self, batch, batch_idx):
        logits, labels = self.logits(batch), batch["y"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        kept = labels != IGNORED
        right = (logits.argmax(-1) == labels)[kept].double().mean()
        self.log("loss", loss, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", logits.max(), reduce_fx="max", on_epoch=True, on_step=True)
        self.log("least", loss, reduce_fx="min", on_epoch=True, on_step=False)
        self.log("right", right, on_step=True, on_epoch=True, prog_bar=True)
        self.log("rows", float(len(labels)), on_epoch=True, batch_size=len(labels))
        self.log("counted", kept.sum().double(), reduce_fx="sum", on_step=False, on_epoch=True)
        return {"loss": loss, "n": len(labels), "counted": int(kept.sum()), "names": ["a"] * len(labels), "text": "x"}

    def on_train_start(self):
        self.seen = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += [outputs["n"], outputs["counted"], len(outputs["names"])]


class Perplexity(Project):
    """Logs what is no mean of parts."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("perplexity", loss.exp(), on_step=True, on_epoch=True)
        return loss


class Vector(Project):
    """Logs a tensor of three elements, which Lightning refuses."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("three", loss.detach() * torch.ones(3))
        return loss


class Counts(Project):
    """Returns a number that depends on the batch in a way of its own."""

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "longest": int((batch["y"] != IGNORED).sum(1).max()) ** 2}

    def on_train_start(self):
        self.seen = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["longest"])


class Augmented(Project):
    """Draws in a hook that sees whole batches."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.training:
            return batch
        keep = torch.rand(batch["x"].shape) > 0.2
        return {**batch, "x": batch["x"] * keep}


class Mixed(Project):
    """Mixes rows by random shares in the step."""

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch["x"])
        share = torch.rand(len(hidden), 1, 1, dtype=torch.float64)
        hidden = hidden + share * self.embed(batch["y"].clamp(min=0))
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())


class CountsLater(Project):
    """The labels that count change with what has been trained."""

    def training_step(self, batch, batch_idx):
        labels = batch["y"].masked_fill(batch["index"].unsqueeze(1) % 3 == self.global_step % 3, IGNORED)
        return F.cross_entropy(self.logits(batch).flatten(0, 1), labels.flatten())


class Behind(Project):
    """Drops something behind the layers."""

    rate, begin = 0.5, 0

    def training_step(self, batch, batch_idx):
        hidden = F.dropout(self.hidden(batch), self.rate if self.global_step >= self.begin else 0.0)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())


class BehindLater(Behind):
    begin = 2


class BehindNever(Behind):
    rate = 0.0


TRAPS = {
    "labels_later": Trap(train=later, plans=(*CUT, "tp2cut", *TAIL), equal=(*CUT, "tp2cut", *TAIL)),
    "labels_uneven": Trap(train=uneven, plans=(*CUT, *TAIL), equal=(*CUT, *TAIL)),
    **{
        f.__name__: Trap(module=with_loss(f), train=later, plans=("pp2cut", "tail"), equal=("pp2cut", "tail"))
        for f in EXACT
    },
    **{f.__name__: Trap(module=with_loss(f), train=later, plans=("cut", "tail"), reason="parts") for f in REFUSED},
    "behind": Trap(module=Behind, plans=TAIL, reason="what is behind the last layer drops something at random"),
    "behind_later": Trap(module=BehindLater, plans=TAIL, reason="behind the last layer draws random numbers"),
    "behind_never": Trap(module=BehindNever, plans=TAIL, equal=TAIL),
    "term_later": Trap(module=Later, plans=(*CUT, "tail"), reason="was not part of the step"),
    "annealed": Trap(module=Annealed, plans=("pp2cut", "cut", "halves"), equal=("pp2cut", "cut", "halves")),
    "annealed_single": Trap(module=AnnealedSingle, plans=CUT, equal=CUT, tolerance=2e-5),
    "added_later": Trap(module=AddedLater, plans=("pp2cut",), reason="the loss is made otherwise"),
    "logged_later": Trap(module=LoggedLater, plans=("cut",), reason="self.log('train_loss') is made otherwise"),
    "logs": Trap(module=Logs, train=padded, plans=(*CUT, *TAIL), equal=(*CUT, *TAIL)),
    "perplexity": Trap(module=Perplexity, plans=("cut",), reason="self.log('perplexity')"),
    "vector": Trap(module=Vector, plans=("pp2cut",)),
    "number_of_its_own": Trap(module=Counts, train=padded, plans=("pp2cut",), reason="'longest'"),
    "augmented": Trap(module=Augmented, plans=CUT, equal=CUT),
    "mixed": Trap(module=Mixed, plans=("pp2cut",), reason="random numbers"),
    "counts_later": Trap(module=CountsLater, plans=(*CUT, "tail"), reason="count"),
}
