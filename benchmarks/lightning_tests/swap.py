"""``pytest -p benchmarks.lightning_tests.swap``: other strategies under Lightning's names, without touching its tests.

``SWAP`` says which: ``stock`` changes nothing; ``processes`` makes ``ddp``, ``ddp_spawn`` and their like build this
project's strategy; ``one`` makes a Trainer on one CPU device that names no strategy build it too, and ``ddp`` makes
that build Lightning's DDP. Spawned processes are forked under all four: the same tests in a tenth of the time.
"""

import ast
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_mist import MistStrategy

SWAP = os.environ.get("SWAP", "stock")
RESULTS = Path(os.environ.get("SWAP_RESULTS", "results.txt"))
METHODS = {"spawn": "fork", "fork": "fork", "notebook": "fork"}


def _register() -> None:
    """Let the names of plain data parallelism build what ``SWAP`` says."""
    kind = DDPStrategy if SWAP in ("stock", "ddp") else MistStrategy
    for name in [name for name in StrategyRegistry if name.startswith("ddp")]:
        method = next((method for word, method in METHODS.items() if word in name), "popen")
        options: dict[str, Any] = {"start_method": method}
        if "find_unused" in name:
            options["find_unused_parameters"] = not name.endswith("false")
        StrategyRegistry.register(name, kind, override=True, **options)


def _replace_the_default(kind: type) -> None:
    """Let a Trainer on one CPU device that names no strategy build this one."""
    original = _AcceleratorConnector._choose_strategy

    def choose(self: Any) -> Any:
        chosen = original(self)
        is_single = type(chosen) is SingleDeviceStrategy and chosen.root_device.type == "cpu"
        return kind() if is_single else chosen

    _AcceleratorConnector._choose_strategy = choose  # type: ignore[method-assign]


_register()
if SWAP in ("one", "ddp"):
    _replace_the_default(MistStrategy if SWAP == "one" else DDPStrategy)


def pytest_configure(config: pytest.Config) -> None:
    """Know a mark of Lightning's tests whose plugin is not needed for them to run."""
    config.addinivalue_line("markers", "flaky: may be run again by pytest-rerunfailures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests whose end is known."""
    known = {ast.literal_eval(line)[0] for line in RESULTS.read_text("utf-8").splitlines()} if RESULTS.exists() else ()
    left = [item for item in items if item.nodeid in known]
    items[:] = [item for item in items if item.nodeid not in known]
    config.hook.pytest_deselected(items=left)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any) -> Any:
    """Write how each test ended, one line each, so that a run that is killed has said what it knew."""
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        message = (
            "" if report.outcome != "failed" else str(getattr(report.longrepr, "reprcrash", "") or report.longrepr)
        )
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(repr((report.nodeid, report.when, report.outcome, message[-1500:])) + "\n")
