"""The L4s of Mist's executed runs, described in two ways.

* From the catalog alone: what somebody gets who plans without the machine.
* From timings of single operators on such a machine, as measuring it would give them: rates by kind and size of
  operator, never the time of a layer.

A single operator, timed again and again by itself, is faster than in a training step in two ways, neither of which may
enter a rate. What it reads may still lie in the cache of the device from the time before: only operators that move
twice :data:`CACHE_BYTES` or more count. And a matrix product of milliseconds does not bring the board to its limit of
power, which a step does: rates of matrix products are held to what the catalog says the device sustains.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median

from lightning_mist.hardware import Cluster, ComputeRate, HardwareProfile, KernelRate, MemoryRate, catalog_profile
from lightning_mist.hardware.describe import parse_cluster

OPERATORS = Path(__file__).parent / "data" / "mist_l4_operators.json"
DTYPE = "float16"
HALF_BYTES = 2

CACHE_BYTES = 48 << 20
"""Second-level cache of an L4 (NVIDIA Ada GPU architecture whitepaper: AD104 has 48 MiB)."""

CAUSAL_SHARE = 0.5
"""Part of the scores that a causal mask leaves, which Apex's softmax alone reads."""

_KINDS = {
    "add": "elementwise",
    "gelu": "elementwise",
    "accumulate": "elementwise",
    "layer norm": "reduction",
    "causal softmax": "reduction",
    "cross entropy": "reduction",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One operator by itself: its name, shapes of its inputs, and seconds."""

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    forward: float
    backward: float


def timings(path: Path = OPERATORS) -> tuple[Timing, ...]:
    """All operators of a file."""
    return tuple(
        Timing(
            operator=item["operator"],
            shapes=tuple(tuple(shape) for shape in item["shapes"]),
            forward=item["forward_seconds"],
            backward=item["backward_seconds"],
        )
        for item in json.loads(path.read_text(encoding="utf-8"))["operators"]
    )


def cluster(num_devices: int) -> Cluster:
    """One node of L4s."""
    return parse_cluster(f"1x{num_devices}xL4")


def catalog(num_devices: int) -> HardwareProfile:
    """What the catalog says."""
    return catalog_profile(cluster(num_devices))


def measured(num_devices: int, *, is_sustained: bool = True) -> HardwareProfile:
    """Rates from operator timings; links as the catalog has them, which were measured on these machines too.

    Args:
        num_devices: Devices of the node.
        is_sustained: Whether rates of matrix products are held to what the device sustains.
    """
    known, found = catalog(num_devices), timings()
    half = next(rate for rate in known.compute if rate.dtype == DTYPE)
    sustained = half.flops_per_second[-1] if is_sustained else float("inf")
    rates = tuple(_memory_rate(kind, found) for kind in ("elementwise", "reduction"))
    return replace(
        known,
        source="operator timings of the Mist artifact, held to the catalog's sustained rate",
        compute=(*(rate for rate in known.compute if rate.dtype != DTYPE), _products(found, sustained)),
        memory_bytes_per_second=rates[0].forward_bytes_per_second[-1],
        rates=rates,
        kernels=(_attention(found),),
    )


def _products(found: tuple[Timing, ...], sustained: float) -> ComputeRate:
    """Linear operations by the size of each product: one in forward, two as large in backward."""
    by_size: dict[float, list[float]] = defaultdict(list)
    for timing in found:
        if timing.operator == "linear":
            x, weight = timing.shapes
            flops = 2.0 * prod(x) * weight[0]
            by_size[flops] += [flops / timing.forward, 2 * flops / timing.backward]
    sizes = sorted(by_size)
    return ComputeRate(
        dtype=DTYPE,
        flops=tuple(sizes),
        flops_per_second=tuple(min(sustained, median(by_size[size])) for size in sizes),
        spread=0.0,
    )


def _attention(found: tuple[Timing, ...]) -> KernelRate:
    """Flash attention, all scores counted: two products in forward, five in backward."""
    forward, backward = [], []
    for timing in found:
        if timing.operator == "packed attention":
            batch, length, _, heads, head = timing.shapes[0]
            product = 2.0 * batch * heads * length * length * head
            forward.append(2 * product / timing.forward)
            backward.append(5 * product / timing.backward)
    return KernelRate(
        kind="causal_attention",
        dtype=DTYPE,
        forward_flops_per_second=median(forward),
        backward_flops_per_second=median(backward),
        spread=0.0,
    )


def _memory_rate(kind: str, found: tuple[Timing, ...]) -> MemoryRate:
    """One rate of what does not fit in the cache, in each direction."""
    rates: tuple[list[float], list[float]] = [], []
    for timing in found:
        if _KINDS.get(timing.operator) == kind:
            for direction, moved, seconds in _moved(timing):
                if moved >= 2 * CACHE_BYTES:
                    rates[direction].append(moved / seconds)
    forward, backward = (median(values) for values in rates)
    return MemoryRate(
        kind=kind,
        bytes=(1.0,),
        forward_bytes_per_second=(forward,),
        backward_bytes_per_second=(backward,),
        spread=0.0,
    )


def _moved(timing: Timing) -> Iterator[tuple[int, int, float]]:
    """Direction, bytes and seconds of what an operator's kernels read and write.

    Gradients that only pass through, or that are first copied because they were given to somebody else, are left out:
    a step does not copy them.
    """
    size = HALF_BYTES * prod(timing.shapes[0])
    if timing.operator in ("add", "accumulate"):
        yield 0, 3 * size, timing.forward
    elif timing.operator == "gelu" or timing.operator == "layer norm":
        yield 0, 2 * size, timing.forward
        yield 1, 3 * size, timing.backward
    elif timing.operator == "causal softmax":
        yield 0, int((1 + CAUSAL_SHARE) * size), timing.forward
    elif timing.operator == "cross entropy":
        # Largest, difference, exponential in place, sum, quotient in place; in backward a product in place.
        yield 0, 8 * size, timing.forward
        yield 1, 2 * size, timing.backward
