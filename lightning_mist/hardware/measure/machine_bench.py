"""Measuring the machine at hand: products, memory, operator launches, collectives, copies, and all of them together.

All ranks measure at the same time and return the same profile: every figure is that of the slowest rank.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

import torch
import torch.distributed as dist

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.cluster import Cluster
from lightning_mist.hardware.groups import RankGroup
from lightning_mist.hardware.measure.collective_fit import measure_collectives
from lightning_mist.hardware.measure.device_bench import measure_on_device
from lightning_mist.hardware.measure.operators import kernel_rates, memory_rates
from lightning_mist.hardware.measure.timing import MIN_SAMPLES, Session, measure
from lightning_mist.hardware.profile import ComputeRate, HardwareProfile

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
    report = progress or _ignore
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


def _ignore(text: str, fraction: float) -> None:
    """No progress is wanted."""
