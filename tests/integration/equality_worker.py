"""Trains small projects with DDP and with mist, one set of processes for all of them, and writes what happened.

Run by tests.ranks with the number of processes, a folder, names of cases, and ``name:resumed`` of those whose
checkpoints are gone on from as arguments.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_mist import Checkpointing, MistStrategy, Plan, StagePlan, ZeroStage
from lightning_mist.plan import OffloadRatios, StageMesh
from tests.machine import assume_profile

VOCABULARY, WIDTH, LENGTH, LAYERS = 31, 16, 10, 4


class Tokens(Dataset):
    def __init__(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        self.data = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return {"x": self.data[index, :-1], "y": self.data[index, 1:]}


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.mix, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.mix(x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None])
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Project(pl.LightningModule):
    def __init__(self, dropout=0.0, optimizer="adamw", tied=False):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def loss(self, batch):
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()), logits

    def training_step(self, batch, batch_idx):
        loss, logits = self.loss(batch)
        accuracy = (logits.argmax(-1) == batch["y"]).float().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"accuracy": accuracy, "constant": 2.0}, on_epoch=True, on_step=False, sync_dist=True)
        self.log("tokens", float(batch["x"].numel()), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "accuracy": accuracy.detach()}

    def validation_step(self, batch, batch_idx):
        loss, _ = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim >= 2]
        rest = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        if self.hparams.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Losses(Callback):
    def __init__(self):
        self.losses, self.extras = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.extras.append(float(outputs["accuracy"]))


def plan(layout, *, rows, microbatches, zero=0, checkpointed=0, tensor=1, context=1, offload=None, shard=None):
    """A plan from ``[(layers, devices), ...]``; batches of ``rows`` rows per rank.

    Stages of fewer devices than ``tensor`` are not split.
    """
    world = sum(len(devices) for _, devices in layout)
    stages, first = [], 0
    for layers, devices in layout:
        width = tensor if len(devices) % tensor == 0 else 1
        degree = len(devices) // width // context
        stages.append(
            StagePlan(
                layers=(first, first + layers),
                mesh=StageMesh(
                    devices=tuple(devices),
                    data_parallel_degree=degree,
                    tensor_parallel_degree=width,
                    context_parallel_degree=context,
                    shard_degree=shard,
                ),
                microbatch_size=rows * world // (microbatches * degree),
                zero_stage=ZeroStage(zero if degree * context > 1 else 0),
                checkpointing=Checkpointing(layers=min(checkpointed, layers)),
                offload=OffloadRatios(**(offload or {})),
            )
        )
        first += layers
    return Plan(global_batch_size=rows * world, num_microbatches=microbatches, stages=tuple(stages))


ALL = {"parameters": 1.0, "gradients": 1.0, "optimizer": 1.0, "activations": 1.0}
SOME = {"parameters": 0.3, "gradients": 0.3, "optimizer": 0.3, "activations": 0.3}

TWO = {
    "auto": {"plan": "auto"},
    "plain": {"plan": plan([(4, [0, 1])], rows=4, microbatches=1)},
    "split": {"plan": plan([(4, [0, 1])], rows=4, microbatches=2, zero=1, checkpointed=2)},
    "zero2": {
        "plan": plan([(4, [0, 1])], rows=4, microbatches=2, zero=2),
        "trainer": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
    },
    "zero3": {
        "plan": plan([(4, [0, 1])], rows=4, microbatches=2, zero=3, checkpointed=1),
        "trainer": {"gradient_clip_val": 0.3},
        "model": {"tied": True},
    },
    "tensor": {
        "plan": plan([(4, [0, 1])], rows=4, microbatches=2, tensor=2, checkpointed=1),
        "trainer": {"gradient_clip_val": 0.3},
    },
    "dropout": {"plan": plan([(1, [1]), (3, [0])], rows=4, microbatches=2, checkpointed=1), "model": {"dropout": 0.2}},
    "tied": {"plan": plan([(3, [1]), (1, [0])], rows=4, microbatches=4), "model": {"tied": True}},
    "norm": {
        "plan": plan([(2, [1]), (2, [0])], rows=4, microbatches=2),
        "trainer": {"gradient_clip_val": 0.3},
        "model": {"tied": True},
    },
    "zero_norm": {"plan": plan([(4, [0, 1])], rows=4, microbatches=1, zero=1), "trainer": {"gradient_clip_val": 0.3}},
    "value": {
        "plan": plan([(2, [1]), (2, [0])], rows=4, microbatches=2),
        "trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    },
    "accumulate": {
        "plan": plan([(2, [1]), (2, [0])], rows=4, microbatches=2),
        "trainer": {"accumulate_grad_batches": 3},
        "model": {"optimizer": "sgd"},
    },
    "moved": {
        "plan": plan([(4, [0, 1])], rows=4, microbatches=1, zero=1, checkpointed=1, offload=ALL),
        "trainer": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
        "model": {"tied": True, "dropout": 0.2},
    },
    "moved3": {
        "plan": plan([(4, [0, 1])], rows=4, microbatches=2, zero=3, offload=SOME),
        "trainer": {"gradient_clip_val": 0.3},
    },
    "moved_stages": {
        "plan": plan([(2, [1]), (2, [0])], rows=4, microbatches=2, offload=ALL),
        "model": {"tied": True, "optimizer": "sgd"},
    },
    "moved_bf16": {
        "plan": plan([(4, [0, 1])], rows=4, microbatches=2, offload=ALL),
        "trainer": {"precision": "bf16-mixed"},
        "tolerance": 2e-2,
    },
    "bf16": {
        "plan": plan([(2, [1]), (2, [0])], rows=4, microbatches=2),
        "trainer": {"precision": "bf16-mixed"},
        "tolerance": 2e-2,
    },
}
FOUR = {
    "auto4": {"plan": "auto"},
    "grid": {"plan": plan([(2, [1, 3]), (2, [0, 2])], rows=4, microbatches=2, zero=1, checkpointed=1)},
    "grid3": {
        "plan": plan([(2, [1, 3]), (2, [0, 2])], rows=4, microbatches=2, zero=3, checkpointed=1),
        "trainer": {"gradient_clip_val": 0.3},
    },
    "hybrid": {
        "plan": plan([(4, [0, 1, 2, 3])], rows=4, microbatches=2, zero=1, shard=2),
        "trainer": {"accumulate_grad_batches": 2},
        "model": {"optimizer": "sgd"},
    },
    "hybrid2": {
        "plan": plan([(4, [0, 1, 2, 3])], rows=4, microbatches=2, zero=2, shard=2, offload=SOME),
        "trainer": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
    },
    "hybrid3": {
        "plan": plan([(4, [0, 1, 2, 3])], rows=4, microbatches=2, zero=3, checkpointed=1, shard=2),
        "trainer": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
        "model": {"tied": True},
    },
    "tensor_grid": {
        "plan": plan([(2, [2, 3]), (2, [0, 1])], rows=4, microbatches=4, tensor=2),
        "trainer": {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
        "model": {"dropout": 0.2},
    },
    "uneven": {
        "plan": plan([(1, [2, 3]), (1, [1]), (2, [0])], rows=4, microbatches=4, zero=1),
        "model": {"tied": True},
    },
}
CASES = TWO | FOUR
RESUMED = (
    "auto",
    "plain",
    "moved",
    "moved3",
    "zero2",
    "zero3",
    "tensor",
    "tied",
    "accumulate",
    "grid3",
    "hybrid",
    "hybrid2",
    "hybrid3",
    "tensor_grid",
    "uneven",
)
"""Those whose checkpoints the other strategy goes on from: each way to hold parameters and the optimizer's state."""


