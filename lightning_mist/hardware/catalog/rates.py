"""How much of their peaks devices of the catalog reach, by kind of operator.

Rates are sustained ones, where they are published: a board of 72 W cannot hold in a training step the clock of a
short benchmark. Of attention every score counts, so that what a causal mask hides counts too; figures that count half
of it are doubled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_mist.hardware.profile import KernelRate, MemoryRate

# How fast fused attention is, by the kernel that torch runs on a generation, head width, direction and mask.
#
# Rates of long sequences, and the length at which half of them is reached, by kernel: derived from published
# measurements by ``python -m benchmarks.hardware.attention_rates`` (the sources by name in :data:`ATTENTION_SOURCES`),
# which also says the formula and how well it holds (median errors of 0.6 to 3 %). In TFLOP/s of the operations that
# must be done.
#
# torch runs FlashAttention-2 but on compute capability 9.0 and 10.0, where it prefers cuDNN
# (``check_prefer_cudnn_attention`` in aten's sdp_utils.cpp). Where a width was not measured the rate is that of the
# other width of the kernel times the ratio on the nearest device where both were.


ATTENTION_SOURCES = {
    "cudnn_fe": "github.com/NVIDIA/cudnn-frontend benchmark/attention_training/results, August and September 2026, and "
    "benchmark/sdpa_benchmark_training/results, April 2026: attention on A100, H200, GB200, GB300 and RTX PRO 6000",
    "fa3": "T. Dao et al., FlashAttention-3, arXiv:2407.08608, figures 5 to 7: FlashAttention-2, -3 and cuDNN, H100",
    "fa_2605": "github.com/Dao-AILab/flash-attention pull request 2605: FlashAttention-4 and cuDNN on B200 and GB300",
    "foundry": "github.com/mosaicml/llm-foundry scripts/train/benchmarking README: steps of MPT on A100s and H100s",
    "tilelang": "github.com/apache/tvm, tl_doc/flash_perf.md: FlashAttention-2 on an RTX 4090",
}
"""Where figures come from, by the name used in comments and in a profile's ``source``."""

TILE_ROWS = 128
"""Queries that a multiprocessor attends with at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One direction of a kernel.

    Attributes:
        tflops: Of long sequences, by head width.
        half_full, half_causal: Lengths at which half of that is reached, without and with a causal mask.
    """

    tflops: tuple[tuple[int, float], ...]
    half_full: float
    half_causal: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """A kernel on a kind of device.

    Attributes:
        saved: How many times as fast a causal mask makes long sequences.
    """

    name: str
    forward: Direction
    backward: Direction
    sources: tuple[str, ...]
    saved: float = 2.0

    def scaled(self, factor: float) -> "AttentionKernel":
        """The same on a device that is so many times as fast."""

        def times(way: Direction) -> Direction:
            faster = tuple((width, factor * rate) for width, rate in way.tflops)
            return replace(way, tflops=faster)

        return replace(self, forward=times(self.forward), backward=times(self.backward))


# Width 64 as on H100s: 320 against 360 TFLOP/s in forward, 302 against 338 in backward (fa3).
AMPERE = AttentionKernel(
    name="FlashAttention-2",
    forward=Direction(tflops=((64, 197), (128, 222), (256, 203)), half_full=0, half_causal=420),
    backward=Direction(tflops=((64, 162), (128, 181), (256, 148)), half_full=40, half_causal=460),
    sources=("cudnn_fe", "fa3"),
)

# At 2048 alone: 169 and 151, 125 and 99 TFLOP/s without and with a mask. Backward of width 256 as on A100s.
ADA = AttentionKernel(
    name="FlashAttention-2",
    forward=Direction(tflops=((64, 169), (128, 169), (256, 156)), half_full=0, half_causal=260),
    backward=Direction(tflops=((64, 125), (128, 126), (256, 103)), half_full=0, half_causal=540),
    sources=("tilelang", "cudnn_fe"),
)

# Of H200s, width 64 of H100s with the cuDNN of 2024, where 128 had 613 and 557.
HOPPER = AttentionKernel(
    name="cuDNN",
    forward=Direction(tflops=((64, 416), (128, 709), (256, 764)), half_full=80, half_causal=660),
    backward=Direction(tflops=((64, 458), (128, 597), (256, 450)), half_full=220, half_causal=900),
    sources=("cudnn_fe", "fa3"),
)

# Of H100s; backward with a mask as forward.
HOPPER_FLASH2 = AttentionKernel(
    name="FlashAttention-2",
    forward=Direction(tflops=((64, 320), (128, 360), (256, 349)), half_full=60, half_causal=380),
    backward=Direction(tflops=((64, 302), (128, 338), (256, 254)), half_full=260, half_causal=380),
    sources=("fa3", "cudnn_fe"),
)

