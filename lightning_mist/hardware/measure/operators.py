"""Measuring how fast the machine at hand does other kinds of operators than matrix products.

Bytes and floating-point operations are counted as when a network is traced: every tensor that an operator reads or
writes once, every score of attention whether a mask hides it or not.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_mist.devices import ops_of
from lightning_mist.hardware.groups import RankGroup
from lightning_mist.hardware.profile import KernelRate, MemoryRate

# Timing a function on every rank at once: samples, their robust median, and agreement between the ranks.
#
# Ranks measure together on purpose. In training all of them compute and communicate at the same time and share cores,
# memory and links; a rank measured alone would be too fast. Every decision (how many calls, how many samples) is taken
# on figures that all ranks have agreed on, so that all do the same and collectives match.


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
    call = function if function is not None else lambda: None
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


aten = torch.ops.aten

Operators = Callable[[], object]
"""Runs some operators of one kind."""

WIDTH, HEAD = 1024, 64
"""Numbers in a row that is reduced or looked up, and in a head."""

CPU_SIZES, DEVICE_SIZES = (2**16, 2**20, 2**23), (2**20, 2**25, 2**28)
"""Bytes of the tensors: in a core's cache, in one that is shared, and in memory."""

CPU_HEADS, DEVICE_HEADS = (1, 2, 512, 64), (4, 16, 2048, 128)
"""Rows, heads, length and width of the attention that is measured."""

CPU_IMAGES, DEVICE_IMAGES = (2, 32, 28, 28), (64, 256, 28, 28)
"""Rows, channels, height and width of the convolution that is measured, by 3 x 3 filters into as many channels."""

SCORES_BACKWARD, FILTERS_BACKWARD = 2.5, 2.0
"""Operations of a backward over those of the forward: five products instead of two, and two instead of one."""


def memory_rates(session: Session, budget_seconds: float) -> tuple[MemoryRate, ...]:
    """Bytes per second of operators that memory limits, at several sizes."""
    sizes = DEVICE_SIZES if session.device.type == "cuda" else CPU_SIZES
    rates: dict[str, tuple[list[float], list[float]]] = {}
    moved: dict[str, list[float]] = {}
    spreads: dict[str, float] = {}
    for size in sizes:
        for kind, forward, backward, calls in _memory_operators(session.device, size):
            moved.setdefault(kind, []).append(forward[1] / calls)
            for found, (run, amount) in zip(rates.setdefault(kind, ([], [])), (forward, backward), strict=True):
                timing = measure(run, session=session, budget_seconds=budget_seconds / (8 * len(sizes)))
                found.append(amount / timing.seconds)
                spreads[kind] = max(spreads.get(kind, 0.0), timing.spread)
    return tuple(
        MemoryRate(
            kind=kind,
            bytes=tuple(moved[kind]),
            forward_bytes_per_second=tuple(forward_rates),
            backward_bytes_per_second=tuple(backward_rates),
            spread=spreads[kind],
        )
        for kind, (forward_rates, backward_rates) in rates.items()
    )


def _memory_operators(
    device: torch.device, size: int
) -> Iterator[tuple[str, tuple[Operators, float], tuple[Operators, float], int]]:
    """By kind, what runs in forward and in backward with the bytes that it moves, and how many operators it is."""
    rows = size // 4 // WIDTH
    # From a generator of its own, as the user's random state must not change.
    random = torch.Generator(device=device).manual_seed(0)
    x, y = (torch.randn(rows, WIDTH, generator=random, device=device, dtype=torch.float32) for _ in range(2))
    weight = torch.ones(WIDTH, device=device, dtype=torch.float32)
    order = torch.randperm(rows, generator=random, device=device)

    def sums() -> None:
        torch.add(x, y)
        F.gelu(x)

    def sums_backward() -> None:
        torch.add(x, y)
        aten.gelu_backward(x, y)

    yield "elementwise", (sums, 5 * size), (sums_backward, 6 * size), 2
    _, mean, deviation = aten.native_layer_norm(x, [WIDTH], weight, weight, 1e-5)
    parts = torch.softmax(x, -1)

    def norms() -> None:
        aten.native_layer_norm(x, [WIDTH], weight, weight, 1e-5)
        torch.softmax(x, -1)

    def norms_backward() -> None:
        aten.native_layer_norm_backward(y, x, [WIDTH], mean, deviation, weight, weight, [True, True, True])
        aten._softmax_backward_data(y, parts, -1, torch.float32)

    yield "reduction", (norms, 4 * size), (norms_backward, 6 * size), 2
    looked_up = 2 * size + 8 * rows
    yield (
        "index",
        (lambda: F.embedding(order, x), looked_up),
        (lambda: aten.embedding_dense_backward(y, order, rows, -1, False), looked_up),
        1,
    )

    def turned() -> object:
        return x.view(rows, -1, HEAD).transpose(0, 1).contiguous()

    yield "copy", (turned, 2 * size), (turned, 2 * size), 1


def kernel_rates(session: Session, dtypes: Sequence[torch.dtype], budget_seconds: float) -> tuple[KernelRate, ...]:
    """FLOP/s of fused attention and of convolutions."""
    return tuple(
        _kernel_rate(session, kind, dtype, run, inputs, flops, ratio, budget_seconds / (3 * len(dtypes)))
        for dtype in dtypes
        for kind, run, inputs, flops, ratio in _kernels(session.device, dtype)
    )


Kernel = tuple[str, Callable[[], torch.Tensor], tuple[torch.Tensor, ...], float, float]
"""Kind, what runs, on what, its operations in forward, and those in backward over them."""


def _kernels(device: torch.device, dtype: torch.dtype) -> Iterator[Kernel]:
    random = torch.Generator(device=device).manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype).requires_grad_()

    heads, images = (DEVICE_HEADS, DEVICE_IMAGES) if device.type == "cuda" else (CPU_HEADS, CPU_IMAGES)
    rows, count, length, width = heads
    query, key, value = made(*heads), made(*heads), made(*heads)
    scores = 4.0 * rows * count * length**2 * width
    for kind, causal in (("attention", False), ("causal_attention", True)):

        def attend(causal: bool = causal) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

        yield kind, attend, (query, key, value), scores, SCORES_BACKWARD
    rows, channels, height, width = images
    image, filters = made(*images), made(channels, channels, 3, 3)
    flops = 2.0 * rows * height * width * channels**2 * 9
    yield "convolution", lambda: F.conv2d(image, filters, padding=1), (image, filters), flops, FILTERS_BACKWARD


def _kernel_rate(
    session: Session,
    kind: str,
    dtype: torch.dtype,
    run: Callable[[], torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    flops: float,
    ratio: float,
    budget_seconds: float,
) -> KernelRate:
    forward = measure(run, session=session, budget_seconds=budget_seconds / 3)
    result = run()
    gradient = torch.ones_like(result)
    backward = measure(
        lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True),
        session=session,
        budget_seconds=2 * budget_seconds / 3,
    )
    return KernelRate(
        kind=kind,
        dtype=str(dtype).removeprefix("torch."),
        forward_flops_per_second=flops / forward.seconds,
        backward_flops_per_second=ratio * flops / backward.seconds,
        spread=max(forward.spread, backward.spread),
    )
