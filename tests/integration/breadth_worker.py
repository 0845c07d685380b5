"""What Lightning projects do besides plain steps, under DDP and under plans, on two ranks; run by tests.ranks."""

import importlib.util
import json
import logging
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from lightning_mist import MistStrategy
from tests.fits import ALL, Project, Tokens, plan

PIPELINE = plan([(2, [1]), (2, [0])], rows=4, microbatches=2)
SHARDED = plan([(4, [0, 1])], rows=4, microbatches=1, zero=1, checkpointed=2)
MOVED = plan([(4, [0, 1])], rows=4, microbatches=1, zero=3, offload=ALL)
MOVED_STAGES = plan([(2, [1]), (2, [0])], rows=4, microbatches=2, offload=ALL)
ROWS = 48


class Plateau(Project):
    """Lowers its learning rate when the mean loss of an epoch does not fall; here it never falls enough."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss_epoch"}}


class Frozen(Project):
    """Trains neither its embedding nor its third block."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embed.requires_grad_(False)
        self.blocks[2].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


class Record(Callback):
    """Losses, learning rates and loss scales of every batch."""

    def __init__(self):
        self.losses, self.rates, self.scales = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(loss))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales.append(1.0 if scaler is None else scaler.get_scale())


def scaled():
    # The first scale overflows half precision, so the scaler lowers it until the gradients are finite.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=4)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


CASES = {
    "scaler": (Project, PIPELINE, scaled),
    "scaler sharded": (Project, SHARDED, scaled),
    "scaler moved": (Project, MOVED, lambda: {**scaled(), "gradient_clip_val": 0.3}),
    "scaler moved stages": (Project, MOVED_STAGES, scaled),
    "frozen moved": (Frozen, MOVED, dict),
    "plateau": (Plateau, PIPELINE, dict),
    "accumulation schedule": (
        Project,
        PIPELINE,
        lambda: {"more": [GradientAccumulationScheduler({0: 1, 1: 3})]},
    ),
    "frozen": (Frozen, PIPELINE, dict),
    "frozen sharded": (Frozen, SHARDED, dict),
    "dropout sharded": (lambda: Project(dropout=0.3), SHARDED, dict),
}


def fit(strategy, make, folder, options, **fit_options):
    pl.seed_everything(3, verbose=False)
    record, options = Record(), dict(options)
    limits = {"max_epochs": 3, **{k: options.pop(k) for k in ("max_steps",) if k in options}}
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        limit_val_batches=0,
        logger=False,
        callbacks=[record, *options.pop("more", ())],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **limits,
        **options,
    )
    module = make()
    trainer.fit(module, DataLoader(Tokens(ROWS, 0), batch_size=4), **fit_options)
    weights = {name: float(p.double().pow(2).sum()) for name, p in module.named_parameters()}
    return trainer, {"losses": record.losses, "rates": record.rates, "scales": record.scales, "weights": weights}


def mist(folder, given):
    return MistStrategy(plan=given, profile_directory=str(folder / "profiles"), plan_path=str(folder / "plan.json"))


def in_mid_epoch(folder):
    """Stop within the second epoch, and go on from there, under DDP and under a plan, from either's checkpoint."""
    found = {}
    for name in ("ddp", "mist"):
        strategy = "ddp" if name == "ddp" else mist(folder, PIPELINE)
        trainer, found[name] = fit(strategy, Project, folder, {"max_steps": 9})
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    for name, origin in (("ddp", "mist"), ("mist", "ddp")):
        strategy = "ddp" if name == "ddp" else mist(folder, PIPELINE)
        path = str(folder / f"{origin}.ckpt")
        _, found[f"{name} goes on"] = fit(strategy, Project, folder, {}, ckpt_path=path)
    return found


def example(folder):
    """Two steps of the Llama example, under DDP and under a plan, and under it built without values."""
    path = Path(__file__).parents[2] / "examples" / "hf_llama" / "train.py"
    spec = importlib.util.spec_from_file_location("hf_llama_train", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given, found = plan([(1, [1]), (1, [0])], rows=2, microbatches=2), {}
    for name in ("ddp", "mist", "without values"):
        pl.seed_everything(3, verbose=False)
        record = Record()
        trainer = pl.Trainer(
            strategy="ddp" if name == "ddp" else mist(folder, given),
            accelerator="cpu",
            devices=2,
            max_steps=2,
            limit_val_batches=0,
            logger=False,
            callbacks=[record],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        with trainer.init_module(empty_init=name == "without values"):
            model = module.Llama(layers=2, width=32)
        trainer.fit(model, module.Sources(length=16, batch_size=2))
        found[name] = record.losses
    return found


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    out, results = Path(sys.argv[1]), {}
    for name in sys.argv[2:]:
        make, given, options = CASES[name]
        folder = out / name
        results[name] = {
            "ddp": fit("ddp", make, folder, options())[1],
            "mist": fit(mist(folder, given), make, folder, options())[1],
        }
    results["mid-epoch"] = in_mid_epoch(out)
    results["example"] = example(out)
    (out / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
