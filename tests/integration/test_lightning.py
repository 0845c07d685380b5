"""An unmodified project under DDP and under mist: the same losses, metrics, files and weights."""

import os

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_mist import MistStrategy
from tests.fits import ALL, Project, Tokens, make_trainer, mist, plan
from tests.machine import assume_profile
from tests.tiers import asked_for, tiered
from tests.workers import launched

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
RESUMED = ("auto", "plain", "moved", "moved3", "zero2", "zero3", "tensor", "tied", "accumulate")
RESUMED += ("grid3", "hybrid", "hybrid2", "hybrid3", "tensor_grid", "uneven")
"""Those whose checkpoints the other strategy goes on from: each way to hold parameters and the optimizer's state."""

FEW = ("auto", "tensor", "moved")
NAMES = tiered(CASES, FEW)


class Losses(Callback):
    def __init__(self):
        self.losses, self.extras = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.extras.append(float(outputs["accuracy"]))


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
    made = make_trainer(
        strategy,
        max_epochs=epochs,
        logger=CSVLogger(folder, name="", version=0),
        callbacks=[losses, checkpoint, LearningRateMonitor(), EarlyStopping("val_loss", patience=5)],
        enable_checkpointing=True,
        default_root_dir=folder,
        log_every_n_steps=1,
        **case.get("trainer", {}),
    )
    # 46 rows for each rank: the last batch of an epoch is smaller than the others.
    train = DataLoader(Tokens(46 * made.world_size, 0), batch_size=4, shuffle=True)
    validation = DataLoader(Tokens(10 * made.world_size, 1), batch_size=4)
    module = Project(**case.get("model", {}))
    made.fit(module, train, validation, ckpt_path=ckpt_path)
    last, is_first = folder / "checkpoints" / "last.ckpt", made.is_global_zero
    return {
        "losses": losses.losses,
        "extras": losses.extras,
        "metrics": {name: float(value) for name, value in sorted(made.callback_metrics.items())},
        "csv": next(folder.rglob("metrics.csv")).read_text() if is_first else "",
        "weights": {name: float(value.double().pow(2).sum()) for name, value in module.state_dict().items()},
        "last": str(last),
        "layout": layout(torch.load(last, weights_only=False)) if is_first else {},
        "report": made.strategy.report.timed_steps if isinstance(made.strategy, MistStrategy) else None,
    }


def both(out, names, resumed):
    """What a rank sees of cases under DDP and under plans, and where each goes on from the other's checkpoint."""
    if "auto" not in names:  # The machine is measured by two processes.
        assume_profile(out / "profiles", int(os.environ["WORLD_SIZE"]))
    results = {}
    for name in names:
        case = CASES[name]

        def ours(folder, case=case):
            return mist(folder, case["plan"], profile_directory=str(out / "profiles"))

        ddp = fit("ddp", case, out / name / "ddp")
        own = fit(ours(out / name / "mist"), case, out / name / "mist")
        results[name] = {"ddp": ddp, "mist": own}
        if name in resumed:  # for one more epoch
            from_ddp = fit(ours(out / name / "a"), case, out / name / "a", ckpt_path=ddp["last"], epochs=3)
            from_mist = fit("ddp", case, out / name / "b", ckpt_path=own["last"], epochs=3)
            results[name] |= {"mist_from_ddp": from_ddp, "ddp_from_mist": from_mist}
    return results


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    names, resumed = asked_for(request, "name"), asked_for(request, "name", test="goes_on")
    return {
        size: launched(both, tmp_path_factory.mktemp("equality"), asked, resumed, world=size)
        for size, cases in ((2, TWO), (4, FOUR))
        if (asked := [name for name in names if name in cases])
    }


def ranks(results, name):
    return results[2 if name in TWO else 4]


def tolerance(name):
    return CASES[name].get("tolerance", 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_sees_ddps_losses_for_its_own_batches(results, name):
    for rank in ranks(results, name):
        ddp, mist = rank[name]["ddp"], rank[name]["mist"]
        assert len(ddp["losses"]) >= 20
        assert mist["losses"] == pytest.approx(ddp["losses"], rel=tolerance(name))
        assert mist["extras"] == pytest.approx(ddp["extras"], rel=tolerance(name), abs=tolerance(name) * 10)


@pytest.mark.parametrize("name", NAMES)
def test_callback_metrics_and_weights_are_ddps_on_every_rank(results, name):
    for rank in ranks(results, name):
        ddp, mist = rank[name]["ddp"], rank[name]["mist"]
        assert mist["metrics"] == pytest.approx(ddp["metrics"], rel=tolerance(name), abs=tolerance(name) * 10)
        assert mist["weights"] == pytest.approx(ddp["weights"], rel=max(1e-4, tolerance(name)))


@pytest.mark.parametrize("name", NAMES)
def test_the_log_file_has_ddps_rows(results, name):
    ddp, mist = (ranks(results, name)[0][name][kind]["csv"].splitlines() for kind in ("ddp", "mist"))
    assert mist[0].split(",") == ddp[0].split(",")
    assert len(mist) == len(ddp)
    for left, right in zip(mist[1:], ddp[1:], strict=True):
        for a, b in zip(left.split(","), right.split(","), strict=True):
            assert (a == b == "") or float(a) == pytest.approx(float(b), rel=tolerance(name), abs=tolerance(name) * 10)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_has_ddps_layout(results, name):
    """The same entries in the same places, of the same shapes: paths of files apart."""
    mist, ddp = (
        {
            key: text
            for key, text in ranks(results, name)[0][name][kind]["layout"].items()
            if "ModelCheckpoint" not in key
        }
        for kind in ("mist", "ddp")
    )
    assert any(key.startswith("/optimizer_states/0/state/0/") for key in ddp)
    assert mist == ddp


@pytest.mark.parametrize("name", tiered(RESUMED, ("tensor",)))
def test_each_goes_on_from_the_others_checkpoint(results, name):
    for rank in ranks(results, name):
        resumed, other = rank[name]["mist_from_ddp"], rank[name]["ddp_from_mist"]
        assert len(resumed["losses"]) == len(other["losses"]) > 0
        assert resumed["losses"] == pytest.approx(other["losses"], rel=max(1e-4, tolerance(name)))


@pytest.mark.parametrize("name", NAMES)
def test_predicted_is_compared_with_measured(results, name):
    assert ranks(results, name)[0][name]["mist"]["report"] > 0
