"""The documents agree with the package: example plans are valid, links lead somewhere, options exist."""

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_mist import MistStrategy
from lightning_mist.cli import main
from lightning_mist.plan import from_json, row_slice
from tests import shown_python
from tests.workers import apart

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_imports_that_documents_show_work(path: Path) -> None:
    for module, names in re.findall(r"^from (lightning_mist[\w.]*) import ([\w, ]+)$", path.read_text(), re.M):
        assert [name for name in names.split(", ") if not hasattr(import_module(module), name)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_modules_that_documents_name_exist(path: Path) -> None:
    rooms = "|".join(sorted(folder.name for folder in (ROOT / "lightning_mist").iterdir() if folder.is_dir()))
    named = re.findall(rf"`((?:{rooms})/[\w/]*(?:\.py)?)`", path.read_text())
    assert [name for name in named if not (ROOT / "lightning_mist" / name).exists()] == []


def test_plan_files_are_valid() -> None:
    plans = [
        from_json(text) for text in re.findall(r"```json\n(.*?)```", (ROOT / "docs/plan-file.md").read_text(), re.S)
    ]
    assert len(plans) == 1
    for plan in plans:
        for rank in range(plan.world_size):
            row_slice(plan, rank, 0)


def _options_of(path: Path) -> set[str]:
    table = re.search(r"\| option \| meaning \|\n(.*?)\n\n", path.read_text(), re.S)
    assert table is not None
    first_cells = [row.split("|")[1] for row in table[1].splitlines()[1:]]
    return {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


def test_options_that_documents_name_exist() -> None:
    every, first = _options_of(ROOT / "docs/options.md"), _options_of(ROOT / "README.md")
    ddp = {*signature(DDPStrategy.__init__).parameters, *signature(DistributedDataParallel.__init__).parameters}
    assert every == {*signature(MistStrategy.__init__).parameters} - ddp
    assert {"plan", "memory_limit", "search"} <= first <= every


def test_the_readme_is_read_in_two_minutes() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert len(text) <= 8_000


def test_commands_of_the_readme_parse(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^lightning-mist (\w+) (.*)$", (ROOT / "README.md").read_text(), re.M)
    assert {name for name, _ in commands} == {"plan", "show", "simulate", "estimate", "profile"}
    for name, arguments in commands:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert [option for option in re.findall(r"--[\w-]+", arguments) if option not in text] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_python_that_documents_show_can_be_parsed(path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.S):
        ast.parse(block)


def blocks_run(name: str, home: Path) -> None:
    """Run what a guide shows, where there is nothing."""
    os.chdir(home)
    os.environ["HOME"] = str(home)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.S)
    exec(compile("\n".join(blocks), name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", ["index.md", "moving.md"])
def test_python_that_guides_show_runs(name: str, tmp_path: Path) -> None:
    apart(blocks_run, name, tmp_path)


def test_errors_of_the_troubleshooting_page_are_ones_that_are_raised() -> None:
    texts = []
    for path in (ROOT / "lightning_mist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts.append("".join(str(part.value) for part in parts if isinstance(part, ast.Constant)))
    titles = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert len(titles) > 10
    assert [title for title in titles if not any(title in text for text in texts)] == []


@pytest.mark.thorough
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "MistStrategy" in (tmp_path / "api/index.html").read_text()


def pages_run(pages: list[Path], home: Path) -> None:
    """Run what pages show, where there is nothing but what they talk about."""
    os.chdir(home)
    os.environ["HOME"] = str(home)
    for page in pages:
        shown_python.run(page)


def test_python_that_pages_show_runs_with_what_they_talk_about(tmp_path: Path) -> None:
    guides = ("index.md", "moving.md")
    pages = [path for path in DOCUMENTS if "```python" in path.read_text() and path.name not in guides]
    assert len(pages) >= 8
    apart(pages_run, [*pages, ROOT / "docs/checkpoints.md"], tmp_path)
