"""A plan for people, as tables: its stages, where the seconds of its step go, and what changed from another plan."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from rich.table import Column, Table

from lightning_mist.console import TextConsole
from lightning_mist.plan.mesh import held_parameters
from lightning_mist.plan.module_map import ModuleMap
from lightning_mist.plan.plan import Plan, StagePlan, StepRates, step_rates
from lightning_mist.plan.plan_text import hybrid, ranges_of
from lightning_mist.units import format_bytes, format_rate, format_seconds

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

_LEAST_SHARE = 1e-6
"""Terms of a smaller share of a step are what rounding left of nothing."""

_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def seconds_table(plan: Plan) -> tuple[str, Table] | None:
    """Where the predicted seconds of a step go, one row for each group of devices; None if the plan does not say.

    Each row adds up to the step. Terms that are nothing on every stage have no column.
    """
    predicted = plan.predicted
    if predicted is None or not any(stage.spent for stage in predicted.stages) or predicted.step_seconds <= 0:
        return None
    rows = spent_rows(plan)
    known = [*_HEADINGS, *(name for row in rows for name in row)]
    names = [name for name in dict.fromkeys(known) if any(name in row for row in rows)]
    unit, scale = next((item for item in _UNITS if predicted.step_seconds >= item[1]), _UNITS[-1])
    title = f"where {format_seconds(predicted.step_seconds)} per step go, by stage ({unit}, and part of the step)"
    headings = ["stage", *(_HEADINGS.get(name, name.removesuffix("_seconds")) for name in names)]
    table = Table(*(Column(heading, justify="right") for heading in headings))
    for group, row in enumerate(rows):
        cells = (_share(row.get(name, 0.0), scale, predicted.step_seconds) for name in names)
        table.add_row(" and ".join(map(str, plan.chunks(group))), *cells)
    return title, table


def spent_rows(plan: Plan) -> list[dict[str, float]]:
    """Seconds by term for every group of devices of a plan with a prediction, without what is next to nothing."""
    least = _LEAST_SHARE * plan.prediction.step_seconds
    return [
        {name: seconds for name, seconds in plan.prediction.stages[group].spent if seconds > least}
        for group in range(plan.num_groups)
    ]


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


def speed_line(plan: Plan) -> str:
    """What a predicted step takes and achieves, in one line: its seconds, tokens, and model FLOPs utilisation."""
    rates = step_rates(plan, plan.prediction.step_seconds)
    parts = [f"{format_seconds(plan.prediction.step_seconds)} per step"]
    if rates is not None:
        is_text = rates.tokens_per_second is not None
        rate = rates.tokens_per_second if rates.tokens_per_second is not None else rates.rows_per_second
        parts.append(f"{per_second(rate / plan.world_size)} {'tokens' if is_text else 'rows'}/s per device")
        if rates.utilisation is not None:
            parts.append(f"MFU {_utilisation(plan, rates)}")
        elif rates.flops_per_second is not None:
            parts.append(f"{format_rate(rates.flops_per_second, 'FLOP/s')} per device")
    return ", ".join(parts)


def throughput(rates: StepRates) -> str:
    """Rows and tokens per second, in words."""
    tokens = "" if rates.tokens_per_second is None else f", {per_second(rates.tokens_per_second)} tokens/s"
    return f"{per_second(rates.rows_per_second)} rows/s{tokens}"


def per_second(value: float) -> str:
    """A number of things per second: three digits, or all of them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _utilisation(plan: Plan, rates: StepRates) -> str:
    """Model FLOPs utilisation, and what it is measured by."""
    work = plan.prediction.work
    assert work is not None
    if rates.utilisation is None:
        return work.peak_source
    return f"{rates.utilisation:.1%} of {format_rate(work.peak_flops_per_second, 'FLOP/s')} ({work.peak_source})"


@dataclass(frozen=True, slots=True)
class _Column:
    """One property of a stage: its heading, its text, and the text at which it is not worth a column."""

    heading: str
    text: Callable[[StagePlan], str]
    dull: str | None = None


def _range(layers: tuple[int, int]) -> str:
    first, count = layers[0], layers[1] - layers[0]
    return "none" if not count else f"{first} (1)" if count == 1 else f"{first}-{layers[1] - 1} ({count})"


def ranges(devices: Sequence[int]) -> str:
    """Numbers in their order, runs of neighbours shortened: ``0-3, 8``."""
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges_of(devices))


def _offload(stage: StagePlan) -> str:
    return ", ".join(f"{kind} {ratio:g}" for kind, ratio in stage.offload.told) or "none"


