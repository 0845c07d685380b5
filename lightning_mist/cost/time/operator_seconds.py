"""Seconds of operators from what they do and the rates of a device: a roofline for every kind.

Operators run one after another, so their seconds add up. Each takes the longer of computing and of moving its bytes.
On a device the host launches ahead, so of a whole region the slower of launching and executing counts; on a CPU
launching is part of executing.

Array axes
    R  regions
    K  operators of one kind (and size) in one direction of a kind of region
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lightning_mist.cost.inputs import FloatArray, RegionWork
from lightning_mist.errors import ProfileError
from lightning_mist.hardware import HardwareProfile, KernelRate, MemoryRate

Direction = Literal["forward", "backward"]

_COMPUTE_DTYPES = {"bf16": "bfloat16", "16": "float16", "64": "float64", "32": "float32", "transformer": "bfloat16"}
"""Element type of matrix products by the first part of Lightning's precision names."""


def compute_dtype(precision: str) -> str:
    """Element type in which a Lightning precision multiplies matrices, for example ``"bfloat16"``.

    Raises:
        ValueError: If the precision is not one of Lightning's.
    """
    name = precision.split("-", maxsplit=1)[0]
    if name not in _COMPUTE_DTYPES:
        raise ValueError(
            f"precision {precision!r}: the element type it computes in is known for names that begin with "
            f"{', '.join(_COMPUTE_DTYPES)}"
        )
    return _COMPUTE_DTYPES[name]


def work_seconds(
    profile: HardwareProfile,
    work: RegionWork,
    dtype: str,
    direction: Direction,
    *,
    launches_ahead: bool,
    head_width: int = 0,
) -> FloatArray:
    """Seconds of one direction of every region.

    Args:
        head_width: Numbers in a head of attention; 0 where it is not known.

    Raises:
        ProfileError: If the profile has no rate for the element type.
    """
    busy_R = work.sums(operator_seconds(profile, work, dtype, direction, head_width))
    launches_R = work.sums(work.calls_K) * profile.operator_seconds
    return np.maximum(busy_R, launches_R) if launches_ahead else busy_R + launches_R


def operator_seconds(
    profile: HardwareProfile, work: RegionWork, dtype: str, direction: Direction, head_width: int = 0
) -> FloatArray:
    """Seconds that operators compute or move bytes, without launching them, by entry.

    Raises:
        ProfileError: If the profile has no rate for the element type.
    """
    kinds_K = np.array(work.kinds, dtype=object)
    calls_K = np.maximum(work.calls_K, 1.0)
    seconds_K = np.zeros(len(kinds_K))
    for kind in sorted(set(work.kinds)):
        of_kind_K = kinds_K == kind
        moved, flops, calls = (array[of_kind_K] for array in (work.moved_K, work.flops_K, calls_K))
        seconds = moved / byte_rate(profile, kind, direction, moved / calls)
        if flops.any():
            kernels = [rate for rate in profile.kernels if (rate.kind, rate.dtype) == (kind, dtype)]
            if kernels:
                rate_K = _kernel_rate(kernels, direction, head_width, flops / calls, moved / calls)
            else:
                rate_K = compute_rate(profile, dtype, flops / calls)
            seconds = np.maximum(seconds, flops / rate_K)
        seconds_K[of_kind_K] = seconds
    return seconds_K


def byte_rate(profile: HardwareProfile, kind: str, direction: Direction, bytes_K: FloatArray) -> FloatArray:
    """Bytes per second of operators that each move so many, interpolated in the logarithm of their number."""
    found: MemoryRate | None = None
    for wanted in (kind, "elementwise"):
        found = found or next((rate for rate in profile.rates if rate.kind == wanted), None)
    if found is None:
        return np.full(len(bytes_K), profile.memory_bytes_per_second)
    rates = found.forward_bytes_per_second if direction == "forward" else found.backward_bytes_per_second
    return np.interp(np.log(np.maximum(bytes_K, 1.0)), np.log(found.bytes), rates)


ATTENTION_COUNTS: dict[Direction, tuple[float, float]] = {"forward": (4.0, 4.0), "backward": (10.0, 8.0)}
"""Operations of attention by queries, keys and numbers in a head, and how often it moves tensors of queries."""


def _kernel_rate(
    kernels: Sequence[KernelRate], direction: Direction, width: int, flops_K: FloatArray, moved_K: FloatArray
) -> FloatArray:
    """FLOP/s of attention or convolutions of so many operations and bytes each.

    Between widths that are known rates are linear in the width, beyond them constant. How long sequences are follows
    from what operators do for each byte in 16 bits: exactly if every head of queries has keys of its own; up to twice
    as long where few share many.
    """
    known = sorted(kernels, key=lambda rate: rate.width)
    rates = [getattr(rate, f"{direction}_flops_per_second") for rate in known]
    large = float(np.interp(width, [rate.width for rate in known], rates)) if width else rates[len(rates) // 2]
    half, idle = getattr(known[0], f"{direction}_half_length"), known[0].idle_rows
    if not (half or idle):
        return np.full(len(flops_K), large)
    operations, tensors = ATTENTION_COUNTS[direction]
    length_K = np.maximum(1.0, flops_K / np.maximum(moved_K, 1.0) * 2 * tensors / operations)
    rows_K = np.maximum(1.0, flops_K / (operations * length_K * (width or 128)))
    rate_K: FloatArray = large / (1 + half / length_K) / (1 + idle / rows_K)
    return rate_K


def compute_rate(profile: HardwareProfile, dtype: str, flops_K: FloatArray | float) -> FloatArray:
    """FLOP/s of matrix products of so many operations each, interpolated in the logarithm of their number.

    Raises:
        ProfileError: If the profile has no rate for the element type.
    """
    for rate in profile.compute:
        if rate.dtype == dtype:
            logarithms_K = np.log(np.maximum(flops_K, 1.0))
            found_K: FloatArray = np.interp(logarithms_K, np.log(rate.flops), rate.flops_per_second)
            return found_K
    known = ", ".join(rate.dtype for rate in profile.compute) or "nothing"
    raise ProfileError(
        f"the profile of {profile.device} has no rate for {dtype}, which this precision computes in; it has {known}: "
        f"measure it for {dtype} (lightning-mist profile --precision), or use a precision that it has"
    )