# FlashAttention in Triton as programs of 2023 had it (llm-foundry's attn_impl: triton), which nobody measured alone:
# what steps of 32,768 and 65,536 tokens on A100s and H100s leave for it beside their products, where it is 60 to 90 %
# of them ("foundry": 98 to 103 and 176 TFLOP/s over both directions, as fast with layers recomputed as without).
TRITON_AMPERE, TRITON_HOPPER = (
    AttentionKernel(
        name="FlashAttention in Triton",
        forward=Direction(tflops=((0, rate),), half_full=0, half_causal=0),
        backward=Direction(tflops=((0, rate),), half_full=0, half_causal=0),
        sources=("foundry",),
    )
    for rate in (100, 176)
)

# Of GB200s. Width 64 as on GB300s, 1208 against 2089 in forward; nobody measured its backward: 458 against 557, as on
# H100s.
BLACKWELL = AttentionKernel(
    name="cuDNN",
    forward=Direction(tflops=((64, 1049), (128, 1814), (256, 2088)), half_full=460, half_causal=1300),
    backward=Direction(tflops=((64, 1206), (128, 1467), (256, 1257)), half_full=520, half_causal=1500),
    sources=("cudnn_fe", "fa_2605", "fa3"),
)

# Of an RTX PRO 6000, where FlashAttention-2 has 343 to 364 of cuDNN's 372 to 380; other widths as on an RTX 4090.
WORKSTATION_BLACKWELL = AttentionKernel(
    name="cuDNN",
    forward=Direction(tflops=((64, 422), (128, 422), (256, 390)), half_full=160, half_causal=640),
    backward=Direction(tflops=((64, 304), (128, 306), (256, 250)), half_full=380, half_causal=1280),
    sources=("cudnn_fe", "tilelang"),
)


def measured_whole(name: str, forward: float, backward: float, *, saved: float, source: str) -> AttentionKernel:
    """A kernel of which one rate is known in each direction, of masked scores that are all counted."""

    def way(tflops: float) -> Direction:
        return Direction(tflops=((0, tflops / saved),), half_full=0, half_causal=0)

    return AttentionKernel(name=name, forward=way(forward), backward=way(backward), sources=(source,), saved=saved)


def attention_rates(kernel: AttentionKernel, dtypes: tuple[str, ...], multiprocessors: int) -> tuple[KernelRate, ...]:
    """The rates of a kernel with and without a causal mask, whose hidden scores count as operations."""
    found = []
    for dtype in dtypes:
        for kind, counted in (("attention", 1.0), ("causal_attention", kernel.saved)):
            causal = kind == "causal_attention"
            for (width, forward), (_, backward) in zip(kernel.forward.tflops, kernel.backward.tflops, strict=True):
                halves = [way.half_causal if causal else way.half_full for way in (kernel.forward, kernel.backward)]
                found.append(
                    KernelRate(
                        kind=kind,
                        dtype=dtype,
                        forward_flops_per_second=counted * forward * 1e12,
                        backward_flops_per_second=counted * backward * 1e12,
                        spread=0.0,
                        width=width,
                        forward_half_length=halves[0],
                        backward_half_length=halves[1],
                        idle_rows=TILE_ROWS / 2 * multiprocessors if width else 0.0,
                    )
                )
    return tuple(found)


