"""Losses and metrics of tokens, whose tail a careless cut along tokens would train wrongly."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.traps.cutting import IGNORED, Padded, with_loss
from tests.traps.project import LENGTH, ROWS, VOCABULARY, Project, Trap

PLANS = ("tokens", "pp2tokens")


class Concentrated(Padded):
    """Labels that count in few tokens of each row: all in one chunk, and none in most others."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        place = torch.arange(rows) % LENGTH
        away = torch.arange(LENGTH) != place.unsqueeze(1)
        self.data["y"][:] = self.data["x"].masked_fill(away & (torch.arange(rows) % 3 > 0).unsqueeze(1), IGNORED)


def concentrated() -> DataLoader[Any]:
    return DataLoader(Concentrated(48), batch_size=ROWS)


def shifted(project, batch):
    return project.logits(batch)[..., :-1, :].reshape(-1, VOCABULARY), batch["y"][..., 1:].reshape(-1)


def causal(project, batch):
    labels = F.pad(batch["y"], (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(project.logits(batch).view(-1, VOCABULARY), labels.view(-1), ignore_index=IGNORED)


def weighted(project, batch):
    weights = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)
    return F.cross_entropy(*shifted(project, batch), weight=weights, label_smoothing=0.1)


def counted(project, batch):
    items = (batch["y"][..., 1:] != IGNORED).sum()
    return F.cross_entropy(*shifted(project, batch), reduction="sum") / items


def capped(project, batch):
    logits = 3 * (project.logits(batch) / 3).tanh()
    labels = batch["y"][:, 1:].reshape(-1)
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels)


def square(project, batch):
    logits, labels = shifted(project, batch)
    return F.cross_entropy(logits, labels) + 0.1 * logits.logsumexp(-1).square().mean()


def square_of_all(project, batch):
    logits = project.logits(batch)
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch["y"][:, 1:].reshape(-1))
    return loss + 0.1 * logits.logsumexp(-1).square().mean()


def last_token(project, batch):
    return F.cross_entropy(project.pair(project.hidden(batch)[:, -1]), batch["z"])


class Accuracy(Project):
    """Logs how many of the tokens that count are right, and how sure it is of all."""

    def training_step(self, batch, batch_idx):
        logits, labels = shifted(self, batch)
        kept, loss = labels != IGNORED, F.cross_entropy(logits, labels)
        right = logits.argmax(-1) == labels
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["y"]))
        self.log("right", (right & kept).sum() / kept.sum(), on_step=True, on_epoch=True)
        self.log("sure", logits.softmax(-1).amax(-1).mean(), on_step=True, on_epoch=True)
        return {"loss": loss, "tokens": int(kept.sum()), "rows": len(batch["y"])}

    def on_train_start(self):
        self.seen = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += [outputs["tokens"], outputs["rows"]]


class Perplexity(Project):
    """Logs what is no mean of chunks."""

    def training_step(self, batch, batch_idx):
        loss = causal(self, batch)
        self.log("perplexity", loss.exp(), on_step=True, on_epoch=True)
        return loss


class Written(Project):
    """Writes into what the last layer gives, some tokens of which two chunks have."""

    def loss(self, batch):
        hidden = self.hidden(batch)
        hidden.mul_(2.0)
        labels = batch["y"][:, 1:].reshape(-1)
        return F.cross_entropy(self.head(hidden)[:, :-1].reshape(-1, VOCABULARY), labels)


TRAPS = {
    **{
        f.__name__: Trap(module=with_loss(f), train=concentrated, plans=PLANS, equal=PLANS)
        for f in (causal, weighted, counted, capped, square)
    },
    "accuracy": Trap(module=Accuracy, train=concentrated, plans=PLANS, equal=PLANS),
    "written": Trap(module=Written, train=concentrated, plans=PLANS, equal=PLANS),
    "square_of_all": Trap(module=with_loss(square_of_all), plans=PLANS, reason="behind the last layer"),
    "last_token": Trap(module=with_loss(last_token), plans=PLANS, reason="behind the last layer"),
    "perplexity": Trap(module=Perplexity, plans=PLANS, reason="self.log('perplexity')"),
}
