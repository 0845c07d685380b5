"""Trains modules that were built without values, under several plans, and writes what happened;
run by tests.ranks."""

import json
import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_mist import MistStrategy
from lightning_mist.errors import MistError
from lightning_mist.model.initialization.construction import deferred_construction
from lightning_mist.model.initialization.initial_values import InitialValues, find_sources
from lightning_mist.plan import StageMesh
from lightning_mist.runtime.parameters.absent_parameters import at_work
from tests.fits import Project, Tokens, plan
from tests.machine import assume_profile

SEED = 3


def tensor_parallel():
    """Both ranks share every layer."""
    whole = plan([(4, [0, 1])], rows=4, microbatches=2)
    mesh = StageMesh(devices=(0, 1), data_parallel_degree=1, tensor_parallel_degree=2)
    return replace(whole, stages=(replace(whole.stages[0], mesh=mesh, microbatch_size=4),))


PIPELINE = plan([(2, [1]), (2, [0])], rows=4, microbatches=2)
PLANS = {
    "pipeline": PIPELINE,
    "zero": plan([(4, [0, 1])], rows=4, microbatches=1, zero=1),
    "zero3": plan([(4, [0, 1])], rows=4, microbatches=1, zero=3),
    "tensor": tensor_parallel(),
    "plain": plan([(4, [0, 1])], rows=4, microbatches=1),
    "auto": "auto",
}


class Configured(Project):
    """Builds its layers where Lightning asks it to."""

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.save_hyperparameters({"optimizer": "adamw"})

    def configure_model(self):
        if not hasattr(self, "embed"):
            with self.trainer.init_module(empty_init=True):
                inner = Project(tied=True)
            self.embed, self.blocks, self.head = inner.embed, inner.blocks, inner.head


class Laden(Project):
    """Its blocks carry frozen values, so that a stage that is trained needs less than the values of the whole."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.frozen = torch.nn.Parameter(torch.rand(256, 256), requires_grad=False)


class Held(Callback):
    """Losses, and bytes of parameters that this rank holds in the first step."""

    def __init__(self):
        self.losses, self.bytes = [], None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.bytes = getattr(trainer.strategy.accelerator, "held_bytes", None)


class Measured(MistStrategy):
    """Leaves with its accelerator how many bytes of parameters are held after the first step."""

    def optimizer_step(self, *args, **kwargs):
        output = super().optimizer_step(*args, **kwargs)
        if not hasattr(self.accelerator, "held_bytes"):
            with at_work():
                storages = [parameter.untyped_storage() for parameter in self.lightning_module.parameters()]
            self.accelerator.held_bytes = sum({item._cdata: item.nbytes() for item in storages}.values())
        return output


def make_trainer(strategy, folder, *, epochs=1, held=None, save=True, validates=False):
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        limit_val_batches=1.0 if validates else 0,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=[item for item in (held, ModelCheckpoint(folder, save_last=True) if save else None) if item],
        enable_checkpointing=save,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def loader():
    return DataLoader(Tokens(48, 0), batch_size=4)


def mist(folder, given, **options):
    return Measured(
        plan=given, profile_directory=str(folder / "profiles"), plan_path=str(folder / "plan.json"), **options
    )


def build(trainer, **options):
    with trainer.init_module(empty_init=True):
        return Project(**options)


def weights(module):
    return {name: float(p.double().pow(2).sum()) for name, p in module.named_parameters()}


def fit(trainer, module, **options):
    pl.seed_everything(SEED, verbose=False)
    trainer.fit(module, loader(), **options)


def with_ddp(folder, **options):
    """The same values in an ordinary module, trained by DDP."""
    pl.seed_everything(SEED, verbose=False)
    with deferred_construction():
        source = Project(**options)
    values = InitialValues(source, find_sources(source), seed=SEED, device=torch.device("cpu"))
    values.materialize(values.names)
    module, held = Project(**options), Held()
    module.load_state_dict(source.state_dict())
    trainer = make_trainer("ddp", folder, held=held)
    fit(trainer, module)
    again, later = Project(**options), Held()
    fit(make_trainer("ddp", folder / "resumed", epochs=2, held=later), again, ckpt_path=str(folder / "last.ckpt"))
    evaluation = make_trainer("ddp", folder, save=False, validates=True)
    validated = evaluation.validate(module, DataLoader(Tokens(8, 1), batch_size=4), verbose=False)
    return {"losses": held.losses, "later": later.losses, "weights": weights(module), "validated": validated}


def under_plan(name, folder):
    assume_profile(folder / "profiles", 2)
    pl.seed_everything(SEED, verbose=False)
    held, later = Held(), Held()
    trainer = make_trainer(mist(folder, PLANS[name]), folder, held=held)
    module = build(trainer)
    all_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    fit(trainer, module)
    result = {"losses": held.losses, "bytes": held.bytes, "all_bytes": all_bytes, "weights": weights(module)}
    try:
        module.state_dict()
        result["state"] = ""
    except MistError as error:
        result["state"] = str(error)
    if name == "pipeline":
        # Evaluation makes the module whole again on every rank, from rank 0's values; so does another fit.
        trainer.save_checkpoint(folder / "after.ckpt")
        evaluation = make_trainer(mist(folder, PLANS[name]), folder, save=False, validates=True)
        result["validated"] = evaluation.validate(module, DataLoader(Tokens(8, 1), batch_size=4), verbose=False)
        result["weights_then"] = weights(module)
    other = make_trainer(mist(folder, PLANS[name]), folder / "resumed", epochs=2, held=later)
    fit(other, build(other), ckpt_path=str(folder / "last.ckpt"))
    result["later"] = later.losses
    if name in ("pipeline", "plain"):
        result["refitted"] = refit(name, module, folder)
    return result


def refit(name, module, folder):
    again = Held()
    fit(make_trainer(mist(folder, PLANS[name]), folder / "again", held=again, save=False), module)
    return again.losses


def configured(folder):
    pl.seed_everything(SEED, verbose=False)
    held = Held()
    fit(make_trainer(mist(folder, PIPELINE), folder, held=held), Configured())
    return {"losses": held.losses, "bytes": held.bytes}


def too_large(folder):
    """An ordinary module whose parameters exceed the limit is kept in host memory, and rank 0's values count."""
    pl.seed_everything(SEED + torch.distributed.get_rank(), verbose=False)
    module, held = Laden(), Held()
    first = weights(module)
    values = [None, None]
    torch.distributed.all_gather_object(values, first)
    all_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    fit(make_trainer(mist(folder, PIPELINE, memory_limit=all_bytes - 1), folder, held=held, save=False), module)
    return {"losses": held.losses, "bytes": held.bytes, "all_bytes": all_bytes, "ranks_differ": values[0] != values[1]}


def nameless(folder):
    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Parameter(torch.zeros(3))

    with torch.device("meta"):
        module = Project()
        module.gate = Gate()
    try:
        fit(make_trainer(mist(folder, PIPELINE), folder, save=False), module)
    except MistError as error:
        return {"error": str(error)}
    return {"error": ""}


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    out = Path(sys.argv[1])
    results = {"ddp": with_ddp(out / "ddp"), "tied": with_ddp(out / "tied", tied=True)}
    for name in sys.argv[2:]:
        results[name] = under_plan(name, out / name)
    results["configured"] = configured(out / "configured")
    results["too_large"] = too_large(out / "too_large")
    results["nameless"] = nameless(out / "nameless")
    (out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
