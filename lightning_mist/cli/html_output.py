"""``lightning-mist plan --html``: the plan in one page."""

import importlib.metadata
import platform
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mist.cli.cluster_input import devices_of
from lightning_mist.cli.compare import comparison_notes
from lightning_mist.cli.output import told
from lightning_mist.plan import Plan

if TYPE_CHECKING:
    from lightning_mist.cli.found_plan import FoundPlan
    from lightning_mist.explain import Explanation


def check_html(path: str) -> None:
    """Refuse a page that cannot be written, before anything has been computed for it.

    Raises:
        ValueError: If its folder is not there, it is a folder, or matplotlib is not installed.
    """
    from lightning_mist.estimate import check_matplotlib

    check_target("report", path, "report.html")
    check_matplotlib(f"report {path!r}")


def check_target(what: str, path: str, example: str) -> None:
    """Refuse a file that cannot be written, before anything has been computed for it.

    Raises:
        ValueError: If its folder is not there, or it is a folder.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"{what} {path!r}: there is no folder {str(target.parent)!r}; make it first")
    if target.is_dir():
        raise ValueError(f"{what} {path!r} is a folder: give the name of a file, such as {example}")


def write_html(path: str, found: "FoundPlan", *, why: "Explanation", given: Mapping[str, Any], seconds: float) -> None:
    """Write the page of a plan.

    Args:
        given: What stood on the command line, by name.
        seconds: The most seconds to search for plans under less memory.
    """
    from lightning_mist.cost import profiles_of
    from lightning_mist.report.frontier import memory_frontier
    from lightning_mist.report.html_report import Report, render_report

    with told("searching plans under less memory, for the report"):
        frontier = memory_frontier(found.planner, found.plan, seconds=seconds, **found.asked)
    report = Report(
        title=f"{given['model']} on {given['cluster']}",
        plan=found.plan,
        result=found.result,
        memory_limits=why.limits,
        device_names=devices_of(found.plan, found.planner.cluster),
        machine=(found.planner.cluster, profiles_of(found.planner.model)),
        explanation=why,
        comparison=found.compared or (),
        comparison_notes=comparison_notes(found.compared, found.spec) if found.compared else (),
        frontier=frontier,
        verdict=found.memory,
        inputs=inputs_of(given, found.plan),
        notes=found.notes,
    )
    Path(path).write_text(render_report(report), encoding="utf-8")


def inputs_of(given: Mapping[str, Any], found: Plan) -> tuple[tuple[str, str], ...]:
    """What a plan was made from, for people: what was said, the command, and the versions."""
    said = [
        (name.replace("_", " "), str(value))
        for name, value in given.items()
        if _is_said(value) and value is not True and name not in _FILES
    ]
    made_for = dict(found.fingerprint)
    parameters = [("parameters", f"{int(made_for['num_parameters']):,}")] if "num_parameters" in made_for else []
    versions = [f"lightning-mist {importlib.metadata.version('lightning-mist')}", f"Python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "highspy")]
    return (*said, *parameters, ("command", command_of(given)), ("versions", ", ".join(versions)))


_FILES = ("out", "html", "explain_seconds")
"""Options that say where results go, and how long to explain them."""


def command_of(given: Mapping[str, Any]) -> str:
    """The command line that says what was given.

    Args:
        given: What stood on the command line, by name; options that are data are named by their fields.
    """
    return shlex.join(["lightning-mist", "plan", *_words(given.items())])


def _words(given: Iterable[tuple[str, Any]]) -> Iterable[str]:
    for name, value in given:
        if is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                current = _plain(getattr(value, field.name))
                if current != field.default:
                    yield from _option(field.name, current, is_switch=field.default is False)
        elif _is_said(value):
            yield from _option(name, _plain(value), is_switch=value is True)


def _option(name: str, value: Any, *, is_switch: bool) -> Iterable[str]:
    """An option of the command line; a switch has no value."""
    yield f"--{name.replace('_', '-')}"
    if not is_switch:
        yield _text(value)


def _plain(value: Any) -> Any:
    """A value as options have it by default: parsers make lists of what is said."""
    return tuple(value) if isinstance(value, list) else value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_said(value: Any) -> bool:
    return value is not None and value is not False and not is_dataclass(value)
