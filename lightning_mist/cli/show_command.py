"""``lightning-mist show``: a plan file as a table, beside another one, as pictures, as a page."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_mist.cli.html_output import check_drawn
from lightning_mist.cli.output import answer, display, print_json, say
from lightning_mist.plan import Plan, describe_changes, load, render
from lightning_mist.plan.plan_tables import ranges
from lightning_mist.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from lightning_mist.schedule import Simulation

_TRACE = ".json"


def show(
    plan: str,
    /,
    against: str | None = None,
    timeline: str | None = None,
    memory: str | None = None,
    memory_limit: str | None = None,
    html: str | None = None,
    json: bool = False,
) -> None:
    """Show a plan file as a table, and as pictures.

    Args:
        plan: The plan file.
        against: Another plan file, to show what changes from the first to it.
        timeline: Where to draw what every stage does when, by the plan's prediction, as .png, .pdf or .svg; or, as
            .json, to write it as a trace for https://ui.perfetto.dev.
        memory: Where to draw the bytes of every stage over one step, as .png, .pdf or .svg.
        memory_limit: Bytes that tensors of each device may take, such as 20GiB, to draw beside them.
        html: Where to write a page with the plan, its pictures and its words; it needs nothing else to be read.
        json: Print JSON on stdout and nothing else there.
    """
    first = load(plan)
    other = None if against is None else load(against)
    changes = None if other is None else describe_changes(first, other)
    limit = None if memory_limit is None else float(parse_bytes(memory_limit))
    if limit is not None and memory is None and html is None:
        raise ValueError(f"memory_limit = {memory_limit!r}: it is drawn beside bytes; give --memory memory.png too")
    if html is not None:
        check_drawn("report", html)
    for path in filter(None, (None if timeline is None or timeline.endswith(_TRACE) else timeline, memory)):
        check_drawn("picture", path)
    if json:
        print_json(first, **({} if changes is None else {"changes": changes.splitlines()}))
    else:
        display(render, first)
        if changes is not None:
            answer(f"\nfrom {plan} to {against}:\n{changes}")
    tell: Callable[[str], None] = say if json else (lambda text: answer(f"\n{text}"))
    if timeline is not None:
        tell(_draw_timeline(first, timeline))
    if memory is not None:
        tell(_draw_memory(first, memory, limit))
    if html is not None:
        tell(_write_page(first, plan, html, limit))


def _draw_timeline(plan: Plan, path: str) -> str:
    from lightning_mist.report.timeline import timeline_of
    from lightning_mist.schedule import simulate_plan

    simulation = simulate_plan(plan)
    if path.endswith(_TRACE):
        Path(path).write_text(trace_text(plan, simulation), encoding="utf-8")
    else:
        from lightning_mist.report.draw_timeline import draw_timeline

        draw_timeline(timeline_of(plan, simulation), path)
    idle = max(simulation.bubble) / simulation.makespan if simulation.makespan else 0.0
    return (
        f"simulated step: {format_seconds(simulation.makespan)}, the idlest stage idles for {idle:.0%} of it; "
        f"{'trace' if path.endswith(_TRACE) else 'timeline'} written to {path}"
    )


def _draw_memory(plan: Plan, path: str, limit: float | None) -> str:
    from lightning_mist.report.draw_memory import draw_memory, memory_picture

    picture = memory_picture(plan, () if limit is None else (limit,) * plan.num_stages)
    draw_memory(picture, path)
    label = picture.timeline.lanes[picture.worst.group].label
    return f"{label} needs most, {format_bytes(picture.worst.peak_bytes)} per device; memory written to {path}"


def _write_page(plan: Plan, source: str, path: str, limit: float | None) -> str:
    from lightning_mist.report.html_report import Report, render_report

    made_for = tuple((name.replace("_", " "), str(value)) for name, value in plan.fingerprint)
    limits = () if limit is None else (limit,) * plan.num_stages
    report = Report(title=Path(source).name, plan=plan, memory_limits=limits, inputs=made_for)
    Path(path).write_text(render_report(report), encoding="utf-8")
    return f"report written to {path}"


def trace_text(plan: Plan, simulation: "Simulation") -> str:
    """A trace of a plan's step, as JSON text.

    Args:
        plan: A plan with a prediction; of earlier ones, which do not say what memory is made of, without bytes.
    """
    from lightning_mist.estimate import memory_curves
    from lightning_mist.schedule import Level, to_chrome_trace

    names = {
        group: f"stage {' and '.join(map(str, plan.chunks(group)))} (ranks {ranges(stage.devices)})"
        for group, stage in enumerate(plan.stages[: plan.num_groups])
    }
    is_known = all(stage.needs for stage in plan.prediction.stages)
    curves = memory_curves(plan, simulation) if is_known else ()
    levels = [
        Level(
            curve.group,
            "bytes",
            float(time),
            tuple((name.removesuffix("_bytes"), float(values_E[index])) for name, values_E in curve.terms),
        )
        for curve in curves
        for index, time in enumerate(curve.times_E)
    ]
    return to_chrome_trace((span for spans in simulation.spans for span in spans), names=names, levels=levels)
