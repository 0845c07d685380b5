"""Measurements of channels running together, as files, and what machines they are of.

A file of samples is JSON with ``name``, ``columns`` and ``rows``; the columns are ``compute_n`` (a product of so many
rows), ``gpu_gpu_mib``, ``h2d_mib``, ``d2h_mib`` (payloads), ``intra_group``, ``inter_group`` (devices of a node and
nodes in the communicating group), ``latency_ms`` (until all were done) and, if known, ``std_ms``.

What each load takes alone is not looked up but fitted, ``latency + size / rate`` by channel (and by group for
communication) over the rows with one load: times are rounded to milliseconds, and a plan's loads will come from
latencies and rates as well.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from lightning_mist.hardware.catalog.interference_kinds import copies_are_staged, lanes_are_shared
from lightning_mist.hardware.measure.device_bench import ConcurrentTimes
from lightning_mist.hardware.profile.interference_model import CHANNELS

SIZES = ("compute_n", "gpu_gpu_mib", "h2d_mib", "d2h_mib")
"""Columns of the loads, in the order of the channels."""

DISTURBED = 0.1
"""Rows whose standard deviation exceeds this part of their mean are left out, as the published fits do."""

ABOVE_SUM = 1.15
"""Rows that took longer than this times their loads one after the other are left out: no overlap explains them. The
published fits leave out all above 1; rounding to milliseconds needs some room."""

RESOLUTION_SECONDS = 2e-3
"""Times below count as if they were this long in a fit: they are rounded to milliseconds."""

MIB, GIB = 2**20, 2**30

TABLES = Path(__file__).parent / "data" / "interference_tables.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine's measurements.

    Attributes:
        name: Its name.
        family: Name that it shares with other measurements of the same machine.
        staged: Whether its copies are staged.
        shared: Whether communication inside its nodes goes over the lanes that copies use.
        times: What was measured running together.
        groups: Group of each of them: devices of a node times nodes.
        left_out: Number of rows left out, by reason.
        is_table: Whether the times were not measured but follow from a published table of slowdowns.
    """

    name: str
    family: str
    staged: bool
    shared: bool
    times: ConcurrentTimes
    groups: tuple[tuple[int, int], ...]
    left_out: Mapping[str, int]
    is_table: bool

    @property
    def ways(self) -> NDArray[np.int64]:
        """Number of channels with a load, for each time."""
        return np.asarray((self.times.loads > 0).sum(axis=0), dtype=np.int64)


