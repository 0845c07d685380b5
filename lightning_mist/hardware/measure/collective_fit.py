"""Measuring collectives in groups, and fitting latency and bandwidth.

A collective of ``p`` payload bytes takes ``latency + p / bandwidth``. The fit minimises the sum of squared *relative*
residuals over the measured sizes (small messages would not count otherwise), with ``latency >= 0``:

    minimise over a >= 0, b > 0:   sum_i ((a + b p_i - t_i) / t_i)^2

Two unknowns: the normal equations are solved in closed form; if they give a < 0 the constrained optimum has a = 0.

A smaller message cannot take longer than a larger one. Where it was measured so it was disturbed, by another process on
its core say, and the larger one's time stands in for it in the fit; the spread is that of the times as measured.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.groups import RankGroup
from lightning_mist.hardware.measure.timing import MIN_SAMPLES, Session, measure
from lightning_mist.hardware.profile import OPERATIONS, CollectiveCost
from lightning_mist.units import format_bytes

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
    smooth = list(seconds)
    for index in range(len(smooth) - 2, -1, -1):
        smooth[index] = min(smooth[index], smooth[index + 1])
    weights = [1 / second**2 for second in smooth]
    w = sum(weights)
    wp = sum(weight * p for weight, p in zip(weights, payloads, strict=True))
    wt = sum(weight * t for weight, t in zip(weights, smooth, strict=True))
    wpp = sum(weight * p * p for weight, p in zip(weights, payloads, strict=True))
    wpt = sum(weight * p * t for weight, p, t in zip(weights, payloads, smooth, strict=True))
    determinant = w * wpp - wp * wp
    slope = (w * wpt - wp * wt) / determinant if determinant > 0 else 0.0
    latency = (wt - slope * wp) / w
    if latency < 0:
        latency, slope = 0.0, wpt / wpp
    if slope <= 0:
        raise ProfileError(
            f"{operation} among {group_size} ranks takes {seconds[0]:.2e} s for {format_bytes(payloads[0])} and "
            f"{seconds[-1]:.2e} s for {format_bytes(payloads[-1])}: time must grow with the payload; measure again "
            "when the machine is idle"
        )
    residuals = [(latency + slope * p - t) / t for p, t in zip(payloads, seconds, strict=True)]
    return CollectiveCost(
        operation=operation,
        group_size=group_size,
        num_nodes=num_nodes,
        latency_seconds=latency,
        bytes_per_second=1 / slope,
        spread=(sum(r * r for r in residuals) / len(residuals)) ** 0.5,
    )
