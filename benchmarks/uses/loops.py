"""What a trainer's arguments change: lengths of loops, precision, clipping, profilers, loggers."""

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from benchmarks.uses.session import SINGLE, Session, Uses
from tests.traps.project import Project, loader

uses = Uses("loops")
precisions = Uses("precision")
more = Uses("loggers and profilers")


class Proportional(Project):
    """Its steps are as long as its gradients: Adam would turn the rounding of small ones into whole steps."""

    def configure_optimizers(self) -> Any:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def option(
    name: str,
    collection: Uses = uses,
    *,
    tolerance: float | None = None,
    module: type[Project] = Project,
    **options: Any,
) -> None:
    """One use with validation and a file of what is logged, and these arguments of the trainer."""

    def run(session: Session) -> None:
        logger = CSVLogger(session.folder, name="", version=0)
        session.fit(module(), val=loader(16, seed=1), **({"logger": logger} | options))

    collection(name, **({} if tolerance is None else {"tolerance": tolerance}))(run)


option("accumulate_grad_batches=2", accumulate_grad_batches=2)
option("accumulate_grad_batches=4, which the epoch is no multiple of", accumulate_grad_batches=4)
option("limit_train_batches=3", limit_train_batches=3)
option("limit_train_batches=0.5, limit_val_batches=0.5", limit_train_batches=0.5, limit_val_batches=0.5)
option("limit_val_batches=0", limit_val_batches=0)
option("val_check_interval=0.5", val_check_interval=0.5)
option("val_check_interval=4 over epochs", val_check_interval=4, check_val_every_n_epoch=None)
option("check_val_every_n_epoch=2", check_val_every_n_epoch=2, max_epochs=3)
option("max_steps=5", max_steps=5, max_epochs=-1)
option("max_steps=5, accumulated", max_steps=5, max_epochs=-1, accumulate_grad_batches=2)
option("min_epochs, max_time", min_epochs=2, max_time={"hours": 1})
option("max_epochs=0", max_epochs=0)
option("fast_dev_run", fast_dev_run=True)
option("fast_dev_run=3", fast_dev_run=3)
option("overfit_batches=2", overfit_batches=2)
option("overfit_batches=0.5", overfit_batches=0.5)
option("num_sanity_val_steps=0", num_sanity_val_steps=0)
option("num_sanity_val_steps=-1", num_sanity_val_steps=-1)
option("inference_mode=False", inference_mode=False)
option("detect_anomaly", detect_anomaly=True)
option("deterministic", deterministic=True)
option("benchmark", benchmark=True)
option("sync_batchnorm", sync_batchnorm=True)
option("gradient_clip_val", gradient_clip_val=0.1)
option("gradient_clip_val by value", gradient_clip_val=0.01, gradient_clip_algorithm="value")
option("gradient_clip_val, accumulated", gradient_clip_val=0.1, accumulate_grad_batches=2)

option("32-true", precisions, tolerance=SINGLE, precision="32-true")
option("64-true", precisions, precision="64-true")
option("16-true", precisions, tolerance=2e-2, module=Proportional, precision="16-true")
option("bf16-true", precisions, tolerance=1e-1, module=Proportional, precision="bf16-true")
option("bf16-mixed", precisions, tolerance=1e-1, precision="bf16-mixed")
option("16-mixed", precisions, tolerance=2e-2, precision="16-mixed")
option("transformer-engine", precisions, precision="transformer-engine")

option("the default logger", more, logger=True)
option("profiler=simple", more, profiler="simple")
option("profiler=advanced", more, profiler="advanced")


@more("several loggers")
def _(session: Session) -> None:
    loggers = [CSVLogger(session.folder / name, name="", version=0) for name in "ab"]
    session.fit(val=loader(16, seed=1), logger=loggers)


@more("a logger of one's own")
def _(session: Session) -> None:
    from lightning.pytorch.loggers.logger import DummyLogger

    class Own(DummyLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
            session.keep("logged", [[step, metrics]])

    session.fit(val=loader(16, seed=1), logger=Own())


@more("hyper-parameters and a graph")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.example_input_array = {"x": torch.zeros(1, 6, dtype=torch.long)}

        def forward(self, x: Any) -> Any:
            return self.logits({"x": x})

    logger = CSVLogger(session.folder, name="", version=0)
    module = Net()
    session.fit(module, logger=logger, enable_checkpointing=True)
    session.keep("hyper-parameters", dict(module.hparams))


@uses("barebones")
def _(session: Session) -> None:
    trainer = session.trainer(barebones=True)
    module = Project()
    trainer.fit(module, loader())
    session.keep_state(trainer, module)


@uses("should_stop in a hook")
def _(session: Session) -> None:
    class Net(Project):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.trainer.should_stop = True

    session.fit(Net(), val=loader(16, seed=1))


@uses("batches skipped by on_train_batch_start")
def _(session: Session) -> None:
    class Net(Project):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    session.fit(Net(), val=loader(16, seed=1))


@uses("a step that returns None on every rank")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 2 else self.loss(batch)

    session.fit(Net())


@uses("KeyboardInterrupt")
def _(session: Session) -> None:
    class Interrupting(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise KeyboardInterrupt

    trainer = session.trainer(callbacks=[Interrupting()])
    try:
        trainer.fit(Project(), loader())
    except BaseException as error:
        session.keep("raised", type(error).__name__)
    session.keep("state", trainer.state.status.value)


@uses("an error in a step")
def _(session: Session) -> None:
    class Net(Project):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 4:
                raise ValueError("what the user's code found")
            return self.loss(batch)

    session.fit(Net())


@uses("automatic stages counted by the trainer")
def _(session: Session) -> None:
    class Net(Project):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer = self.trainer
            session.keep("counts", [[trainer.num_training_batches, trainer.estimated_stepping_batches]])
            session.keep("flags", [[trainer.is_last_batch, trainer.world_size, trainer.num_devices]])

    session.fit(Net(), accumulate_grad_batches=2)
