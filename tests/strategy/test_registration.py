"""``strategy="mist"`` is there however a program is started: each way is a new interpreter that imports nothing of us.

Every program is started once for the whole file, since most of its time is importing torch.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
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
    class_path: MistStrategy
    init_args:
      memory_limit: 3GiB
''')

def parse(*arguments):
    built = cli.LightningCLI(module, args=[*common, *arguments], run=False, save_config_callback=None)
    return [type(built.trainer.strategy).__module__, built.trainer.strategy._request.memory_limit]

print(json.dumps([
    parse("--trainer.strategy=mist"),
    parse("--trainer.strategy=mist", "--trainer.strategy.memory_limit=22GiB"),
    parse(f"--config={config}"),
]))
"""


COMMANDS = {
    "both": ["both.py"],
    "module": ["-m", "package.one", "pytorch_lightning"],
    "torchrun": [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "one.py",
        "lightning.pytorch",
    ],
    "without_entry_point": ["without_entry_point.py"],
    "cli": ["command_line.py", "lightning.pytorch"],
    "old_cli": ["command_line.py", "pytorch_lightning"],
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a program prints, by name."""
    folder = tmp_path_factory.mktemp("registration")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    programs = {"both": BOTH, "without_entry_point": WITHOUT_ENTRY_POINT, "command_line": COMMAND_LINE}
    for name, text in {**programs, "one": ONE, "package/one": ONE}.items():
        (folder / f"{name}.py").write_text(text)

    def run(name: str) -> Any:
        known = {**os.environ, **({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if name == "without_entry_point" else {})}
        command = [sys.executable, *COMMANDS[name]]
        done = subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


NEW = "lightning_mist.strategy.lightning"
OLD = "lightning_mist.strategy.pytorch_lightning"


@pytest.mark.thorough
def test_both_namespaces_in_one_program(printed: Callable[[str], Any]) -> None:
    methods = {
        "mist": "popen",
        "mist_spawn": "spawn",
        "mist_fork": "fork",
        "mist_notebook": "fork",
        "ddp_mist": "popen",
    }
    assert printed("both") == {
        name: [[NEW, "MistStrategy", method], [OLD, "MistStrategy", method]] for name, method in methods.items()
    }


def test_program_run_as_a_module(printed: Callable[[str], Any]) -> None:
    assert printed("module") == [OLD, "MistStrategy", "popen"]


def test_program_run_by_torchrun(printed: Callable[[str], Any]) -> None:
    assert printed("torchrun") == [NEW, "MistStrategy", "popen"]


def test_importing_the_package_registers_where_entry_points_are_off(printed: Callable[[str], Any]) -> None:
    assert [kind for kind, *_ in printed("without_entry_point")] == [NEW, OLD]


@pytest.mark.parametrize(("name", "module"), [("cli", NEW), ("old_cli", OLD)])
def test_command_line_and_config_files(printed: Callable[[str], Any], name: str, module: str) -> None:
    assert printed(name) == [[module, None], [module, 22 * GIB], [module, 3 * GIB]]
