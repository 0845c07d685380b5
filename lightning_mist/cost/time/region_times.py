"""Seconds of computation and of communication, from measurements where there are any and from rates otherwise.

Array axes
    R  regions in execution order: the head, every layer, the tail
    K  payloads; or operators of one kind (and size) in one direction of a kind of region
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_mist.cost.inputs import Collectives, FloatArray, RegionCosts, RegionWork, StageRegions, regions_of
from lightning_mist.cost.time.runtime_overheads import SPLIT_BACKWARD
from lightning_mist.errors import PlanError, ProfileError
from lightning_mist.hardware import Cluster, CollectiveCost, HardwareProfile, KernelRate, MemoryRate
from lightning_mist.model.spec import LayerSeconds, ModelSpec

# Seconds of operators from what they do and the rates of a device: a roofline for every kind.
#
# Operators run one after another, so their seconds add up. Each takes the longer of computing and of moving its
# bytes. On a device the host launches ahead, so of a whole region the slower of launching and executing counts; on a
# CPU launching is part of executing.


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


TimeSource = Literal["measured", "extrapolated", "rates"]
"""Whether seconds lie between measured ones, beyond them, or come from FLOPs, bytes and launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSeconds:
    """Seconds of every region at one number of rows.

    Attributes:
        recompute_R: Of repeating forwards in backward.
        source: Where they come from; the least certain source counts.
        exchange: The parts of both in which tensor-parallel ranks exchange; ``None`` without such ranks.
    """

    forward_R: FloatArray
    backward_R: FloatArray
    recompute_R: FloatArray
    source: TimeSource
    exchange: tuple[FloatArray, FloatArray] | None = None

    def terms(self, costs: RegionCosts, regions: StageRegions) -> dict[str, FloatArray]:
        """What stages compute, and what tensor-parallel ranks exchange meanwhile, by names of ``StageSeconds``.

        Args:
            costs: Say what part of FLOPs makes gradients of matrices.
        """
        weight_R = np.minimum(1.0, costs.weight_flops_R / np.maximum(costs.backward_flops_R, 1.0))
        exchange_K = recompute_exchange_K = np.zeros(len(regions))
        if self.exchange is not None:
            exchange_K = regions.sums(self.exchange[0]) + regions.sums(self.exchange[1])
            recompute_exchange_K = regions.recomputed_sums(self.exchange[0])
        return {
            "forward_K": regions.sums(self.forward_R),
            "backward_K": regions.sums(self.backward_R),
            "recompute_K": regions.recomputed_sums(self.recompute_R),
            "weight_K": regions.sums(weight_R * self.backward_R),
            "exchange_K": exchange_K,
            "recompute_exchange_K": recompute_exchange_K,
        }


