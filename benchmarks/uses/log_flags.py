"""Every flag of ``self.log``, and the other ways of values into loggers."""

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError

from benchmarks.uses.session import Session, Uses
from tests.traps.project import VOCABULARY, Project, loader

uses = Uses("self.log")


class Logging(Project):
    """Logs its loss in training and validation with the options given."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("value", loss, **self.options)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value of validation", self.loss(batch), **self.options)


def logged(session: Session, module: Any, *, val: Any = True, **options: Any) -> None:
    """Train with a file of what is logged."""
    val = loader(16, seed=1) if val is True else val
    session.fit(module, val=val, logger=CSVLogger(session.folder, name="", version=0), **options)


def flag(name: str, **options: Any) -> None:
    """One use for each choice of options."""
    uses(name)(lambda session: logged(session, Logging(**options)))


flag("as it is")
flag("on_step", on_step=True, on_epoch=False)
flag("on_epoch", on_step=False, on_epoch=True)
flag("on_step and on_epoch", on_step=True, on_epoch=True)
flag("prog_bar", prog_bar=True, on_step=True, on_epoch=True)
flag("logger=False", logger=False)
flag("sync_dist", sync_dist=True, on_step=True, on_epoch=True)
flag("reduce_fx=sum", reduce_fx="sum", on_epoch=True)
flag("reduce_fx=min", reduce_fx="min", on_epoch=True)
flag("reduce_fx=max, sync_dist", reduce_fx="max", on_epoch=True, sync_dist=True)
flag("reduce_fx=torch.sum, sync_dist", reduce_fx=torch.sum, on_epoch=True, sync_dist=True)
flag("batch_size", batch_size=3, on_epoch=True)
flag("rank_zero_only", rank_zero_only=True, on_step=True, on_epoch=False)
flag("enable_graph", enable_graph=True, on_epoch=True)


@uses("add_dataloader_idx=False, two loaders")
def _(session: Session) -> None:
    class Net(Project):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            loss = self.loss(batch)
            self.log("both", loss, sync_dist=True)
            self.log(f"of {dataloader_idx}", loss, add_dataloader_idx=False)

    logged(session, Net(), val=[loader(16, seed=1), loader(8, seed=2)])


@uses("log_dict of tensors and numbers")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log_dict({"loss": loss, "rows": len(batch["x"]), "half": 0.5}, on_step=True, on_epoch=True)
            return loss

    logged(session, Net())


@uses("python numbers with reduce_fx=sum")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("rows", float(len(batch["x"])), on_step=True, on_epoch=True, reduce_fx="sum")
            self.log("index", float(batch_idx), on_epoch=True, reduce_fx="max")
            return self.loss(batch)

    logged(session, Net())


@uses("not a number")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("nothing", float("nan"), on_epoch=True)
            return self.loss(batch)

    logged(session, Net())


@uses("a metric object")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.accuracy = MeanMetric(), MulticlassAccuracy(VOCABULARY)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.mean(loss.detach())
            self.log("mean", self.mean, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(self.logits(batch).flatten(0, 1), batch["y"].flatten())
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True, metric_attribute="accuracy")

    logged(session, Net())


@uses("a metric of predictions in training")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(VOCABULARY)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.logits(batch).flatten(0, 1)
            self.accuracy(logits, batch["y"].flatten())
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            return torch.nn.functional.cross_entropy(logits, batch["y"].flatten())

    logged(session, Net())


@uses("metrics computed and reset by hand")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = MetricCollection({"error": MeanSquaredError(), "mean": MeanMetric()})

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self.pair(self.hidden(batch))[..., 0].mean(1)
            self.metrics["error"].update(logits, batch["z"].double())
            self.metrics["mean"].update(logits)

        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.metrics.compute())
            self.metrics.reset()

    logged(session, Net())


@uses("from hooks of the module")
def _(session: Session) -> None:
    class Net(Project):
        def on_train_start(self) -> None:
            self.log("start", 1.0)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("index", float(batch_idx), on_step=True, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            self.log("epoch", float(self.current_epoch), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            self.log("validated", self.trainer.callback_metrics.get("val_loss", torch.zeros(())))

    logged(session, Net())


@uses("from a callback")
def _(session: Session) -> None:
    class Noting(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.log("twice", 2 * outputs["loss"], on_step=True, on_epoch=True, sync_dist=True)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.log("count", float(trainer.global_step))

    logged(session, Project(), callbacks=[Noting()])


@uses("straight to the logger")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.logger.log_metrics({"own": float(loss)}, step=self.global_step)
            return loss

    logged(session, Net())


@uses("straight to the logger at the end of a batch")
def _(session: Session) -> None:
    class Net(Project):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.logger.log_metrics({"own": float(outputs["loss"])}, step=self.global_step)

    logged(session, Net())


@uses("every third step")
def _(session: Session) -> None:
    logged(session, Logging(on_step=True, on_epoch=True), log_every_n_steps=3)


@uses("where it is forbidden")
def _(session: Session) -> None:
    class Net(Project):
        def on_fit_start(self) -> None:
            self.log("early", 1.0)

    logged(session, Net())


@uses("a name twice with other options")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("value", loss, on_step=True)
            self.log("value", loss, on_step=False, on_epoch=True)
            return loss

    logged(session, Net())


@uses("something that is no number")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("text", "text")  # type: ignore[arg-type]
            return self.loss(batch)

    logged(session, Net())


@uses("a returned dictionary")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return {"loss": loss, "twice": 2 * loss.detach(), "rows": len(batch["x"])}

    logged(session, Net())
