"""Tables and bars of a report: where seconds and bytes go, and what others would take."""

from collections.abc import Sequence

from lightning_mist.cost.memory import TERMS
from lightning_mist.explain import ComparedPlan
from lightning_mist.plan import Plan
from lightning_mist.plan.plan_tables import per_second
from lightning_mist.report import page
from lightning_mist.report.draw_memory import COLORS as MEMORY_COLORS
from lightning_mist.report.draw_memory import WORDS as MEMORY_WORDS
from lightning_mist.runtime.support import unsupported
from lightning_mist.units import format_bytes, format_seconds

SPENT = {
    "compute_seconds": ("compute", "#0072b2"),
    "recompute_seconds": ("recompute", "#f0e442"),
    "communication_seconds": ("exposed transfers", "#cc79a7"),
    "copies_seconds": ("exposed copies", "#882255"),
    "optimizer_seconds": ("optimizer", "#e69f00"),
    "overhead_seconds": ("overhead", "#999999"),
    "bubble_seconds": ("bubble", "var(--shade)"),
}
"""What seconds are spent on, by the names in plans: words and colour."""

_SECONDS = (
    "Each line adds up to the step. Exposed is what computation does not hide: of collectives and transfers between "
    "stages, and of copies between device and host. Overhead is the runtime's own Python as far as devices wait for it."
)
_MEMORY = (
    "Bytes of each stage's most loaded device at the moment when it needs most. What lies beyond the limit for tensors "
    "is left for the context, communicators and what the allocator keeps free."
)


def seconds_section(plan: Plan) -> str:
    """Where the seconds of a step go."""
    predicted = plan.predicted
    assert predicted is not None
    rows = [dict(predicted.stages[group].spent) for group in range(plan.num_groups)]
    if not any(rows) or predicted.step_seconds <= 0:
        return ""
    names = [name for name in SPENT if any(row.get(name, 0.0) > 0 for row in rows)]
    lines = [
        page.Bar(
            label=group_name(plan, group),
            parts=tuple(
                (
                    SPENT[name][1],
                    row.get(name, 0.0) / predicted.step_seconds,
                    f"{SPENT[name][0]} {format_seconds(row.get(name, 0.0))}",
                )
                for name in names
                if row.get(name, 0.0) > 0
            ),
            text=format_seconds(predicted.step_seconds - row.get("bubble_seconds", 0.0)) + " busy",
        )
        for group, row in enumerate(rows)
    ]
    cells = [
        [group_name(plan, group), *(_part(row.get(name, 0.0), predicted.step_seconds) for name in names)]
        for group, row in enumerate(rows)
    ]
    return page.section(
        f"Where the {format_seconds(predicted.step_seconds)} of a step go",
        page.paragraph(_SECONDS, "soft"),
        page.keys((SPENT[name][1], SPENT[name][0]) for name in names),
        page.bars(lines),
        page.table(["stage", *(SPENT[name][0] for name in names)], cells),
    )


def memory_section(plan: Plan, limits: Sequence[float] = ()) -> str:
    """What the peak of every stage is made of."""
    predicted = plan.predicted
    assert predicted is not None
    stages = [predicted.stages[group] for group in range(plan.num_groups)]
    rows = [{name: value for name, value in stage.breakdown if name in TERMS} for stage in stages]
    if not any(rows):
        return ""
    highest = max(stage.peak_bytes for stage in stages)
    top = max(highest, *limits) if limits else highest
    names = [name for name in MEMORY_COLORS if any(row.get(name, 0.0) > 0 for row in rows)]
    lines = [
        page.Bar(
            label=group_name(plan, group),
            parts=tuple(
                (MEMORY_COLORS[name], row[name] / top, f"{MEMORY_WORDS[name]} {format_bytes(row[name])}")
                for name in names
                if row.get(name, 0.0) > 0
            ),
            text=_of_limit(stages[group].peak_bytes, limits[group] if limits else None),
            mark=limits[group] / top if limits else None,
        )
        for group, row in enumerate(rows)
    ]
    cells = [
        [
            group_name(plan, group),
            *(format_bytes(row[name]) if row.get(name) else "-" for name in names),
            format_bytes(stages[group].peak_bytes),
        ]
        for group, row in enumerate(rows)
    ]
    return page.section(
        "Where the memory goes",
        page.paragraph(_MEMORY, "soft"),
        page.keys((MEMORY_COLORS[name], MEMORY_WORDS[name]) for name in names),
        page.bars(lines),
        page.table(["stage", *(MEMORY_WORDS[name] for name in names), "peak"], cells),
    )


def comparison_table(compared: Sequence[ComparedPlan]) -> str:
    """A plan beside others."""
    has_tokens = any(item.tokens_per_second is not None for item in compared)
    headings = ["plan", "step", "times ours", "tokens/s" if has_tokens else "rows/s", "peak memory", "settings"]
    rows = []
    for item in compared:
        if item.plan is None or item.step_seconds is None or item.peak_bytes is None or item.ratio is None:
            rows.append([item.name, "-", "-", "-", "-", item.noted(item.reason)])
            continue
        rate = item.tokens_per_second if has_tokens else item.rows_per_second
        mark = " (a forecast: not executed yet)" if unsupported(item.plan) else ""
        rows.append(
            [
                item.name,
                format_seconds(item.step_seconds),
                f"{item.ratio:.2f}",
                "-" if rate is None else per_second(rate),
                format_bytes(item.peak_bytes),
                item.noted(item.settings + mark),
            ]
        )
    return page.table(headings, rows, text=("plan", "settings"), ours=0)


def group_name(plan: Plan, group: int) -> str:
    """The stages of a group of devices."""
    chunks = plan.chunks(group)
    return f"stage{'s' * (len(chunks) > 1)} {' and '.join(map(str, chunks))}"


def _part(seconds: float, step: float) -> str:
    return f"{format_seconds(seconds)} ({seconds / step:.1%})" if seconds > 0 else "-"


def _of_limit(peak: float, limit: float | None) -> str:
    return format_bytes(peak) if limit is None else f"{format_bytes(peak)} of {format_bytes(limit)}"