_COLUMNS = (
    _Column("layers", lambda stage: _range(stage.layers)),
    _Column("devices", lambda stage: ranges(stage.devices)),
    _Column("microbatch", lambda stage: str(stage.microbatch_size)),
    _Column("data parallel", lambda stage: str(stage.mesh.data_parallel_degree), dull="1"),
    _Column("tensor parallel", lambda stage: str(stage.mesh.tensor_parallel_degree), dull="1"),
    _Column("context parallel", lambda stage: str(stage.mesh.context_parallel_degree), dull="1"),
    _Column("sequence parallel", lambda stage: "yes" if stage.mesh.sequence_parallel else "no", dull="no"),
    _Column("ZeRO", lambda stage: str(int(stage.zero_stage)), dull="0"),
    _Column("HSDP", lambda stage: hybrid(stage) or "whole", dull="whole"),
    _Column("checkpointed", lambda stage: str(stage.checkpointing.layers), dull="0"),
    _Column("recomputed", lambda stage: stage.checkpointing.kind, dull="full"),
    _Column("tail chunks", lambda stage: str(stage.tail_chunks), dull="1"),
    _Column("offload", _offload, dull="none"),
)
"""What a table shows of each stage, and what two plans are compared by."""


def render(plan: Plan, *, width: int = 120, color: bool = False, devices: Sequence[str] = ()) -> str:
    """A plan as a table: one line per stage, with the predictions if there are any, and where their seconds go."""
    headings, rows = stage_cells(plan, devices)
    table = Table(*(Column(heading, justify="right") for heading in headings))
    for row in rows:
        table.add_row(*row)
    console = TextConsole(width, color=color)
    # A table's own title would be broken at the width of what may be few columns.
    console.print(_title(plan), style="bold")
    console.print_table(table)
    seconds = seconds_table(plan)
    if seconds is not None:
        title, table = seconds
        console.print(title, style="bold italic")
        console.print_table(table)
    for line in rate_lines(plan):
        console.print(line)
    return console.text


