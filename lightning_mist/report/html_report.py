"""A plan in one page: what it is, what it costs, why it was chosen, and what it was made from."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_mist.errors import PlanError
from lightning_mist.explain import ComparedPlan, Explanation, explanation_sections
from lightning_mist.hardware import AnyCluster, HardwareProfile
from lightning_mist.plan import Plan, Predicted, ZeroStage, step_rates
from lightning_mist.plan.plan_tables import per_second, stage_cells
from lightning_mist.report import page
from lightning_mist.report.figures import inline_svg, styled
from lightning_mist.report.frontier import Frontier, frontier_figure, frontier_lines
from lightning_mist.report.html_tables import comparison_bars, comparison_table, memory_section, seconds_section
from lightning_mist.report.timeline import timeline_of
from lightning_mist.runtime.support import unsupported
from lightning_mist.schedule import Simulation, simulate_plan
from lightning_mist.tuner.select import TuneResult
from lightning_mist.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page is made of.

    Attributes:
        title: What was planned for what, for example ``"gpt3-22b on 4x8xL4"``.
        result: The search that found it, if one did.
        memory_limits: Bytes that tensors may take on each device of each stage, if known.
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
    verdict: str = ""
    inputs: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def render_report(report: Report) -> str:
    """A page that needs nothing else: text, tables and pictures, on light and dark screens and on paper."""
    if report.plan.predicted is None:
        raise PlanError("the plan has no predicted seconds: a report needs a plan that `lightning-mist plan` made")
    return page.page(f"{report.title}: the plan", _sections(report, report.plan.predicted))


def _sections(report: Report, predicted: Predicted) -> Iterator[str]:
    plan, missing = report.plan, unsupported(report.plan)
    simulation = simulate_plan(plan)
    yield page.title_line(report.title)
    yield page.paragraph(headline(plan), "lead")
    yield page.paragraph(report.verdict)
    yield page.paragraph("" if report.result is None else f"{_capital(report.result.proof[0])}.", "soft")
    yield page.figures(_figures(report, predicted))
    yield page.warning("A forecast: this version does not execute all of this plan yet", missing)
    yield page.section(
        "The plan", page.paragraph(_PLAN, "soft"), page.table(*stage_cells(plan, report.device_names), text=_WORDY)
    )
    yield _map(report)
    yield seconds_section(plan)
    yield _timeline(plan, simulation)
    yield memory_section(plan, report.memory_limits)
    yield _memory(report, simulation)
    yield from _why(report)
    yield _comparison(report)
    yield _frontier(report)
    if report.result is not None:
        yield page.section("How sure it is that this plan is the best", page.items(report.result.proof))
    yield page.section("What to know of this plan, and where its numbers come from", page.items(report.notes))
    yield page.section("What this was made from", page.pairs(report.inputs))
    yield page.section("Words", page.pairs(words_for(plan)))


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
    assert plan.predicted is not None
    seconds = plan.predicted.step_seconds
    if plan.num_groups < plan.num_stages:
        parts = f"{plan.num_stages} stages on {plan.num_groups} groups of devices, {plan.world_size} in all"
    elif plan.num_stages > 1:
        parts = f"{plan.num_stages} pipeline stages on {plan.world_size} devices"
    else:
        parts = f"One stage (no pipeline) on {plan.world_size} device{'s' * (plan.world_size > 1)}"
    rates = step_rates(plan, seconds)
    tokens = None if rates is None else rates.tokens_per_second
    rate = "" if tokens is None else f", {per_second(tokens)} tokens/s"
    loaders = "" if plan.data_parallel_size is None else f" of {plan.num_loaders} data loaders"
    return (
        f"{parts}: a step of {plan.global_batch_size} rows{loaders} in {plan.num_microbatches} "
        f"microbatch{'es' * (plan.num_microbatches > 1)} is predicted to take {format_seconds(seconds)}{rate}."
    )


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
    yield format_bytes(peak), f"peak memory of the fullest device{limit}"
    if plan.num_groups > 1:
        shares = [dict(stage.spent).get("bubble_seconds", 0.0) for stage in predicted.stages[: plan.num_groups]]
        if any(stage.spent for stage in predicted.stages) and predicted.step_seconds > 0:
            mean = sum(shares) / len(shares) / predicted.step_seconds
            yield f"{mean:.1%}", "of the step stages wait for each other (bubble)"


def _map(report: Report) -> str:
    from lightning_mist.report.draw_map import map_figure

    if report.machine is None:
        return ""
    with styled("map", is_text=True):
        svg = inline_svg(map_figure(report.plan, *report.machine), "map", "Nodes, and what each of their devices runs")
    caption = (
        "Which node runs what. Nodes that run the same, but for rows, are drawn once; devices that share each layer "
        "touch. Rates are those that the plan was priced with, of one device while all of its node send."
    )
    return page.section("Where it runs", page.picture(svg, caption))


def _timeline(plan: Plan, simulation: Simulation) -> str:
    from lightning_mist.report.draw_timeline import timeline_figure

    timeline = timeline_of(plan, simulation)
    with styled("timeline", is_text=True):
        svg = inline_svg(timeline_figure(timeline), "timeline", "Timeline of one step, by stage")
    caption = (
        "What every stage does when, by the plan's own schedule on a clock. Numbers are microbatches; where there is "
        "nothing but grey, devices wait. Thin lanes are what they copy and exchange meanwhile, hidden or not."
    )
    return page.section("One step on a clock", page.picture(svg, caption))


def _memory(report: Report, simulation: Simulation) -> str:
    """Bytes over the step as a picture, of plans that say what they are made of."""
    from lightning_mist.report.draw_memory import memory_figure, memory_picture, unit_figure

    assert report.plan.predicted is not None
    if not all(stage.needs for stage in report.plan.predicted.stages):
        return ""
    picture = memory_picture(report.plan, report.memory_limits, simulation)
    with styled("memory", is_text=True):
        svg = inline_svg(memory_figure(picture), "memory", "Memory over one step, by stage and by what it is used for")
    caption = (
        "Bytes of each stage's most loaded device, with what it must hold during each action, at the time when that "
        "action runs. The highest point is the peak that the plan was chosen by."
    )
    pictures = [page.picture(svg, caption)]
    with styled("units", is_text=True):
        if (figure := unit_figure(picture)) is not None:
            svg = inline_svg(figure, "units", "Memory over the layers of one forward and one backward")
            pictures.append(page.picture(svg, _UNITS))
    return page.section("Memory over one step", *pictures)


_UNITS = (
    "The same within one microbatch of the fullest stage: in front of the first layer (head), in each layer, and "
    "behind the last one (tail: logits and loss), forward and backward. Each tooth is the most while a unit runs."
)


def _why(report: Report) -> Iterator[str]:
    """Why this plan: of a whole explanation all, else what the search itself says."""
    if report.explanation is not None:
        parts = explanation_sections(report.explanation)
        inner = [page.subsection(_capital(title), page.items(lines)) for title, lines in parts]
        yield page.section("Why this plan", *inner)
    elif report.result is not None and report.result.alternatives:
        yield page.section("Other plans", page.items(report.result.compared))


def _comparison(report: Report) -> str:
    if not report.comparison:
        return ""
    intro = (
        "What people would have chosen, each tuned over its own settings, under the same cost model and the same "
        "memory limits. Bars are seconds of a step and what they go to, the mean of all stages; hatched is what has no "
        "plan, with the reason. Times ours: how many times as long a step takes."
    )
    return page.section(
        "Beside what people would have chosen",
        page.paragraph(intro, "soft"),
        *comparison_bars(report.comparison),
        comparison_table(report.comparison),
        page.items(report.comparison_notes),
    )


def _frontier(report: Report) -> str:
    found = report.frontier
    if found is None or not found.points:
        return ""
    if len(found.points) < LEAST_POINTS:
        return page.section("With less memory", page.items(frontier_lines(found)))
    with styled("frontier", is_text=True):
        svg = inline_svg(frontier_figure(found), "frontier", "Seconds of the best plan against the memory limit")
    caption = "The best plan found anew under each memory limit: what memory buys, and how much of it is needed at all."
    return page.section("With less memory", page.picture(svg, caption), page.items(frontier_lines(found)))


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
