"""Modules built without values train as DDP trains them with values, and no rank holds more than its part."""

import math
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_mist import MistStrategy
from lightning_mist.errors import MistError
from lightning_mist.model.initialization import InitialValues, deferred_construction, find_sources
from lightning_mist.plan import StageMesh
from lightning_mist.runtime.parameters.absent_parameters import at_work
from tests.fits import Project, Tokens, make_trainer, plan
from tests.machine import assume_profile
from tests.tiers import asked_for
from tests.workers import launched

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


def trainer_of(strategy, folder, *, epochs=1, held=None, save=True, validates=False):
    return make_trainer(
        strategy,
        max_epochs=epochs,
        limit_val_batches=1.0 if validates else 0,
        num_sanity_val_steps=0,
        callbacks=[item for item in (held, ModelCheckpoint(folder, save_last=True) if save else None) if item],
        enable_checkpointing=save,
        default_root_dir=folder,
    )


def loader():
    return DataLoader(Tokens(48, 0), batch_size=4)


def measured(folder, given, **options):
    kept = {"profile_directory": str(folder / "profiles"), "plan_path": str(folder / "plan.json")}
    return Measured(plan=given, **kept, **options)


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
    trainer = trainer_of("ddp", folder, held=held)
    fit(trainer, module)
    again, later = Project(**options), Held()
    fit(trainer_of("ddp", folder / "resumed", epochs=2, held=later), again, ckpt_path=str(folder / "last.ckpt"))
    evaluation = trainer_of("ddp", folder, save=False, validates=True)
    validated = evaluation.validate(module, DataLoader(Tokens(8, 1), batch_size=4), verbose=False)
    return {"losses": held.losses, "later": later.losses, "weights": weights(module), "validated": validated}


def under_plan(name, folder):
    assume_profile(folder / "profiles", 2)
    pl.seed_everything(SEED, verbose=False)
    held, later = Held(), Held()
    trainer = trainer_of(measured(folder, PLANS[name]), folder, held=held)
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
        # Evaluation and another fit take rank 0's values.
        trainer.save_checkpoint(folder / "after.ckpt")
        evaluation = trainer_of(measured(folder, PLANS[name]), folder, save=False, validates=True)
        result["validated"] = evaluation.validate(module, DataLoader(Tokens(8, 1), batch_size=4), verbose=False)
        result["weights_then"] = weights(module)
    other = trainer_of(measured(folder, PLANS[name]), folder / "resumed", epochs=2, held=later)
    fit(other, build(other), ckpt_path=str(folder / "last.ckpt"))
    result["later"] = later.losses
    if name in ("pipeline", "plain"):
        result["refitted"] = refit(name, module, folder)
    return result


def refit(name, module, folder):
    again = Held()
    fit(trainer_of(measured(folder, PLANS[name]), folder / "again", held=again, save=False), module)
    return again.losses


def configured(folder):
    pl.seed_everything(SEED, verbose=False)
    held = Held()
    fit(trainer_of(measured(folder, PIPELINE), folder, held=held), Configured())
    return {"losses": held.losses, "bytes": held.bytes}


def too_large(folder):
    """An ordinary module whose parameters exceed the limit is kept in host memory, and rank 0's values count."""
    pl.seed_everything(SEED + torch.distributed.get_rank(), verbose=False)
    module, held = Laden(), Held()
    first = weights(module)
    values = [None, None]
    torch.distributed.all_gather_object(values, first)
    all_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    fit(trainer_of(measured(folder, PIPELINE, memory_limit=all_bytes - 1), folder, held=held, save=False), module)
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
        fit(trainer_of(measured(folder, PIPELINE), folder, save=False), module)
    except MistError as error:
        return {"error": str(error)}
    return {"error": ""}


def trained(out, names):
    """What a rank sees of all fits."""
    return {
        "ddp": with_ddp(out / "ddp"),
        "tied": with_ddp(out / "tied", tied=True),
        **{name: under_plan(name, out / name) for name in names},
        "configured": configured(out / "configured"),
        "too_large": too_large(out / "too_large"),
        "nameless": nameless(out / "nameless"),
    }


pytestmark = pytest.mark.thorough  # tests/strategy/test_empty_parameters.py says the same of one process


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("deferred")


@pytest.fixture(scope="module")
def ranks(request, folder):
    return launched(trained, folder, asked_for(request, "name"))


@pytest.mark.parametrize("name", [*PLANS])
def test_losses_are_those_of_ddp_with_the_same_values(ranks, name):
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(rank["ddp"]["losses"], abs=1e-5)
        assert len(rank[name]["losses"]) == 6


@pytest.mark.parametrize("name", [*PLANS])
def test_checkpoints_are_resumed_into_modules_without_values(ranks, name):
    for rank in ranks:
        assert rank[name]["later"] == pytest.approx(rank["ddp"]["later"], abs=1e-5)


def test_no_rank_holds_the_whole(ranks):
    for rank in ranks:
        assert rank["pipeline"]["bytes"] < 0.6 * rank["pipeline"]["all_bytes"]
        assert rank["tensor"]["bytes"] < 0.9 * rank["tensor"]["all_bytes"]
        assert rank["zero3"]["bytes"] < 0.6 * rank["zero3"]["all_bytes"]
        assert rank["too_large"]["bytes"] < 0.6 * rank["too_large"]["all_bytes"]


def test_afterwards_rank_zero_has_everything(ranks, folder):
    first, second = (rank["pipeline"] for rank in ranks)
    assert first["weights"] == pytest.approx(ranks[0]["ddp"]["weights"], rel=1e-5)
    assert first["state"] == ""
    assert all(math.isnan(value) for value in second["weights"].values())
    assert "on rank 1 after fit: a module that no device could hold is whole on rank 0 only" in second["state"]
    saved = torch.load(folder / "pipeline" / "after.ckpt", weights_only=False)["state_dict"]
    assert float(saved["embed.weight"].double().pow(2).sum()) == first["weights"]["embed.weight"]


def test_evaluation_and_another_fit_get_the_values_of_rank_zero(ranks):
    # Evaluated by the plan's own forwards it stays where it is.
    assert ranks[0]["pipeline"]["weights_then"] == ranks[0]["pipeline"]["weights"]
    assert all(math.isnan(value) for value in ranks[1]["pipeline"]["weights_then"].values())
    for rank in ranks:
        assert rank["pipeline"]["validated"][0] == pytest.approx(rank["ddp"]["validated"][0], abs=1e-5)
        # Its optimizer starts anew, so it goes another way than the resumed one.
        assert max(rank["pipeline"]["refitted"]) < max(rank["pipeline"]["losses"])
        assert rank["pipeline"]["refitted"] == pytest.approx(rank["plain"]["refitted"], abs=1e-4)


def test_modules_may_be_built_in_configure_model_and_tie_parameters(ranks):
    for rank in ranks:
        assert rank["configured"]["losses"] == pytest.approx(rank["tied"]["losses"], abs=1e-4)


def test_a_module_with_values_above_the_limit_starts_from_those_of_rank_zero(ranks):
    assert all(rank["too_large"]["ranks_differ"] for rank in ranks)
    for rank in ranks:
        assert all(map(math.isfinite, rank["too_large"]["losses"]))


def test_what_cannot_be_initialised_is_named(ranks):
    for rank in ranks:
        assert "parameter gate.gate is on the meta device" in rank["nameless"]["error"]
        assert "init_module" in rank["nameless"]["error"]
