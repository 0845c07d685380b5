"""Metric objects that the step updates: they hold on every rank what they hold under DDP."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassPrecision
from torchmetrics.regression import MeanSquaredError
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from tests.traps.context import Decoder
from tests.traps.evaluation import own as own_rows
from tests.traps.project import VOCABULARY, WIDTH, Block, Project, Trap, loader


class Measured(Project):
    """Measures what it predicts, and shows what its metrics hold on this rank after every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.add_metrics()
        self.measured = [item for item in self.modules() if isinstance(item, Metric)]

    def add_metrics(self) -> None:
        self.acc, self.mean = MulticlassAccuracy(VOCABULARY), MeanMetric()

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.logits(batch).flatten(0, 1), batch["y"].flatten()
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return self.step({**batch, "labels": labels}, batch_idx, logits, loss)

    def on_train_epoch_end(self) -> None:
        for item in self.measured:
            states = (vars(item)[name] for name in item._defaults if name in vars(item))
            self.seen += [float(value) for state in states for one in _listed(state) for value in one.flatten()]
            self.seen.append(item._update_count)


def _listed(state: Any) -> list[torch.Tensor]:
    return state if isinstance(state, list) else [state]


class Objects(Measured):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.acc(logits, batch["labels"])
        self.log("acc", self.acc, on_step=True, on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


class OfTokens(Objects, Decoder):
    """Has layers whose tokens can be shared out."""


class Values(Measured):
    """Logs and returns what forwards give."""

    def add_metrics(self) -> None:
        super().add_metrics()
        self.every = MetricCollection([MulticlassAccuracy(VOCABULARY), MulticlassPrecision(VOCABULARY)], prefix="all_")

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        acc = self.acc(logits.argmax(-1), batch["labels"])
        self.log("acc", acc, prog_bar=True)
        self.log_dict(self.every(logits, batch["labels"]), on_step=True, on_epoch=True)
        self.mean(self.acc(logits, batch["labels"]), weight=2.0)
        return {"loss": loss, "acc": acc, "more": [acc, loss.detach()]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [float(outputs["acc"]), float(outputs["more"][0])]

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("by_hand", self.mean.compute())
        self.log_dict({f"end_{name}": value for name, value in self.every.compute().items()})
        for item in (self.acc, self.mean, self.every):
            item.reset()


class Collected(Measured):
    """Uses a collection with groups of equal states, whole and by its members."""

    def add_metrics(self) -> None:
        kinds = MulticlassAccuracy(VOCABULARY), MulticlassPrecision(VOCABULARY), MulticlassConfusionMatrix(VOCABULARY)
        self.every = MetricCollection([*kinds[:2]], prefix="all_")
        self.apart = MetricCollection({"matrix": kinds[2], "mean": MeanMetric()})

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.every.update(logits, batch["labels"])
        self.log_dict(self.every, on_step=False, on_epoch=True)
        self.apart["matrix"].update(logits, batch["labels"])
        self.apart["mean"](logits)
        self.log("mean", self.apart["mean"])
        if batch_idx % 3 == 0:
            self.every["MulticlassPrecision"].update(logits, batch["labels"])
        return loss


class Twice(Measured):
    """A metric is updated, logged, and updated again."""

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.mean(loss)
        self.log("first", self.mean)
        self.log("value", self.mean(2 * loss))
        return loss


class SomeBatches(Measured):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        if batch_idx % 3 == 0:
            self.acc.update(logits, batch["labels"])
        self.log("acc", self.acc, on_step=False, on_epoch=True)
        return loss


class Head(nn.Linear):
    """A layer behind the blocks that measures what it gives."""

    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY)
        self.mean = MeanMetric()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden)
        self.mean.update(logits)
        return logits


class InHead(Measured):
    def add_metrics(self) -> None:
        self.head = Head().double()

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.log("mean", self.head.mean, on_step=False, on_epoch=True)
        return loss


class MeasuringBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        self.mean.update(hidden)
        return hidden


class LateBlock(Block):
    """Begins to measure after some steps, when nobody looks for it any more."""

    def __init__(self, owner: list[Any]) -> None:
        super().__init__()
        self.mean, self.owner = MeanMetric(), owner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # Before the layer computes: recomputation ends with the last tensor that backward needs.
        if self.owner[0].global_step >= 3:
            self.mean.update(hidden)
        return super().forward(hidden)


class LateInBlock(Measured):
    def add_metrics(self) -> None:
        self.blocks = nn.ModuleList([LateBlock([self]) for _ in self.blocks]).double()

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        return loss