def split_seconds(
    specs: tuple[ModelSpec, ModelSpec],
    profile: HardwareProfile,
    cluster: Cluster,
    costs: tuple[RegionCosts, RegionCosts],
    rows: float,
    degree: int,
) -> RegionSeconds:
    """Seconds of every region on one of several tensor-parallel ranks, what these exchange included.

    Seconds of the whole network, measured or not, shrink as those from FLOPs, bytes and launches do. The ranks that
    share layers are in as few nodes as can be, and wait for each other.
    """
    whole = region_seconds(specs[0], profile, cluster, costs[0], rows)
    rates = [
        region_seconds(replace(spec, seconds=()), profile, cluster, item, rows)
        for spec, item in zip(specs, costs, strict=True)
    ]
    part = costs[1]
    operators_R = np.array([region.forward_operators for region in regions_of(specs[0])], dtype=np.float64)
    split_R = profile.overheads.split_operator_seconds * operators_R

    def scaled(name: str) -> FloatArray:
        before_R, after_R = (getattr(item, name) for item in rates)
        seconds_R: FloatArray = getattr(whole, name) * np.where(
            before_R > 0, after_R / np.maximum(before_R, 1e-300), 1.0
        )
        return seconds_R

    def exchanged(collectives: Collectives) -> FloatArray:
        seconds_R = np.zeros_like(whole.forward_R)
        for operation, bytes_R, calls_R in collectives:
            seconds_R = seconds_R + collective_seconds(profile, operation, degree, nodes, bytes_R, calls_R)
        return seconds_R

    nodes = -(-degree // cluster.devices_per_node)
    exchange = exchanged(part.forward_collectives), exchanged(part.backward_collectives)
    return RegionSeconds(
        forward_R=scaled("forward_R") + exchange[0] + split_R,
        backward_R=scaled("backward_R") + exchange[1] + SPLIT_BACKWARD * split_R,
        recompute_R=scaled("recompute_R") + exchange[0] + split_R,
        source=whole.source,
        exchange=exchange,
    )


def region_seconds(
    spec: ModelSpec, profile: HardwareProfile, cluster: Cluster, costs: RegionCosts, rows: float
) -> RegionSeconds:
    """Seconds of one forward, one backward (without recomputation) and one recomputation of every region.

    Measured layers were not timed when they are recomputed: that is as much of their forward as follows from what both
    do.

    Args:
        spec: The network, perhaps with measured seconds of its kinds of layers.
        cluster: Tells whether operators queue on a device or run one after another.

    Raises:
        ProfileError: If a kind was not measured and the profile lacks the rate of the computation's element type.
        PlanError: If it multiplies in types that no profile has rates of.
    """
    measured = {seconds.kind: seconds for seconds in spec.seconds}
    regions = regions_of(spec)
    forward_R, backward_R, recompute_R = np.zeros((3, len(regions)))
    is_partial = costs.recompute_work is not costs.forward_work
    sources: set[TimeSource] = set()
    if is_partial or any(region.kind not in measured for region in regions):
        if spec.unpriced:
            raise PlanError(
                f"no seconds of {spec.name}: {'; '.join(spec.unpriced)}, which profiles have no rates of. A fit times "
                "layers before it plans, and the estimate command counts their bytes"
            )
        dtype, ahead = compute_dtype(spec.precision), cluster.device.kind == "cuda"
        options: dict[str, Any] = {"launches_ahead": ahead, "head_width": spec.head_width}
        forward_R[:] = work_seconds(profile, costs.forward_work, dtype, "forward", **options)
        backward_R[:] = work_seconds(profile, costs.backward_work, dtype, "backward", **options)
        recompute_R[:] = forward_R
        if is_partial:
            recompute_R[:] = work_seconds(profile, costs.recompute_work, dtype, "forward", **options)
    again_R = np.divide(recompute_R, forward_R, out=np.ones(len(regions)), where=forward_R > 0)
    for index, region in enumerate(regions):
        if region.kind in measured:
            seconds = measured[region.kind]
            forward_R[index] = interpolate(seconds.rows, seconds.forward, rows)
            backward_R[index] = interpolate(seconds.rows, seconds.backward, rows)
            recompute_R[index] = again_R[index] * forward_R[index]
            sources.add(_source(seconds, rows))
        elif region.forward_work:
            sources.add("rates")
    order: tuple[TimeSource, ...] = ("rates", "extrapolated", "measured")
    worst: TimeSource = next((source for source in order if source in sources), "measured")
    return RegionSeconds(forward_R=forward_R, backward_R=backward_R, recompute_R=recompute_R, source=worst)


def _source(seconds: LayerSeconds, rows: float) -> TimeSource:
    return "measured" if seconds.rows[0] <= rows <= seconds.rows[-1] else "extrapolated"


def interpolate(rows: Sequence[int], seconds: Sequence[float], wanted: float) -> float:
    """Seconds at a number of rows.

    Linear between measured sizes. Beyond them as ``a + b rows`` grows or shrinks from the nearest measured size: ``a``
    is what a layer costs however few its rows are, neither it nor ``b`` is negative, and the line is the one with the
    least squares of relative errors over all measured sizes. A single size says nothing of ``a``: then seconds are
    taken to grow with the rows above it, and not to shrink below it.
    """
    if rows[0] <= wanted <= rows[-1]:
        return float(np.interp(wanted, rows, seconds))
    end = 0 if wanted < rows[0] else len(rows) - 1
    if len(rows) == 1:
        return float(seconds[0] * max(1.0, wanted / rows[0]))
    fixed, each = _line(rows, seconds)
    known = fixed + each * rows[end]
    return float(seconds[end] * (fixed + each * wanted) / known) if known > 0 else 0.0


def _line(rows: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """``a`` and ``b``, neither negative, of the line ``a + b rows`` with the least squares of relative errors."""
    sizes, found = np.asarray(rows, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    weights = np.where(found > 0, 1 / np.maximum(found, 1e-12), 0.0)
    if not weights.any():
        return 0.0, 0.0
    (fixed, each), *_ = np.linalg.lstsq(np.stack([weights, weights * sizes], axis=1), weights * found, rcond=None)
    if fixed < 0:
        return 0.0, float((weights**2 * sizes * found).sum() / ((weights * sizes) ** 2).sum())
    if each < 0:
        return float((weights**2 * found).sum() / (weights**2).sum()), 0.0
    return float(fixed), float(each)


def collective_seconds(
    profile: HardwareProfile,
    operation: str,
    group_size: int,
    num_nodes: int,
    payload_K: npt.ArrayLike,
    calls_K: npt.ArrayLike = 1,
) -> FloatArray:
    """Seconds of a collective: its calls' latencies, and its bytes at the rate of the nearest group that is known.

    From that group's size to another they change as in a ring; see :func:`ring_steps`.

    Args:
        operation: A name of :class:`CollectiveCost`. Where ``"reduce"`` is not known it takes what ``"broadcast"``
            takes: it is the same tree run backwards.
        payload_K: Bytes of the whole un-sharded tensors.

    Raises:
        ProfileError: If the profile does not have the operation.
    """
    payload = np.asarray(payload_K, dtype=np.float64)
    if group_size < 2:
        return np.zeros_like(payload)
    if operation == "reduce" and not any(cost.operation == operation for cost in profile.collectives):
        operation = "broadcast"
    cost = _nearest(profile, operation, group_size, num_nodes)
    hops, crossings = ring_steps(operation, group_size)
    measured_hops, measured_crossings = ring_steps(operation, cost.group_size)
    steps, share = hops / measured_hops, crossings / measured_crossings
    used = (payload > 0) * (np.asarray(calls_K) * cost.latency_seconds * steps)
    if cost.fill_seconds:
        used = used + np.minimum(np.asarray(calls_K) * cost.fill_seconds, payload * cost.fill_seconds / cost.fill_bytes)
    return used + payload * share / cost.bytes_per_second


def ring_steps(operation: str, group_size: int) -> tuple[float, float]:
    """How often a ring passes on a message of an operation, and how often the payload goes over each link.

    Reducing and gathering are ``n - 1`` steps of an ``n``-th of the payload each, and all-reduce is one after the other
    (nccl-tests, doc/PERFORMANCE.md). What goes from one rank to all, or from all to one, goes through the ring in small
    pieces, once over each link.
    """
    between = group_size - 1
    if operation == "send_recv":
        return 1.0, 1.0
    if operation in ("broadcast", "reduce"):
        return float(between), 1.0
    rounds = 2.0 if operation == "all_reduce" else 1.0
    return rounds * between, rounds * between / group_size


def _nearest(profile: HardwareProfile, operation: str, group_size: int, num_nodes: int) -> CollectiveCost:
    """The measured collective of the closest number of nodes, then of the closest group size."""
    found = [cost for cost in profile.collectives if cost.operation == operation and cost.group_size > 1]
    if not found:
        known = ", ".join(sorted({cost.operation for cost in profile.collectives})) or "nothing"
        raise ProfileError(
            f"the profile of {profile.device} has no {operation} among {group_size} devices; it has {known}: "
            "measure the machine with all the devices that will train"
        )

    for cost in found:
        if (cost.num_nodes, cost.group_size) == (num_nodes, group_size):
            return cost

    def distance(cost: CollectiveCost) -> tuple[float, float, int]:
        return (
            abs(log(cost.num_nodes / num_nodes)),
            abs(log(cost.group_size / group_size)),
            -cost.group_size,
        )

    return min(found, key=distance)
