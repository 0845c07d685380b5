"""A plan in one page: what it is, what it costs, why it was chosen, and what it was made from."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from lightning_mist.cost.memory import TERMS
from lightning_mist.errors import PlanError
from lightning_mist.estimate import COLORS as MEMORY_COLORS
from lightning_mist.estimate import MemoryEstimate
from lightning_mist.explain import ComparedPlan, Explanation, explanation_sections
from lightning_mist.hardware import AnyCluster, HardwareProfile
from lightning_mist.plan import Plan, Predicted, ZeroStage, step_rates
from lightning_mist.plan.plan_tables import counted, per_second, spent_rows, stage_cells, stages_named
from lightning_mist.report.draw_map import draw_map
from lightning_mist.report.draw_memory import WORDS as MEMORY_WORDS
from lightning_mist.report.draw_memory import memory_figure, memory_picture, unit_figure
from lightning_mist.report.draw_timeline import timeline_figure
from lightning_mist.report.figures import inline_svg, styled
from lightning_mist.report.frontier import Frontier, frontier_figure, frontier_lines
from lightning_mist.report.timeline import timeline_of
from lightning_mist.runtime.support import unsupported
from lightning_mist.schedule import Simulation, simulate_plan
from lightning_mist.tuner.select import TuneResult
from lightning_mist.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page is made of.

    Attributes:
        title: What was planned for what, for example ``"gpt3-22b on 4x8xL4"``, or the name of a plan file.
        result: The search that found it, if one did.
        memory_limits: Bytes that tensors may take on each device of each stage, if known.
        estimate: Whether it fits. Of its bytes none are shown: a page has those that the plan was chosen by.
        device_names: What the devices of each stage are; empty if they are all alike.
        machine: What it is for, if known, and what each of its parts was priced with.
        comparison: The plan beside others; the plan itself comes first.
        inputs: What it was made from, as ``(name, value)``: model, cluster, batch, command, versions.
    """

    title: str
    plan: Plan
    result: TuneResult | None = None
    memory_limits: tuple[float, ...] = ()
    device_names: tuple[str, ...] = ()
    machine: tuple[AnyCluster, tuple[HardwareProfile, ...]] | None = None
    explanation: Explanation | None = None
    comparison: tuple[ComparedPlan, ...] = ()
    comparison_notes: tuple[str, ...] = ()
    frontier: Frontier | None = None
    estimate: MemoryEstimate | None = None
    inputs: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def render_report(report: Report) -> str:
    """A page that needs nothing else: text, tables and pictures, on light and dark screens and on paper."""
    if report.plan.predicted is None:
        raise PlanError("the plan has no predicted seconds: a report needs a plan that `lightning-mist plan` made")
    return page(f"{report.title}: the plan", _sections(report, report.plan.predicted))


def _sections(report: Report, predicted: Predicted) -> Iterator[str]:
    plan, missing = report.plan, unsupported(report.plan)
    simulation = simulate_plan(plan)
    yield title_line(report.title)
    yield paragraph(headline(plan), "lead")
    yield paragraph("" if report.estimate is None else _verdict(report.estimate))
    yield paragraph("" if report.result is None else f"{_capital(report.result.proof[0])}.", "soft")
    yield figures(_figures(report, predicted))
    yield warning("A forecast: this version does not execute all of this plan yet", missing)
    yield section("The plan", paragraph(_PLAN, "soft"), table(*stage_cells(plan, report.device_names), text=_WORDY))
    yield _map(report)
    yield seconds_section(plan)
    yield _timeline(plan, simulation)
    yield memory_section(plan, report.memory_limits)
    yield _memory(report, simulation)
    yield from _why(report)
    yield _comparison(report)
    yield _frontier(report)
    if report.result is not None:
        yield section("How sure it is that this plan is the best", items(report.result.proof))
    yield section("What to know of this plan, and where its numbers come from", items(report.notes))
    yield section("What this was made from", pairs(report.inputs))
    yield section("Words", pairs(words_for(plan)))


