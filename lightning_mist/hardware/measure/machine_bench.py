"""Measuring the machine at hand: products, memory, operator launches, collectives, copies, and all of them together.

All ranks measure at the same time and return the same profile: every figure is that of the slowest rank.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.cluster import Cluster
from lightning_mist.hardware.groups import RankGroup
from lightning_mist.hardware.measure.device_bench import measure_on_device
from lightning_mist.hardware.measure.operators import MIN_SAMPLES, Session, kernel_rates, measure, memory_rates
from lightning_mist.hardware.profile import OPERATIONS, CollectiveCost, ComputeRate, HardwareProfile
from lightning_mist.units import format_bytes

Progress = Callable[[str, float], None]
"""Called with what is being measured and the fraction done, in [0, 1]."""

MATMUL_SHARE, MEMORY_SHARE, OPERATOR_SHARE, COPY_SHARE, COLLECTIVE_SHARE = 0.25, 0.05, 0.05, 0.1, 0.35
KINDS_SHARE = 0.1
"""Parts of the time budget. The remaining tenth is for creating tensors, warming up and agreeing."""

TOGETHER_SHARE = 0.1
"""What running everything together takes of the time budget, on top of it; devices only."""

SMALLEST_MATMUL, LARGEST_MATMUL = 64, 8192
"""Edge of the square matrices: from below a small model's head size to a large model's hidden size."""

HEAT_SECONDS, HOT_EDGE = 0.1, 1024
"""How long a device runs products of this edge and larger ahead of their samples: 36 products of 4096 in a row, a tenth
of a second, bring an L4 to its limit of power and from 69 to 53 TFLOP/s, as every training step does, while 36 of 2048,
a hundredth, do not (github.com/zzc0721/torch-performance-test-data issue 120 and test.py)."""

OPERATORS_PER_CALL = 50
"""Operators launched per timed call, so that the loop around them does not count."""


def measure_profile(
    *,
    cluster: Cluster,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    groups: Sequence[RankGroup] = (),
    progress: Progress | None = None,
    budget_seconds: float = 20.0,
) -> HardwareProfile:
    """Measure this machine on all ranks at once.

    Every rank calls this with the same arguments (but its own device).

    Args:
        groups: Groups to measure collectives in, the same list on every rank, one of them of all ranks; none with a
            single device. See :func:`~lightning_mist.hardware.groups.measuring_groups`.

    Returns:
        The profile, the same on every rank.

    Raises:
        ProfileError: If no group has all ranks, or a fit makes no sense.
        ValueError: If no element types are given or the budget is not positive.
    """
    if not dtypes or budget_seconds <= 0:
        raise ValueError(f"{len(dtypes)} element types, budget_seconds = {budget_seconds}: both must be positive")
    report = progress or (lambda text, fraction: None)
    session = Session(device=device, world=_world(cluster, groups))
    profile = _computing(cluster, session, dtypes, budget_seconds, report)
    return _from_first_rank(session, _moving(profile, session, groups, budget_seconds, report))


def _computing(
    cluster: Cluster, session: Session, dtypes: Sequence[torch.dtype], budget_seconds: float, report: Progress
) -> HardwareProfile:
    compute = _compute_rates(session, dtypes, budget_seconds * MATMUL_SHARE, report)
    report("memory bandwidth", MATMUL_SHARE)
    memory = memory_rate(session, budget_seconds * MEMORY_SHARE)
    report("operator launches", MATMUL_SHARE + MEMORY_SHARE)
    operator = operator_seconds(session, budget_seconds * OPERATOR_SHARE)
    report("kinds of operators", MATMUL_SHARE + MEMORY_SHARE + OPERATOR_SHARE)
    return HardwareProfile(
        device=cluster.device.name,
        source=f"measured on {socket.gethostname()}, {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S}",
        compute=compute,
        memory_bytes_per_second=memory,
        operator_seconds=operator,
        collectives=(),
        rates=memory_rates(session, budget_seconds * KINDS_SHARE / 2),
        kernels=kernel_rates(session, dtypes, budget_seconds * KINDS_SHARE / 2),
    )


def _moving(
    profile: HardwareProfile, session: Session, groups: Sequence[RankGroup], budget_seconds: float, report: Progress
) -> HardwareProfile:
    """The profile with what devices exchange, with each other and with the host, and both beside computing."""
    before = MATMUL_SHARE + MEMORY_SHARE + OPERATOR_SHARE + KINDS_SHARE
    report("host copies", before)
    to_device, to_host = copy_rates(session, budget_seconds * COPY_SHARE)
    before += COPY_SHARE
    collectives = measure_collectives(
        session,
        groups,
        budget_seconds * COLLECTIVE_SHARE,
        lambda text, fraction: report(text, before + (1 - before) * fraction),
    )
    interference = measure_on_device(
        session,
        groups,
        copies=(to_device, to_host),
        collectives=collectives,
        budget_seconds=budget_seconds * TOGETHER_SHARE,
        report=lambda: report("all of it together", 1.0),
    )
    report("done", 1.0)
    return replace(
        profile,
        collectives=collectives,
        host_to_device_bytes_per_second=to_device,
        device_to_host_bytes_per_second=to_host,
        interference=interference,
    )


def _compute_rates(
    session: Session, dtypes: Sequence[torch.dtype], budget_seconds: float, report: Progress
) -> tuple[ComputeRate, ...]:
    rates = []
    for index, dtype in enumerate(dtypes):
        report(f"matrix products in {_name(dtype)}", MATMUL_SHARE * index / len(dtypes))
        rates.append(matmul_rate(session, dtype, budget_seconds / len(dtypes)))
    return tuple(rates)


def matmul_rate(session: Session, dtype: torch.dtype, budget_seconds: float) -> ComputeRate:
    """Rates of square matrix products of doubling edge, until the budget or the memory of a device ends."""
    flops: list[float] = []
    rates: list[float] = []
    spread, edge, spent, expected = 0.0, SMALLEST_MATMUL, 0.0, 0.0
    # Random numbers, as constant ones draw less power and let a device clock higher than it can in training; from a
    # generator of its own, as the user's random state must not change.
    random = torch.Generator(device=session.device).manual_seed(0)
    while edge <= LARGEST_MATMUL and (not flops or spent + expected <= budget_seconds):
        left, right = (torch.randn(edge, edge, generator=random, device=session.device).to(dtype) for _ in range(2))
        out = torch.empty(edge, edge, dtype=dtype, device=session.device)
        start = time.perf_counter()
        timing = measure(
            lambda a=left, b=right, c=out: torch.mm(a, b, out=c),  # type: ignore[misc]
            session=session,
            budget_seconds=budget_seconds / 10,
            heat_seconds=HEAT_SECONDS if session.device.type == "cuda" and edge >= HOT_EDGE else 0.0,
        )
        (elapsed,) = session.agree([time.perf_counter() - start])
        flops.append(2.0 * edge**3)
        rates.append(flops[-1] / timing.seconds)
        spread = max(spread, timing.spread)
        # The next product has eight times the operations; it is warmed up and timed once before it is sampled.
        spent, expected, edge = spent + elapsed, 8 * timing.seconds * (MIN_SAMPLES + 2), 2 * edge
    return ComputeRate(dtype=_name(dtype), flops=tuple(flops), flops_per_second=tuple(rates), spread=spread)


def memory_rate(session: Session, budget_seconds: float) -> float:
    """Bytes read plus written per second by adding two large vectors into a third.

    On a CPU a vector is 64 MiB, larger than last-level caches; on a device 256 MiB.
    """
    count = (2**28 if session.device.type == "cuda" else 2**26) // 4
    left = torch.ones(count, device=session.device, dtype=torch.float32)
    right = torch.ones(count, device=session.device, dtype=torch.float32)
    out = torch.empty(count, device=session.device, dtype=torch.float32)
    timing = measure(lambda: torch.add(left, right, out=out), session=session, budget_seconds=budget_seconds)
    return 3 * 4 * count / timing.seconds


def operator_seconds(session: Session, budget_seconds: float) -> float:
    """Time of launching one operator on a tiny tensor from Python, autograd recording.

    On a device the clock stops when the last kernel is done, so this is the longer of launch and execution.
    """
    start = torch.ones(16, device=session.device, dtype=torch.float32, requires_grad=True)

    def chain() -> None:
        value = start
        for _ in range(OPERATORS_PER_CALL):
            value = value * 1.0

    return measure(chain, session=session, budget_seconds=budget_seconds).seconds / OPERATORS_PER_CALL


def copy_rates(session: Session, budget_seconds: float) -> tuple[float, float]:
    """Bytes per second of pinned copies to and from the device; zeros where there is no separate device."""
    if session.device.type != "cuda":
        return 0.0, 0.0
    size = 2**26
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device=session.device)
    rates = []
    for target, source in ((device, host), (host, device)):
        timing = measure(
            lambda t=target, s=source: t.copy_(s, non_blocking=True),  # type: ignore[misc]
            session=session,
            budget_seconds=budget_seconds / 2,
        )
        rates.append(size / timing.seconds)
    return rates[0], rates[1]


def _world(cluster: Cluster, groups: Sequence[RankGroup]) -> RankGroup | None:
    if cluster.world_size == 1:
        return None
    for group in groups:
        if len(group.ranks) == cluster.world_size:
            return group
    raise ProfileError(
        f"{len(groups)} groups, none of all {cluster.world_size} ranks: measuring needs one that has every rank; "
        "measuring_groups() creates it"
    )


def _from_first_rank(session: Session, profile: HardwareProfile) -> HardwareProfile:
    """Host name and date differ between ranks; the first rank's hold for all."""
    if session.world is None:
        return profile
    box = [profile]
    dist.broadcast_object_list(box, src=session.world.ranks[0], group=session.world.handle, device=session.device)
    return box[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Measuring collectives in groups, and fitting latency and bandwidth.
#
# A collective of ``p`` payload bytes takes ``latency + p / bandwidth``. The fit minimises the sum of squared *relative*
# residuals over the measured sizes (small messages would not count otherwise), with ``latency >= 0``:
#
# minimise over a >= 0, b > 0: sum_i ((a + b p_i - t_i) / t_i)^2
#
# A smaller message cannot take longer than a larger one. Where it was measured so it was disturbed, by another process
# on its core say, and the larger one's time stands in for it in the fit; the spread is that of the times as measured.


# torch 2.13 renamed these two and warns of the old names, which older releases need.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MIN_SIZES = 4
"""Payload sizes measured even if they exceed the budget: up to 4 MiB, where even a slow CPU's latency is the minor part
(about 0.2 of 2 ms, as measured)."""

GROWTH = 4
"""Sizes are added beyond the budget until one takes so many times the shortest time: where processes outnumber cores,
waiting for a turn (3 ms and more) hides what a message of 4 MiB takes, and a rate could not be told."""

HOST_SIZES = (2**12, 2**16, 2**20, 2**22, 2**24, 2**26)
"""Payload bytes on a CPU: from a loss to a layer's gradients."""

DEVICE_SIZES = (2**14, 2**18, 2**22, 2**25, 2**28)
"""Payload bytes on a device: from a small bucket to a large layer's gradients."""


def measure_collectives(
    session: Session,
    groups: Sequence[RankGroup],
    budget_seconds: float,
    progress: Callable[[str, float], None],
) -> tuple[CollectiveCost, ...]:
    """Measure every operation in every shape of group, groups of one shape at the same time."""
    shapes: dict[tuple[int, int], RankGroup | None] = {}
    rank = dist.get_rank() if groups else 0
    for group in groups:
        key = (len(group.ranks), group.num_nodes)
        shapes[key] = group if rank in group.ranks else shapes.get(key)
    runs = [(key, name) for key in shapes for name in OPERATIONS if name != "send_recv" or key[0] == 2]
    costs = []
    for index, (key, name) in enumerate(runs):
        nodes = f" on {key[1]} nodes" if key[1] > 1 else ""
        progress(f"{name} among {key[0]} ranks{nodes}", index / len(runs))
        costs.append(_measure_one(session, shapes[key], key, name, budget_seconds / len(runs)))
    return tuple(costs)


def _measure_one(
    session: Session, group: RankGroup | None, key: tuple[int, int], name: str, budget_seconds: float
) -> CollectiveCost:
    sizes = DEVICE_SIZES if session.device.type == "cuda" else HOST_SIZES
    # Payloads are multiples of the group size, as shards are equal.
    candidates = [max(1, size // (4 * key[0])) * 4 * key[0] for size in sizes]
    payloads: list[int] = []
    seconds: list[float] = []
    spent, expected = 0.0, 0.0
    for payload in candidates:
        if payloads:
            expected = (MIN_SAMPLES + 2) * seconds[-1] * payload / payloads[-1]
        growing = bool(seconds) and seconds[-1] >= GROWTH * min(seconds)
        if len(payloads) >= MIN_SIZES and growing and spent + expected > budget_seconds:
            break
        start = time.perf_counter()
        call = None if group is None else collective_call(name, group, payload, session.device)
        timing = measure(call, session=session, budget_seconds=budget_seconds / len(candidates), aligned=True)
        (elapsed,) = session.agree([time.perf_counter() - start])
        spent += elapsed
        payloads.append(payload)
        seconds.append(timing.seconds / 2 if name == "send_recv" else timing.seconds)
    return fit_collective(name, key[0], key[1], payloads, seconds)


def collective_call(name: str, group: RankGroup, payload_bytes: int, device: torch.device) -> Callable[[], object]:
    """A function that runs one operation to completion on this rank.

    ``send_recv`` goes there and back, so that it takes twice the time of one way whatever the ranks' clocks.

    Args:
        payload_bytes: Bytes of the whole tensor, a multiple of four times the group size.
    """
    count, size = payload_bytes // 4, len(group.ranks)
    handle = group.handle
    made = torch.zeros(count, device=device, dtype=torch.float32)

    def whole() -> torch.Tensor:
        # Training exchanges tensors that were just made. In host memory that matters: the first touch of a page takes
        # about as long as sending it. On a device they come from the allocator's pool.
        return torch.zeros(count, dtype=torch.float32) if device.type == "cpu" else made

    shard = torch.zeros(count // size, device=device, dtype=torch.float32)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole(), group=handle)
    if name == "all_gather":
        return lambda: _all_gather(whole(), shard, group=handle)
    if name == "reduce_scatter":
        return lambda: _reduce_scatter(shard, whole(), group=handle)
    if name == "broadcast":
        return lambda: dist.broadcast(whole(), src=group.ranks[0], group=handle)
    if name == "reduce":
        return lambda: dist.reduce(whole(), dst=group.ranks[0], group=handle)
    if name == "send_recv":
        return _ping_pong(whole, group)
    raise ValueError(f"{name!r} is not an operation: known are {', '.join(OPERATIONS)}")


def _ping_pong(make: Callable[[], torch.Tensor], group: RankGroup) -> Callable[[], object]:
    first, second = group.ranks
    leads = dist.get_rank() == first
    peer = second if leads else first

    def there_and_back() -> None:
        tensor = make()
        for sending in (leads, not leads):
            if sending:
                dist.send(tensor, dst=peer, group=group.handle)
            else:
                dist.recv(tensor, src=peer, group=group.handle)

    return there_and_back


def fit_collective(
    operation: str, group_size: int, num_nodes: int, payloads: Sequence[int], seconds: Sequence[float]
) -> CollectiveCost:
    """Fit ``latency + payload / bandwidth`` to measured times; see the module's text.

    Args:
        payloads: Bytes, ascending, at least two different sizes.

    Returns:
        The fit; its spread is the root mean square of the relative residuals.

    Raises:
        ProfileError: If the time does not grow with the payload.
    """
    smooth = np.minimum.accumulate(np.array(seconds)[::-1])[::-1]
    if smooth[0] == smooth[-1]:
        raise ProfileError(
            f"{operation} among {group_size} ranks takes {seconds[0]:.2e} s for {format_bytes(payloads[0])} and "
            f"{seconds[-1]:.2e} s for {format_bytes(payloads[-1])}: time must grow with the payload; measure again "
            "when the machine is idle"
        )
    # Payloads as parts of the largest, so that both unknowns are seconds.
    lines = np.stack([np.ones(len(payloads)), np.array(payloads) / payloads[-1]], 1) / smooth[:, None]
    latency, largest = map(float, nnls(lines, np.ones(len(payloads)))[0])
    slope = largest / payloads[-1]
    residuals = [(latency + slope * p - t) / t for p, t in zip(payloads, seconds, strict=True)]
    return CollectiveCost(
        operation=operation,
        group_size=group_size,
        num_nodes=num_nodes,
        latency_seconds=latency,
        bytes_per_second=1 / slope,
        spread=(sum(r * r for r in residuals) / len(residuals)) ** 0.5,
    )
