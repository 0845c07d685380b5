"""An error that a program catches is not final, and ranks that come apart do not wait for each other."""

import json
import os
import time

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.faults.worlds import HARM, run_worlds
from lightning_mist.strategy.training.engine import Engine
from tests.fits import make_trainer, mist
from tests.machine import assume_profile
from tests.tiers import asked_for, tiered
from tests.traps.project import LAYERS, PLANS, Block, Project, Rows, loader
from tests.workers import apart


class Pruned(Exception):
    """As Optuna's, with something in it."""

    def __init__(self, trial, why):
        super().__init__(trial, why)
        self.trial = trial


def rank():
    return int(os.environ["LOCAL_RANK"])


class Fails(Project):
    """Raises in the fourth batch, on all ranks."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise RuntimeError("DefaultCPUAllocator: not enough")
        return super().training_step(batch, batch_idx)


class FailsOn(Callback):
    """Raises before the fourth batch on some ranks; others are slow there."""

    def __init__(self, *ranks, seconds=0.0):
        self.ranks, self.seconds = ranks, seconds

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3 and rank() in self.ranks:
            raise RuntimeError("DefaultCPUAllocator: not enough")
        if batch_idx == 3:
            time.sleep(self.seconds)


class Prunes(Callback):
    """Raises behind the validation of some ranks."""

    def __init__(self, *ranks):
        self.ranks = ranks

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking and rank() in self.ranks:
            raise Pruned(7, "too slow")


class FailsInSetup(Callback):
    def setup(self, trainer, module, stage):
        if rank() == 1:
            raise Pruned(7, "no data")


class Late(Project):
    """Gets its blocks when its strategy asks for them, without values under one that gives these later."""

    def __init__(self):
        super().__init__()
        del self.blocks
        self.float()

    def configure_model(self):
        if not hasattr(self, "blocks"):
            with self.trainer.init_module(empty_init=True):
                self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)


def uneven(rows):
    """As many rows of four for this rank as are given, without a sampler that evens them out."""
    return DataLoader(Rows(rows), batch_size=4)


class Watch:
    """What a logger of rank 0 does with ``watch``: hooks on modules of that rank only."""

    def __init__(self, which, reads="outputs", everywhere=False):
        self.which, self.reads, self.everywhere, self.seen = which, reads, everywhere, []

    def __call__(self, module):
        if rank() == 0 or self.everywhere:
            for part in self.which(module):
                part.register_forward_hook(self.look)

    def look(self, part, given, output):
        if self.reads == "parameters":
            self.seen += [float(parameter.detach().norm()) for parameter in part.parameters()]
        else:
            self.seen.append(0.0 if output is None else float(output.detach().norm()))


def trainer_of(plan, folder, callbacks=(), **options):
    assume_profile(folder / "profiles", 2)
    strategy = "ddp_find_unused_parameters_true" if plan == "ddp" else mist(folder, PLANS[plan])
    return make_trainer(strategy, callbacks=list(callbacks), default_root_dir=folder, **({"max_epochs": 1} | options))


FAILING = {
    "all": [(Fails,)],
    "first": [(Project, FailsOn(0))],
    "last": [(Project, FailsOn(1))],
    "pruned": [(Project, Prunes(0, 1))],
    "pruned on one": [(Project, Prunes(0))],
    "again": [(Project, FailsOn(1)), (Project, FailsOn(0))],
    "setup": [(Project, FailsInSetup())],
    "slow": [(Project, FailsOn(1, seconds=13.0))],
    "same": [(Project, FailsOn(0, 1))],
    "same on one": [(Project, FailsOn(1))],
    "none": [],
}
"""Fits that fail before the one that trains."""


WATCHES = {
    "blocks": Watch(lambda module: module.blocks, "parameters"),
    "outputs": Watch(lambda module: module.blocks),
    "embed": Watch(lambda module: [module.embed], "parameters"),
    "parts": Watch(lambda module: [block.up for block in module.blocks]),
    "every": Watch(lambda module: module.modules()),
    "whole": Watch(lambda module: [module], everywhere=True),
}


def uneven_ends(plan, folder):
    """The data of the first rank end early; what ends the other, where DDP has a broken connection."""
    (folder / HARM).touch()
    trainer = trainer_of(plan, folder, use_distributed_sampler=False, num_sanity_val_steps=0)
    trainer.fit(Project(), uneven((16, 32)[rank()]))
    return {"steps": trainer.global_step}


def judged_afterwards(plan, folder):
    module, trainer = Late(), trainer_of(plan, folder)
    trainer.fit(module, loader())
    (folder / HARM).touch()
    return {"tested": trainer.test(module, loader(16, seed=1), verbose=False)}


def left_in_teardown(plan, folder):
    """The second rank fails in the next fit while the first is still in the teardown of the one before."""
    release = Engine.release_optimizers

    def late(engine, timeout):
        time.sleep(3 * (rank() == 0))
        return release(engine, timeout)

    Engine.release_optimizers = late
    trainer_of(plan, folder).fit(Project(), loader())
    (folder / HARM).touch()
    trainer_of(plan, folder, [FailsInSetup()]).fit(Project(), loader())
    return {}


OTHERS = {"uneven": uneven_ends, "tested": judged_afterwards, "teardown": left_in_teardown}


def run(name, folder):
    case, plan = name.split("/")
    if case in OTHERS:
        pl.seed_everything(3, verbose=False)
        (folder / f"rank{rank()}.json").write_text(json.dumps(OTHERS[case](plan, folder)))
        return
    seen = {"errors": []}
    for trial in FAILING.get(case, []):
        pl.seed_everything(1, verbose=False)
        kind, *callbacks = trial
        module = kind()
        started = time.monotonic()
        try:
            trainer_of(plan, folder, callbacks).fit(module, loader(), loader(16, seed=1))
        except (RuntimeError, Pruned) as error:
            seconds = time.monotonic() - started
            seen["errors"].append([type(error).__name__, str(error), getattr(error, "trial", None), seconds])
    pl.seed_everything(3, verbose=False)
    module = module if "same" in case else Project()
    (folder / HARM).touch()
    trainer = trainer_of(plan, folder)
    watch = WATCHES.get(case, lambda module: None)
    watch(module)
    trainer.fit(module, loader(), loader(16, seed=1))
    seen["steps"] = trainer.global_step
    seen["weights"] = [value for weight in module.state_dict().values() for value in weight.flatten().tolist()]
    seen["looks"] = getattr(watch, "seen", [])
    (folder / f"rank{rank()}.json").write_text(json.dumps(seen))


def run_cases(names, folder):
    """How worlds, side by side, ended, and what each rank saw."""
    found = {}
    for name, fate in run_worlds(run, names, folder, jobs=2, seconds=90).items():
        files = [folder / name.replace("/", "_") / f"rank{number}.json" for number in range(2)]
        seen = [json.loads(file.read_text()) if file.exists() else None for file in files]
        found[name] = {"codes": list(fate.codes), "seconds": fate.seconds, "output": fate.output, "seen": seen}
    return found


EACH = ("plain", "zero1", "zero3", "pp2", "tp2")
TRIALS = [f"{case}/{plan}" for case in ("all", "first", "last", "pruned", "pruned on one", "setup") for plan in EACH]
TRIALS += ["again/pp2", "again/zero3", "first/auto", "slow/plain", "slow/pp2", "same/zero1", "same/plain"]
FIRST_TRIALS = ("last/plain", "all/pp2")

REFUSED = {
    "parts/zero3": "modules have hooks on some ranks only",
    "blocks/zero3": "modules have hooks on some ranks only",
    "embed/tp2": "modules have hooks on some ranks only",
    "whole/zero1": "a hook on the LightningModule itself",
    "whole/zero3": "a hook on the LightningModule itself",
    "same/tp2": "the parameters of the module on rank 0 have no values",
    "same/pp2": "the parameters of the module on rank 0 have no values",
    "same on one/zero3": "the parameters of the module on rank 0 have no values",
}
"""What would wait or train wrongly is refused on all ranks."""

WATCHED = ("outputs/zero1", "whole/plain", "every/auto")
APART = ("uneven/plain", "uneven/zero1", "uneven/zero3", "uneven/pp2", "uneven/tp2")
TEARDOWN = ("teardown/pp2", "teardown/zero1")
TESTED = ("tested/tp2", "tested/zero3", "tested/pp2")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    names = asked_for(request, "name")
    names = [*dict.fromkeys([*names, *(name for wanted in names for name in beside(wanted))])]
    return apart(run_cases, names, tmp_path_factory.mktemp("caught"), seconds=1500)


def beside(name):
    """What a world is compared with."""
    case, _ = name.split("/")
    if name in TRIALS:
        return ["same/ddp"] if case == "same" else ["none/ddp"]
    return [f"{case}/ddp"] if name in WATCHED else []


def trained(found, name):
    assert found[name]["codes"] == [0, 0], found[name]["output"][-3000:]
    for seen, wanted in zip(found[name]["seen"], found[beside(name)[0]]["seen"], strict=True):
        assert seen["steps"] == wanted["steps"]
        assert seen["weights"] == pytest.approx(wanted["weights"], rel=1e-9, abs=1e-9)
        assert seen["looks"] == pytest.approx(wanted["looks"], rel=1e-9)
    return found[name]["seen"]


@pytest.mark.parametrize("name", tiered(TRIALS, FIRST_TRIALS))
def test_a_fit_that_follows_a_caught_error_trains(found, name):
    case, _ = name.split("/")
    for number, seen in enumerate(trained(found, name)):
        may_be_over = case == "pruned on one" and number == 1  # where nothing waits behind the last validation
        assert may_be_over or len(seen["errors"]) == len(FAILING[case])
        for kind, text, trial, seconds in seen["errors"]:
            is_pruned = "pruned" in case or case == "setup"
            assert (kind, trial) == (("Pruned", 7) if is_pruned else ("RuntimeError", None))
            assert ("too slow" if "pruned" in case else "no data" if case == "setup" else "not enough") in text
            if case in ("first", "last"):
                other = 0 if case == "first" else 1
                assert (f"rank {other} failed, and rank {number} waited for it" in text) == (number != other)
            assert seconds < 60


@pytest.mark.parametrize("name", tiered(WATCHED, ()))
def test_what_a_logger_of_one_rank_watches_is_as_under_ddp(found, name):
    trained(found, name)


@pytest.mark.parametrize("name", tiered(tuple(REFUSED), ("parts/zero3",)))
def test_what_ranks_do_not_agree_on_is_refused(found, name):
    assert found[name]["codes"] == [1, 1]
    assert REFUSED[name] in found[name]["output"]


@pytest.mark.parametrize("name", tiered(APART, ("uneven/plain",)))
def test_ranks_whose_data_end_apart_end_soon(found, name):
    assert None not in found[name]["codes"]
    assert any(found[name]["codes"])
    assert found[name]["seconds"] < 40


@pytest.mark.parametrize("name", tiered(TEARDOWN, ()))
def test_a_rank_that_fails_while_another_is_in_the_teardown_before_ends_it(found, name):
    assert found[name]["codes"] == [1, 1]
    assert "rank 1 failed, and rank 0 waited for it: Pruned" in found[name]["output"].replace(f"{__name__}.", "")


@pytest.mark.parametrize("name", tiered(TESTED, ("tested/tp2",)))
def test_a_module_whose_values_came_late_is_tested_after_its_fit(found, name):
    assert found[name]["codes"] == [0, 0], found[name]["output"][-3000:]
    first, second = found[name]["seen"]
    assert first == second
    assert first["tested"][0]["test_loss"] > 0
