"""Rates of attention kernels from published measurements: what the catalog's table of them is derived from.

    python -m benchmarks.hardware.attention_rates kernel_rates.json

Of every kernel on every kind of device, by head width and direction, in TFLOP/s of the operations that must be done (a
causal mask halves them; backward is 2.5 times forward):

    rate = large / (1 + half / length) / (1 + tail)

``half`` is the length at which half of the rate of long sequences is reached, one for all widths of a kernel, of its
own where scores are masked (tiles on the diagonal are computed whole). ``tail`` is what multiprocessors idle at the end
of a launch, half of a tile of 128 queries each:

    tail = 64 multiprocessors / (batch heads length)

``half`` is what makes rates agree best (least sum of absolute logarithms), ``large`` their median then. Sequences
beyond 16k are left out: there the board's limit of power holds short benchmarks too, and kernels no longer differ.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MULTIPROCESSORS = {"A100": 108, "H100": 132, "H200": 132, "B200": 148, "GB200": 148, "GB300": 148, "RTXPRO6000": 188}
"""Of the devices whose kernels are fitted (data sheets); of others nothing is known to idle."""

LONGEST = 16384
HALVES = np.arange(0.0, 2001.0, 20.0)
TILE_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFit:
    """One kernel in one direction.

    Attributes:
        large: TFLOP/s of long sequences by head width.
        half_full, half_causal: Lengths of half that rate without and with a causal mask.
        error: Median of the absolute logarithms of measured over fitted rates.
    """

    large: Mapping[int, float]
    half_full: float
    half_causal: float
    error: float
    count: int


def usable(row: Mapping[str, Any]) -> bool:
    """Whether a measurement is of an ordinary kernel in 16 bits with everything stated."""
    stated = all(row.get(name) for name in ("head_dim", "seq", "tflops")) and row.get("device_stated", True)
    plain = row["dtype"] in ("bf16", "fp16") and not row.get("deterministic") and not row.get("faulty")
    return bool(stated and plain and row["pass"] in ("forward", "backward") and row["seq"] <= LONGEST)


def fit(rows: Sequence[Mapping[str, Any]]) -> KernelFit:
    """The rates of one kernel in one direction on one kind of device."""
    length = np.array([row["seq"] for row in rows], dtype=float)
    causal = np.array([row["causal"] for row in rows], dtype=bool)
    width = np.array([row["head_dim"] for row in rows])
    rate = np.array([row["tflops"] for row in rows], dtype=float) * np.array([1 + _tail(row) for row in rows])

    def scaled(full: float, masked: float) -> np.ndarray:
        return np.log(rate * (1 + np.where(causal, masked, full) / length))

    def spread(full: float, masked: float) -> float:
        logs = scaled(full, masked)
        return sum(float(np.abs(logs[width == one] - np.median(logs[width == one])).sum()) for one in set(width))

    fulls = HALVES if (~causal).any() else HALVES[:1]
    masks = HALVES if causal.any() else HALVES[:1]
    full, masked = min(((full, mask) for full in fulls for mask in masks), key=lambda pair: spread(*pair))
    logs = scaled(full, masked)
    large = {int(one): float(np.exp(np.median(logs[width == one]))) for one in sorted(set(width))}
    error = float(np.median(np.abs(logs - np.log([large[int(one)] for one in width]))))
    return KernelFit(large=large, half_full=full, half_causal=masked, error=error, count=len(rows))


def _tail(row: Mapping[str, Any]) -> float:
    idle = MULTIPROCESSORS.get(str(row["device"]).split("-", maxsplit=1)[0], 0)
    work = (row.get("batch") or 0) * (row.get("heads") or 0) * row["seq"]
    return TILE_ROWS / 2 * idle / work if work else 0.0


def fits(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], KernelFit]:
    """By device, kernel and direction."""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if usable(row):
            groups[row["device"], row["kernel"], row["pass"]].append(row)
    return {key: fit(found) for key, found in sorted(groups.items())}


def main() -> None:
    """Print a row for every kernel."""
    parser = argparse.ArgumentParser(description="Rates of attention kernels from published measurements.")
    parser.add_argument("measurements", type=Path, help="the file with an array 'attention'")
    rows = json.loads(parser.parse_args().measurements.read_text(encoding="utf-8"))["attention"]
    for (device, kernel, direction), found in fits(rows).items():
        large = " ".join(f"{width}:{rate:.0f}" for width, rate in found.large.items())
        print(
            f"{device:14} {kernel:10} {direction:8} {large:40} half {found.half_full:5.0f} "
            f"causal {found.half_causal:5.0f} error {found.error:6.1%} of {found.count}"
        )


if __name__ == "__main__":
    main()