def read_samples(path: Path) -> Machine:
    """A machine of a file of samples.

    Raises:
        ValueError: If a column is missing, or copies or communication were never measured alone.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    missing = {*SIZES, "intra_group", "inter_group", "latency_ms"} - set(content["columns"])
    if missing:
        raise ValueError(f"{path} has no columns {', '.join(sorted(missing))}")
    rows = np.array(content["rows"], dtype=np.float64)
    column = {name: rows[:, index] for index, name in enumerate(content["columns"])}
    seconds = column["latency_ms"] * _unit(column["latency_ms"])
    deviation = column.get("std_ms", np.zeros(len(rows))) * _unit(column["latency_ms"])
    sizes = np.stack([column[name] for name in SIZES])
    shape = np.stack([column["intra_group"], column["inter_group"]]).astype(int)
    loads, rates = alone_seconds(sizes, shape, seconds)
    ways = (sizes > 0).sum(axis=0)
    known = np.isfinite(loads).all(axis=0)
    together, positive = ways > 1, seconds > 0
    steady = deviation <= DISTURBED * seconds
    explained = seconds <= ABOVE_SUM * np.where(known, loads.sum(axis=0), np.inf)
    keep = together & known & positive & steady & explained
    left_out = {
        "alone_not_measured": int((together & ~known).sum()),
        "zero": int((together & known & ~positive).sum()),
        "disturbed": int((together & known & positive & ~steady).sum()),
        "above_sum": int((together & known & positive & steady & ~explained).sum()),
    }
    inside = [rate for (nodes, channel), rate in rates.items() if channel == 1 and nodes == 1]
    copies = [rate for (_, channel), rate in rates.items() if channel in (2, 3)]
    if len(copies) < 2:
        raise ValueError(f"{path}: copies were not measured alone in both directions")
    copy_rate = sum(copies) / len(copies) * MIB
    return Machine(
        name=str(content["name"]),
        family=str(content["name"]),
        staged=copies_are_staged(copy_rate),
        shared=bool(inside) and lanes_are_shared(max(inside) * MIB, copy_rate),
        times=ConcurrentTimes(loads=loads[:, keep], seconds=seconds[keep], across_nodes=shape[1][keep] > 1),
        groups=tuple((int(per_node), int(nodes)) for per_node, nodes in shape[:, keep].T),
        left_out=left_out,
        is_table=False,
    )


def _unit(latencies: NDArray[np.float64]) -> float:
    """Seconds per unit: such files say milliseconds and mean seconds; a median under one tells."""
    return 1.0 if np.median(latencies) < 1.0 else 1e-3


def alone_seconds(
    sizes: NDArray[np.float64], shape: NDArray[np.int64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.float64], dict[tuple[int, int], float]]:
    """What each load of each row takes alone.

    Args:
        sizes: Channels times rows.
        shape: Devices of a node and nodes in the communicating group, times rows.
        seconds: Time of each row.

    Returns:
        Seconds, channels times rows, not a number where that load was never measured alone; and rates in size per
        second by (nodes, channel), the largest of the groups.
    """
    single = ((sizes > 0).sum(axis=0) == 1) & (seconds > 0)
    loads = np.zeros(sizes.shape)
    rates: dict[tuple[int, int], float] = {}
    groups = sorted(set(map(tuple, shape.T.tolist())))
    for channel in range(len(SIZES)):
        parts = groups if channel == 1 else [None]
        for group in parts:
            member = np.ones(len(seconds), bool) if group is None else (np.array(group) == shape.T).all(axis=1)
            used = member & (sizes[channel] > 0)
            alone = used & single
            if not alone.any():
                loads[channel, used] = np.nan
                continue
            latency, per_size = affine(sizes[channel, alone], seconds[alone])
            loads[channel, used] = latency + per_size * sizes[channel, used]
            nodes = 1 if group is None else group[1]
            if per_size > 0:
                rates[nodes, channel] = max(rates.get((nodes, channel), 0.0), 1.0 / per_size)
    return loads, rates


def affine(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Latency and seconds per size, neither negative, of the least squared relative residuals."""
    weight = 1.0 / np.maximum(seconds, RESOLUTION_SECONDS)
    scale = np.array([1e-3, float(np.median(seconds) / np.median(sizes))])
    matrix = np.stack([np.full_like(sizes, scale[0]), sizes * scale[1]], axis=1) * weight[:, None]
    found, _ = nnls(matrix, seconds * weight)
    return float(found[0] * scale[0]), float(found[1] * scale[1])


def table_machines(path: Path = TABLES) -> list[Machine]:
    """Machines of which a table of slowdowns was published, but no samples.

    Only pairs of channels are taken from a table: factors of three and four channels are often on the bounds of the fit
    that made them. A table that was fitted to groups inside and between nodes stands for both.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    return [_table_machine(entry) for entry in content["machines"]]


def _table_machine(entry: Mapping[str, Any]) -> Machine:
    loads, seconds, above = [], [], 0
    steps = [3e-3 * step for step in range(1, 5)]
    for pair in entry["pairs"]:
        first, second = pair["channels"]
        slowdown = dict(zip(pair["channels"], pair["slowdown"], strict=True))
        for one, other in product(steps, steps):
            row = np.zeros(len(CHANNELS))
            row[[CHANNELS.index(first), CHANNELS.index(second)]] = one, other
            took = _pair_seconds({first: one, second: other}, slowdown)
            above += took > ABOVE_SUM * (one + other)
            if took <= ABOVE_SUM * (one + other):
                loads.append(row)
                seconds.append(took)
    kinds = [False, True] if entry["across_nodes"] else [False]
    across = np.repeat(kinds, len(seconds))
    copies = (entry["to_device_gib_per_second"] + entry["to_host_gib_per_second"]) / 2 * GIB
    return Machine(
        name=entry["name"],
        family=entry["family"],
        staged=copies_are_staged(copies),
        shared=lanes_are_shared(entry["network_gib_per_second"] * GIB, copies),
        times=ConcurrentTimes(
            loads=np.tile(np.array(loads).T, len(kinds)),
            seconds=np.tile(np.array(seconds), len(kinds)),
            across_nodes=across,
        ),
        groups=tuple((8, 2 if value else 1) for value in across),
        left_out={"above_sum": above * len(kinds)},
        is_table=True,
    )


def _pair_seconds(loads: Mapping[str, float], slowdown: Mapping[str, float]) -> float:
    """Two loads together by a published table: each slowed down by its factor until the first is done."""
    slowed = {channel: load * slowdown[channel] for channel, load in loads.items()}
    first = min(slowed.values())
    return first + max((slowed[channel] - first) / slowdown[channel] for channel in loads)


def families(machines: Sequence[Machine]) -> list[str]:
    """Names of the families, in order of first appearance."""
    return list(dict.fromkeys(machine.family for machine in machines))