def layout(value, name=""):
    """What a checkpoint holds and where: types, shapes and hyper-parameters, without values of tensors."""
    if isinstance(value, torch.Tensor):
        return {name: f"{value.dtype} {tuple(value.shape)} {value.device.type}"}
    if isinstance(value, dict) and value:
        return {key: text for item in value for key, text in layout(value[item], f"{name}/{item}").items()}
    if isinstance(value, (list, tuple)) and value:
        items = enumerate(value)
        return {key: text for index, item in items for key, text in layout(item, f"{name}/{index}").items()}
    return {name: type(value).__name__ if isinstance(value, float) else repr(value)}


def fit(strategy, case, folder, *, ckpt_path=None, epochs=2):
    pl.seed_everything(3, verbose=False)
    losses = Losses()
    checkpoint = ModelCheckpoint(folder / "checkpoints", monitor="val_loss", save_last=True)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(sys.argv[1]),
        max_epochs=epochs,
        logger=CSVLogger(folder, name="", version=0),
        callbacks=[losses, checkpoint, LearningRateMonitor(), EarlyStopping("val_loss", patience=5)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
        **case.get("trainer", {}),
    )
    # 46 rows for each rank: the last batch of an epoch is smaller than the others.
    train = DataLoader(Tokens(46 * trainer.world_size, 0), batch_size=4, shuffle=True)
    validation = DataLoader(Tokens(10 * trainer.world_size, 1), batch_size=4)
    module = Project(**case.get("model", {}))
    trainer.fit(module, train, validation, ckpt_path=ckpt_path)
    weights = {name: float(value.double().pow(2).sum()) for name, value in module.state_dict().items()}
    return {
        "losses": losses.losses,
        "extras": losses.extras,
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "csv": next(folder.rglob("metrics.csv")).read_text() if trainer.is_global_zero else "",
        "weights": weights,
        "last": str(folder / "checkpoints" / "last.ckpt"),
        "layout": layout(torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False))
        if trainer.is_global_zero
        else {},
        "plan": None if not isinstance(trainer.strategy, MistStrategy) else len(trainer.strategy.plan.stages),
        "report": None if not isinstance(trainer.strategy, MistStrategy) else trainer.strategy.report.timed_steps,
    }


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    out, names = Path(sys.argv[2]), sys.argv[3:]
    if "auto" not in names:  # The machine is measured by two processes.
        assume_profile(out / "profiles", int(sys.argv[1]))
    results = {}
    for name in [name for name in names if name in CASES]:
        case = CASES[name]
        make = lambda folder, case=case: MistStrategy(  # noqa: E731
            plan=case["plan"], profile_directory=str(out / "profiles"), plan_path=str(folder / "plan.json")
        )
        ddp = fit("ddp", case, out / name / "ddp")
        mist = fit(make(out / name / "mist"), case, out / name / "mist")
        results[name] = {"ddp": ddp, "mist": mist}
        if f"{name}:resumed" in names:
            # Each goes on from the other's checkpoint for one more epoch.
            from_ddp = fit(make(out / name / "a"), case, out / name / "a", ckpt_path=ddp["last"], epochs=3)
            from_mist = fit("ddp", case, out / name / "b", ckpt_path=mist["last"], epochs=3)
            results[name] |= {"mist_from_ddp": from_ddp, "ddp_from_mist": from_mist}
    rank = torch.distributed.get_rank()
    (out / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