def stage_cells(plan: Plan, devices: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """What a table of a plan shows: headings, and the cells of every stage."""
    has_chunks = plan.num_groups < plan.num_stages
    columns = [
        column
        for column in _COLUMNS
        if column.dull is None or any(column.text(stage) != column.dull for stage in plan.stages)
    ]
    predicted = plan.predicted
    headings = [
        "stage",
        *["group", "chunk"] * has_chunks,
        *["on"] * bool(devices),
        *(column.heading for column in columns),
    ]
    headings += ["forward", "backward", "peak memory"] * (predicted is not None)
    rows = []
    for index, stage in enumerate(plan.stages):
        place = [str(plan.group_of(index)), str(index // plan.num_groups)] if has_chunks else []
        place += [devices[index]] if devices else []
        cells = [str(index), *place, *(column.text(stage) for column in columns)]
        if predicted is not None:
            said = predicted.stages[index]
            cells += map(format_seconds, (said.forward_seconds, said.backward_seconds))
            cells.append(format_bytes(said.peak_bytes))
        rows.append(cells)
    return headings, rows


def _title(plan: Plan) -> str:
    of = "" if plan.data_parallel_size is None else f" of {counted(plan.num_loaders, 'data loader')}"
    return (
        f"{counted(plan.num_stages, 'stage')} on {counted(plan.world_size, 'device')}, {plan.schedule}: "
        f"{counted(plan.global_batch_size, 'row')}{of} in {counted(plan.num_microbatches, 'microbatch')}"
    )


def counted(number: int, noun: str) -> str:
    """A number of things in words."""
    plural = noun if number == 1 else noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {plural}"


def stages_named(stages: Sequence[int]) -> str:
    """The stages that share a group of devices, by number."""
    return f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"


def describe_changes(plan: Plan, other: Plan) -> str:
    """What differs from ``plan`` to ``other``, one line each: ``stage 1: layers 6-11 (6) -> 5-11 (7)``."""
    lines = [
        f"{name}: {getattr(plan, name)} -> {getattr(other, name)}"
        for name in ("global_batch_size", "num_loaders", "num_microbatches", "schedule", "world_size", "num_stages")
        if getattr(plan, name) != getattr(other, name)
    ]
    for index in range(max(plan.num_stages, other.num_stages)):
        if index >= plan.num_stages:
            lines.append(f"stage {index}: only in the other plan, {_summary(other.stages[index])}")
        elif index >= other.num_stages:
            lines.append(f"stage {index}: not in the other plan, {_summary(plan.stages[index])}")
        else:
            lines += _stage_changes(index, plan, other)
    if plan.predicted is not None and other.predicted is not None:
        before, after = plan.predicted.step_seconds, other.predicted.step_seconds
        if before != after:
            relative = f" ({(after - before) / before:+.1%})" if before else ""
            lines.append(f"predicted step: {format_seconds(before)} -> {format_seconds(after)}{relative}")
    before_pairs, after_pairs = dict(plan.fingerprint), dict(other.fingerprint)
    for name in sorted(before_pairs.keys() | after_pairs.keys()):
        if before_pairs.get(name) != after_pairs.get(name):
            lines.append(
                f"made for {name}: {before_pairs.get(name, 'not said')} -> {after_pairs.get(name, 'not said')}"
            )
    if not lines:
        return "the plans are equal" if plan == other else "the plans run alike and differ in details of predictions"
    return "\n".join(lines)


def _summary(stage: StagePlan) -> str:
    return ", ".join(
        f"{column.heading} {column.text(stage)}" for column in _COLUMNS if column.text(stage) != column.dull
    )


def _stage_changes(index: int, plan: Plan, other: Plan) -> list[str]:
    before, after = plan.stages[index], other.stages[index]
    lines = [
        f"stage {index}: {column.heading} {column.text(before)} -> {column.text(after)}"
        for column in _COLUMNS
        if column.text(before) != column.text(after)
    ]
    if plan.predicted is not None and other.predicted is not None:
        peaks = plan.predicted.stages[index].peak_bytes, other.predicted.stages[index].peak_bytes
        if peaks[0] != peaks[1]:
            lines.append(f"stage {index}: peak memory {format_bytes(peaks[0])} -> {format_bytes(peaks[1])}")
    return lines


def split_notes(plan: Plan, module_map: ModuleMap) -> tuple[str, ...]:
    """What to know of how the plan's stages split layers, rows and parameters: what stays whole, what is slow."""
    tensor = sorted({stage.mesh.tensor_parallel_degree for stage in plan.stages} - {1})
    context = sorted({stage.mesh.context_parallel_degree for stage in plan.stages} - {1})
    return (
        *(f"tensor_parallel_degree {degree}: {note}" for degree in tensor for note in module_map.split(degree).notes),
        *(
            f"context_parallel_degree {degree}: {note}"
            for degree in context
            for note in module_map.context(degree).notes
        ),
        *_whole_notes(plan, module_map),
    )


UNEVEN = 1.05
"""How many times the mean a rank must have of what ZeRO shares out for that to be said."""


def _whole_notes(plan: Plan, module_map: ModuleMap) -> Iterator[str]:
    """What ZeRO deals out whole, why, and how much more than the mean the fullest rank has of all that is shared."""
    layout, found = held_parameters(plan, module_map), dict[tuple[str, str], list[tuple[int, float]]]()
    for group, stage in enumerate(plan.stages[: plan.num_groups]):
        degree, count = stage.mesh.tensor_parallel_degree, stage.mesh.shard_ranks
        cut = {part.name for part in module_map.split(degree).parameters}
        sizes = {use.name: prod(use.shape) / (degree if use.name in cut else 1) for use in module_map.parameters}
        shared = [item for item in layout if group in item.stages and (item.requires_grad or stage.zero_stage == 3)]
        tied = ", ".join(item.name for item in shared if not item.is_even and len(item.stages) > 1)
        what, why = "parameters", [*module_map.excludes("even_shards")]
        if list(stage.devices) != sorted(stage.devices):
            why.append("the devices of a stage are not in ascending order")
        if not why and tied and any(item.is_even for item in shared):
            what, why = tied, ["several stages hold it"]
        if not why or not stage.zero_stage or count == 1:
            continue
        every, loads = sum(sizes[item.name] for item in shared), [0.0] * count
        for item in shared:
            if not item.is_even:
                loads[item.owner(group)] += sizes[item.name]
        # Of what is left ranks have equal shares.
        ratio = (max(loads) * count + every - sum(loads)) / (every or 1)
        found.setdefault((what, "; ".join(why)), []).append((group, ratio))
    for (what, reasons), stages in found.items():
        groups, ratios = zip(*stages, strict=True)
        cost = f"; the fullest rank has {max(ratios):.3g} times the mean" if max(ratios) > UNEVEN else ""
        where = f"stage{'s' * (len(groups) > 1)} {ranges(groups)}"
        yield f"ZeRO deals out {what} whole, not in even pieces, on {where}: {reasons}{cost}"
