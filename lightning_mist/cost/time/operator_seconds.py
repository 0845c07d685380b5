"""Seconds of operators from what they do and the rates of a device: a roofline for every kind.

Operators run one after another, so their seconds add up. Each takes the longer of computing and of moving its bytes.
On a device the host launches ahead, so of a whole region the slower of launching and executing counts; on a CPU
launching is part of executing.

Array axes
    R  regions
    E  operators of one kind (and size) in one direction of a kind of region
"""

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
    profile: HardwareProfile, work: RegionWork, dtype: str, direction: Direction, *, launches_ahead: bool
) -> FloatArray:
    """Seconds of one direction of every region.

    Raises:
        ProfileError: If the profile has no rate for the element type.
    """
    busy_R = work.sums(operator_seconds(profile, work, dtype, direction))
    launches_R = work.sums(work.calls_E) * profile.operator_seconds
    return np.maximum(busy_R, launches_R) if launches_ahead else busy_R + launches_R


def operator_seconds(profile: HardwareProfile, work: RegionWork, dtype: str, direction: Direction) -> FloatArray:
    """Seconds that operators compute or move bytes, without launching them, by entry.

    Raises:
        ProfileError: If the profile has no rate for the element type.
    """
    kinds_E = np.array(work.kinds, dtype=object)
    calls_E = np.maximum(work.calls_E, 1.0)
    seconds_E = np.zeros(len(kinds_E))
    for kind in sorted(set(work.kinds)):
        of_kind_E = kinds_E == kind
        moved, flops, calls = (array[of_kind_E] for array in (work.moved_E, work.flops_E, calls_E))
        seconds = moved / byte_rate(profile, kind, direction, moved / calls)
        if flops.any():
            seconds = np.maximum(seconds, flops / _flop_rate(profile, kind, dtype, direction, flops / calls))
        seconds_E[of_kind_E] = seconds
    return seconds_E


def byte_rate(profile: HardwareProfile, kind: str, direction: Direction, bytes_E: FloatArray) -> FloatArray:
    """Bytes per second of operators that each move so many, interpolated in the logarithm of their number."""
    found: MemoryRate | None = None
    for wanted in (kind, "elementwise"):
        found = found or next((rate for rate in profile.rates if rate.kind == wanted), None)
    if found is None:
        return np.full(len(bytes_E), profile.memory_bytes_per_second)
    rates = found.forward_bytes_per_second if direction == "forward" else found.backward_bytes_per_second
    return np.interp(np.log(np.maximum(bytes_E, 1.0)), np.log(found.bytes), rates)


def _flop_rate(
    profile: HardwareProfile, kind: str, dtype: str, direction: Direction, flops_E: FloatArray
) -> FloatArray:
    kernel: KernelRate | None = next(
        (rate for rate in profile.kernels if (rate.kind, rate.dtype) == (kind, dtype)), None
    )
    if kernel is None:
        return compute_rate(profile, dtype, flops_E)
    rate = kernel.forward_flops_per_second if direction == "forward" else kernel.backward_flops_per_second
    return np.full(len(flops_E), rate)


def compute_rate(profile: HardwareProfile, dtype: str, flops_E: FloatArray) -> FloatArray:
    """FLOP/s of matrix products of so many operations each, interpolated in the logarithm of their number.

    Raises:
        ProfileError: If the profile has no rate for the element type.
    """
    for rate in profile.compute:
        if rate.dtype == dtype:
            logarithms_E = np.log(np.maximum(flops_E, 1.0))
            return np.interp(logarithms_E, np.log(rate.flops), rate.flops_per_second)
    known = ", ".join(rate.dtype for rate in profile.compute) or "nothing"
    raise ProfileError(
        f"the profile of {profile.device} has no rate for {dtype}, which this precision computes in; it has {known}: "
        f"measure it for {dtype} (lightning-mist profile --precision), or use a precision that it has"
    )
