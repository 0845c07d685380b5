"""Fits that save after each epoch, and fits that go on from there under another plan, with the same samples.

One loader feeds all ranks, so that a step sees the same rows in a world of any size.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.parity.plans import Group, Layout, make_plan
from lightning_mist import MistStrategy
from lightning_mist.plan import OffloadRatios
from tests import zoo

ROWS, LAYERS, EPOCHS, STEPS = 4, 4, 2, 3
"""Rows of a batch, layers of the model, epochs, and steps of each."""

_STATE = OffloadRatios(optimizer=1.0)
_ALL = OffloadRatios(parameters=1.0, gradients=1.0, optimizer=1.0, activations=1.0)


def _layout(*groups: Group, **options: Any) -> Layout:
    return Layout(groups=groups, loaders=1, **options)


LAYOUTS: dict[str, Layout] = {
    "plain": _layout(Group()),
    "one device, all offloaded": _layout(Group(offload=_ALL), parts=2),
    "dp 2, ZeRO 0": _layout(Group(dp=2)),
    "dp 2, ZeRO 1": _layout(Group(dp=2, zero=1)),
    "dp 2, ZeRO 2": _layout(Group(dp=2, zero=2), parts=2),
    "dp 2, ZeRO 3": _layout(Group(dp=2, zero=3, checkpointed=1)),
    "dp 2, ZeRO 3, all offloaded": _layout(Group(dp=2, zero=3, offload=_ALL)),
    "dp 2, ZeRO 1, state offloaded": _layout(Group(dp=2, zero=1, offload=_STATE)),
    "tp 2": _layout(Group(tp=2)),
    "pp 2": _layout(Group(), Group(), parts=2),
    "pp 2, zero bubble, all offloaded": _layout(Group(offload=_ALL), Group(offload=_ALL), schedule="zb-h1", parts=2),
    "pp 2, interleaved": _layout(Group(), Group(), schedule="interleaved-1f1b", chunks=2),
    "dp 4, ZeRO 3, HSDP 2 x 2": _layout(Group(dp=4, zero=3, shard=2)),
    "pp 2 x dp 2, ZeRO 2": _layout(Group(dp=2, zero=2), Group(dp=2, zero=2)),
    "pp 2 x tp 2, sequence": _layout(Group(tp=2, sequence=True), Group(tp=2, sequence=True)),
    "tp 2 x dp 2, ZeRO 3": _layout(Group(dp=2, tp=2, zero=3)),
    "stages (dp 2, ZeRO 3), (tp 2)": _layout(Group(dp=2, zero=3), Group(tp=2)),
}


def world_of(name: str) -> int:
    """How many processes a plan is for."""
    return sum(group.dp * group.tp for group in LAYOUTS[name].groups)


class Model(pl.LightningModule):
    """A small language model of the zoo, with a scheduler of the learning rate."""

    def __init__(self, network: str = "nano_even") -> None:
        super().__init__()
        self.network, _ = zoo.make(network)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The network's."""
        return {"loss": zoo.loss_of(self.network.training_step(batch, batch_idx))}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the loss down."""
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        """As users do: matrices decay, the rest does not."""
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def samples() -> TensorDataset:
    """Pairs of sequences of tokens."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(zoo.EVEN, (ROWS * STEPS, 9), generator=generator)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def quiet() -> None:
    """Say nothing of what Lightning and torch say of every fit."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def fit(
    name: str, folder: Path, *, saves_to: Path | None = None, resumes: Path | None = None, **options: Any
) -> list[float]:
    """Train under a plan; every rank of its world calls it.

    Args:
        folder: For what the strategy keeps.
        saves_to: Where a checkpoint is written after the first epoch.
        resumes: A checkpoint to go on from.
        **options: Of the strategy.

    Returns:
        The loss of every step, and the norm of all weights at the end.
    """
    pl.seed_everything(2, verbose=False)
    # Before Lightning does it: checkpoints are loaded into the precision that a module has.
    module = Model().double()
    saves = pl.callbacks.ModelCheckpoint(
        dirpath=None if saves_to is None else saves_to.parent,
        filename=None if saves_to is None else saves_to.stem,
        monitor="epoch",  # the first is the best
        mode="min",
        enable_version_counter=False,
    )
    strategy = MistStrategy(
        plan=make_plan(LAYOUTS[name], LAYERS, rows=ROWS),
        data_parallel_size=1,
        profile_directory=str(folder),
        self_check=False,
        **options,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_of(name),
        precision="64-true",
        max_epochs=EPOCHS,
        gradient_clip_val=0.3,
        logger=False,
        callbacks=None if saves_to is None else [saves],
        enable_checkpointing=saves_to is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(samples(), batch_size=ROWS), ckpt_path=resumes)
    with torch.no_grad():
        norm = torch.linalg.vector_norm(torch.cat([parameter.flatten() for parameter in module.parameters()]))
    return [*module.losses, float(norm)]
