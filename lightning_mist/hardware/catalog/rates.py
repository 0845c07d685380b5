"""How much of their peaks devices of the catalog reach, by kind of operator.

Rates are sustained ones, where they are published: a board of 72 W cannot hold in a training step the clock of a
short benchmark. Of attention every score counts, so that what a causal mask hides counts too; figures that count half
of it are doubled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_mist.hardware.profile import KernelRate, MemoryRate

RATE_SOURCES = {
    "sustained": "github.com/zzc0721/torch-performance-test-data issue 120: matrix products on an L4 for seconds",
    "sasank": "github.com/chsasank/device-benchmarks: matrix products by type and copies, of 21 to 57 devices",
    "flash2": "T. Dao, FlashAttention-2, arXiv:2307.08691, 3.1.1 and 4.1: A100",
    "a5000": "github.com/gpu-mode/ring-attention issue 10: FlashAttention-2 on an RTX A5000",
    "efficient": "github.com/Dao-AILab/flash-attention issue 416: memory-efficient attention beside FlashAttention-2",
    "hopper": "github.com/Dao-AILab/flash-attention pull request 1791: FlashAttention-2 on an H100",
    "b200": "github.com/Dao-AILab/flash-attention issue 1589: FlashAttention-2 on a B200",
    "predictable": "H. He, thonking.ai: products of random numbers on an A100",
    "h200": "a published study of a hybrid model's kernels in vLLM on an H200 (bench.core.ceilings): products of "
    "16384 x 5120 x 34816 at its 700 W, where its clock is 73 % of the highest, and copies of 4 GiB",
}
"""Where figures come from, by the name used in comments and in a profile's ``source``."""

CAUSAL_SPEEDUP = 1.75
"""A causal mask makes attention 1.7 to 1.8 times as fast (flash2, 3.1.1)."""

REDUCTION_BACKWARD, INDEX_FORWARD, INDEX_BACKWARD = 0.90, 0.64, 0.70
"""Parts of the element-wise rate, of operators on an L4 (mist): a layer norm of 8 x 2048 x 2048 numbers reads and
writes three tensors in 0.93 ms in backward; an embedding of as many 134 MB in 0.87 ms in forward; in backward, less
what adding to a gradient takes, the table and two tensors of 2 rows in 1.3 ms. In forward norms, softmax and losses,
and copies in both directions, move 234 to 247 GB/s as sums do."""

KERNEL_SECONDS = 2.05e-6
"""Shortest time between two events with an operator between them on an L4 (mist)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Parts of a device's peaks that its operators reach.

    Attributes:
        matmul: Large matrix products in 16 bits and TF32, of their peaks.
        single: The same in 32 bits without tensor cores.
        memory: Large element-wise operators, of the memory's peak bandwidth.
        attention: Fused attention in 16 bits without a mask, forward and backward, of the peak in 16 bits.
        causal: The same with a causal mask, all scores counted.
        multiprocessors: How many of them compute at a time (datasheet); 0 where nothing is computed in tiles.
        burst: What large matrix products would reach of their peaks without the limit of power, which ``matmul`` is
            about: smaller products, which leave multiprocessors idle, are held by it less, as these draw no power. The
            same as ``matmul`` where nothing is known of that.
    """

    matmul: float
    single: float
    memory: float
    attention: tuple[float, float]
    causal: tuple[float, float]
    multiprocessors: int
    sources: tuple[str, ...]
    burst: float = 0.0


def _faster(attention: tuple[float, float]) -> tuple[float, float]:
    return attention[0] * CAUSAL_SPEEDUP, attention[1] * CAUSAL_SPEEDUP


# Of 121 TFLOP/s 52.5 in float16 products of 10240, 53.8 of 8192, 54.9 to 59.4 in bfloat16, 10.9 in float32 (sustained),
# while products of 2048 reach 68.8 before the board is at its 72 W, and single ones up to 85; 54.4 at a clock locked at
# 1050 MHz (mist). 235 to 247 of 300 GB/s; attention of heads of 128 numbers: 79.6 and 66 TFLOP/s of counted scores
# (mist).
_L4 = Efficiencies(
    matmul=0.434,
    single=0.36,
    memory=0.80,
    attention=(0.66 / CAUSAL_SPEEDUP, 0.545 / CAUSAL_SPEEDUP),
    causal=(0.66, 0.545),
    multiprocessors=58,
    sources=("sustained", "mist", "flash2"),
    burst=0.70,
)

# 0.82 and 0.53 of what flash attention does (efficient), which on an L4 does 0.84 and 0.69 of what large products do.
_EFFICIENT = (0.82 * 0.84, 0.53 * 0.69)

# The L4's 70 W. 240 of 320 GB/s, 4 of 8.1 TFLOP/s (sasank).
_T4 = Efficiencies(
    matmul=0.45,
    single=0.49,
    memory=0.75,
    attention=(0.45 * _EFFICIENT[0], 0.45 * _EFFICIENT[1]),
    causal=_faster((0.45 * _EFFICIENT[0], 0.45 * _EFFICIENT[1])),
    multiprocessors=40,
    sources=("sustained", "sasank", "efficient", "mist"),
)

# 84 of 125 and 13 of 15.7 TFLOP/s, 766 of 900 GB/s (sasank).
_V100 = Efficiencies(
    matmul=0.67,
    single=0.83,
    memory=0.85,
    attention=(0.67 * _EFFICIENT[0], 0.67 * _EFFICIENT[1]),
    causal=_faster((0.67 * _EFFICIENT[0], 0.67 * _EFFICIENT[1])),
    multiprocessors=80,
    sources=("sasank", "efficient", "mist"),
)