class RenewedInBlock(LateInBlock):
    """Puts a new metric into its layers before every batch."""

    def on_train_batch_start(self, *_: Any) -> None:
        for block in self.blocks:
            block.mean = MeanMetric()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(sum(block.mean.weight for block in self.blocks)))


class InBlock(Measured):
    def add_metrics(self) -> None:
        self.blocks = nn.ModuleList([MeasuringBlock() for _ in self.blocks]).double()

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        return loss


class Between(Measured):
    """Measures what the first layer gives, which the last stage does not have."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.blocks[0](self.embed(batch["x"]))
        self.mean.update(hidden.square().mean(-1))
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return hidden

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


class InLoss(Measured):
    def add_metrics(self) -> None:
        self.error = MeanSquaredError()

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        return loss + 0.1 * self.error(logits[:, 0], batch["labels"].double())


class AsLoss(InLoss):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        return {"loss": self.error(logits[:, 0], batch["labels"].double())}


class NoRows(Measured):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.mean.update(logits.std())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


class Computes(Measured):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.mean.update(loss.detach())
        self.log("so far", self.mean.compute())
        return loss


class Reads(Measured):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.mean.update(1.0)
        return loss * (1 + 0.01 * self.mean.weight.item())


class Sets(Measured):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.mean.weight = torch.tensor(2.0)
        return loss


class Own(Metric):
    """The user's own: keeps all that it is given."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx="cat")
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: torch.Tensor) -> None:
        self.kept.append(values)
        self.total += values.sum()

    def compute(self) -> torch.Tensor:
        return torch.cat([item.flatten() for item in self.kept]).median() + self.total


class OfOwnClass(Measured):
    def add_metrics(self) -> None:
        self.own = Own()

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.own(logits[:, :3].detach())
        self.log("own", self.own, on_step=True, on_epoch=True)
        return loss


class InList(Measured):
    """Keeps metrics in a list, where Lightning does not look."""

    def add_metrics(self) -> None:
        self.kept = [MeanMetric(), {"sum": SumMetric()}]

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.kept[0].update(loss)
        self.kept[1]["sum"].update(batch["index"])
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen += [float(item.compute()) for item in (self.kept[0], self.kept[1]["sum"])]


class WrittenAfter(Measured):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        found = logits.detach().clone()
        self.mean.update(found)
        found.zero_()
        return loss


class Drawing(MeanMetric):
    def update(self, value: Any, weight: Any = 1.0) -> None:
        super().update(value * torch.rand(()), weight)


class Draws(Measured):
    def add_metrics(self) -> None:
        self.mean = Drawing()

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.mean.update(loss)
        return loss


class SyncsOnStep(Measured):
    def add_metrics(self) -> None:
        self.mean = MeanMetric(dist_sync_on_step=True)

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.log("mean", self.mean(loss.item()))
        return loss


class Late(Measured):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        if self.global_step >= 3:
            self.acc(logits, batch["labels"])
        return loss


class LateRead(Measured):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.mean.update(1.0)
        return loss * (1 + 0.01 * self.mean.weight.item()) if self.global_step >= 3 else loss


class Wrapped(Measured):
    """Metrics of metrics, and one that gives a dictionary."""

    def add_metrics(self) -> None:
        self.ends = MinMaxMetric(MulticlassAccuracy(VOCABULARY))
        self.one = ClasswiseWrapper(MulticlassAccuracy(VOCABULARY, average=None), prefix="one_")
        self.each = MetricCollection({"acc": ClasswiseWrapper(MulticlassAccuracy(VOCABULARY, average=None))})

    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.ends.update(logits, batch["labels"])
        self.one.update(logits, batch["labels"])
        self.each.update(logits, batch["labels"])
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log_dict({**self.ends.compute(), **self.one.compute(), **self.each.compute()})
        self.each.reset()


class ResetInStep(Measured):
    def step(self, batch: Any, batch_idx: int, logits: Any, loss: Any) -> Any:
        self.acc.reset()
        self.acc.update(logits, batch["labels"])
        return loss


