import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy, SearchSpace
from lightning_mist.plan import load
from lightning_mist.strategy.planning import workflow
from tests.machine import assume_profile

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice on loggers, workers and small datasets


@pytest.fixture(autouse=True)
def _no_group_stays():
    """A dry run leaves the process group to the end of the process, which does not come here."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        self.steps = []

    def training_step(self, batch, batch_idx):
        if not getattr(self.trainer.strategy, "is_planning", False):
            self.steps.append(batch_idx)
        return self.blocks(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Warns(Net):
    def on_train_batch_start(self, batch, batch_idx):
        warnings.warn("of a step", stacklevel=1)


class Seen(pl.Callback):
    def __init__(self):
        self.hooks = []

    def on_exception(self, trainer, module, error):
        self.hooks.append("on_exception")

    def teardown(self, trainer, module, stage):
        self.hooks.append("teardown")


class Rows(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=4)


def options(tmp_path):
    return {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "default_root_dir": str(tmp_path),
    }


def test_a_dry_run_prints_the_plan_and_ends_before_anything_is_trained(tmp_path, capfd):
    profiles = str(assume_profile(tmp_path / "profiles", 1))
    module, path, seen = Net(), tmp_path / "plan.json", Seen()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    search = SearchSpace(checkpointed_shares=(1.0,))  # plain data parallelism is not planned
    strategy = MistStrategy(dry_run=True, search=search, plan_path=str(path), profile_directory=profiles)
    with pytest.raises(SystemExit) as ended:
        pl.Trainer(strategy=strategy, callbacks=[seen], **options(tmp_path)).fit(module, Rows())
    assert ended.value.code == 0
    assert module.steps == []
    assert seen.hooks == ["teardown"]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert load(path) == strategy.plan
    said = capfd.readouterr().err
    assert "dry_run=True: nothing was trained, the plan is in" in said
    assert "stage" in said


def test_what_a_fit_says_first_is_the_plan_and_nothing_of_its_trials(tmp_path, monkeypatch, capfd):
    decide, seen = workflow.decide, []

    def warning(*given, **more):
        warnings.warn("of a trial", stacklevel=1)
        return decide(*given, **more)

    monkeypatch.setattr(workflow, "decide", warning)
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: seen.append(str(message)))
    search = SearchSpace(checkpointed_shares=(1.0,))  # plain data parallelism is not planned
    strategy = MistStrategy(search=search, profile_directory=str(assume_profile(tmp_path / "profiles", 1)))
    warnings.simplefilter("always")  # pytest puts filters back
    pl.Trainer(strategy=strategy, **options(tmp_path)).fit(Warns(), Rows())
    assert {"of a step"} == {text for text in seen if text.startswith("of a ")}
    plan, memory, why = (line for line in capfd.readouterr().err.splitlines() if line.startswith("mist "))
    assert plan.startswith("mist dp 1, recompute 3 of 3, microbatch 4 x 1; predicted: ")
    assert memory.startswith("mist Fits in ")
    assert why.startswith("mist chosen among ")


def test_the_command_line_has_it(tmp_path, capfd):
    profiles = assume_profile(tmp_path / "profiles", 1)
    chosen = ["--trainer.strategy=lightning_mist.MistStrategy", "--trainer.strategy.dry_run=true"]
    chosen += [f"--trainer.strategy.profile_directory={profiles}"]
    with pytest.raises(SystemExit) as ended:
        LightningCLI(Net, Rows, args=["fit", *chosen], trainer_defaults=options(tmp_path), save_config_callback=None)
    assert ended.value.code == 0
    assert "dry_run=True: nothing was trained" in capfd.readouterr().err


def test_processes_that_somebody_waits_for_do_not_end_so():
    with pytest.raises(ValueError, match="dry_run=True with start_method='spawn': a process that ends"):
        MistStrategy(dry_run=True, start_method="spawn")
