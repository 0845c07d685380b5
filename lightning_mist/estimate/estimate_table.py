"""Estimates for people, one alone, or one for every combination of some values as a table of all.

One has its verdict first, then bytes by term and stage, the largest tensors, and what would help.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from rich.table import Table
from rich.text import Text

from lightning_mist.console import TextConsole
from lightning_mist.cost.memory import TERMS
from lightning_mist.estimate.estimate_data import (
    OUTER_TERMS,
    WORDS,
    MemoryEstimate,
    PeakTensor,
    StageEstimate,
    describe_change,
    estimate_to_json,
)
from lightning_mist.units import format_bytes

_COLORS = {"fits": "green", "tight": "yellow", "does not fit": "red"}
_FIRST_COLUMN = 34
_COLUMN = 15
"""Columns of text that the labels and one stage take."""

_LONGEST_OPERATOR = 20


def render_estimate(estimate: MemoryEstimate, *, width: int = 120, color: bool = False) -> str:
    """An estimate as text."""
    console = TextConsole(width, color=color)
    console.print(estimate.headline(), style=f"bold {_COLORS[estimate.verdict]}")
    console.print(f"\n{estimate.subject()}")
    per_table = max(1, (width - _FIRST_COLUMN) // _COLUMN)
    groups = estimate.stages[: estimate.plan.num_groups]
    for first in range(0, len(groups), per_table):
        console.print(_stage_table(estimate, groups[first : first + per_table]))
    worst = estimate.worst
    if worst.tensors:
        console.print(_tensor_table(f"largest tensors at the peak of stage {worst.stage}", worst.tensors))
        title = "tensors that take most together, those that differ in their layer alone as one"
        console.print(_tensor_table(title, worst.kinds, together=True))
    if estimate.changes:
        console.print("what would make it fit", style="bold")
        for change in estimate.changes:
            console.print(f"  {describe_change(change)}")
    elif estimate.verdict != "fits":
        console.print("nothing that was tried makes it fit", style="bold")
    for note in (f"source: {estimate.source}", *estimate.notes):
        console.print(f"note: {note}", style="dim")
    return console.text


def _stage_table(estimate: MemoryEstimate, stages: Sequence[StageEstimate]) -> Table:
    plan = estimate.plan
    table = Table(title="bytes of the most loaded device", title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for stage in stages:
        indices = ", ".join(map(str, plan.chunks(stage.stage)))
        table.add_column(f"stage {indices}", justify="right")
    for name in (*TERMS, *OUTER_TERMS):
        values = [stage.term(name) for stage in stages]
        if any(values):
            table.add_row(WORDS[name], *map(format_bytes, values))
    table.add_section()
    for label, attribute in (("allocated", "allocated"), ("reserved", "reserved"), ("device total", "device_total")):
        table.add_row(label, *(format_bytes(getattr(stage, attribute).p50) for stage in stages))
    limits = dict.fromkeys(format_bytes(estimate.limit_of(stage)) for stage in stages)
    table.add_row("device total, 95 of 100", *(format_bytes(stage.device_total.p95) for stage in stages))
    table.add_row(
        f"of {' or '.join(limits)}",
        *(_part(stage.device_total.p95 / estimate.limit_of(stage)) for stage in stages),
    )
    if any(stage.host_bytes for stage in stages):
        table.add_row("host memory", *(format_bytes(stage.host_bytes) for stage in stages))
    table.add_row("at its peak in", *(stage.phase for stage in stages))
    return table


def _part(ratio: float) -> str:
    """A part of the limit; multiples of it are no percentages."""
    return f"{ratio:.0%}" if ratio < 10 else f"{ratio:,.0f} times"


def _tensor_table(title: str, tensors: Sequence[PeakTensor], *, together: bool = False) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    if together:
        table.add_column("together", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("alike", justify="right")
    table.add_column("part of")
    table.add_column("module", overflow="fold", ratio=1)
    table.add_column("operator", no_wrap=True, max_width=_LONGEST_OPERATOR)
    table.add_column("line", no_wrap=True)
    for tensor in tensors:
        sizes = [tensor.all_bytes] * together + [tensor.bytes]
        part = tensor.term.removesuffix("_bytes")
        if tensor.count == 1 and tensor.microbatch is not None:
            part += f" of microbatch {tensor.microbatch}"
        words = (part, tensor.module, _short(tensor.operator), tensor.line)
        table.add_row(*map(format_bytes, sizes), str(tensor.count), *map(Text, words))
    return table


def _short(operator: str) -> str:
    """As short as it is still understood: ``"mm"`` for ``"aten.mm.default"``."""
    return (operator.rpartition(".")[0] or operator).removeprefix("aten.").removeprefix("lightning_mist.")


# Many estimates at once, as a table.


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One combination of values."""

    values: tuple[tuple[str, str], ...]
    estimate: MemoryEstimate | None = None
    error: str = ""