RATE_SOURCES = {
    "sustained": "github.com/zzc0721/torch-performance-test-data issue 120: matrix products on an L4 for seconds",
    "sasank": "github.com/chsasank/device-benchmarks: matrix products by type and copies, of 21 to 57 devices",
    "flash2": "T. Dao, FlashAttention-2, arXiv:2307.08691, 3.1.1 and 4.1: A100",
    "a5000": "github.com/gpu-mode/ring-attention issue 10: FlashAttention-2 on an RTX A5000",
    "efficient": "github.com/Dao-AILab/flash-attention issue 416: memory-efficient attention beside FlashAttention-2",
    "fa_5090": "public notes of FlashAttention-2 and cuDNN on an RTX 5090 at 4096 tokens",
    "norms": "github.com/NVIDIA/cudnn-frontend benchmark/norms/results, February 2026: torch's norms on H200 and GB200",
    "liger": "github.com/linkedin/Liger-Kernel benchmark/data: torch's norms and losses on A100 and H100",
    "perf": "github.com/zzc0721/torch-performance-test-data: owners' square products by size, and its database",
    "quack": "github.com/Dao-AILab/quack benchmarks/sm120_cluster_benchmark.md: reductions on an RTX 5090",
    "predictable": "H. He, thonking.ai: products of random numbers on an A100",
    "h200": "a published study of a hybrid model's kernels in vLLM on an H200 (bench.core.ceilings): products of "
    "16384 x 5120 x 34816 at its 700 W, where its clock is 73 % of the highest, and copies of 4 GiB",
    **ATTENTION_SOURCES,
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
        attention: The kernel of fused attention in 16 bits; None where its rates were measured.
        reduction: Parts of the element-wise rate that norms, softmax and losses reach, forward and backward.
        multiprocessors: How many of them compute at a time (datasheet); 0 where nothing is computed in tiles.
        burst: What large matrix products would reach of their peaks without the limit of power, which ``matmul`` is
            about: smaller products, which leave multiprocessors idle, are held by it less, as these draw no power. The
            same as ``matmul`` where nothing is known of that.
    """

    matmul: float
    single: float
    memory: float
    attention: AttentionKernel | None
    multiprocessors: int
    sources: tuple[str, ...]
    burst: float = 0.0
    reduction: tuple[float, float] = (1.0, REDUCTION_BACKWARD)


# Of 121 TFLOP/s 52.5 in float16 products of 10240, 53.8 of 8192, 54.9 to 59.4 in bfloat16, 10.9 in float32 (sustained),
# while products of 2048 reach 68.8 before the board is at its 72 W, and single ones up to 85; 54.4 at a clock locked at
# 1050 MHz (mist). 235 to 247 of 300 GB/s; attention of heads of 128 numbers: 79.6 and 66 TFLOP/s of counted scores
# (mist).
_L4 = Efficiencies(
    matmul=0.434,
    single=0.36,
    memory=0.80,
    attention=measured_whole("FlashAttention-2", 0.66 * 121, 0.545 * 121, saved=CAUSAL_SPEEDUP, source="mist"),
    multiprocessors=58,
    sources=("sustained", "mist", "flash2"),
    burst=0.70,
)


# 0.82 and 0.53 of what flash attention does (efficient), which on an L4 does 0.84 and 0.69 of what large products do.
def _efficient(products: float) -> AttentionKernel:
    """Memory-efficient attention where large products have so many TFLOP/s."""
    masked = (0.82 * 0.84 * CAUSAL_SPEEDUP * products, 0.53 * 0.69 * CAUSAL_SPEEDUP * products)
    return measured_whole("memory-efficient", *masked, saved=CAUSAL_SPEEDUP, source="efficient")


# The L4's 70 W. 240 of 320 GB/s, 4 of 8.1 TFLOP/s (sasank).
_T4 = Efficiencies(
    matmul=0.45,
    single=0.49,
    memory=0.75,
    attention=_efficient(0.45 * 65),
    multiprocessors=40,
    sources=("sustained", "sasank", "efficient", "mist"),
)

# 84 of 125 and 13 of 15.7 TFLOP/s, 766 of 900 GB/s (sasank).
_V100 = Efficiencies(
    matmul=0.67,
    single=0.83,
    memory=0.85,
    attention=_efficient(0.67 * 125),
    multiprocessors=80,
    sources=("sasank", "efficient", "mist"),
)

# Of attention boards with GDDR have the same part of their peak: an RTX A5000 82 TFLOP/s of 111 (a5000), as an A100 222
# of 312.
# 56 TFLOP/s, 14 in 32 bits, and 469 of 600 GB/s on an A10 (sasank), which AWS's board is a variant of.
_A10G = Efficiencies(
    matmul=0.80,
    single=0.40,
    memory=0.78,
    attention=AMPERE.scaled(70 / 312),
    multiprocessors=80,
    sources=("sasank", "a5000", *AMPERE.sources),
)

_HBM_REDUCTION = (0.62, 0.42)
"""Norms and losses keep fewer bytes in flight than HBM can move. Of the peak bandwidth, in forward and backward: layer
norms of 4096 x 16384 float32 0.52 and 0.36 on an A100, 0.52 and 0.37 on an H100 (liger); RMS norms of 2048 to 8192
bfloat16 0.53 to 0.70 and 0.30 to 0.38 on an H200 (norms); a log-softmax and its loss 0.41 and 0.42, of 16384 words
0.54 and 0.43, on an A100 (liger). In the middle 0.55 and 0.37, of 0.89 that element-wise operators have: squares of
ReLUs in bfloat16 on an H100 2893 and 2964 GB/s of 3350, all tensors counted (liger)."""

# 257 of 312 TFLOP/s in products of 8192 random numbers, 271 at best (predictable, mamf); 19 of 19.5 (sasank); 1727 of
# an A800's 1935 GB/s (mli).
_A100 = Efficiencies(
    matmul=0.825,
    single=0.97,
    memory=0.89,
    attention=AMPERE,
    multiprocessors=108,
    sources=("predictable", "mamf", "sasank", "mli", "liger", *AMPERE.sources),
    reduction=_HBM_REDUCTION,
)

# 673 of 989 TFLOP/s and 4277 of 4800 GB/s sustained on an H200 (h200), 766 to 794 in the best shape (mamf).
_HOPPER = Efficiencies(
    matmul=0.68,
    single=0.68,
    memory=0.89,
    attention=HOPPER,
    multiprocessors=132,
    sources=("h200", "mamf", "norms", "liger", *HOPPER.sources),
    reduction=_HBM_REDUCTION,
)

# 1745 of 2250 TFLOP/s at best (mamf), and as much less sustained as Hopper. Norms 4170 to 5340 and 1940 to 2270 GB/s of
# 8000 (norms). Attention as GB200s, whose limit of power is higher, in proportion to the peaks.
_BLACKWELL = replace(
    _HOPPER,
    matmul=0.66,
    single=0.66,
    attention=BLACKWELL.scaled(2250 / 2500),
    multiprocessors=148,
    sources=("mamf", "h200", "norms", *BLACKWELL.sources),
    reduction=(0.64, 0.30),
)
_GB200 = replace(_BLACKWELL, attention=BLACKWELL)  # 1822 of 2500 TFLOP/s at best (mamf)

# 27 of 35.6 TFLOP/s and 831 of 936 GB/s (sasank); products of 16 bits as on an RTX 4090.
_RTX3090 = replace(
    _A10G,
    attention=AMPERE.scaled(71 / 312),
    multiprocessors=82,
    matmul=0.96,
    single=0.76,
    memory=0.89,
    sources=("mli", "sasank", "a5000", *AMPERE.sources),
)
# 84 multiprocessors of the same kind at 1.8 GHz; at 300 W as much below its peak as an A40, 110 of 149.7 TFLOP/s
# (perf).
_A6000 = replace(
    _RTX3090,
    attention=AMPERE.scaled(154.8 / 312),
    multiprocessors=84,
    matmul=0.74,
    sources=("perf", "sasank", "a5000", *AMPERE.sources),
)

# 159 (mli) and 168 (sasank) of 165, 58 of 82.6 TFLOP/s, 912 of 1008 GB/s (sasank).
_RTX4090 = replace(
    _RTX3090, attention=ADA, multiprocessors=128, single=0.70, memory=0.90, sources=("mli", "sasank", *ADA.sources)
)

# 264 and 269 of 362 TFLOP/s (perf); attention as an RTX 4090's, which has 168 in products; memory as its.
_L40S = replace(
    _RTX4090,
    attention=ADA.scaled(269 / 168),
    multiprocessors=142,
    matmul=0.74,
    sources=("perf", "sasank", *ADA.sources),
)

# 387 to 417 and 334 to 350 TFLOP/s of two owners, of 500 (perf); memory as of an RTX 5090, 1480 to 1570 of 1792 GB/s
# (quack).
_RTXPRO6000 = replace(
    _RTX4090,
    attention=WORKSTATION_BLACKWELL,
    multiprocessors=188,
    matmul=0.76,
    memory=0.85,
    sources=("perf", "quack", "sasank", *WORKSTATION_BLACKWELL.sources),
)

# 234 to 240 TFLOP/s of two owners, 175 of a third, where the data sheet has 209.5 at a lower clock (perf). Attention
# 204 TFLOP/s of cuDNN and 187 to 191 of FlashAttention-2 at 4096 (fa_5090), half of an RTX PRO 6000's.
_RTX5090 = replace(
    _RTXPRO6000,
    attention=WORKSTATION_BLACKWELL.scaled(0.5),
    multiprocessors=170,
    matmul=1.0,
    sources=("perf", "quack", "sasank", "fa_5090", *WORKSTATION_BLACKWELL.sources),
)
_RTX5060TI = replace(_RTX5090, attention=WORKSTATION_BLACKWELL.scaled(0.5 * 47.4 / 209.5), multiprocessors=36)

# Rates that were measured are peaks.
_CPU = Efficiencies(
    matmul=1.0,
    single=1.0,
    memory=1.0,
    attention=None,
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
    "GH200": _HOPPER,
    "GB200": _GB200,
    "L40S": _L40S,
    "A6000": _A6000,
    "RTXPRO6000": _RTXPRO6000,
    "RTX5090": _RTX5090,
    "RTX5060Ti": _RTX5060TI,
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
