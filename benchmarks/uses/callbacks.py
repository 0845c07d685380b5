"""Lightning's callbacks, and callbacks of one's own."""

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import callbacks as built_in
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm

from benchmarks.uses.session import Session, Uses
from tests.traps.project import Project, loader

uses = Uses("callbacks")
own = Uses("callbacks of one's own")


def fitted(session: Session, *callbacks: Any, module: Any = None, **options: Any) -> Any:
    """Train with callbacks and a file of what is logged."""
    logger = CSVLogger(session.folder, name="", version=0)
    options = {"logger": logger, "val": loader(16, seed=1)} | options
    return session.fit(module, callbacks=callbacks, **options)


def saving(name: str, **options: Any) -> None:
    """One use of ModelCheckpoint."""

    def run(session: Session) -> None:
        checkpoint = built_in.ModelCheckpoint(session.folder / "checkpoints", **options)
        fitted(session, checkpoint, enable_checkpointing=True)
        best = str(checkpoint.best_model_path).replace(str(session.folder), "")
        session.keep("best", [best, checkpoint.best_model_score, checkpoint.kth_best_model_path])

    uses(f"ModelCheckpoint, {name}")(run)


saving("best and last", monitor="val_loss", save_last=True)
saving("every two steps", every_n_train_steps=2, save_top_k=-1)
saving("of a value of training", monitor="train_loss_epoch", mode="max", save_on_train_epoch_end=True)
saving("weights only", save_weights_only=True)
saving("two best by name", monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.4f}")
saving("by time", train_time_interval=timedelta(days=1), save_last=True)


def simple(name: str, make: Any, **options: Any) -> None:
    """One use of another callback."""

    def run(session: Session) -> None:
        callback = make()
        fitted(session, callback, **options)
        for attribute in ("stopped_epoch", "best_score", "lrs", "wait_count"):
            if hasattr(callback, attribute):
                session.keep(attribute, [getattr(callback, attribute)])

    uses(name)(run)


simple("EarlyStopping on validation", lambda: built_in.EarlyStopping("val_loss", patience=0, mode="max"), max_epochs=4)
simple(
    "EarlyStopping on training",
    lambda: built_in.EarlyStopping("train_loss_epoch", mode="max", patience=1, check_on_train_epoch_end=True),
    max_epochs=4,
)
simple("EarlyStopping by threshold", lambda: built_in.EarlyStopping("train_loss_step", stopping_threshold=2.8))
simple("EarlyStopping on what is not logged", lambda: built_in.EarlyStopping("nothing"))
simple("LearningRateMonitor", lambda: built_in.LearningRateMonitor("step", log_momentum=True, log_weight_decay=True))
simple("LearningRateFinder", lambda: built_in.LearningRateFinder(num_training_steps=8), module=None)
simple("GradientAccumulationScheduler", lambda: built_in.GradientAccumulationScheduler({0: 2, 1: 3}))
simple("StochasticWeightAveraging", lambda: built_in.StochasticWeightAveraging(1e-2, 0.5), max_epochs=3)
simple("WeightAveraging", built_in.WeightAveraging)
simple("EMAWeightAveraging", lambda: built_in.EMAWeightAveraging(decay=0.8))
simple("Timer", lambda: built_in.Timer({"hours": 1}))
simple("TQDMProgressBar", built_in.TQDMProgressBar, enable_progress_bar=True)
simple("RichProgressBar", built_in.RichProgressBar, enable_progress_bar=True)
simple("ModelSummary", lambda: built_in.ModelSummary(max_depth=2), enable_model_summary=True)
simple("RichModelSummary", built_in.RichModelSummary, enable_model_summary=True)
simple("ModelPruning", lambda: built_in.ModelPruning("l1_unstructured", amount=0.2))
simple("LambdaCallback", lambda: built_in.LambdaCallback(on_train_epoch_end=lambda trainer, module: None))
simple("BatchSizeFinder", lambda: built_in.BatchSizeFinder(max_trials=1))


@uses("ThroughputMonitor")
def _(session: Session) -> None:
    class Monitor(built_in.ThroughputMonitor):
        def _compute(self, trainer: Any, iter_num: int | None = None) -> None:
            # Not the seconds.
            session.keep("counts", [[iter_num, self._samples[trainer.state.stage], self._batches[trainer.state.stage]]])

    monitor = Monitor(batch_size_fn=lambda batch: len(batch["x"]), window_size=3)
    session.fit(callbacks=[monitor], logger=CSVLogger(session.folder, name="", version=0))


@uses("BackboneFinetuning")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.embed

        def configure_optimizers(self) -> Any:
            trained = [item for item in self.parameters() if item.requires_grad]
            return torch.optim.SGD(trained, lr=0.1)

    finetuning = built_in.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    fitted(session, finetuning, module=Net())


