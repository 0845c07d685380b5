import pytest

from benchmarks.lightning_tests import run
from benchmarks.lightning_tests.lists import LISTS

TESTS = """
import pytest
from lightning.pytorch import Trainer

def kind(**options):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options)
    return type(trainer.strategy).__name__, getattr(trainer.strategy, "_start_method", None)

def test_names():
    assert kind(strategy="ddp_spawn", devices=2) == ("DDPStrategy", "fork")

def test_default():
    assert kind(devices=1)[0] == "SingleDeviceStrategy"

@pytest.mark.flaky(reruns=3)
def test_other():
    pass

def test_skipped():
    pytest.skip("for a reason")
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    return tmp_path


def ends(checkout, swap):
    results = checkout / f"{swap}.txt"
    return {
        name.partition("::")[2]: outcome
        for name, (outcome, _) in run.run(checkout, ["test_it.py"], swap, results, timeout_seconds=60).items()
    }


@pytest.mark.thorough
def test_strategies_are_swapped(checkout):
    stock = {"test_names": "passed", "test_default": "passed", "test_other": "passed", "test_skipped": "skipped"}
    assert ends(checkout, "stock") == stock
    assert ends(checkout, "one") == {**stock, "test_names": "failed", "test_default": "failed"}
    assert ends(checkout, "ddp") == {**stock, "test_default": "failed"}
    # What is in the file of results is not run again.
    (checkout / "tests" / "test_it.py").write_text(TESTS.replace("    pass\n", "    assert False\n"))
    assert ends(checkout, "stock") == stock


def test_what_ends_otherwise_is_counted_with_its_reason(monkeypatch):
    monkeypatch.setattr(run, "REASONS", (("count", "it counts"),))
    stock = {f"tests_pytorch/a.py::{name}": ("passed", "") for name in ("test_w", "test_x", "test_y", "test_z")}
    ddp = {f"tests_pytorch/a.py::{name}": ("failed", "") for name in ("test_w",)}
    swapped = stock | {
        "tests_pytorch/a.py::test_w": ("failed", "not supported"),
        "tests_pytorch/a.py::test_x": ("failed", "bad count"),
        "tests_pytorch/a.py::test_y": ("failed", "?"),
    }
    assert run.others(stock, swapped) == [f"tests_pytorch/a.py::{name}" for name in ("test_w", "test_x", "test_y")]
    rows, reasons = run.compared(stock, swapped, ddp)
    (row,) = rows
    assert row == {
        "file": "a.py",
        "tests": 4,
        "passed as stock": 1,
        "skipped as stock": 0,
        "failed as stock": 0,
        "as under DDP": 1,
        "other": 2,
    }
    assert reasons == {run.AS_DDP: ["test_w"], "it counts": ["test_x"], "not known: ?": ["test_y"]}


def test_lists_are_there():
    assert set(LISTS) == {"processes", "one"}