_AMPERE_ATTENTION = (0.73, 0.63)  # of an A100 (flash2), and of an RTX A5000: 81.3 and 70.1 of 111 TFLOP/s (a5000)

# 56 TFLOP/s, 14 in 32 bits, and 469 of 600 GB/s on an A10 (sasank), which AWS's board is a variant of.
_A10G = Efficiencies(
    matmul=0.80,
    single=0.40,
    memory=0.78,
    attention=_AMPERE_ATTENTION,
    causal=_faster(_AMPERE_ATTENTION),
    multiprocessors=80,
    sources=("sasank", "flash2", "a5000"),
)

# 257 of 312 TFLOP/s in products of 8192 random numbers, 271 at best (predictable, mamf); 19 of 19.5 (sasank); 1727 of
# an A800's 1935 GB/s (mli).
_A100 = Efficiencies(
    matmul=0.825,
    single=0.97,
    memory=0.89,
    attention=_AMPERE_ATTENTION,
    causal=_faster(_AMPERE_ATTENTION),
    multiprocessors=108,
    sources=("predictable", "mamf", "sasank", "mli", "flash2"),
)

# 673 of 989 TFLOP/s and 4277 of 4800 GB/s sustained on an H200 (h200), 766 to 794 in the best shape (mamf); attention
# without a mask 370 and 290 TFLOP/s, with a causal one 284 and 287 of halved scores (hopper).
_HOPPER = Efficiencies(
    matmul=0.68,
    single=0.68,
    memory=0.89,
    attention=(0.374, 0.293),
    causal=(0.574, 0.580),
    multiprocessors=132,
    sources=("h200", "mamf", "hopper"),
)

# 1745 of 2250 TFLOP/s at best (mamf), and as much less sustained as Hopper; attention 381 and 302 TFLOP/s (b200).
_BLACKWELL = replace(
    _HOPPER,
    matmul=0.66,
    single=0.66,
    attention=(0.169, 0.134),
    causal=_faster((0.169, 0.134)),
    multiprocessors=148,
    sources=("mamf", "h200", "b200"),
)

# 27 of 35.6 TFLOP/s and 831 of 936 GB/s (sasank); products of 16 bits as on an RTX 4090.
_RTX3090 = replace(
    _A100, multiprocessors=82, matmul=0.96, single=0.76, memory=0.89, sources=("mli", "sasank", "flash2", "a5000")
)

# 159 (mli) and 168 (sasank) of 165, 58 of 82.6 TFLOP/s, 912 of 1008 GB/s (sasank).
_RTX4090 = replace(_RTX3090, multiprocessors=128, single=0.70, memory=0.90)

# Rates that were measured are peaks.
_CPU = Efficiencies(
    matmul=1.0,
    single=1.0,
    memory=1.0,
    attention=(0.0, 0.0),
    causal=(0.0, 0.0),
    multiprocessors=0,
    sources=("measured",),
)

EFFICIENCIES: Mapping[str, Efficiencies] = {
    "L4": _L4,
    "A10G": _A10G,
    "T4": _T4,
    "V100-16": _V100,
    "V100-32": _V100,
    "A100-40": _A100,
    "A100-80": _A100,
    "H100": _HOPPER,
    "H200": _HOPPER,
    "B200": _BLACKWELL,
    "RTX3090": _RTX3090,
    "RTX4090": _RTX4090,
    "cpu": _CPU,
}
"""By the catalog's names of devices."""


def _cpu_memory(
    kind: str, sizes: tuple[int, int, int], forward: tuple[float, ...], backward: tuple[float, ...]
) -> MemoryRate:
    """Sizes of :data:`~lightning_mist.hardware.measure.operators.CPU_SIZES` as they are moved; rates in GB/s."""
    return MemoryRate(
        kind=kind,
        bytes=tuple(float(size) for size in sizes),
        forward_bytes_per_second=tuple(rate * 1e9 for rate in forward),
        backward_bytes_per_second=tuple(rate * 1e9 for rate in backward),
        spread=0.0,
    )


CPU_RATES = (
    _cpu_memory("elementwise", (163840, 2621440, 20971520), (30.3, 60.3, 36.8), (19.2, 40.0, 29.2)),
    _cpu_memory("reduction", (131072, 2097152, 16777216), (18.5, 24.9, 23.9), (29.8, 54.7, 30.9)),
    _cpu_memory("index", (131200, 2099200, 16793600), (54.8, 98.4, 89.2), (29.9, 49.0, 27.1)),
    _cpu_memory("copy", (131072, 2097152, 16777216), (35.0, 83.1, 79.7), (34.8, 86.7, 76.0)),
)
"""Tensors of 64 KiB, 1 MiB and 8 MiB (measured)."""

CPU_KERNELS = tuple(
    KernelRate(
        kind=kind,
        dtype=dtype,
        forward_flops_per_second=forward * 1e9,
        backward_flops_per_second=backward * 1e9,
        spread=0.0,
    )
    for kind, dtype, forward, backward in (
        ("attention", "float32", 92.9, 95.2),
        ("causal_attention", "float32", 92.9, 95.3),
        ("convolution", "float32", 175.0, 165.0),
        ("attention", "bfloat16", 88.2, 117.0),
        ("causal_attention", "bfloat16", 87.6, 116.0),
        ("convolution", "bfloat16", 237.0, 211.0),
    )
)
"""GFLOP/s (measured); at lengths of 512 a mask saves nothing, and 3 x 3 convolutions compute less than is counted."""