LEAST_POINTS = 3
"""Fewer limits than these are no picture."""

_WORDY = ("on", "devices", "offload")
"""Columns that may be long."""

_PLAN = (
    "One line for each stage, a group of devices that runs some of the layers. Forward and backward are seconds of one "
    "microbatch; peak memory is that of the stage's most loaded device."
)


def headline(plan: Plan) -> str:
    """A plan in a sentence."""
    seconds = plan.prediction.step_seconds
    if plan.num_groups < plan.num_stages:
        parts = f"{plan.num_stages} stages on {plan.num_groups} groups of devices, {plan.world_size} in all"
    elif plan.num_stages > 1:
        parts = f"{plan.num_stages} pipeline stages on {plan.world_size} devices"
    else:
        parts = f"One stage (no pipeline) on {counted(plan.world_size, 'device')}"
    rates = step_rates(plan, seconds)
    tokens = None if rates is None else rates.tokens_per_second
    rate = "" if tokens is None else f", {per_second(tokens)} tokens/s"
    loaders = "" if plan.data_parallel_size is None else f" of {plan.num_loaders} data loaders"
    return (
        f"{parts}: a step of {plan.global_batch_size} rows{loaders} in {counted(plan.num_microbatches, 'microbatch')} "
        f"is predicted to take {format_seconds(seconds)}{rate}."
    )


def _verdict(estimate: MemoryEstimate) -> str:
    has = format_bytes(estimate.limit_of(estimate.worst))
    surely = {"fits": ", in 95 of 100 cases and more", "tight": ": it may turn out not to fit"}
    return f"{_capital(estimate.verdict)} in {has} per device{surely.get(estimate.verdict, '')}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _figures(report: Report, predicted: Predicted) -> Iterator[tuple[str, str]]:
    plan = report.plan
    rates = step_rates(plan, predicted.step_seconds)
    yield format_seconds(predicted.step_seconds), "one optimizer step, predicted"
    if rates is not None:
        if rates.tokens_per_second is not None:
            yield per_second(rates.tokens_per_second), "tokens per second, all devices"
        else:
            yield per_second(rates.rows_per_second), "rows per second, all devices"
        if rates.utilisation is not None and predicted.work is not None:
            yield f"{rates.utilisation:.1%}", f"of the devices' peak ({predicted.work.peak_source})"
    worst = max(range(plan.num_stages), key=lambda index: predicted.stages[index].peak_bytes)
    peak = predicted.stages[worst].peak_bytes
    limit = f" of {format_bytes(report.memory_limits[worst])} for tensors" if report.memory_limits else ""
    verdict = "" if report.estimate is None else f": {report.estimate.verdict}"
    yield format_bytes(peak), f"peak memory of the fullest device{limit}{verdict}"
    if plan.num_groups > 1:
        shares = [dict(stage.spent).get("bubble_seconds", 0.0) for stage in predicted.stages[: plan.num_groups]]
        if any(stage.spent for stage in predicted.stages) and predicted.step_seconds > 0:
            mean = sum(shares) / len(shares) / predicted.step_seconds
            yield f"{mean:.1%}", "of the step stages wait for each other (bubble)"


def _map(report: Report) -> str:
    if report.machine is None:
        return ""
    caption = (
        "Which node runs what. Nodes that run the same, but for rows, are drawn once; devices that share each layer "
        "touch. Rates are those that the plan was priced with, of one device while all of its node send."
    )
    return section("Where it runs", draw_map(report.plan, *report.machine), paragraph(caption, "soft"))


def _timeline(plan: Plan, simulation: Simulation) -> str:
    timeline = timeline_of(plan, simulation)
    with styled("timeline", is_text=True):
        svg = inline_svg(timeline_figure(timeline), "timeline", "Timeline of one step, by stage")
    caption = (
        "What every stage does when, by the plan's own schedule on a clock. Numbers are microbatches; where there is "
        "nothing but grey, devices wait. Thin lanes are what they copy and exchange meanwhile, hidden or not."
    )
    return section("One step on a clock", framed(svg, caption))


