"""Timing a function on every rank at once: samples, their robust median, and agreement between the ranks.

Ranks measure together on purpose. In training all of them compute and communicate at the same time and share cores,
memory and links; a rank measured alone would be too fast. Every decision (how many calls, how many samples) is taken on
figures that all ranks have agreed on, so that all do the same and collectives match.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lightning_mist.devices import ops_of
from lightning_mist.hardware.groups import RankGroup

OUTLIER_SCORE = 3.5
"""Modified z-score that makes a sample an outlier: Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993."""

CONSISTENCY = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution (same source)."""

SAMPLE_SECONDS = 1e-2
"""A sample repeats short functions until it takes about this long: more than the 3 ms that Linux lets a process run
before others on its core get their turn (sched(7); kernel documentation, scheduler, sched-eevdf), so that a sample sees
the sharing of cores. With 1 ms, 4 processes on 2 cores were measured twice too fast in small products."""

MIN_SAMPLES, MAX_SAMPLES = 3, 15
"""Three are the least that can outvote one outlier; the median of 15 has a third of one sample's spread."""

MOST_CALLS = 10_000
"""Calls in one go, however short they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Robust summary of samples.

    Attributes:
        spread: Their median absolute deviation over their median.
    """

    seconds: float
    spread: float
    samples: int
    outliers: int


def summarize(samples: Sequence[float]) -> Timing:
    """Median and spread of samples, outliers by the modified z-score rejected."""
    if not samples:
        raise ValueError("no samples: at least one is needed")
    center = statistics.median(samples)
    deviation = CONSISTENCY * statistics.median(abs(sample - center) for sample in samples)
    kept = [sample for sample in samples if abs(sample - center) <= OUTLIER_SCORE * deviation] or [center]
    median = statistics.median(kept)
    spread = statistics.median(abs(sample - median) for sample in kept) / median if median > 0 else 0.0
    return Timing(seconds=median, spread=spread, samples=len(kept), outliers=len(samples) - len(kept))


def synchronize(device: torch.device) -> None:
    """Wait until everything launched on the device is done."""
    ops_of(device).synchronize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Where a measurement runs.

    Attributes:
        world: Group of all ranks, or None for a single process.
    """

    device: torch.device
    world: RankGroup | None

    def agree(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, position by position; also a barrier."""
        if self.world is None:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.world.handle)
        return [float(value) for value in tensor.tolist()]


def _seconds(function: Callable[[], object], calls: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def heating_calls(heat_seconds: float, seconds: float) -> int:
    """How often a function that takes some seconds is called to keep a device busy for so long, within reason."""
    return min(MOST_CALLS, math.ceil(heat_seconds / seconds))


def measure(
    function: Callable[[], object] | None,
    *,
    session: Session,
    budget_seconds: float,
    aligned: bool = False,
    heat_seconds: float = 0.0,
) -> Timing:
    """Time a function on all ranks at once; it counts as long as it took on the slowest rank.

    Args:
        function: What to time; None on a rank that only waits for the others (it must still call this).
        budget_seconds: Roughly how long all samples may take; at least :data:`MIN_SAMPLES` are taken.
        aligned: True for collectives: the ranks start each sample together, and a sample lasts until the last one has
            ended. False for computations: they start together once, and the slowest rank is that of the largest median.
        heat_seconds: How long it runs ahead of the samples, for rates that a device cannot hold for longer.

    Returns:
        Seconds of one call, the same on all ranks.
    """
    call = function if function is not None else _nothing
    call()
    session.agree([0.0])
    (first,) = session.agree([_seconds(call, 1, session.device) if function is not None else 0.0])
    first = max(first, 1e-7)
    calls = max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / first)))
    repeats = max(MIN_SAMPLES, min(MAX_SAMPLES, int(budget_seconds / (first * calls))))
    samples = []
    session.agree([0.0])
    for _ in range(heating_calls(heat_seconds, first)):
        call()
    for _ in range(repeats):
        if aligned:
            session.agree([0.0])
        samples.append(_seconds(call, calls, session.device) if function is not None else 0.0)
    if aligned:
        return summarize(session.agree(samples))
    own = summarize(samples)
    seconds, spread = session.agree([own.seconds, own.spread])
    return replace(own, seconds=seconds, spread=spread)


def _nothing() -> None:
    """Stands for the function on a rank that does not take part."""
