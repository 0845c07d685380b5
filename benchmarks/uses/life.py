"""Optimizers, learning rates and their tuner; resuming, and what comes beside ``fit``."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn

from benchmarks.uses.session import Session, Uses
from tests.traps.project import Project, loader

optimizers = Uses("optimizers")
life = Uses("resume, validate, test, predict")


def optimized(name: str, configure: Any, **options: Any) -> None:
    """One use of other optimizers."""

    def run(session: Session) -> None:
        session.fit(type("Net", (Project,), {"configure_optimizers": configure})(), val=loader(16, seed=1), **options)

    optimizers(name)(run)


def _sgd(module: Any, **options: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05, **options)


def _scheduled(module: Any, make: Any, **options: Any) -> Any:
    optimizer = _sgd(module, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **options}}


def _groups(module: Any) -> Any:
    large, small = ([item for item in module.parameters() if (item.ndim > 1) is wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}], eps=1e-3)


def _one_cycle(module: Any) -> Any:
    steps = int(module.trainer.estimated_stepping_batches)
    make = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)  # noqa: E731
    return _scheduled(module, make, interval="step")


optimized("SGD with momentum", lambda module: _sgd(module, momentum=0.9, nesterov=True))
optimized("AdamW in groups", _groups)
optimized("Adagrad", lambda module: torch.optim.Adagrad(module.parameters(), lr=0.05))
optimized("RMSprop", lambda module: torch.optim.RMSprop(module.parameters(), lr=1e-3))
optimized("Adafactor", lambda module: torch.optim.Adafactor(module.parameters(), lr=1e-2))
optimized("LBFGS", lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=2))
optimized("none", lambda module: None)
optimized("two in automatic optimisation", lambda module: [_sgd(module), _sgd(module)])
optimized(
    "a list of one and its schedule", lambda module: ([o := _sgd(module)], [torch.optim.lr_scheduler.StepLR(o, 1)])
)
optimized("StepLR", lambda module: _scheduled(module, lambda o: torch.optim.lr_scheduler.StepLR(o, 1)))
optimized(
    "CosineAnnealingLR by step",
    lambda module: _scheduled(module, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8), interval="step"),
    accumulate_grad_batches=2,
)
optimized("OneCycleLR from estimated_stepping_batches", _one_cycle)
optimized(
    "ReduceLROnPlateau",
    lambda module: _scheduled(
        module, lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, mode="max", patience=0), monitor="val_loss"
    ),
    max_epochs=3,
)
optimized("one that is fused", lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, fused=True))
optimized("one that maximizes", lambda module: _sgd(module, maximize=True))


def overriding(name: str, **methods: Any) -> None:
    """One use of a hook of the module that optimisation goes through."""
    optimizers(name)(lambda session: session.fit(type("Net", (Project,), methods)(), val=loader(16, seed=1)) and None)


def _warm(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (self.trainer.global_step + 1)
    optimizer.step(closure=closure)


def _every_second(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    if batch_idx % 2:
        optimizer.step(closure=closure)
    else:
        closure()


def _zero(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def _clip(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


overriding("optimizer_step with a warm-up", optimizer_step=_warm)
overriding("optimizer_step every second batch", optimizer_step=_every_second)
overriding("optimizer_zero_grad", optimizer_zero_grad=_zero)
overriding("backward", backward=lambda self, loss: loss.backward())
overriding("configure_gradient_clipping", configure_gradient_clipping=_clip)


@optimizers("lr_scheduler_step")
def _(session: Session) -> None:
    class Net(Project):
        def configure_optimizers(self) -> Any:
            return _scheduled(self, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()
            session.keep("rates", scheduler.get_last_lr())

    session.fit(Net())


@optimizers("frozen layers")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.embed.requires_grad_(False)
            self.blocks[1].requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([item for item in self.parameters() if item.requires_grad], lr=0.1)

    session.fit(Net())


@optimizers("a parameter that nothing uses")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3).double()

    session.fit(Net())


@optimizers("tied weights and a penalty on all of them")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.embed.weight

        def loss(self, batch: Any) -> Any:
            return super().loss(batch) + 1e-2 * sum(item.pow(2).sum() for item in self.parameters())

    session.fit(Net(), val=loader(16, seed=1))


class Manual(Project):
    """Steps its optimizers itself."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.automatic_optimization, self.count = False, count

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.05) for _ in range(self.count)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chosen = self.optimizers()
        chosen = chosen[batch_idx % self.count] if isinstance(chosen, list) else chosen
        loss = self.loss(batch)
        chosen.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(chosen, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        chosen.step()
        self.log("train_loss", loss)
        return loss


optimizers("manual optimisation")(lambda session: session.fit(Manual()) and None)
optimizers("manual optimisation, two optimizers")(lambda session: session.fit(Manual(2)) and None)


class Rated(Project):
    """Has a learning rate that the tuner may choose."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@optimizers("lr_find, then fit")
def _(session: Session) -> None:
    module, trainer = Rated(), session.trainer()
    found = Tuner(trainer).lr_find(module, loader(), num_training=8, early_stop_threshold=None)
    session.keep("curve", found.results)
    session.keep("rate", module.lr)
    trainer.fit(module, loader())
    session.keep_state(trainer, module)


@optimizers("scale_batch_size")
def _(session: Session) -> None:
    Tuner(session.trainer()).scale_batch_size(Rated(), train_dataloaders=loader())


def _saving(session: Session, **options: Any) -> Any:
    return ModelCheckpoint(session.folder / "checkpoints", save_last=True, **options)


@life("resume from a file")
def _(session: Session) -> None:
    session.fit(callbacks=[_saving(session)], enable_checkpointing=True)
    session.fit(ckpt_path=session.folder / "checkpoints" / "last.ckpt", max_epochs=3)


@life("resume ckpt_path=last, within an epoch")
def _(session: Session) -> None:
    session.fit(callbacks=[_saving(session, every_n_train_steps=1)], enable_checkpointing=True, max_steps=4)
    session.fit(callbacks=[_saving(session)], enable_checkpointing=True, ckpt_path="last", max_epochs=2)


@life("fit twice")
def _(session: Session) -> None:
    module = Project()
    session.fit(module)
    session.fit(module, loader(24, seed=5))


@life("fit twice with one trainer")
def _(session: Session) -> None:
    module = Project()
    trainer = session.fit(module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader())
    session.keep_state(trainer, module)


class Evaluated(Project):
    """Has every step."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.logits(batch).sum(-1)


@life("validate, test, predict after fit")
def _(session: Session) -> None:
    module = Evaluated()
    trainer = session.fit(module, val=loader(16, seed=1))
    session.keep("validated", trainer.validate(module, loader(16, seed=1), verbose=False))
    session.keep("tested", trainer.test(module, loader(16, seed=2), verbose=False))
    session.keep("predicted", trainer.predict(module, loader(16, seed=3)))


@life("validate before fit, with the same trainer")
def _(session: Session) -> None:
    module, trainer = Evaluated(), session.trainer()
    session.keep("validated", trainer.validate(module, loader(16, seed=1), verbose=False))
    trainer.fit(module, loader())
    session.keep_state(trainer, module)


@life("evaluation alone")
def _(session: Session) -> None:
    module, trainer = Evaluated(), session.trainer()
    session.keep("tested", trainer.test(module, loader(16, seed=2), verbose=False))
    session.keep("predicted", trainer.predict(module, loader(16, seed=3)))


@life("test ckpt_path=best")
def _(session: Session) -> None:
    module = Evaluated()
    checkpoint = _saving(session, monitor="val_loss", mode="max")
    trainer = session.fit(module, val=loader(16, seed=1), callbacks=[checkpoint], enable_checkpointing=True)
    session.keep("tested", trainer.test(module, loader(16, seed=2), ckpt_path="best", verbose=False))


@life("load_from_checkpoint")
def _(session: Session) -> None:
    trainer = session.fit(callbacks=[_saving(session)], enable_checkpointing=True)
    trainer.strategy.barrier()
    module = Project.load_from_checkpoint(session.folder / "checkpoints" / "last.ckpt")
    session.keep("loaded", module.state_dict())


@life("save_checkpoint by hand, after and while fitting")
def _(session: Session) -> None:
    class Net(Project):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(session.folder / f"epoch{self.current_epoch}.ckpt")

    trainer = session.fit(Net())
    trainer.save_checkpoint(session.folder / "after.ckpt")
    trainer.save_checkpoint(session.folder / "weights.ckpt", weights_only=True)


@life("hooks of checkpoints")
def _(session: Session) -> None:
    class Net(Project):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = {"norm": checkpoint["state_dict"]["head.weight"].norm(), "epoch": self.current_epoch}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            session.keep("loaded", checkpoint["own"])

    session.fit(Net(), callbacks=[_saving(session)], enable_checkpointing=True)
    session.fit(Net(), ckpt_path=session.folder / "checkpoints" / "last.ckpt", max_epochs=3)


@life("weights loaded into the module before fit")
def _(session: Session) -> None:
    session.fit(callbacks=[_saving(session)], enable_checkpointing=True).strategy.barrier()
    module = Project()
    content = torch.load(session.folder / "checkpoints" / "last.ckpt", weights_only=False)
    module.load_state_dict(content["state_dict"])
    session.fit(module)


@life("configure_model")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            pl.LightningModule.__init__(self)

        def configure_model(self) -> None:
            if not hasattr(self, "embed"):
                inner = Project()
                for name, child in inner.named_children():
                    self.add_module(name, child)

    session.fit(Net(), val=loader(16, seed=1))


@life("a buffer that the step changes")
def _(session: Session) -> None:
    class Net(Project):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running", torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.running.mul_(0.9).add_(0.1 * loss.detach())
            self.log("running", self.running)
            return loss + 0.1 * loss * self.running

    session.fit(Net(), val=loader(16, seed=1))


@life("dropout", said="parts of a batch draw other dropout masks")
def _(session: Session) -> None:
    class Net(Project):
        def hidden(self, batch: Any) -> Any:
            return nn.functional.dropout(super().hidden(batch), 0.2, self.training)

    session.fit(Net(), val=loader(16, seed=1))
