"""A profile for people: what was measured of a machine, as tables."""

from rich.table import Table

from lightning_mist.console import TextConsole
from lightning_mist.hardware.cluster import Cluster
from lightning_mist.hardware.profile import COEFFICIENTS, HardwareProfile
from lightning_mist.units import format_bytes, format_rate, format_seconds


def render_profile(cluster: Cluster, profile: HardwareProfile, *, width: int = 120, color: bool = False) -> str:
    """A profile as tables: matrix products by size, memory and launches, collectives by group."""
    console = TextConsole(width, color=color)
    devices = f"{cluster.num_nodes}x{cluster.devices_per_node}x{cluster.device.name}"
    sizes = f"{format_bytes(cluster.device.memory_bytes)} each"
    if cluster.kind == "cuda" and cluster.host_memory_bytes is not None:
        sizes += f", {format_bytes(cluster.host_memory_bytes)} in each host"
    console.print(f"{devices}, {sizes}: {profile.source}", soft_wrap=False)
    for table in (
        _matrix_products(profile),
        _kernels(profile),
        _memory(profile),
        _rates(profile),
        _collectives(profile),
        _together(profile),
        _corrections(profile),
    ):
        if table.row_count:
            console.print(table)
    return console.text


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def _matrix_products(profile: HardwareProfile) -> Table:
    """Rates by the edge of square matrices, one column for each element type."""
    rates = [dict(zip(map(_edge, rate.flops), rate.flops_per_second, strict=True)) for rate in profile.compute]
    table = _table("matrix products", ("edge", *(rate.dtype for rate in profile.compute)))
    for edge in sorted({edge for known in rates for edge in known}):
        table.add_row(str(edge), *(format_rate(known[edge], "FLOP/s") if edge in known else "" for known in rates))
    if table.row_count:
        table.add_row("spread", *(f"{rate.spread:.1%}" for rate in profile.compute))
    return table


def _edge(flops: float) -> int:
    """Edge of the square matrices whose product takes so many operations, ``2 n^3``."""
    return int(0.5 + float((flops / 2) ** (1 / 3)))


def _kernels(profile: HardwareProfile) -> Table:
    table = _table("other computation", ("kind", "type", "forward", "backward", "spread"))
    for rate in profile.kernels:
        forward, backward = rate.forward_flops_per_second, rate.backward_flops_per_second
        table.add_row(
            rate.kind.replace("_", " "),
            rate.dtype,
            format_rate(forward, "FLOP/s"),
            format_rate(backward, "FLOP/s"),
            f"{rate.spread:.1%}",
        )
    return table


def _memory(profile: HardwareProfile) -> Table:
    table = _table("operators that move bytes", ("kind", "per call", "forward", "backward", "spread"))
    for rate in profile.rates:
        sizes = zip(rate.bytes, rate.forward_bytes_per_second, rate.backward_bytes_per_second, strict=True)
        for index, (size, forward, backward) in enumerate(sizes):
            table.add_row(
                "" if index else rate.kind,
                format_bytes(size),
                format_rate(forward, "B/s"),
                format_rate(backward, "B/s"),
                "" if index else f"{rate.spread:.1%}",
            )
    return table


def _corrections(profile: HardwareProfile) -> Table:
    table = _table("corrections of predictions, from runs", ("term", "factor", "spread", "runs"))
    for item in profile.corrections:
        table.add_row(item.term, f"{item.factor:.3f}", f"{item.spread:.3f}", str(item.samples))
    return table


def _rates(profile: HardwareProfile) -> Table:
    table = _table("memory, launches, copies", ("", ""))
    table.show_header = False
    table.add_row("memory, read and written", format_rate(profile.memory_bytes_per_second, "B/s"))
    table.add_row("launch of an operator", format_seconds(profile.operator_seconds))
    for name, rate in (
        ("host to device", profile.host_to_device_bytes_per_second),
        ("device to host", profile.device_to_host_bytes_per_second),
        ("all devices of a node", profile.host_bytes_per_second_per_node),
    ):
        if rate:
            table.add_row(f"copies, {name}", format_rate(rate, "B/s"))
    overheads = profile.overheads
    for name, seconds in (
        ("step", overheads.step_seconds),
        ("forward or backward", overheads.action_seconds),
        ("message", overheads.message_seconds),
        ("step whose ranks exchange batches", overheads.exchange_seconds),
        ("operator on a stand-in", overheads.stand_in_seconds),
        ("operator on shared out tensors", overheads.split_operator_seconds),
        ("layer's sharded parameters", overheads.unit_seconds),
        ("recomputed layer", overheads.recomputed_layer_seconds),
        ("operator of a backward in two parts", overheads.deferred_operator_seconds),
    ):
        if seconds:
            table.add_row(f"overhead per {name}", format_seconds(seconds))
    return table


def _collectives(profile: HardwareProfile) -> Table:
    table = _table("collectives", ("operation", "ranks", "nodes", "latency", "payload", "spread"))
    for cost in profile.collectives:
        table.add_row(
            cost.operation,
            str(cost.group_size),
            str(cost.num_nodes),
            format_seconds(cost.latency_seconds),
            format_rate(cost.bytes_per_second, "B/s"),
            f"{cost.spread:.1%}",
        )
    return table


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


def _together(profile: HardwareProfile) -> Table:
    """What channels do to each other: 0 % free of each other, 100 % as if they took turns."""
    known = profile.interference
    error = f"; mean error {known.spread:.1%}" if known is not None and known.spread else ""
    table = _table(f"slowdown when running together ({known.source}{error})" if known is not None else "", ("", ""))
    table.show_header = False
    if known is not None:
        for name in COEFFICIENTS:
            table.add_row(_PAIRS[name], f"{getattr(known, name):.0%}")
    return table
