"""How fast fused attention is, by the kernel that torch runs on a generation, head width, direction and mask.

Rates of long sequences, and the length at which half of them is reached, by kernel: derived from published measurements
by ``python -m benchmarks.hardware.attention_rates`` (the sources by name in :data:`ATTENTION_SOURCES`), which also says
the formula and how well it holds (median errors of 0.6 to 3 %). In TFLOP/s of the operations that must be done.

torch runs FlashAttention-2 but on compute capability 9.0 and 10.0, where it prefers cuDNN
(``check_prefer_cudnn_attention`` in aten's sdp_utils.cpp). Where a width was not measured the rate is that of the other
width of the kernel times the ratio on the nearest device where both were.
"""

from dataclasses import dataclass, replace

from lightning_mist.hardware.profile import KernelRate

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