def _memory(report: Report, simulation: Simulation) -> str:
    """Bytes over the step as a picture, of plans that say what they are made of."""
    if not all(stage.needs for stage in report.plan.prediction.stages):
        return ""
    picture = memory_picture(report.plan, report.memory_limits, simulation)
    with styled("memory", is_text=True):
        svg = inline_svg(memory_figure(picture), "memory", "Memory over one step, by stage and by what it is used for")
    caption = (
        "Bytes of each stage's most loaded device, with what it must hold during each action, at the time when that "
        "action runs. The highest point is the peak that the plan was chosen by."
    )
    pictures = [framed(svg, caption)]
    with styled("units", is_text=True):
        if (figure := unit_figure(picture)) is not None:
            svg = inline_svg(figure, "units", "Memory over the layers of one forward and one backward")
            pictures.append(framed(svg, _UNITS))
    return section("Memory over one step", *pictures)


_UNITS = (
    "The same within one microbatch of the fullest stage: in front of the first layer (head), in each layer, and "
    "behind the last one (tail: logits and loss), forward and backward. Each tooth is the most while a unit runs."
)


def _why(report: Report) -> Iterator[str]:
    """Why this plan: of a whole explanation all, else what the search itself says."""
    if report.explanation is not None:
        parts = explanation_sections(report.explanation)
        inner = [subsection(_capital(title), items(lines)) for title, lines in parts]
        yield section("Why this plan", *inner)
    elif report.result is not None and report.result.alternatives:
        yield section("Other plans", items(report.result.compared))


def _comparison(report: Report) -> str:
    if not report.comparison:
        return ""
    intro = (
        "What people would have chosen, each tuned over its own settings, under the same cost model and the same "
        "memory limits. Bars are seconds of a step and what they go to, the mean of all stages; hatched is what has no "
        "plan, with the reason. Times ours: how many times as long a step takes."
    )
    return section(
        "Beside what people would have chosen",
        paragraph(intro, "soft"),
        *comparison_bars(report.comparison),
        comparison_table(report.comparison),
        items(report.comparison_notes),
    )


def _frontier(report: Report) -> str:
    found = report.frontier
    if found is None or not found.points:
        return ""
    if len(found.points) < LEAST_POINTS:
        return section("With less memory", items(frontier_lines(found)))
    with styled("frontier", is_text=True):
        svg = inline_svg(frontier_figure(found), "frontier", "Seconds of the best plan against the memory limit")
    caption = "The best plan found anew under each memory limit: what memory buys, and how much of it is needed at all."
    return section("With less memory", framed(svg, caption), items(frontier_lines(found)))


def words_for(plan: Plan) -> Iterator[tuple[str, str]]:
    """The words of a report that a plan needs, each with what it means."""
    stages = plan.stages
    yield "row", "one sample of a batch; of language models one sequence of tokens"
    yield "microbatch", "a part of a batch that goes through the network at once; gradients of all parts are added up"
    if plan.num_stages > 1:
        yield "stage", "a run of neighbouring layers, and the group of devices that computes them"
        yield "schedule", _SCHEDULES[plan.schedule]
        yield "bubble", "time in which devices wait for other stages, while the pipeline fills, drains, or is uneven"
    if any(stage.data_parallel_degree > 1 for stage in stages):
        yield "data parallel", "so many copies of a stage work on different rows and average their gradients"
    if any(stage.mesh.tensor_parallel_degree > 1 for stage in stages):
        yield "tensor parallel", "so many devices share every layer's matrices and exchange results within each layer"
    if any(stage.mesh.sequence_parallel for stage in stages):
        yield "sequence parallel", "these devices also share what lies between matrices, along the sequence"
    if any(stage.mesh.context_parallel_degree > 1 for stage in stages):
        yield "context parallel", "so many devices share the tokens of each row"
    if any(stage.zero_stage > ZeroStage.NONE for stage in stages):
        yield (
            "ZeRO",
            "copies of a stage share out what else each would hold whole: 1 optimizer state, 2 gradients too, "
            "3 parameters too",
        )
    if any(stage.checkpointing.layers for stage in stages):
        yield "checkpointed", "layers whose activations are not kept but computed again in backward (recompute)"
    if any(stage.offload.any for stage in stages):
        yield "offload", "the share of parameters, gradients, optimizer state or activations that lives in host memory"
    yield "closed form", "the formula of a step's seconds that the search minimises, and what its proof is about"
    yield "clock", "runs the plan's schedule action by action; predicted steps are the clock's"
    yield (
        "working set",
        "what is there only while a microbatch is computed: its own activations, and what layers need meanwhile",
    )


