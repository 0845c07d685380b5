"""What a fit on two ranks measures is kept, and used by the next one."""

import re
import shutil
from dataclasses import asdict, replace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mist import MistStrategy, SearchSpace
from lightning_mist.hardware import load_corrections
from tests.fits import make_trainer
from tests.machine import assume_profile
from tests.workers import launched

STEPS, WIDTH = 14, 64


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch, batch_idx):
        return self.head(self.blocks(batch[0])).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(folder, plan):
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    shutil.rmtree(folder / "profiles" / "plans", ignore_errors=True)  # each fit is to plan anew
    strategy = MistStrategy(
        plan=plan,
        profile_directory=str(folder / "profiles"),
        plan_path=str(folder / "plan.json"),
        verbose=True,
        search=SearchSpace(num_stages=(2,), schedules=("1f1b",), checkpointing=False),
    )
    trainer = make_trainer(strategy, max_steps=STEPS, default_root_dir=folder)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(2 * 8 * STEPS, WIDTH)), batch_size=8))
    return strategy


def described(strategy):
    """What a fit had learned before, what it was predicted by, and what it taught."""
    basis, plan = strategy._decision.basis, strategy.plan
    found = {"plan": repr(plan), "times": [asdict(stage.measured_times) for stage in strategy.report.stages]}
    found["microbatches"] = plan.num_microbatches
    if basis is None:
        return found
    plain = replace(basis, corrections=())
    found["before"] = [asdict(item) for item in basis.corrections]
    found["after"] = [asdict(item) for item in strategy.report.corrections]
    kept, warning = load_corrections(basis.store)
    found["kept"], found["warning"] = [asdict(item) for item in kept], warning
    found["forward"] = [stage.forward_seconds for stage in plan.predicted.stages]
    found["uncorrected forward"] = [stage.forward_seconds for stage in plain.predict(plan).stages]
    found["action overhead"] = basis.profile.overheads.action_seconds
    return found


def taught(folder):
    """What a rank sees of two fits in a row, of which the first corrects the second, and of one of a given plan."""
    torch.set_num_threads(1)
    assume_profile(folder / "profiles", 2)
    first, second = (described(fit(folder, "auto")) for _ in range(2))
    return {"first": first, "second": second, "given": described(fit(folder, str(folder / "plan.json")))}


# What runs teach is tested in one process too.
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("correction")
    found = launched(taught, out, printed=out / "printed.txt")
    printed = (out / "printed.txt").read_text()
    said = r"later plans for this machine are corrected by it(, and the next fit plans anew)?: forward x "
    assert re.search(said, " ".join(printed.split()))
    assert "predictions are corrected by what earlier runs measured: forward x " in printed
    assert len(list((out / "profiles").glob("corrections-*.json"))) == 1
    return found


def by_term(corrections):
    return {item["term"]: item for item in corrections}


def test_the_first_fit_learns_and_the_second_one_uses_it(ranks):
    first, second = ranks[0]["first"], ranks[0]["second"]
    assert first["before"] == []
    assert {"forward", "backward", "update"} <= set(by_term(first["after"]))
    assert second["before"] == first["after"]
    assert {len(item["ratios"]) for item in second["before"]} == {1}
    assert second["after"] == second["kept"] != second["before"]
    assert {len(item["ratios"]) for item in second["after"]} == {2}
    assert first["warning"] is second["warning"] is None


def test_predictions_move_to_where_it_was_measured(ranks):
    first, second = ranks[0]["first"], ranks[0]["second"]
    factor = by_term(first["after"])["forward"]["factor"]
    overhead = len(first["forward"]) * first["microbatches"] * first["action overhead"]
    measured = sum(times["forward_seconds"] for times in first["times"])
    expected = first["microbatches"] * sum(first["uncorrected forward"]) + overhead
    assert (factor > 1) == (measured > expected)
    assert first["forward"] == first["uncorrected forward"]
    assert second["forward"] == pytest.approx([factor * seconds for seconds in second["uncorrected forward"]])


def test_a_given_plan_teaches_nothing(ranks):
    assert "before" not in ranks[0]["given"]
    assert all(stage["forward_seconds"] > 0 for stage in ranks[0]["given"]["times"])


def test_ranks_agree_on_the_plan_and_only_the_first_learns(ranks):
    for name in ("first", "second", "given"):
        assert ranks[0][name]["plan"] == ranks[1][name]["plan"]
        assert ranks[0][name]["times"] == ranks[1][name]["times"]
        assert "before" not in ranks[1][name]
