"""Where a step's seconds go, and the rates that follow, for people."""

from rich.table import Table

from lightning_mist.plan.plan import Plan
from lightning_mist.plan.throughput import StepRates, step_rates
from lightning_mist.units import format_rate, format_seconds

_HEADINGS = {
    "compute_seconds": "compute",
    "recompute_seconds": "recompute",
    "communication_seconds": "exposed\ntransfers",
    "copies_seconds": "exposed\ncopies",
    "optimizer_seconds": "optimizer",
    "overhead_seconds": "overhead",
    "bubble_seconds": "bubble",
}
"""Headings by the names in :attr:`~lightning_mist.plan.plan.PredictedStage.spent`, in the order of columns."""

_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def seconds_table(plan: Plan) -> tuple[str, Table] | None:
    """Where the predicted seconds of a step go, one row for each group of devices; None if the plan does not say.

    Each row adds up to the step. Terms that are nothing on every stage have no column.
    """
    predicted = plan.predicted
    if predicted is None or not any(stage.spent for stage in predicted.stages) or predicted.step_seconds <= 0:
        return None
    rows = [dict(predicted.stages[group].spent) for group in range(plan.num_groups)]
    known = [*_HEADINGS, *(name for row in rows for name in row)]
    names = [name for name in dict.fromkeys(known) if any(row.get(name, 0.0) > 0 for row in rows)]
    unit, scale = next((item for item in _UNITS if predicted.step_seconds >= item[1]), _UNITS[-1])
    title = f"where {format_seconds(predicted.step_seconds)} per step go, by stage ({unit}, and part of the step)"
    table = Table()
    table.add_column("stage", justify="right")
    for name in names:
        table.add_column(_HEADINGS.get(name, name.removesuffix("_seconds")), justify="right")
    for group, row in enumerate(rows):
        cells = (_share(row.get(name, 0.0), scale, predicted.step_seconds) for name in names)
        table.add_row(" and ".join(map(str, plan.chunks(group))), *cells)
    return title, table


def _share(seconds: float, scale: float, step_seconds: float) -> str:
    """Seconds in a unit, and their part of the step."""
    if seconds == 0:
        return "-"
    value = seconds / scale
    text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"{text} {seconds / step_seconds:3.0%}"


def rate_lines(plan: Plan) -> tuple[str, ...]:
    """The predicted step, what it achieves, and how far that is from what the devices could do."""
    predicted = plan.predicted
    if predicted is None:
        return ()
    head, rates = f"predicted step: {format_seconds(predicted.step_seconds)}", step_rates(plan, predicted.step_seconds)
    if rates is None or predicted.work is None:
        return (head,)
    lines = [f"{head}, {throughput(rates)}"]
    if rates.flops_per_second is not None:
        model = f"{format_rate(predicted.work.model_flops, 'FLOP')} of the model per step"
        lines.append(
            f"{model}, {format_rate(rates.flops_per_second, 'FLOP/s')} per device: {_utilisation(plan, rates)}"
        )
    if rates.roofline_ratio is not None:
        least, ratio = format_seconds(predicted.work.roofline_seconds), per_second(rates.roofline_ratio)
        lines.append(
            f"roofline: {least} with every operator at the limit of its device and no waiting; "
            f"the step takes {ratio} times that"
        )
    return tuple(lines)


def throughput(rates: StepRates) -> str:
    """Rows and tokens per second, in words."""
    tokens = "" if rates.tokens_per_second is None else f", {per_second(rates.tokens_per_second)} tokens/s"
    return f"{per_second(rates.rows_per_second)} rows/s{tokens}"


def per_second(value: float) -> str:
    """A number of things per second: three digits, or all of them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _utilisation(plan: Plan, rates: StepRates) -> str:
    """Model FLOPs utilisation, and what it is measured by."""
    assert plan.predicted is not None
    work = plan.predicted.work
    assert work is not None
    if rates.utilisation is None:
        return work.peak_source
    return f"{rates.utilisation:.1%} of {format_rate(work.peak_flops_per_second, 'FLOP/s')} ({work.peak_source})"