_SCHEDULES = {
    "1f1b": "1F1B: once the pipeline is full every stage alternates one forward and one backward",
    "gpipe": "GPipe: all forwards of a batch, then all backwards",
    "interleaved-1f1b": "interleaved 1F1B: devices hold several runs of layers, so that the pipeline fills sooner",
    "zb-h1": "ZB-H1: gradients of weights are computed apart from those of inputs, and fill waiting time",
}


# Pieces of a page: text is escaped here and nowhere else, and what a page looks like is said here once.


STYLE = "\n" + files("lightning_mist.report").joinpath("style.css").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class StackedBar:
    """One stacked bar.

    Attributes:
        parts: ``(color, share of the whole width, what it says when pointed at)``.
        mark: Where a limit is, as a share of the whole width.
    """

    label: str
    parts: tuple[tuple[str, float, str], ...]
    text: str
    mark: float | None = None


def page(title: str, sections: Iterable[str]) -> str:
    """A whole page that needs nothing else."""
    body = "\n".join(section for section in sections if section)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def title_line(text: str) -> str:
    """The heading of the page."""
    return f"<h1>{escape(text)}</h1>"


def subsection(title: str, *parts: str) -> str:
    """A smaller heading with what belongs to it."""
    return f"<h3>{escape(title)}</h3>" + "\n".join(parts)


def section(title: str, *parts: str) -> str:
    """A heading with what belongs to it; nothing if nothing does."""
    inner = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inner}\n</section>" if inner else ""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of text."""
    return f"<p{_class(kind)}>{escape(text)}</p>" if text else ""


def items(texts: Sequence[str]) -> str:
    """A list of sentences."""
    return "<ul>\n" + "\n".join(f"<li>{escape(text)}</li>" for text in texts) + "\n</ul>" if texts else ""


def pairs(values: Iterable[tuple[str, str]]) -> str:
    """Names with what they stand for."""
    rows = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values)
    return f"<dl>\n{rows}\n</dl>" if rows else ""


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[str] = (), ours: int | None = None
) -> str:
    """A table of text.

    Args:
        text: Headings of columns of words, which are set to the left.
        ours: The row to be seen first.
    """
    kinds = ["text" if heading in text else "" for heading in headings]
    head = "".join(f"<th{_class(kind)}>{escape(heading)}</th>" for heading, kind in zip(headings, kinds, strict=True))
    lines = [
        f"<tr{_class('ours' if index == ours else '')}>"
        + "".join(f"<td{_class(kind)}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for index, row in enumerate(rows)
    ]
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table></div>"
    )


def bar_rows(lines: Iterable[StackedBar]) -> str:
    """Stacked bars below each other, all as long."""
    rows = []
    for line in lines:
        parts = "".join(
            f'<i style="width:{100 * share:.3f}%;background:{color}" title="{escape(words, quote=True)}"></i>'
            for color, share, words in line.parts
        )
        mark = "" if line.mark is None else f'<u style="left:{100 * min(line.mark, 0.998):.3f}%" title="limit"></u>'
        label, text = escape(line.label), escape(line.text)
        rows.append(f'<div><span>{label}</span><span class="bar">{parts}{mark}</span><span>{text}</span></div>')
    return '<div class="bars">\n' + "\n".join(rows) + "\n</div>" if rows else ""


