"""Registration by the import hook, without and with the real Lightning."""

import importlib
import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import lightning_mist
from lightning_mist import _autoload

REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description="", **init_params):
        self[name] = (strategy, init_params)

StrategyRegistry = Registry()
"""


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``mist_fake_ns`` whose ``strategies`` module the hook watches; yields that module's file."""
    package = tmp_path / "mist_fake_ns"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "implementation.py").write_text("class MistStrategy(dict):\n    pass\n")
    (package / "strategies.py").write_text(REGISTRY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_autoload.STRATEGIES, "mist_fake_ns.strategies", "mist_fake_ns.implementation")
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if type(f).__module__ != _autoload.__name__])
    yield package / "strategies.py"
    for name in [name for name in sys.modules if name.startswith("mist_fake_ns")]:
        del sys.modules[name]


def _strategies() -> ModuleType:
    return importlib.import_module("mist_fake_ns.strategies")


def test_registers_when_the_namespace_is_imported_later(namespace: Path) -> None:
    _autoload.autoload()
    registry = _strategies().StrategyRegistry
    assert list(registry) == ["mist", "mist_spawn", "mist_fork", "mist_notebook", "ddp_mist"]
    assert [arguments for _, arguments in registry.values()] == list(_autoload.NAMES.values())


def test_registers_when_the_namespace_was_imported_before(namespace: Path) -> None:
    registry = _strategies().StrategyRegistry
    assert "mist" not in registry
    _autoload.autoload()
    assert "mist" in registry


def test_registers_again_after_a_reload(namespace: Path) -> None:
    _autoload.autoload()
    assert "mist" in importlib.reload(_strategies()).StrategyRegistry


def test_factory_imports_the_strategy_only_when_called(namespace: Path) -> None:
    _autoload.autoload()
    factory, arguments = _strategies().StrategyRegistry["mist_spawn"]
    assert "mist_fake_ns.implementation" not in sys.modules
    strategy = factory(**arguments)
    assert type(strategy).__name__ == "MistStrategy"
    assert strategy == {"start_method": "spawn"}


def test_a_name_already_taken_is_left_alone(namespace: Path) -> None:
    namespace.write_text(REGISTRY + "StrategyRegistry.register('mist', 'somebody else')\n")
    _autoload.autoload()
    registry = _strategies().StrategyRegistry
    assert registry["mist"] == ("somebody else", {})
    assert "mist_spawn" in registry


def test_calling_twice_leaves_one_finder(namespace: Path) -> None:
    before = len(sys.meta_path)
    _autoload.autoload()
    _autoload.autoload()
    assert len(sys.meta_path) == before + 1


def test_the_module_keeps_its_own_loader(namespace: Path) -> None:
    _autoload.autoload()
    module = _strategies()
    assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader


def test_a_registry_that_fails_is_logged_and_not_raised(namespace: Path, caplog: pytest.LogCaptureFixture) -> None:
    namespace.write_text("class StrategyRegistry:\n    pass\n")
    _autoload.autoload()
    with caplog.at_level(logging.WARNING, logger="lightning_mist"):
        _strategies()
    assert "not known to mist_fake_ns.strategies" in caplog.text


def test_an_error_of_the_namespace_itself_is_not_hidden(namespace: Path) -> None:
    namespace.write_text("raise ValueError('theirs')\n")
    _autoload.autoload()
    with pytest.raises(ValueError, match="theirs"):
        _strategies()


def test_a_missing_namespace_is_a_plain_import_error(namespace: Path) -> None:
    namespace.unlink()
    _autoload.autoload()
    with pytest.raises(ModuleNotFoundError, match=r"mist_fake_ns\.strategies"):
        _strategies()


def run_python(code: str, directory: Path) -> str:
    """Run ``code`` in a new interpreter, with ``directory`` first on its path, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_nothing_along(tmp_path: Path) -> None:
    loaded = run_python(
        """
        import sys, typing
        before = set(sys.modules)
        import lightning_mist
        print(*sorted(set(sys.modules) - before))
        """,
        tmp_path,
    )
    assert loaded.split() == ["lightning_mist", "lightning_mist._autoload"]


@pytest.mark.thorough
def test_a_broken_installation_breaks_neither_torch_nor_lightning(tmp_path: Path) -> None:
    package = tmp_path / "lightning_mist"
    package.mkdir()
    source = Path(lightning_mist.__file__).parent
    for name in ("__init__.py", "_autoload.py"):
        (package / name).write_text((source / name).read_text())
    for name in ("strategy", "plan", "tuner", "errors"):
        (package / f"{name}.py").write_text("raise RuntimeError('broken installation')\n")
    printed = run_python(
        """
        import torch
        import lightning.pytorch as pl
        import lightning_mist
        print(lightning_mist.__file__)
        pl.Trainer(strategy="ddp", accelerator="cpu", devices=1, logger=False)
        try:
            pl.Trainer(strategy="mist", accelerator="cpu", devices=1, logger=False)
        except RuntimeError as error:
            print(error)
        """,
        tmp_path,
    )
    assert printed.splitlines() == [str(package / "__init__.py"), "broken installation"]


def test_public_names() -> None:
    assert lightning_mist.__all__ == [
        "Checkpointing",
        "Cluster",
        "HardwareProfile",
        "InfeasibleError",
        "MemoryEstimate",
        "MistError",
        "MistFabricStrategy",
        "MistStrategy",
        "OffloadRatios",
        "Plan",
        "PlanError",
        "ProfileError",
        "ScheduleError",
        "SearchSpace",
        "StagePlan",
        "TraceError",
        "ZeroStage",
        "estimate_memory",
        "plan_of",
        "register_memory_rule",
        "trace_model",
        "tune",
    ]
    assert set(lightning_mist.__all__) <= set(dir(lightning_mist))
    for name in lightning_mist.__all__:
        assert getattr(lightning_mist, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_mist' has no attribute 'Plam'"):
        lightning_mist.Plam  # noqa: B018