def parse_sweep(text: str, known: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Names and values of a text such as ``"microbatch_size=1,2,4 zero_stage=1,3"``, in its order.

    Raises:
        ValueError: If it is written otherwise, or a name is not known or comes twice.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for part in text.split():
        name, sign, values = part.partition("=")
        name = name.replace("-", "_")
        chosen = tuple(value for value in values.split(",") if value)
        if not sign or not chosen:
            raise ValueError(f"sweep {part!r}: write names and values, for example microbatch_size=1,2,4")
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"sweep {part!r}: {name!r} cannot be gone through; did you mean {near!r}?")
        if name in axes:
            raise ValueError(f"sweep {text!r}: {name} comes twice; give all its values at once")
        axes[name] = chosen
    if not axes:
        raise ValueError(f"sweep {text!r}: there is nothing to go through; write for example microbatch_size=1,2,4")
    return axes


def combinations(axes: Mapping[str, Sequence[str]]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Every combination of values, the last name's changing fastest."""
    for values in itertools.product(*axes.values()):
        yield tuple(zip(axes, values, strict=True))


def render_sweep(points: Sequence[SweepPoint], *, width: int = 120, color: bool = False) -> str:
    """The points as a table, one line each, and why some are no plans."""
    table = Table(title=_title(points), title_justify="left", title_style="bold")
    for name, _ in points[0].values:
        table.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for heading in ("worst stage", "allocated", "reserved", "device total", "95 of 100"):
        table.add_column(heading, justify="right")
    table.add_column("verdict", overflow="fold")
    for point in points:
        values = [value for _, value in point.values]
        if point.estimate is None:
            table.add_row(*values, *[""] * 5, "no such plan")
            continue
        worst, verdict = point.estimate.worst, point.estimate.verdict
        sizes = (worst.allocated.p50, worst.reserved.p50, worst.device_total.p50, worst.device_total.p95)
        table.add_row(*values, str(worst.stage), *map(format_bytes, sizes), Text(verdict, style=_COLORS[verdict]))
    console = TextConsole(width, color=color)
    console.print(table)
    for error in dict.fromkeys(point.error for point in points if point.error):
        console.print(f"no such plan: {error}")
    return console.text


def sweep_to_json(points: Sequence[SweepPoint]) -> str:
    """The points as a list of objects with ``values`` and either ``estimate`` or ``error``."""

    def outcome(point: SweepPoint) -> dict[str, object]:
        if point.estimate is None:
            return {"error": point.error}
        return {"estimate": json.loads(estimate_to_json(point.estimate))}

    document = [{"values": dict(point.values), **outcome(point)} for point in points]
    return json.dumps(document, indent=1) + "\n"


def _title(points: Sequence[SweepPoint]) -> str:
    known = [point.estimate for point in points if point.estimate is not None]
    fitting = sum(estimate.verdict == "fits" for estimate in known)
    limit = f" within {format_bytes(known[0].memory_limit)} per device" if known else ""
    return f"{fitting} of {len(points)} combinations fit{limit}"