def keys(values: Iterable[tuple[str, str]]) -> str:
    """A legend of ``(color, words)``."""
    found = "".join(f'<span><i style="background:{color}"></i>{escape(words)}</span>' for color, words in values)
    return f'<div class="keys">{found}</div>'


def figures(values: Iterable[tuple[str, str]]) -> str:
    """Key figures in boxes, as ``(value, words)``."""
    found = "\n".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in values)
    return f'<div class="figures">\n{found}\n</div>'


def framed(svg: str, caption: str) -> str:
    """A picture with words under it."""
    return f'<figure><div class="wide">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>'


def warning(title: str, texts: Sequence[str]) -> str:
    """A highlighted box of sentences; nothing without any."""
    return f'<div class="warning"><b>{escape(title)}</b>{items(texts)}</div>' if texts else ""


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


# Tables and bars of a report: where seconds and bytes go, and what others would take.


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
    title: str, intro: str, terms: Terms, bars: Sequence[StackedBar], cells: Sequence[Sequence[str]], *more: str
) -> str:
    """Bars with their legend, and a table that says their parts and more."""
    words = [words for words, _ in terms.values()]
    return section(
        title,
        paragraph(intro, "soft"),
        keys((color, words) for words, color in terms.values()),
        bar_rows(bars),
        table(["stage", *words, *more], cells),
    )


def seconds_section(plan: Plan) -> str:
    """Where the seconds of a step go."""
    predicted = plan.predicted
    assert predicted is not None
    rows, step = spent_rows(plan), predicted.step_seconds
    if not any(rows) or step <= 0:
        return ""
    terms, labels = _present(SPENT, rows), [stages_named(plan.chunks(group)) for group in range(plan.num_groups)]
    busy = [format_seconds(step - row.get("bubble_seconds", 0.0)) + " busy" for row in rows]
    bars = [
        StackedBar(label, _parts(row, terms, step, format_seconds), text)
        for label, row, text in zip(labels, rows, busy, strict=True)
    ]
    cells = [
        [label, *(_part(row.get(name, 0.0), step) for name in terms)] for label, row in zip(labels, rows, strict=True)
    ]
    return _section(f"Where the {format_seconds(step)} of a step go", _SECONDS, terms, bars, cells)


def memory_section(plan: Plan, limits: Sequence[float] = ()) -> str:
    """What the peak of every stage is made of."""
    stages = [plan.prediction.stages[group] for group in range(plan.num_groups)]
    rows = [{name: value for name, value in stage.breakdown if name in TERMS} for stage in stages]
    if not any(rows):
        return ""
    top = max(*(stage.peak_bytes for stage in stages), *limits, 0.0)
    terms = _present({name: (MEMORY_WORDS[name], color) for name, color in MEMORY_COLORS.items()}, rows)
    bars, cells = [], []
    for group, (stage, row) in enumerate(zip(stages, rows, strict=True)):
        label, limit = stages_named(plan.chunks(group)), limits[group] if limits else None
        mark = None if limit is None else limit / top
        bars.append(StackedBar(label, _parts(row, terms, top, format_bytes), _of_limit(stage.peak_bytes, limit), mark))
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
            bars.append(StackedBar(item.name, ((HATCHED, 1.0, reason),), short))
        else:
            parts = _parts(row, terms, longest, format_seconds)
            bars.append(StackedBar(item.name, parts, format_seconds(item.step_seconds)))
    return keys((color, words) for words, color in terms.values()), bar_rows(bars)


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
        mark = " (a forecast: not executed yet)" if item.plan is not None and unsupported(item.plan) else ""
        settings = item.noted(item.reason if item.plan is None else item.settings + mark)
        rows.append([item.name, *item.cells(in_tokens=has_tokens, digits=2), settings])
    return table(headings, rows, text=("plan", "settings"), ours=0)


def _part(seconds: float, step: float) -> str:
    return f"{format_seconds(seconds)} ({seconds / step:.1%})" if seconds > 0 else "-"


def _of_limit(peak: float, limit: float | None) -> str:
    return format_bytes(peak) if limit is None else f"{format_bytes(peak)} of {format_bytes(limit)}"
