"""Loss curves of real architectures: twenty optimizer steps under mist are those under DDP, on every rank."""

import os
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.parity.plans import Group, Layout, make_plan
from lightning_mist import MistStrategy
from lightning_mist.model import find_blocks
from tests import zoo
from tests.fits import make_trainer
from tests.tiers import asked_for
from tests.workers import launched

STEPS, ROWS = 20, 4

LAYOUTS = {
    "two": Layout(groups=(Group(), Group())),
    "split": Layout(groups=(Group(checkpointed=1), Group(checkpointed=1)), parts=2),
    "sharded": Layout(groups=(Group(dp=2, zero=1),)),
    "zero2": Layout(groups=(Group(dp=2, zero=2),), parts=2),
    "zero3": Layout(groups=(Group(dp=2, zero=3, checkpointed=1),), parts=2),
    "tensor": Layout(groups=(Group(tp=2),)),
    "sequence": Layout(groups=(Group(tp=2, sequence=True, checkpointed=1),)),
    "chunks": Layout(groups=(Group(), Group()), schedule="interleaved-1f1b", chunks=2),
    "grid": Layout(groups=(Group(tp=2), Group(tp=2, sequence=True))),
    "mixed": Layout(groups=(Group(dp=2, zero=3), Group(tp=2))),
    "hybrid": Layout(groups=(Group(dp=4, zero=2, shard=2),), parts=2),
    "tensor and shards": Layout(groups=(Group(dp=2, tp=2, zero=3),)),
}


class Curve(pl.LightningModule):
    """Trains a model of the zoo as an ordinary Lightning project would."""

    def __init__(self, name):
        super().__init__()
        self.model, self.make_batch = zoo.make(name)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = zoo.loss_of(self.model.training_step(batch, batch_idx))
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, eps=1e-4)


def plan(layout, layers):
    """The layout's plan with rank 0 in the last stage, where the planner puts it too."""
    made = make_plan(layout, layers, rows=ROWS)
    last, world = len(made.stages[-1].devices), made.world_size

    def turned(mesh):
        return replace(mesh, devices=tuple((device + last) % world for device in mesh.devices))

    return replace(made, stages=tuple(replace(stage, mesh=turned(stage.mesh)) for stage in made.stages))


def fit(name, strategy, folder):
    pl.seed_everything(2, verbose=False)
    module = Curve(name)
    torch.manual_seed(100 + int(os.environ["RANK"]))
    batches = [module.make_batch(ROWS) for _ in range(STEPS)]
    trainer = make_trainer(
        strategy, max_steps=STEPS, gradient_clip_val=0.3, use_distributed_sampler=False, default_root_dir=folder
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.losses


def losses_of(pairs, folder):
    """Losses of this rank, by pair of a model and a layout."""
    results, ddp = {}, {}
    for pair in pairs:
        name, layout = pair.split(":")
        layers = len(find_blocks(zoo.make(name)[0]))
        mist = MistStrategy(plan=plan(LAYOUTS[layout], layers))
        if name not in ddp:
            ddp[name] = fit(name, "ddp", folder)
        results[pair] = {"ddp": ddp[name], "mist": fit(name, mist, folder)}
    return results


pytestmark = pytest.mark.thorough  # gradients and gloo have tests of their own in the first tier

TWO = ["gpt2:split", "llama:sharded", "bert:two", "vit:split", "demo:two", "nano:two", "gpt2:chunks", "llama:zero3"]
TWO += ["lora_llama:zero3", "gpt2_even:tensor", "llama_even:sequence", "lora_llama:tensor"]
FOUR = ["gpt2_even:grid", "llama_even:mixed", "gpt2:hybrid", "nano_even:tensor and shards"]


@pytest.fixture(scope="module")
def curves(request, tmp_path_factory):
    asked = asked_for(request, "pair")
    found = {}
    for size, pairs in ((2, TWO), (4, FOUR)):
        if pairs := [pair for pair in pairs if pair in asked]:
            ranks = launched(losses_of, pairs, tmp_path_factory.mktemp("curves"), world=size)
            found |= {pair: [rank[pair] for rank in ranks] for pair in pairs}
    return found


@pytest.mark.parametrize("pair", [*TWO, *FOUR])
def test_curves_are_ddps(curves, pair):
    for rank in curves[pair]:
        assert len(rank["ddp"]) == 20
        assert rank["ddp"][-1] < rank["ddp"][0] * 1.2
        assert rank["mist"] == pytest.approx(rank["ddp"], rel=1e-5)


def test_ranks_see_different_batches(curves):
    assert curves["gpt2:chunks"][0]["ddp"] != curves["gpt2:chunks"][1]["ddp"]
