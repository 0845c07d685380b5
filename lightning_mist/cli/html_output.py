"""``lightning-mist plan --html``: the plan in one page."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from lightning_mist.cli.cluster_input import devices_of, precision_notes
from lightning_mist.cli.output import COMMAND, answer, display, told
from lightning_mist.console import TextConsole
from lightning_mist.plan import Plan, split_notes, to_json

if TYPE_CHECKING:
    from lightning_mist.estimate import MemoryEstimate
    from lightning_mist.explain import ComparedPlan, Explanation
    from lightning_mist.model import ModelSpec
    from lightning_mist.tuner import Planner, TuneResult


FORMATS = (".png", ".pdf", ".svg")
"""Kinds of pictures that can be drawn."""


def check_drawn(what: Literal["picture", "report"], path: str) -> None:
    """Refuse a picture, or a page with pictures, that cannot be written, before anything has been computed for it.

    Raises:
        ValueError: If it is of no kind that can be drawn, its folder is not there, it is a folder, or matplotlib is not
            installed.
    """
    if what == "picture" and Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"picture {path!r}: write a name that ends in {', '.join(FORMATS)}")
    check_target(what, path, "report.html" if what == "report" else "picture.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{what} {path!r} needs matplotlib: pip install 'lightning-mist[pictures]', or leave it out"
        ) from error


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
        comparison_notes=comparison_notes(found.compared, found.planner.spec) if found.compared else (),
        frontier=frontier,
        estimate=found.estimate,
        inputs=inputs_of(given, found.plan),
        notes=found.notes,
    )
    Path(path).write_text(render_report(report), encoding="utf-8")


def inputs_of(given: Mapping[str, Any], found: Plan) -> tuple[tuple[str, str], ...]:
    """What a plan was made from, for people: what was said, the command, and the versions."""
    said = [
        (name.replace("_", " "), str(value))
        for name, value in given.items()
        if not (value is None or value == "" or isinstance(value, bool) or name in _FILES)
    ]
    made_for = dict(found.fingerprint)
    parameters = [("parameters", f"{int(made_for['num_parameters']):,}")] if "num_parameters" in made_for else []
    versions = [f"lightning-mist {importlib.metadata.version('lightning-mist')}", f"Python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "highspy")]
    return (*said, *parameters, ("command", COMMAND.get()), ("versions", ", ".join(versions)))


_FILES = ("out", "html", "explain_seconds")
"""Options that say where results go, and how long to explain them."""


# What is known of a plan that was asked for, and what it needs of memory in words.


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan and all that is known of it."""

    planner: "Planner"
    asked: dict[str, Any]
    result: "TuneResult"
    plan: Plan
    estimate: "MemoryEstimate"
    restricted: tuple[str, ...]
    compared: "tuple[ComparedPlan, ...] | None"
    precision_note: str = ""

    @property
    def memory(self) -> str:
        """What it needs of devices, in sentences."""
        return memory_words(self.estimate)

    @property
    def cautions(self) -> tuple[str, ...]:
        """What to know before the plan is used; the rest of the notes says where its numbers come from."""
        split = split_notes(self.plan, self.planner.spec.module_map)
        precision = precision_notes(self.planner.cluster, self.planner.spec.precision)
        return (*self.restricted, *split, *precision, *self.planner.spec.notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the plan and of its numbers, for people."""
        return (*self.cautions, *self.result.notes)


def memory_words(estimate: "MemoryEstimate") -> str:
    """What a plan needs of devices, and what would leave more room, in sentences."""
    text = estimate.headline()
    if estimate.device_verdict == "fits":
        return text
    need, has = estimate.worst.device_total, estimate.limit_of(estimate.worst)
    return f"{text} To be surer, plan with less: --memory-limit {int(10 * has / need.p95 * has / 2**30) / 10:g}GiB."


TITLE = "what people would have chosen, each at its best by the same cost model"
"""What the table says it is."""


def print_comparison(items: "Sequence[ComparedPlan]", spec: "ModelSpec") -> None:
    """Print a comparison as a table, with what to know of it."""
    answer()
    display(render_comparison, items, comparison_notes(items, spec))


def comparison_notes(items: "Sequence[ComparedPlan]", spec: "ModelSpec") -> tuple[str, ...]:
    """What to know of a comparison."""
    from lightning_mist.explain import baseline_notes, faster_notes

    return (*faster_notes(items), *baseline_notes(spec))


def render_comparison(
    items: "Sequence[ComparedPlan]", notes: Sequence[str] = (), *, width: int = 120, color: bool = False
) -> str:
    """A comparison as a table, with notes under it."""
    table = Table(title=TITLE, title_justify="left")
    table.add_column("plan", min_width=16)
    has_tokens = any(item.tokens_per_second is not None for item in items)
    for heading in ("step", "times\nours", "tokens/s" if has_tokens else "rows/s", "peak\nmemory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("settings", ratio=1, overflow="fold")
    known: dict[tuple[Plan, str], str] = {}
    for item in items:
        cells = item.cells(in_tokens=has_tokens, digits=3)
        if item.plan is None:
            table.add_row(item.name, *cells, item.noted(item.reason))
            continue
        first = known.setdefault((replace(item.plan, predicted=None, fingerprint=()), item.precision), item.name)
        settings = (
            item.settings
            if first == item.name
            else "the same plan"
            if first == items[0].name
            else f"the same plan as {first}"
        )
        mark = " *" if not_executed(item) else ""
        table.add_row(f"{item.name}{mark}", *cells, item.noted(settings))
    console = TextConsole(width, color=color)
    console.print(table)
    lines = [console.text]
    if any(not_executed(item) for item in items):
        lines.append("* a forecast: the runtime does not execute all of this plan yet")
    told = (fill(note, width, break_long_words=False, break_on_hyphens=False) for note in notes)
    return "\n".join((*lines, *told))


def not_executed(item: "ComparedPlan") -> tuple[str, ...]:
    """What the runtime does not execute yet of a line's plan."""
    from lightning_mist.runtime.support import unsupported

    return () if item.plan is None else unsupported(item.plan)


def comparison_json(items: "Sequence[ComparedPlan]") -> list[dict[str, object]]:
    """A comparison for machines: every figure, and the plans as in plan files."""
    return [
        {
            **{name: getattr(item, name) for name in _FIGURES},
            "plan": None if item.plan is None else json.loads(to_json(item.plan)),
            "not_executed": not_executed(item),
        }
        for item in items
    ]


_FIGURES = (
    *("name", "settings", "reason", "note", "step_seconds", "ratio", "rows_per_second", "tokens_per_second"),
    *("peak_bytes", "stack", "precision"),
)
"""What is said of each plan of a comparison beside the plan itself."""
