"""What holds for every test: one thread per process, no network, fixed seeds."""

import gc
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Before anything imports torch, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
from hypothesis import settings

from tests.tiers import EVERYTHING, FIRST_TIER, asks_for_everything, first_tier

if TYPE_CHECKING:
    from pathlib import Path

    from tests.workers import GlooWorkers


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all`` runs both tiers."""
    parser.addoption("--all", action="store_true", help="run both tiers: every random instance, tests marked thorough")


def pytest_configure(config: pytest.Config) -> None:
    """Properties have as many examples as the tier gives them, from before test modules are imported."""
    settings.load_profile(EVERYTHING if asks_for_everything(config) else FIRST_TIER)


def pytest_ignore_collect(collection_path: "Path", config: pytest.Config) -> bool | None:
    """Leave out what other libraries are needed for, unless it is asked for."""
    is_asked_for = any("compat" in argument for argument in config.args)
    return True if collection_path.parts[-2:] == ("tests", "compat") and not is_asked_for else None


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Put the environment back: Lightning leaves addresses, ports and ranks of its processes in it."""
    # Processes that share out the suite are told the width of a terminal that their output does not go to.
    os.environ.pop("COLUMNS", None)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Give every test the same random numbers, whichever ran before it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files that take long first, leave out what is not of the tier, and skip what needs a CUDA device."""
    # Processes that share out files are done at the same time if the last ones are short.
    items.sort(key=lambda item: not {"integration", "traps"} & set(item.path.parts))
    if not asks_for_everything(config):
        items[:], left = first_tier(items)
        config.hook.pytest_deselected(items=left)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Set aside what importing and collecting have left, so that no collection of garbage looks at it again.

    Many tests, and what they test, collect garbage themselves: half a second each time with all modules imported.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_group() -> None:
    """No test begins with the process group of a fit before it, which Lightning leaves where it is."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def single_rank(tmp_path: "Path") -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def gloo_workers() -> Iterator["GlooWorkers"]:
    """Four processes that run functions as the ranks of gloo worlds; started when a test first asks."""
    from tests.workers import GlooWorkers

    workers = GlooWorkers(4)
    yield workers
    workers.close()
