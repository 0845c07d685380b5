"""An explanation for people at a terminal."""

from collections.abc import Sequence
from textwrap import wrap

from rich.table import Column, Table

from lightning_mist.console import TextConsole
from lightning_mist.estimate import WORDS
from lightning_mist.explain.explain_text import Section, explanation_sections
from lightning_mist.explain.explanation import Explanation
from lightning_mist.plan import Plan
from lightning_mist.units import format_bytes

LEAST_SHARE = 0.005
"""Terms that take a smaller share of every stage's peak have no column of their own."""


def render_explanation(explanation: Explanation, *, width: int = 120, color: bool = False) -> str:
    """An explanation as text: the bytes of every stage by term, and titles with sentences."""
    console = TextConsole(width, color=color)
    title, table = memory_table(explanation.plan)
    console.print(title, style="bold italic")
    console.print_table(table)
    console.print()
    _print_sections(console, explanation_sections(explanation))
    return console.text


def render_sections(sections: Sequence[Section], *, width: int = 120, color: bool = False) -> str:
    """Titles with sentences as text, a line between sections."""
    console = TextConsole(width, color=color)
    _print_sections(console, [(title, lines) for title, lines in sections if lines])
    return console.text


def _print_sections(console: TextConsole, sections: Sequence[Section]) -> None:
    for place, (title, lines) in enumerate(sections):
        if place:
            console.print()
        console.print(title, style="bold italic")
        for line in lines:
            parts = wrap(line, console.width - 2, break_long_words=False, break_on_hyphens=False)
            for number, part in enumerate(parts):
                console.print(f"{'  ' if number else '- '}{part}", soft_wrap=True)


def memory_table(plan: Plan) -> tuple[str, Table]:
    """A title and a table of what the peak of every group of devices is made of."""
    stages = [plan.prediction.stages[group] for group in range(plan.num_groups)]
    rows = [{name: size for name, size in stage.breakdown if name in WORDS} for stage in stages]
    shown = [
        name
        for name in WORDS
        if any(row.get(name, 0.0) > LEAST_SHARE * stage.peak_bytes for row, stage in zip(rows, stages, strict=True))
    ]
    headings = ("stage", *(WORDS[name] for name in shown), "others", "peak")
    table = Table(*(Column(heading, justify="right") for heading in headings))
    for group, (row, stage) in enumerate(zip(rows, stages, strict=True)):
        others = stage.peak_bytes - sum(row.get(name, 0.0) for name in shown)
        cells = [*(row.get(name, 0.0) for name in shown), others, float(stage.peak_bytes)]
        table.add_row(
            " and ".join(map(str, plan.chunks(group))), *(format_bytes(size) if size else "-" for size in cells)
        )
    return "bytes of the most loaded device at its peak, by stage", table
