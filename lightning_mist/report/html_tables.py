"""Tables and bars of a report: where seconds and bytes go, and what others would take."""

from collections.abc import Callable, Mapping, Sequence

from lightning_mist.cost.memory import TERMS
from lightning_mist.explain import ComparedPlan
from lightning_mist.plan import Plan
from lightning_mist.plan.plan_tables import per_second, spent_rows
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


Terms = Mapping[str, tuple[str, str]]
"""Words and colour of terms by their names in plans."""


def _present(terms: Terms, rows: Sequence[Mapping[str, float]]) -> Terms:
    """The terms that are more than nothing in any row."""
    return {name: term for name, term in terms.items() if any(row.get(name, 0.0) > 0 for row in rows)}


def _parts(
    row: Mapping[str, float], terms: Terms, whole: float, said: Callable[[float], str]
) -> tuple[tuple[str, float, str], ...]:
    """Parts of a bar, of which ``whole`` takes the whole width."""
    return tuple(
        (color, row[name] / whole, f"{words} {said(row[name])}")
        for name, (words, color) in terms.items()
        if row.get(name, 0.0) > 0
    )


def _section(
    title: str, intro: str, terms: Terms, bars: Sequence[page.Bar], cells: Sequence[Sequence[str]], *more: str
) -> str:
    """Bars with their legend, and a table that says their parts and more."""
    words = [words for words, _ in terms.values()]
    return page.section(
        title,
        page.paragraph(intro, "soft"),
        page.keys((color, words) for words, color in terms.values()),
        page.bars(bars),
        page.table(["stage", *words, *more], cells),
    )


def seconds_section(plan: Plan) -> str:
    """Where the seconds of a step go."""
    predicted = plan.predicted
    assert predicted is not None
    rows, step = spent_rows(plan), predicted.step_seconds
    if not any(rows) or step <= 0:
        return ""
    terms, labels = _present(SPENT, rows), [group_name(plan, group) for group in range(plan.num_groups)]
    busy = [format_seconds(step - row.get("bubble_seconds", 0.0)) + " busy" for row in rows]
    bars = [
        page.Bar(label, _parts(row, terms, step, format_seconds), text)
        for label, row, text in zip(labels, rows, busy, strict=True)
    ]
    cells = [
        [label, *(_part(row.get(name, 0.0), step) for name in terms)] for label, row in zip(labels, rows, strict=True)
    ]
    return _section(f"Where the {format_seconds(step)} of a step go", _SECONDS, terms, bars, cells)


def memory_section(plan: Plan, limits: Sequence[float] = ()) -> str:
    """What the peak of every stage is made of."""
    assert plan.predicted is not None
    stages = [plan.predicted.stages[group] for group in range(plan.num_groups)]
    rows = [{name: value for name, value in stage.breakdown if name in TERMS} for stage in stages]
    if not any(rows):
        return ""
    top = max(*(stage.peak_bytes for stage in stages), *limits, 0.0)
    terms = _present({name: (MEMORY_WORDS[name], color) for name, color in MEMORY_COLORS.items()}, rows)
    bars, cells = [], []
    for group, (stage, row) in enumerate(zip(stages, rows, strict=True)):
        label, limit = group_name(plan, group), limits[group] if limits else None
        mark = None if limit is None else limit / top
        bars.append(page.Bar(label, _parts(row, terms, top, format_bytes), _of_limit(stage.peak_bytes, limit), mark))
        amounts = (format_bytes(row[name]) if row.get(name) else "-" for name in terms)
        cells.append([label, *amounts, format_bytes(stage.peak_bytes)])
    return _section("Where the memory goes", _MEMORY, terms, bars, cells, "peak")


HATCHED = "repeating-linear-gradient(45deg,#999999 0px,#999999 2px,transparent 2px,transparent 8px)"
"""What stands for no plan."""


def comparison_bars(compared: Sequence[ComparedPlan]) -> tuple[str, str]:
    """Seconds of a step of a plan and of others, by what they are spent on: a legend, and bars."""
    longest = max(item.step_seconds or 0.0 for item in compared)
    rows = [{} if item.plan is None else _mean(spent_rows(item.plan)) for item in compared]
    # Bars end where steps do: a bubble must not look like what is behind them.
    terms, bars = _present({**SPENT, "bubble_seconds": ("bubble", "#b4b8bf")}, rows), []
    for item, row in zip(compared, rows, strict=True):
        if item.step_seconds is None:
            reason = item.noted(item.reason)
            short = reason if len(reason) <= MOST_REASON else f"{reason[: MOST_REASON - 3]}..."
            bars.append(page.Bar(item.name, ((HATCHED, 1.0, reason),), short))
        else:
            parts = _parts(row, terms, longest, format_seconds)
            bars.append(page.Bar(item.name, parts, format_seconds(item.step_seconds)))
    return page.keys((color, words) for words, color in terms.values()), page.bars(bars)


MOST_REASON = 56
"""Characters of a reason beside a bar; the table has all of it."""


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


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
