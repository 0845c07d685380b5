"""Plans that the planner makes for training move state where memory asks for it, and are never refused for it."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import InfeasibleError, MistStrategy
from tests.fits import make_trainer
from tests.machine import assume_profile

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice on loggers, workers and small datasets

WIDTH, ROWS, LAYERS = 128, 4, 3


class Net(pl.LightningModule):
    optimizer_class = torch.optim.AdamW

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch[0])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return self.optimizer_class(self.parameters(), lr=1e-3)


class Counted(torch.optim.AdamW):
    """Counts its steps for all parameters together."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class Counting(Net):
    optimizer_class = Counted


class ReadsState(pl.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        print(sum(float(entry["exp_avg"].sum()) for entry in trainer.optimizers[0].state.values()))


class ReadsWeights(pl.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        print(sum(float(weight.sum()) for weight in module.parameters()))


class Penalised(Net):
    """Its step runs a backward of its own."""

    def training_step(self, batch, batch_idx):
        rows = batch[0].clone().requires_grad_()
        loss = super().training_step((rows,), batch_idx)
        (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
        return loss + gradient.pow(2).sum()


class Reaching(Net):
    """Uses a layer's parameter outside of it, through a reference that its module does not have."""

    def __init__(self):
        super().__init__()
        self.others = [self.blocks[1][0].weight]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.1 * self.others[0].pow(2).mean()


BYTES = sum(p.numel() * 4 for p in Net().parameters())


@pytest.fixture(scope="module", autouse=True)
def _end_of_the_process_group():
    """Lightning leaves its process group to the process; other tests make their own."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    return str(assume_profile(tmp_path_factory.mktemp("profiles"), 1))


def train(strategy, module, callbacks=()):
    pl.seed_everything(1, verbose=False)
    module = module()
    rows = torch.randn(6 * ROWS, 6, generator=torch.Generator().manual_seed(0))
    trainer = make_trainer(strategy, devices=1, max_epochs=1, callbacks=list(callbacks))
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=ROWS))
    return trainer, module.losses


def limited(folder, profiles, parts, **more):
    """A strategy that may use so many times the parameters' bytes, and files."""
    return MistStrategy(
        memory_limit=int(parts * BYTES), profile_directory=profiles, offload_directory=str(folder / "state"), **more
    )


def test_state_that_does_not_fit_goes_to_files_and_nothing_else_changes(tmp_path, profiles):
    with pytest.raises(InfeasibleError):
        train(MistStrategy(memory_limit=int(3.9 * BYTES), profile_directory=profiles), Net)
    trainer, losses = train(limited(tmp_path, profiles, 3.9), Net)
    (stage,) = trainer.strategy.plan.stages
    assert stage.offload.optimizer > 0
    assert trainer.strategy.estimate.verdict != "does not fit"
    assert losses == train("ddp", Net)[1]
    # The same question again is answered by the plan that was kept.
    again, losses_again = train(limited(tmp_path, profiles, 3.9), Net)
    assert again.strategy.plan.stages == trainer.strategy.plan.stages
    assert losses_again == losses


@pytest.mark.parametrize(
    ("module", "callbacks", "kept"),
    [
        (Counting, (), ("parameters", "optimizer")),
        (Net, (ReadsState,), ("parameters", "optimizer")),
        (Net, (ReadsWeights,), ("parameters",)),
        (Penalised, (), ("parameters",)),
        (Reaching, (), ("parameters", "optimizer")),
    ],
)
def test_what_has_to_be_on_the_device_is_left_there(tmp_path, profiles, capsys, module, callbacks, kept):
    hooks = [callback() for callback in callbacks]
    if len(kept) == 2:
        with pytest.raises(InfeasibleError):
            train(limited(tmp_path, profiles, 3.9), module, hooks)
        # Where everything has room it trains.
        train(limited(tmp_path, profiles, 30), module, hooks)
    else:
        trainer, losses = train(limited(tmp_path, profiles, 3.9, verbose=True), module, hooks)
        offload = trainer.strategy.plan.stages[0].offload
        assert (offload.parameters, offload.optimizer > 0) == (0.0, True)
        assert "without offload of parameters: " in capsys.readouterr().err
        assert losses == train("ddp", module, hooks)[1]


def test_no_more_goes_to_files_than_there_is_room_for(tmp_path, profiles, monkeypatch):
    monkeypatch.setattr(
        "lightning_mist.strategy.planning.decision.disk_usage", lambda path: SimpleNamespace(free=BYTES)
    )
    with pytest.raises(InfeasibleError, match="host"):
        train(limited(tmp_path, profiles, 3.9), Net)
