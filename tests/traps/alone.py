"""Validation, test and prediction outside of a fit, after one or without, give what they give under DDP."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from torch import nn

from tests.traps.evaluation import KeepsLogged, own
from tests.traps.project import LAYERS, Block, Project, Trap, loader

PLANS = ("zero3whole", "moved3", "pp2", "tp2")
SHARED = ("pp2", "tp2")
EVERY = ("validate", "test", "predict")


class Asked(Project):
    """Validation, test and prediction, each with something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, rows = self.loss(batch), len(batch["x"])
        self.log("val_loss", loss, sync_dist=True, batch_size=rows)
        self.log("val_index", 0.1 + batch_idx, on_step=True, on_epoch=True, batch_size=rows)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.pair(self.hidden(batch).mean(1))
        loss = F.cross_entropy(logits, batch["z"])
        self.log("test_loss", loss, sync_dist=True, batch_size=len(batch["x"]))
        return {"loss": loss, "logits": logits, "at": batch_idx}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self.logits(batch), "rows": [batch["index"], batch_idx]}

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [float(outputs["loss"]), float(outputs["at"]), *outputs["logits"].flatten().tolist()]

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [*outputs["rows"][0].tolist(), float(outputs["logits"].sum())]


class TwoLoaders(Asked):
    """Two loaders, of which ranks have differing numbers of batches."""

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch) * (1 + dataloader_idx)
        self.log("test_loss", loss, sync_dist=True, batch_size=len(batch["x"]))
        return {"loss": loss, "logits": loss, "at": batch_idx + 10 * dataloader_idx}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch["x"]))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"logits": self.logits(batch) * (1 + dataloader_idx), "rows": [batch["index"], batch_idx]}

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().on_test_batch_end(outputs, batch, batch_idx)

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().on_predict_batch_end(outputs, batch, batch_idx)


class Drawn(Asked):
    """Prediction is a sample: dropout that is still on, and noise."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.head(F.dropout(self.hidden(batch), 0.3, training=True))
        return {"logits": logits + torch.rand_like(logits), "rows": [batch["index"], batch_idx]}


class Collected(Asked):
    """Test collects what it gives on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.outputs.append(self.loss(batch))
        return {"loss": self.outputs[-1], "logits": self.outputs[-1], "at": batch_idx}

    def on_test_epoch_end(self) -> None:
        self.seen += torch.stack(self.outputs).tolist()


class Norms(Asked):
    """A hook of test looks at all weights."""

    def on_test_start(self) -> None:
        self.seen += [float(parameter.detach().norm()) for parameter in self.parameters()]


class OfRank(Asked):
    """A hook keeps a mean of what this rank's batches gave in a buffer, which the step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) + self.mean
        return {"loss": loss, "logits": loss, "at": batch_idx}

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_test_batch_end(outputs, batch, batch_idx)
        self.mean.mul_(0.9).add_(outputs["loss"], alpha=0.1)


class OutOfPlace(Asked):
    """Test uses a weight of the first layer behind the last one."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) + self.blocks[0].up.weight.square().mean()
        return {"loss": loss, "logits": loss, "at": batch_idx}


class Turned(Asked):
    """Every other module of this class runs its layers in the other order."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.is_turned = self.made % 2 == 0

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block in reversed(self.blocks) if self.is_turned else self.blocks:
            hidden = block(hidden)
        return hidden


class Late(Asked):
    """Every other module of this class is built without values, where its strategy can give them later."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.is_late = self.made % 2 == 0
        if self.is_late:
            del self.blocks

    def configure_model(self) -> None:
        if self.is_late and not hasattr(self, "blocks"):
            torch.set_default_dtype(torch.float64)
            with self.trainer.init_module(empty_init=True):
                torch.set_default_dtype(torch.float64)
                self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
            torch.set_default_dtype(torch.float32)


class _Writer(BasePredictionWriter):
    """Writes predictions as they come and at the end; beside what this rank holds if so told."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__("batch_and_epoch")
        self.seen: list[float] = []
        if reads:
            self.write_on_epoch_end = self.write_with_weights

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.seen += [*map(float, indices or ()), float(prediction["logits"].sum())]

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.seen += [float(item["logits"].sum()) for item in predictions]

    def write_with_weights(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.seen += [float(parameter.sum()) for parameter in module.parameters()]


class _Modes(Callback):
    """Keeps whether the module trains, and what is logged."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_test_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.seen += [float(module.training), float(module.head.training)]

    def on_test_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.seen += [float(trainer.logged_metrics[name]) for name in sorted(trainer.logged_metrics)]


def _two() -> list[Any]:
    return [own(8, 20), own(12, 4, seed=9)]


def _trap(module: type[Asked], *then: str, **options: Any) -> Trap:
    given: dict[str, Any] = {"val": lambda: own(22, 5), "equal": PLANS, "whole": ()}
    return Trap(module=module, then=then, plans=PLANS, **(given | options))


TRAPS = {
    "after-a-fit": _trap(Asked, *EVERY, callbacks=lambda: [_Modes()]),
    "alone": _trap(Asked, "alone", *EVERY, callbacks=lambda: [_Modes()]),
    "sampled": _trap(Asked, "alone", "test", "predict", val=lambda: loader(18, seed=1)),
    "between-fits": _trap(Asked, "test", "save", "fit", "predict", "save"),
    "two-loaders": _trap(TwoLoaders, "test", "predict", val=_two),
    "saved": _trap(Asked, "save", "test saved", "predict"),
    "saved-without-values": _trap(Late, "save", "test saved"),
    "double-precision": _trap(Asked, "validate", callbacks=lambda: [KeepsLogged()], trainer={"precision": "64-true"}),
    "drawn": _trap(Drawn, "predict"),
    "drawn-alone": _trap(Drawn, "alone", "predict"),
    "writer": _trap(Asked, "predict", callbacks=lambda: [_Writer(reads=False)], val=lambda: loader(18, seed=1)),
    "writer-of-weights": _trap(Asked, "predict", callbacks=lambda: [_Writer(reads=True)], whole=PLANS),
    "collected": _trap(Collected, "test", whole=SHARED),
    "collected-alone": _trap(Collected, "alone", "test", whole=SHARED),
    "norms": _trap(Norms, "alone", "test", whole=PLANS),
    "of-rank": _trap(OfRank, "test", whole=SHARED),
    "out-of-place": _trap(OutOfPlace, "test", whole=("zero3whole", "moved3", "pp2")),
    "turned": _trap(Turned, "test another", whole=("zero3whole", "moved3", "pp2")),
    "no-batches": _trap(Asked, "alone", "test", val=lambda: own(0, 0)),
    "one-without-batches": _trap(Asked, "alone", "predict", val=lambda: own(0, 9)),
}