class Validated(Project):
    """Measures what it predicts in validation only, on ranks with differing numbers of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.acc, self.mean = MulticlassAccuracy(VOCABULARY), MeanMetric()
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.logits(batch).flatten(0, 1), batch["y"].flatten()
        self.log("acc", self.acc(logits, labels), batch_size=len(batch["x"]))
        self.mean.update(F.cross_entropy(logits, labels))
        self.log("mean", self.mean)
        return self.acc(logits, labels)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [batch_idx, float(outputs)]

    def on_validation_epoch_end(self) -> None:
        self.seen += [float(state) for state in self.acc.tp.flatten()]
        self.log("by hand", self.acc.compute())
        self.acc.reset()


class ReadInValidation(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        given = super().validation_step(batch, batch_idx)
        return given + self.acc.tp.sum()


BESIDE = ("zero1", "zero3")
SHARED = ("pp2", "pp2cut", "tp2")
EVERY = (*BESIDE, "cut", *SHARED)
CUT = ("cut", "pp2cut")

TRAPS = {
    "objects": Trap(module=Objects, plans=(*EVERY, "auto", "tp2cut", "tail"), equal=(*EVERY, "auto", "tp2cut", "tail")),
    "of tokens": Trap(module=OfTokens, plans=("cp2", "pp2cut"), equal=("cp2", "pp2cut")),
    "values": Trap(module=Values, plans=EVERY, equal=EVERY),
    "collected": Trap(module=Collected, plans=SHARED, equal=SHARED),
    "twice": Trap(module=Twice, plans=SHARED, equal=SHARED),
    "some batches": Trap(module=SomeBatches, plans=SHARED, equal=SHARED),
    "a short batch": Trap(module=Objects, train=lambda: loader(46), plans=SHARED, equal=SHARED),
    "accumulated": Trap(module=Objects, trainer={"accumulate_grad_batches": 2}, plans=("pp2cut",), equal=("pp2cut",)),
    "in head": Trap(module=InHead, plans=SHARED, equal=SHARED),
    "in block": Trap(module=InBlock, plans=("zero3whole", "zero3", *SHARED), equal=("zero3whole",), reason="mean"),
    "late in block": Trap(module=LateInBlock, plans=("zero3", "checkpointed", *SHARED), reason="mean"),
    "renewed in block": Trap(module=RenewedInBlock, plans=("checkpointed",), reason="mean"),
    "renewed by hook": Trap(module=RenewedInBlock, plans=("zero3",), reason="may use parameters (self.blocks"),
    "between": Trap(module=Between, plans=SHARED, equal=SHARED),
    "in loss": Trap(module=InLoss, plans=("zero3whole", *SHARED), equal=("zero3whole",), reason="error"),
    "as loss": Trap(module=AsLoss, plans=("zero3whole", *SHARED), equal=("zero3whole",), reason="error"),
    "no rows": Trap(module=NoRows, plans=SHARED, equal=("pp2", "tp2"), reason="mean"),
    "computes": Trap(module=Computes, plans=("zero3whole", *SHARED), equal=("zero3whole",), reason="compute"),
    "reads": Trap(module=Reads, plans=("zero3whole", *SHARED), equal=("zero3whole",), reason="weight"),
    "sets": Trap(module=Sets, plans=("zero3whole", *SHARED), equal=("zero3whole",), reason="weight"),
    "of own class": Trap(module=OfOwnClass, plans=EVERY, equal=EVERY),
    "in list": Trap(module=InList, plans=SHARED, equal=SHARED),
    "written after": Trap(module=WrittenAfter, plans=("zero3whole", *SHARED), equal=("zero3whole",), reason="mean"),
    "draws": Trap(module=Draws, plans=("zero3whole", *SHARED), equal=("zero3whole",), reason="random"),
    "syncs on step": Trap(module=SyncsOnStep, plans=SHARED, equal=SHARED),
    "late": Trap(module=Late, plans=SHARED, equal=("pp2", "tp2"), reason="acc"),
    "late read": Trap(module=LateRead, plans=("pp2",), reason="weight"),
    "wrapped": Trap(module=Wrapped, plans=SHARED, equal=SHARED),
    "validated": Trap(
        module=Validated,
        val=lambda: own_rows(12, 7),
        plans=("zero3whole", "pp2", "tp2"),
        equal=("zero3whole", "pp2", "tp2"),
        whole=(),
        then=("validate",),
    ),
    "validated alone": Trap(
        module=Validated,
        val=lambda: own_rows(12, 7),
        plans=("pp2", "tp2"),
        equal=("pp2", "tp2"),
        whole=(),
        then=("alone", "validate"),
    ),
    "read in validation": Trap(
        module=ReadInValidation,
        val=lambda: own_rows(12, 7),
        plans=("zero3whole", "pp2"),
        equal=("zero3whole", "pp2"),
        whole=("pp2",),
    ),
    "reset in step": Trap(module=ResetInStep, plans=("pp2cut",), equal=("pp2cut",)),
}
