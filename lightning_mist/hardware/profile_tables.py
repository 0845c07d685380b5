"""A profile for people: what was measured of a machine, as tables."""

from collections.abc import Sequence

from rich.table import Table

from lightning_mist.console import TextConsole
from lightning_mist.hardware.cluster import Cluster
from lightning_mist.hardware.profile import COEFFICIENTS, HardwareProfile
from lightning_mist.units import format_bytes, format_rate, format_seconds

Rows = list[tuple[str, ...]]
"""Cells of a table, line by line."""


def render_profile(cluster: Cluster, profile: HardwareProfile, *, width: int = 120, color: bool = False) -> str:
    """A profile as tables: matrix products by size, memory and launches, collectives by group."""
    console = TextConsole(width, color=color)
    devices = f"{cluster.num_nodes}x{cluster.devices_per_node}x{cluster.device.name}"
    sizes = f"{format_bytes(cluster.device.memory_bytes)} each"
    if cluster.kind == "cuda" and cluster.host_memory_bytes is not None:
        sizes += f", {format_bytes(cluster.host_memory_bytes)} in each host"
    console.print(f"{devices}, {sizes}: {profile.source}", soft_wrap=False)
    known = profile.interference
    error = f"; mean error {known.spread:.1%}" if known is not None and known.spread else ""
    together = f"slowdown when running together ({known.source}{error})" if known is not None else ""
    corrections = [(item.term, f"{item.factor:.3f}", str(len(item.ratios))) for item in profile.corrections]
    dtypes = tuple(rate.dtype for rate in profile.compute)
    for title, headings, rows in (
        ("matrix products", ("edge", *dtypes), _matrix_products(profile)),
        ("other computation", ("kind", "type", "forward", "backward", "spread"), _kernels(profile)),
        ("operators that move bytes", ("kind", "per call", "forward", "backward", "spread"), _memory(profile)),
        ("memory, launches, copies", (), _rates(profile)),
        ("collectives", ("operation", "ranks", "nodes", "latency", "payload", "spread"), _collectives(profile)),
        (together, (), [(_PAIRS[name], f"{getattr(known, name):.0%}") for name in COEFFICIENTS if known is not None]),
        ("corrections of predictions, from runs", ("term", "factor", "runs"), corrections),
    ):
        if rows:
            console.print(_table(title, headings, rows))
    return console.text


def _table(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """A table whose first column are words; without headings if there are none."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=bool(headings))
    for index, heading in enumerate(headings or ("",) * len(rows[0])):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _matrix_products(profile: HardwareProfile) -> Rows:
    """Rates by the edge of square matrices, one column for each element type."""
    rates = [dict(zip(map(_edge, rate.flops), rate.flops_per_second, strict=True)) for rate in profile.compute]
    rows: Rows = [
        (str(edge), *(format_rate(known[edge], "FLOP/s") if edge in known else "" for known in rates))
        for edge in sorted({edge for known in rates for edge in known})
    ]
    return [*rows, ("spread", *(f"{rate.spread:.1%}" for rate in profile.compute))] if rows else []


def _edge(flops: float) -> int:
    """Edge of the square matrices whose product takes so many operations, ``2 n^3``."""
    return int(0.5 + float((flops / 2) ** (1 / 3)))


def _kernels(profile: HardwareProfile) -> Rows:
    return [
        (
            rate.kind.replace("_", " "),
            rate.dtype,
            format_rate(rate.forward_flops_per_second, "FLOP/s"),
            format_rate(rate.backward_flops_per_second, "FLOP/s"),
            f"{rate.spread:.1%}",
        )
        for rate in profile.kernels
    ]


def _memory(profile: HardwareProfile) -> Rows:
    """What moves bytes, by kind of operator and size."""
    rows: Rows = []
    for rate in profile.rates:
        sizes = zip(rate.bytes, rate.forward_bytes_per_second, rate.backward_bytes_per_second, strict=True)
        for index, (size, *both) in enumerate(sizes):
            directions = (format_rate(each, "B/s") for each in both)
            head, spread = ("", "") if index else (rate.kind, f"{rate.spread:.1%}")
            rows.append((head, format_bytes(size), *directions, spread))
    return rows


def _rates(profile: HardwareProfile) -> Rows:
    copies = (
        ("host to device", profile.host_to_device_bytes_per_second),
        ("device to host", profile.device_to_host_bytes_per_second),
        ("all devices of a node", profile.host_bytes_per_second_per_node),
    )
    overheads = ((words, getattr(profile.overheads, name)) for name, words in _OVERHEADS.items())
    return [
        ("memory, read and written", format_rate(profile.memory_bytes_per_second, "B/s")),
        ("launch of an operator", format_seconds(profile.operator_seconds)),
        *((f"copies, {name}", format_rate(rate, "B/s")) for name, rate in copies if rate),
        *((f"overhead per {name}", format_seconds(seconds)) for name, seconds in overheads if seconds),
    ]


_OVERHEADS = {
    "step_seconds": "step",
    "action_seconds": "forward or backward",
    "message_seconds": "message",
    "exchange_seconds": "step whose ranks exchange batches",
    "stand_in_seconds": "operator on a stand-in",
    "split_operator_seconds": "operator on shared out tensors",
    "unit_seconds": "layer's sharded parameters",
    "recomputed_layer_seconds": "recomputed layer",
    "deferred_operator_seconds": "operator of a backward in two parts",
}
"""In words, what :class:`~lightning_mist.hardware.StepOverheads` are paid for."""


def _collectives(profile: HardwareProfile) -> Rows:
    return [
        (
            cost.operation,
            str(cost.group_size),
            str(cost.num_nodes),
            format_seconds(cost.latency_seconds),
            format_rate(cost.bytes_per_second, "B/s"),
            f"{cost.spread:.1%}",
        )
        for cost in profile.collectives
    ]


_PAIRS = {
    "compute_network": "computation and communication in a node",
    "compute_across": "computation and communication between nodes",
    "compute_to_device": "computation and copies from the host",
    "compute_to_host": "computation and copies to the host",
    "to_device_to_host": "copies in both directions",
    "network_to_device": "communication in a node and copies from the host",
    "network_to_host": "communication in a node and copies to the host",
    "across_to_device": "communication between nodes and copies from the host",
    "across_to_host": "communication between nodes and copies to the host",
}
"""In words, the coefficients of :class:`~lightning_mist.hardware.profile.interference_model.Interference`."""
