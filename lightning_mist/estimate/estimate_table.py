"""An estimate for people: verdict first, then bytes by term and stage, the largest tensors, and what would help."""

from collections.abc import Sequence

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
)
from lightning_mist.units import format_bytes

_COLORS = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}
_FIRST_COLUMN = 34
_COLUMN = 15
"""Columns of text that the labels and one stage take."""

_LONGEST_OPERATOR = 20


def render_estimate(estimate: MemoryEstimate, *, width: int = 120, color: bool = False) -> str:
    """An estimate as text."""
    console = TextConsole(width, color=color)
    console.print(estimate.headline(), style=_COLORS[estimate.verdict])
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
