"""Master weights under Lightning, in two processes: as the same arithmetic in one, to the bit, for twenty steps."""

import math
import os
from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.parity.plans import Group, Layout
from lightning_mist import MistStrategy
from lightning_mist.model import find_blocks
from lightning_mist.plan import OffloadRatios
from tests import zoo
from tests.fits import make_trainer
from tests.integration.masters import train_alone
from tests.integration.parity import MAX_NORM, cast, make_optimizer, map_of
from tests.integration.test_curves import LAYOUTS, ROWS, plan
from tests.tiers import asked_for, tiered
from tests.workers import launched

STEPS, DECAY = 10, 0.75

SOME = OffloadRatios(parameters=0.5, gradients=0.3, optimizer=0.8)
ALL = OffloadRatios(parameters=1.0, gradients=1.0, optimizer=1.0)

LAYOUTS = {
    **LAYOUTS,
    "ddp": Layout(groups=(Group(dp=2),)),
    "zero1": Layout(groups=(Group(dp=2, zero=1),)),
    "moved0": Layout(groups=(Group(dp=2, offload=OffloadRatios(optimizer=0.5)),)),
    "moved1": Layout(groups=(Group(dp=2, zero=1, offload=SOME),)),
    "moved3": Layout(groups=(Group(dp=2, zero=3, offload=ALL),)),
}


class Average(pl.Callback):
    """An exponential moving average of what the optimizer has updated, as user code keeps them."""

    def __init__(self):
        self.values = None

    def on_before_optimizer_step(self, trainer, module, optimizer):
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        module.types.add(("in hooks", *{str(p.dtype) for p in trained}, *{str(p.grad.dtype) for p in trained}))

    def on_train_batch_end(self, trainer, module, *_):
        now = {name: p.detach().clone() for name, p in module.model.named_parameters()}
        self.values = (
            now if self.values is None else {n: DECAY * v + (1 - DECAY) * now[n] for n, v in self.values.items()}
        )


class Project(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.make_batch = zoo.make("vit")
        self.losses, self.types = [], set()

    def training_step(self, batch, batch_idx):
        self.types.add(("in the step", *{str(p.dtype) for p in self.model.parameters()}))
        return zoo.loss_of(self.model.training_step(batch, batch_idx))

    def validation_step(self, batch, batch_idx):
        self.types.add(("in validation", *{str(p.dtype) for p in self.model.parameters()}))
        self.log("loss", zoo.loss_of(self.model.training_step(batch, batch_idx)), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return make_optimizer(self.model)


def project():
    pl.seed_everything(2, verbose=False)
    return Project()


def batches_of(rank, module):
    torch.manual_seed(100 + rank)
    return [module.make_batch(ROWS) for _ in range(STEPS)]


def max_norm_of(pair):
    """Norms of pieces add up in another order, and what rounds otherwise once is another number of 16 bits."""
    groups = [group for layout in pair.split(">") for group in LAYOUTS[layout].groups]
    return None if any(group.zero and group.dp > 1 for group in groups) else MAX_NORM


def fit(layout, folder, epochs, max_norm, callbacks=(), resumed=None):
    module = project()
    layers = len(find_blocks(module.model))
    made = plan(LAYOUTS[layout], layers)
    trainer = make_trainer(
        MistStrategy(plan=made, master_weights=True),
        precision="bf16-true",
        max_epochs=epochs,
        gradient_clip_val=max_norm,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
        default_root_dir=folder,
    )
    batches = batches_of(int(os.environ["RANK"]), module)
    trainer.fit(
        module, DataLoader(batches, batch_size=None), DataLoader(batches[:1], batch_size=None), ckpt_path=resumed
    )
    path = folder / f"{layout}-{epochs}.ckpt"
    trainer.save_checkpoint(path)
    return module, made, path


@cache
def where_it_can_be_cut():
    model, make_batch = zoo.make("vit")
    return map_of(model.to(torch.bfloat16), cast(make_batch(ROWS), torch.bfloat16))


def compared(pair, world, folder):
    first, _, second = pair.partition(">")
    average = Average()
    callbacks, max_norm = (average,) if first == "ddp" else (), max_norm_of(pair)
    if second:
        *_, path = fit(first, folder, 1, max_norm)
        module, made, path = fit(second, folder, 2, max_norm, resumed=path)
    else:
        module, made, path = fit(first, folder, 2, max_norm, callbacks)
    own = project()
    torch.set_default_dtype(torch.float32)
    every = [cast(batches_of(rank, own), torch.bfloat16) for rank in range(world)]
    steps = [list(batches) for batches in zip(*every, strict=True)] * 2
    seen = []
    module_map = where_it_can_be_cut()
    losses, masters, _ = train_alone(
        *(own.model, made, module_map, steps, torch.bfloat16, make_optimizer, seen.append), max_norm or math.inf
    )
    saved = torch.load(path, weights_only=True)
    off = {
        name: float((saved["state_dict"][f"model.{name}"] - value.detach()).abs().max())
        for name, value in masters.named_parameters()
    }
    wanted = None
    for now in seen:
        wanted = now if wanted is None else {n: DECAY * v + (1 - DECAY) * now[n] for n, v in wanted.items()}
    averages = average.values or wanted
    return {
        "losses": module.losses,
        "expected": [float(loss[int(os.environ["RANK"])]) for loss in losses][-len(module.losses) :],
        "off": max(off.values()),
        "average": max(float((averages[n] - v).abs().max()) for n, v in wanted.items()),
        "types": sorted(" ".join(item) for item in module.types),
        "saved": sorted({str(value.dtype) for value in saved["state_dict"].values()}),
    }


def every(pairs, folder):
    return {pair: compared(pair, int(os.environ["WORLD_SIZE"]), folder) for pair in pairs}


MOVING = ["moved0", "moved1", "ddp>moved3", "moved3>zero1", "moved1>moved0"]
PAIRS = ["ddp", "zero1", "zero2", "zero3", "two", "chunks", "split", "ddp>zero1", "zero2>zero3", *MOVING]
FIRST = ("ddp", "split", "ddp>zero1", "zero2>zero3", "ddp>moved3", "moved1>moved0")


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    return launched(every, asked_for(request, "pair"), tmp_path_factory.mktemp("masters"))


@pytest.mark.parametrize("pair", tiered(PAIRS, FIRST))
def test_twenty_steps_checkpoints_and_averages(ranks, pair):
    for rank in ranks:
        found = rank[pair]
        assert found["losses"] == found["expected"]
        assert found["off"] == 0.0
        assert found["average"] == 0.0
        assert found["saved"] == ["torch.float32"]
        assert {"in the step torch.bfloat16", "in validation torch.bfloat16"} <= set(found["types"])


def test_hooks_see_masters_and_their_gradients(ranks):
    if "ddp" in ranks[0]:
        assert "in hooks torch.float32 torch.float32" in ranks[0]["ddp"]["types"]
