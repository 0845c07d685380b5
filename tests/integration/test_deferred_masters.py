"""Modules without values have the master weights of modules with values, to the bit, and no device holds them all."""

from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy
from lightning_mist.model.initialization import InitialValues, deferred_construction, find_sources
from lightning_mist.runtime.recording import StorageMeter
from lightning_mist.strategy.planning import workflow
from tests.fits import ALL, make_trainer, plan
from tests.tiers import asked_for, tiered
from tests.workers import launched

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10 is refused")

LAYERS, ROWS, WIDTH, VOCABULARY = 4, 2, 48, 11
MOVED = {name: ratio for name, ratio in ALL.items() if name != "activations"}

WHOLE = {
    "": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1),
    "pipeline": plan([(2, [1]), (2, [0])], rows=ROWS, microbatches=2),
}
PLANS = {
    "zero0": WHOLE[""],
    **{f"zero{zero}": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=zero) for zero in (1, 2, 3)},
    **{
        f"moved{zero}": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=zero, offload=MOVED)
        for zero in range(4)
    },
    "some": plan([(LAYERS, [0, 1])], rows=ROWS, microbatches=1, zero=3, offload={"parameters": 0.4, "optimizer": 0.6}),
    "pipeline": WHOLE["pipeline"],
    "moved pipeline": plan([(2, [1]), (2, [0])], rows=ROWS, microbatches=2, offload=MOVED),
}
ALONE = plan([(LAYERS, [0])], rows=ROWS, microbatches=1, offload=MOVED)

LIMIT = 500_000
"""Bytes: more than all masters, and less than these and what is computed with."""

LARGEST = 4 * 4 * WIDTH * WIDTH
"""Bytes of the largest master."""


class Norm(nn.LayerNorm):
    """Stays in the type that it has."""

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)

    def forward(self, x):
        return super().forward(x.float()).type_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.base = Norm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.register_buffer("scale", torch.rand(WIDTH) / 3)

    def forward(self, x):
        inner = self.norm(x) * self.scale
        return x + self.down(F.gelu(self.base(inner) + self.up(inner)))


class Net(pl.LightningModule):
    """A tied weight, frozen ones, buffers, and norms that stay in single precision."""

    def __init__(self):
        super().__init__()
        self.make()
        self.losses = []

    def make(self):
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), batch[0].roll(1, 1).flatten())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Configured(Net):
    """Builds its layers where Lightning asks it to."""

    def make(self):
        pass

    def configure_model(self):
        if not hasattr(self, "embed"):
            with self.trainer.init_module(empty_init=True):
                super().make()

    @classmethod
    def of(cls, _):
        return cls()


class Metered(MistStrategy):
    """Meters what a device gets until training begins; what the user has built is in host memory."""

    def setup(self, trainer):
        self.meter = StorageMeter()
        for parameter in trainer.lightning_module.parameters():
            parameter.untyped_storage()._mist_is_host = True
        with self.meter:
            super().setup(trainer)
            self.peak, self.held = self.meter.peak_bytes, self.meter.current_bytes


def with_values(_):
    """The values that a module without values is given, in an ordinary module."""
    pl.seed_everything(3, verbose=False)
    with deferred_construction():
        source = Net()
    values = InitialValues(source, find_sources(source), seed=3, device=torch.device("cpu"))
    values.materialize(values.names)
    module = Net()
    module.load_state_dict(source.state_dict())
    return module


def without_values(trainer):
    with trainer.init_module(empty_init=True):
        return Net()


def fit(folder, made, build=with_values, *, limit=None, epochs=1, resumed=None):
    """Losses of this rank, what rank 0 has saved and where, and bytes of the device before training."""
    strategy = Metered(plan=made, master_weights=True, memory_limit=limit, profile_directory=str(folder))
    trainer = make_trainer(
        strategy,
        precision="bf16-true",
        max_epochs=epochs,
        limit_val_batches=0,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)],
        default_root_dir=folder,
    )
    pl.seed_everything(3, verbose=False)
    module = build(trainer)
    rows = torch.randint(0, VOCABULARY, (3 * ROWS, 6), generator=torch.Generator().manual_seed(trainer.global_rank))
    # What plans need is not asked, which would take longer than all the rest.
    with mock.patch.object(workflow, "_estimate", return_value=None):
        trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=ROWS), ckpt_path=resumed)
    path = folder / f"epoch={epochs - 1}.ckpt"
    saved = torch.load(path, weights_only=True)
    weights = {name: (value.dtype, value.float().numpy()) for name, value in saved["state_dict"].items()}
    return {"losses": module.losses, "weights": weights, "path": path, "peak": strategy.peak, "held": strategy.held}


def on_two(names, folder):
    """What a rank sees of all fits."""
    wanted = {name: fit(folder / f"whole {name}", made, epochs=2) for name, made in WHOLE.items()}
    found = {"wanted": wanted}
    for name in names:
        place, made = folder / name, PLANS[name]
        whole = wanted["pipeline" if "pipeline" in name else ""]
        first = fit(place, made, without_values)
        # Goes on from what a module with values has saved, and a module with values from what it has saved.
        second = fit(place / "there", made, Configured.of, epochs=2, resumed=whole["path"].with_name("epoch=0.ckpt"))
        back = fit(place / "back", made, epochs=2, resumed=first["path"])
        found[name] = [first, second, back]
    return {**found, "large": fit(folder / "large", PLANS["moved2"], limit=LIMIT)}


def alone(folder):
    """The same of one process."""
    ways = {"whole": (with_values, None), "empty": (without_values, LIMIT), "large": (with_values, LIMIT)}
    return [fit(folder / name, ALONE, build, limit=limit) for name, (build, limit) in ways.items()]


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    return launched(on_two, asked_for(request, "name"), tmp_path_factory.mktemp("masters"))


def same(found, wanted, *, last=3):
    """Whether training was the same to the bit."""
    assert found["losses"] == wanted["losses"][-last:]
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, (dtype, value) in wanted["weights"].items():
        assert found["weights"][name][0] is dtype, name
        assert (found["weights"][name][1] == value).all(), name


@pytest.mark.parametrize("name", tiered(PLANS, ("moved1", "moved pipeline")))
def test_training_is_that_of_a_module_with_values(ranks, name):
    for rank in ranks:
        wanted = rank["wanted"]["pipeline" if "pipeline" in name else ""]
        first, second, back = rank[name]
        assert first["losses"] == wanted["losses"][:3]
        same(second, wanted)
        same(back, wanted)
        assert {str(dtype) for dtype, _ in first["weights"].values()} == {"torch.float32", "torch.bfloat16"}
        # One parameter where its values are made, and one on the device.
        for found in (first, second):
            assert found["peak"] <= found["held"] + 2 * LARGEST, found
        if name == "moved1":
            assert first["held"] < LARGEST / 8


def test_a_module_with_values_that_no_device_holds_with_its_masters(ranks):
    for rank in ranks:
        assert rank["large"]["losses"] == rank["wanted"][""]["losses"][:3]
        assert rank["large"]["peak"] <= rank["large"]["held"] + 2 * LARGEST < LIMIT / 2


def test_one_device_with_everything_in_host_memory(tmp_path):
    wanted, *found = launched(alone, tmp_path, world=1)[0]
    for item in found:
        same(item, wanted)
        assert item["peak"] <= item["held"] + 2 * LARGEST
        assert item["held"] < LARGEST / 8
