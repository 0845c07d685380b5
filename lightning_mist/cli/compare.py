"""``lightning-mist plan --compare``: the plan beside what people would have chosen."""

import json
from collections.abc import Sequence
from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING

from rich.table import Table

from lightning_mist.cli.output import answer, has_colors, terminal_width
from lightning_mist.console import TextConsole
from lightning_mist.plan import Plan, to_json
from lightning_mist.plan.plan_tables import per_second
from lightning_mist.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lightning_mist.explain import ComparedPlan
    from lightning_mist.model import ModelSpec

TITLE = "what people would have chosen, each at its best by the same cost model"
"""What the table says it is."""


def print_comparison(items: "Sequence[ComparedPlan]", spec: "ModelSpec") -> None:
    """Print a comparison as a table, with what to know of it."""
    text = render_comparison(items, comparison_notes(items, spec), width=terminal_width(), color=has_colors())
    answer(f"\n{text}")


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
        if item.plan is None:
            table.add_row(item.name, "-", "-", "-", "-", item.noted(item.reason))
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
        table.add_row(f"{item.name}{mark}", *_cells(item, has_tokens), item.noted(settings))
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


def _cells(item: "ComparedPlan", has_tokens: bool) -> tuple[str, ...]:
    assert item.step_seconds is not None
    assert item.ratio is not None
    assert item.peak_bytes is not None
    rate = item.tokens_per_second if has_tokens else item.rows_per_second
    shown = "-" if rate is None else per_second(rate)
    return format_seconds(item.step_seconds), f"{item.ratio:.3f}", shown, format_bytes(item.peak_bytes)
