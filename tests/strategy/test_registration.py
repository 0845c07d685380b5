"""``strategy="mist"`` is there however a program is started: each way is a new interpreter that imports nothing of us.

All programs are started together, once for the whole file, since most of their time is importing torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.thorough  # each test starts interpreters

GIB = 2**30

TRAINERS = """
import importlib, json, sys

def trainer(root, strategy):
    pl = importlib.import_module(root)
    built = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    kind = type(built.strategy)
    assert isinstance(built.strategy, importlib.import_module(root + ".strategies").DDPStrategy), kind.__mro__
    return [kind.__module__, kind.__qualname__, built.strategy._start_method]
"""

BOTH = (
    TRAINERS
    + """
result = {}
for name in ("mist", "mist_spawn", "mist_fork", "mist_notebook", "ddp_mist"):
    result[name] = [trainer(root, name) for root in ("lightning.pytorch", "pytorch_lightning")]
print(json.dumps(result))
"""
)

ONE = TRAINERS + """print(json.dumps(trainer(sys.argv[1], "mist")))\n"""

WITHOUT_ENTRY_POINT = (
    TRAINERS
    + """
import lightning.pytorch, pytorch_lightning.strategies
assert "mist" not in pytorch_lightning.strategies.StrategyRegistry
import lightning_mist
print(json.dumps([trainer(root, "mist") for root in ("lightning.pytorch", "pytorch_lightning")]))
"""
)

COMMAND_LINE = """
import importlib, json, sys
from pathlib import Path

root = sys.argv[1]
cli = importlib.import_module(root + ".cli")
module = importlib.import_module(root).LightningModule
common = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
config = Path(root + ".yaml")
config.write_text('''
trainer:
  strategy:
    class_path: lightning_mist.MistStrategy
    init_args:
      memory_limit: 3GiB
''')

def parse(*arguments):
    built = cli.LightningCLI(module, args=[*common, *arguments], run=False, save_config_callback=None)
    return [type(built.trainer.strategy).__module__, built.trainer.strategy._request.memory_limit]

print(json.dumps([
    parse("--trainer.strategy=mist"),
    parse("--trainer.strategy=lightning_mist.MistStrategy", "--trainer.strategy.memory_limit=22GiB"),
    parse(f"--config={config}"),
]))
"""


def _commands() -> dict[str, list[str]]:
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=1",
        "one.py",
        "lightning.pytorch",
    ]
    return {
        "both": ["both.py"],
        "module": ["-m", "package.one", "pytorch_lightning"],
        "torchrun": torchrun,
        "without_entry_point": ["without_entry_point.py"],
        "cli": ["command_line.py", "lightning.pytorch"],
        "old_cli": ["command_line.py", "pytorch_lightning"],
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What every program printed, by name."""
    folder = tmp_path_factory.mktemp("registration")
    programs = {"both": BOTH, "one": ONE, "without_entry_point": WITHOUT_ENTRY_POINT, "command_line": COMMAND_LINE}
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "one.py").write_text(ONE)
    running = {}
    for name, command in _commands().items():
        environment = dict(os.environ)
        if name == "without_entry_point":
            environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        running[name] = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    printed: dict[str, Any] = {}
    try:
        for name, process in running.items():
            output, errors = process.communicate(timeout=240)
            assert process.returncode == 0, f"{name}: {errors}"
            printed[name] = json.loads(output.splitlines()[-1])
        yield printed
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.communicate()


NEW = "lightning_mist.strategy.lightning"
OLD = "lightning_mist.strategy.pytorch_lightning"


@pytest.mark.thorough
def test_both_namespaces_in_one_program(results: dict[str, Any]) -> None:
    methods = {
        "mist": "popen",
        "mist_spawn": "spawn",
        "mist_fork": "fork",
        "mist_notebook": "fork",
        "ddp_mist": "popen",
    }
    assert results["both"] == {
        name: [[NEW, "MistStrategy", method], [OLD, "MistStrategy", method]] for name, method in methods.items()
    }


def test_program_run_as_a_module(results: dict[str, Any]) -> None:
    assert results["module"] == [OLD, "MistStrategy", "popen"]


def test_program_run_by_torchrun(results: dict[str, Any]) -> None:
    assert results["torchrun"] == [NEW, "MistStrategy", "popen"]


def test_importing_the_package_registers_where_entry_points_are_off(results: dict[str, Any]) -> None:
    assert [kind for kind, *_ in results["without_entry_point"]] == [NEW, OLD]


@pytest.mark.parametrize(("name", "module"), [("cli", NEW), ("old_cli", OLD)])
def test_command_line_and_config_files(results: dict[str, Any], name: str, module: str) -> None:
    assert results[name] == [[module, None], [module, 22 * GIB], [module, 3 * GIB]]
