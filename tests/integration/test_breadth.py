"""What projects do besides plain steps gives under plans what it gives under DDP."""

import importlib.util
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from tests.fits import ALL, Project, Tokens, make_trainer, mist, plan
from tests.tiers import asked_for
from tests.workers import launched

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
    trainer = make_trainer(
        strategy,
        limit_val_batches=0,
        callbacks=[record, *options.pop("more", ())],
        default_root_dir=folder,
        **limits,
        **options,
    )
    module = make()
    trainer.fit(module, DataLoader(Tokens(ROWS, 0), batch_size=4), **fit_options)
    weights = {name: float(p.double().pow(2).sum()) for name, p in module.named_parameters()}
    return trainer, {"losses": record.losses, "rates": record.rates, "scales": record.scales, "weights": weights}


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
        trainer = make_trainer(
            "ddp" if name == "ddp" else mist(folder, given),
            max_steps=2,
            limit_val_batches=0,
            callbacks=[record],
            default_root_dir=folder,
        )
        with trainer.init_module(empty_init=name == "without values"):
            model = module.Llama(layers=2, width=32)
        trainer.fit(model, module.Sources(length=16, batch_size=2))
        found[name] = record.losses
    return found


def seen(out, names):
    """What a rank sees of all of them."""
    results = {"mid-epoch": in_mid_epoch(out), "example": example(out)}
    for name in names:
        make, given, options = CASES[name]
        results[name] = {
            "ddp": fit("ddp", make, out / name, options())[1],
            "mist": fit(mist(out / name, given), make, out / name, options())[1],
        }
    return results


pytestmark = pytest.mark.thorough  # the table of uses in docs/uses.md is of all of these


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    return launched(seen, tmp_path_factory.mktemp("breadth"), asked_for(request, "name"))


def assert_same(found, wanted, *, steps):
    assert len(found["losses"]) == steps
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-4, abs=1e-7)
    assert found["rates"] == wanted["rates"]
    assert found["scales"] == wanted["scales"]


@pytest.mark.parametrize("name", [*CASES])
def test_it_is_as_under_ddp(ranks, name):
    for rank in ranks:
        assert_same(rank[name]["mist"], rank[name]["ddp"], steps=18)


def test_each_case_does_what_it_is_there_for(ranks):
    for rank in ranks:
        scales = rank["scaler"]["mist"]["scales"]
        assert scales[1] < scales[0], "no gradient overflowed"
        assert max(scales[5:]) > min(scales), "the scale never grew"
        assert len(set(rank["plateau"]["mist"]["rates"])) == 2
        assert rank["accumulation schedule"]["mist"]["losses"] != rank["plateau"]["mist"]["losses"]
        first = rank["frozen"]["mist"]["weights"]
        assert first["embed.weight"] != pytest.approx(rank["plateau"]["mist"]["weights"]["embed.weight"], rel=1e-6)


def test_a_fit_goes_on_within_an_epoch_from_a_checkpoint_saved_after_the_fit(ranks):
    for rank in ranks:
        found = rank["mid-epoch"]
        assert_same(found["mist"], found["ddp"], steps=9)
        # Each went on from the other's checkpoint: the optimizer's whole state was in both.
        assert_same(found["mist goes on"], found["ddp goes on"], steps=len(found["ddp goes on"]["losses"]))
        assert len(found["mist goes on"]["losses"]) >= 6


def test_the_llama_example_trains(ranks):
    for rank in ranks:
        found = rank["example"]
        assert len(found["mist"]) == 2
        assert found["mist"] == pytest.approx(found["ddp"], abs=1e-5)
        # Built without values it starts from other random numbers of the same kind.
        assert found["without values"] != found["mist"]
        assert found["without values"] == pytest.approx(found["ddp"], rel=0.1)
