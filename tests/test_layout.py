"""The house's own rules: how large folders and modules are, what names mean one thing, and who enters by which door."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

import lightning_mist

ROOT = Path(lightning_mist.__file__).parent
FOLDERS = sorted({path.parent for path in ROOT.rglob("*.py")})
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")

MOST_MODULES, MOST_LINES, MOST_FUNCTION_LINES, MOST_DEPTH, MOST_PACKAGE_LINES = 20, 700, 80, 12, 80_639
PAGE_LINES, PAGE_WITH_IMPORTER = 120, 400
"""A module with fewer lines and one importer, in its folder, is a page of it where both together are so few lines."""

PAGES_WITH_A_REASON = {
    "lightning_mist.cli.profile_command": "every command has a module",
    "lightning_mist.cli.simulate_command": "every command has a module",
}
"""Modules that are kept apart from their only importer all the same, and why."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Modules of the package that a module imports, for typing or not."""
    known = {name_of(module) for module in ROOT.rglob("*.py")}
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append(inner if inner in known else str(node.module))
    return tuple(found)


def depth_of(folder: Path) -> int:
    """Longest chain of imports among what lies in a folder."""
    own = name_of(folder / "__init__.py")
    below: dict[str, set[str]] = defaultdict(set)
    for module in folder.rglob("*.py"):
        first = name_of(module).removeprefix(f"{own}.").split(".")[0]
        for imported in imports_of(module):
            if imported.startswith(f"{own}.") and name_of(module) != own:
                below[first].add(imported.removeprefix(f"{own}.").split(".")[0])
    depths: dict[str, int] = {}

    def depth(child: str) -> int:
        if child not in depths:
            depths[child] = 1 + max((depth(other) for other in below[child] if other != child), default=0)
        return depths[child]

    return max(map(depth, list(below)), default=0)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_folders_can_be_overlooked(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MOST_MODULES
    assert depth_of(folder) <= MOST_DEPTH


def test_modules_and_functions_are_short() -> None:
    sizes = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.rglob("*.py")}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES} == {}
    assert sum(sizes.values()) <= MOST_PACKAGE_LINES
    long = [
        f"{name_of(path)}.{node.name}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES
    ]
    assert long == []


def test_no_name_of_a_module_is_given_twice() -> None:
    names = Counter(path.stem for path in MODULES)
    assert [name for name, times in names.items() if times > 1] == []


def test_no_public_class_has_the_name_of_another() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_no_module_is_a_page_of_its_only_importer() -> None:
    importers: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for imported in imports_of(path):
            importers[imported].add(name_of(path))
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    pages = {
        name
        for name, size in lines.items()
        for importer in importers[name]
        if importers[name] == {importer}
        and importer in lines
        and importer.rpartition(".")[0] == name.rpartition(".")[0]
        and size < PAGE_LINES
        and size + lines[importer] <= PAGE_WITH_IMPORTER
    }
    assert pages == set(PAGES_WITH_A_REASON)


def test_names_of_arrays_end_in_letters_of_the_glossary() -> None:
    glossary = (ROOT.parent / "docs" / "glossary.md").read_text(encoding="utf-8")
    letters = set(re.findall(r"^\| `([A-Z])` \|", glossary, re.MULTILINE))
    assert 8 <= len(letters) <= 10
    unknown = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for name in set(re.findall(r"\b_?[a-z]\w*_\d?[A-Z]+\d?\b", path.read_text(encoding="utf-8"))):
            if not {letter for letter in name.rpartition("_")[2] if letter.isupper()} <= letters:
                unknown[name].add(name_of(path))
    assert unknown == {}


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != ROOT], ids=lambda folder: folder.name)
def test_doors_and_modules_have_names_of_their_own(folder: Path) -> None:
    door = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    named = {
        alias.asname or alias.name
        for node in door.body
        if isinstance(node, ast.ImportFrom) and node.module != name_of(folder / "__init__.py")
        for alias in node.names
    }
    inside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert named & inside == set()


def test_folders_inside_rooms_are_entered_by_their_doors() -> None:
    around = []
    for path in ROOT.rglob("*.py"):
        for imported in imports_of(path):
            home = imported.rpartition(".")[0]
            is_module = (ROOT.parent / f"{imported.replace('.', '/')}.py").exists()
            if is_module and home.count(".") > 1 and not f"{name_of(path)}.".startswith(f"{home}."):
                around.append(f"{name_of(path)} -> {imported}")
    assert around == []


def test_names_are_imported_from_where_they_are_made_or_from_doors() -> None:
    made: dict[str, set[str]] = {}
    for path in MODULES:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        made[name_of(path)] = {
            name.id if isinstance(name, ast.Name) else name.name
            for node in body
            if not isinstance(node, ast.Import | ast.ImportFrom)
            for name in ast.walk(node)
            if isinstance(name, ast.FunctionDef | ast.ClassDef)
            or (isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
        }
    passed_on = [
        f"{name_of(path)} takes {alias.name} from {node.module}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module in made
        for alias in node.names
        if alias.name not in made[node.module]
    ]
    assert passed_on == []