@uses("OnExceptionCheckpoint")
def _(session: Session) -> None:
    class Failing(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise ValueError("what the user's code found")

    keep = built_in.OnExceptionCheckpoint(session.folder / "checkpoints")
    try:
        fitted(session, keep, Failing())
    except ValueError as error:
        session.keep("error", str(error))


@uses("BasePredictionWriter")
def _(session: Session) -> None:
    class Writer(built_in.BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
            session.keep("batches", [[prediction, indices]])

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            session.keep("epoch", [predictions, indices])

    class Net(Project):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.logits(batch).argmax(-1)

    trainer = fitted(session, Writer("batch_and_epoch"), module=(module := Net()))
    session.keep("predictions", trainer.predict(module, loader(8, seed=2)))


def watching(name: str, **hooks: Any) -> None:
    """One use of a callback of one's own; its hooks return what is to be compared."""

    def run(session: Session) -> None:
        def noting(hook: Any) -> Any:
            def call(self: Any, trainer: Any, module: Any, *rest: Any) -> None:
                session.keep("seen", [hook(trainer, module, *rest)])

            return call

        callback = type("Own", (Callback,), {hook: noting(action) for hook, action in hooks.items()})()
        fitted(session, callback)

    own(name)(run)


def _gradients(trainer: Any, module: Any, *_: Any) -> Any:
    return {name: None if item.grad is None else item.grad.norm() for name, item in module.named_parameters()}


def _sample(trainer: Any, module: Any, *_: Any) -> Any:
    with torch.no_grad():
        return module.logits(next(iter(loader(4, seed=3)))).sum()


def _norms(trainer: Any, module: Any, *_: Any) -> Any:
    return {name: item.detach().norm() for name, item in module.named_parameters()}


def _clamp(trainer: Any, module: Any, *_: Any) -> Any:
    with torch.no_grad():
        for item in module.parameters():
            item.clamp_(-0.2, 0.2)


def _clip(trainer: Any, module: Any, *_: Any) -> Any:
    return torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)


watching("gradients after backward", on_after_backward=_gradients)
watching("gradients before the optimizer's step", on_before_optimizer_step=_gradients)
watching("gradients before they are zeroed", on_before_zero_grad=_gradients)
watching("clips gradients", on_before_optimizer_step=_clip)
watching("norms of parameters at the end of an epoch", on_train_epoch_end=_norms)
watching("norms of parameters in validation", on_validation_epoch_end=_norms)
watching("calls the module at the end of a batch", on_train_batch_end=_sample)
watching("calls the module at the end of an epoch", on_train_epoch_end=_sample)
watching("calls the module in validation", on_validation_epoch_end=_sample)
watching("clamps parameters", on_train_batch_end=_clamp)
watching("the optimizer's state", on_train_epoch_end=lambda trainer, module: trainer.optimizers[0].state_dict())
watching("the module's state", on_train_epoch_end=lambda trainer, module: module.state_dict())
watching("counters of the trainer", on_train_batch_end=lambda trainer, *_: [trainer.global_step, trainer.current_epoch])
watching("values of metrics", on_train_batch_end=lambda trainer, *_: {**trainer.callback_metrics})
watching("ranks", on_train_batch_end=lambda trainer, module, *_: [trainer.global_rank, module.global_rank])
watching("the batch", on_train_batch_end=lambda trainer, module, outputs, batch, index: [batch, index])
watching("numbers at random", on_train_batch_end=lambda *_: torch.rand(2))


@own("the order of all hooks")
def _(session: Session) -> None:
    names = [name for name in dir(Callback) if name.startswith("on_")]
    note = lambda name: lambda self, *_, **__: session.keep("hooks", [name])  # noqa: E731
    hooks = {name: note(name) for name in names if "state_dict" not in name and "checkpoint" not in name}
    fitted(session, type("Own", (Callback,), hooks)())


@own("grad_norm logged as Lightning's documents say")
def _(session: Session) -> None:
    class Net(Project):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self, norm_type=2))

    fitted(session, module=Net())


@own("its state in checkpoints")
def _(session: Session) -> None:
    class Own(Callback):
        def __init__(self) -> None:
            self.count = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = self.count

    fitted(session, Own(), enable_checkpointing=True)


@own("a moving average of its own, swapped in for validation")
def _(session: Session) -> None:
    class Average(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.mean = {name: item.detach().clone() for name, item in module.named_parameters()}

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            for name, item in module.named_parameters():
                self.mean[name].lerp_(item.detach(), 0.1)

        def _swap(self, module: Any) -> None:
            for name, item in module.named_parameters():
                kept = item.detach().clone()
                item.data.copy_(self.mean[name])
                self.mean[name] = kept

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                self._swap(module)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                self._swap(module)

    fitted(session, Average())
