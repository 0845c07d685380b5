"""What a step does and the least it could take: model FLOPs, the peak of the devices, the roofline.

The roofline of a step is what it would take if every operator ran at the limit of the device and nothing else existed:

    roofline = 1 / N  (sum over operators of max(FLOPs / peak, bytes / bandwidth) + optimizer's bytes / bandwidth)

over ``N`` devices that share the work evenly, without communication, launches or waiting. All rows of the step go
through an operator at once, so that parameters are read once: no cut of the batch reads fewer bytes. So no plan goes
below it, unless operators find their operands in caches, which the bandwidth is not about.

Of unlike devices those of kind ``p`` would take ``s_p`` seconds each for everything. Weighed by ``v_p``, their time per
second of another kind's, every operator costs at least what it costs where it is cheapest, and all devices together
have ``sum n_p v_p`` to spend in each second of the step (linear programming duality); with ``v_p = s_1 / s_p`` that is
their combined speed.

The peaks are those of the data sheet for devices of the catalog with a data sheet. Of others (a CPU) they are the
fastest matrix product and the bandwidth of the profile.

Array axes
    R  regions
    K  operators of one kind (and size) in one direction of a kind of region
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import FloatArray, RegionCosts
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.time import compute_dtype
from lightning_mist.errors import ProfileError
from lightning_mist.hardware import HardwareProfile
from lightning_mist.hardware.catalog import CatalogDevice, find_device
from lightning_mist.plan import StepWork

_NEEDED = {"causal_attention": 0.5}
"""Part of the counted operations that a kernel must do: fused causal attention skips the scores that the mask hides."""


def step_work(memory: MemoryModel, kinds: Sequence[tuple[HardwareProfile, int]], rows: int) -> StepWork:
    """The work of a step of so many rows, and the least it could take.

    Args:
        memory: The whole network's compiled expressions.
        kinds: How fast each kind of device was measured to be, and how many there are.
        rows: Rows of the step over all devices.
    """
    spec, costs = memory.spec, memory.costs(rows)
    trained = sum(item.bytes for item in spec.parameters if item.trainable)
    limits, names = [], []
    for profile, _ in kinds:
        sheet = _data_sheet(profile)
        peak, source = _peak(sheet, profile, spec.precision)
        bandwidth = _bandwidth(profile) if sheet is None else sheet.memory_bytes_per_second
        update = spec.optimizer.step_moved_bytes_per_parameter_byte * trained / bandwidth
        limits.append(_Limit(peak=peak, bandwidth=bandwidth, update=update))
        names.append(source)
    alone = [float(_least_seconds(costs, (item,), (1.0,)).sum()) + item.update for item in limits]
    weights = [alone[0] / seconds if seconds > 0 else 1.0 for seconds in alone]
    seconds = float(_least_seconds(costs, limits, weights).sum())
    seconds += min(weight * item.update for weight, item in zip(weights, limits, strict=True))
    devices, names = sum(count for _, count in kinds), list(dict.fromkeys(names))
    is_known = all(item.peak > 0 for item in limits)
    peak = sum(item.peak * count for item, (_, count) in zip(limits, kinds, strict=True)) / devices if is_known else 0.0
    return StepWork(
        model_flops=float(costs.forward_flops_R.sum() + costs.backward_flops_R.sum()),
        peak_flops_per_second=peak,
        peak_source=names[0] if len(names) == 1 else f"on average of all devices: {'; '.join(names)}",
        roofline_seconds=seconds / sum(weight * count for weight, (_, count) in zip(weights, kinds, strict=True)),
        sequence_length=spec.sequence_length,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """What a kind of device can do at most: FLOP/s, bytes per second, and the seconds of an optimizer's step on one."""

    peak: float
    bandwidth: float
    update: float


def _least_seconds(costs: RegionCosts, limits: Sequence[_Limit], weights: Sequence[float]) -> FloatArray:
    """The least seconds of forward and backward of every region, each operator on the kind where it weighs least."""
    total_R = np.zeros_like(costs.forward_flops_R)
    for work in (costs.forward_work, costs.backward_work):
        needed_K = work.flops_K * np.array([_NEEDED.get(kind, 1.0) for kind in work.kinds])
        least_K = np.full_like(needed_K, np.inf)
        for item, weight in zip(limits, weights, strict=True):
            busy_K = needed_K / item.peak if item.peak > 0 else np.zeros_like(needed_K)
            least_K = np.minimum(least_K, weight * np.maximum(busy_K, work.moved_K / item.bandwidth))
        total_R = total_R + work.sums(least_K)
    return total_R


def _bandwidth(profile: HardwareProfile) -> float:
    """The most bytes per second of large operators that a profile knows of any kind."""
    large = [max(kind.forward_bytes_per_second[-1], kind.backward_bytes_per_second[-1]) for kind in profile.rates]
    return max(profile.memory_bytes_per_second, *large, 0.0)


def _data_sheet(profile: HardwareProfile) -> CatalogDevice | None:
    """The catalog's entry of a device that has a data sheet."""
    try:
        found = find_device(profile.device)
    except ProfileError:
        return None
    return found if found.kind == "cuda" else None


def _peak(sheet: CatalogDevice | None, profile: HardwareProfile, precision: str) -> tuple[float, str]:
    """The most FLOP/s in a precision, 0 if nothing says it, and where that comes from."""
    try:
        dtype = compute_dtype(precision)
    except ValueError as error:  # a plugin's own precision, of layers that were measured
        return 0.0, str(error)
    known = {} if sheet is None else dict(sheet.peak_flops)
    if dtype in known and sheet is not None:
        return known[dtype], f"{dtype} in the data sheet of {sheet.name}"
    measured = [rate for rate in profile.compute if rate.dtype == dtype]
    if not measured:
        return 0.0, f"nothing says how fast {profile.device} computes in {dtype}"
    origin = "of the catalog" if profile.source.startswith("catalog") else "measured"
    return max(measured[0].flops_per_second), f"the fastest {dtype} matrix product {origin}"
