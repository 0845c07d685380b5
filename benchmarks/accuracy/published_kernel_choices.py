"""What kernels of published runs make of a network's costs where they are neither torch's nor those of a stack.

*Unfused attention*, as Megatron-LM had it before FlashAttention: scores by one batched product, a softmax with scale
and mask in one kernel, a second product. Every score counts, also those that the mask hides. Forward writes and reads
scores and probabilities once each, backward reads probabilities and their gradient and writes that of scores
(``megatron/fused_kernels/scaled_upper_triang_masked_softmax.h``); probabilities are kept.

*Exchanges beside products*, as Megatron-LM has them with ``CUDA_DEVICE_MAX_CONNECTIONS=1`` since 2022: in backward the
gradient of a column-split product's input is scattered, or reduced where the sequence is not shared out, while the
gradient of its weights is made (``LinearWithGradAccumulationAndAsyncCommunication``). Both take longer by the machine's
interference.

*What fused layers keep*, as Megatron-LM's do: gated SiLU keeps what it was given, not SiLU's result; attention takes
fewer heads of keys and values as they are, not repeated; with sequence parallelism a rank keeps its part of what a
column-split product was given, and gathers it once more in backward.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy

from lightning_mist.model.spec import MICROBATCH, SEQUENCE, LayerSpec, ModelSpec, OperatorCost

_HALF = 2
"""Bytes of a number in 16 bits."""


def unfused_attention(spec: ModelSpec, sizes: Mapping[str, Any]) -> ModelSpec:
    """A network whose attention writes its scores."""
    splits = tuple(
        replace(split, layers=tuple(_unfused(layer, sizes, split.degree) for layer in split.layers))
        for split in spec.splits
    )
    return replace(spec, layers=tuple(_unfused(layer, sizes, 1) for layer in spec.layers), splits=splits)


def _unfused(layer: LayerSpec, sizes: Mapping[str, Any], degree: int) -> LayerSpec:
    heads = sizes["heads"] // degree
    scores = _HALF * MICROBATCH * heads * SEQUENCE**2
    # Two products of scores and a tensor of a head's width, and what they return.
    product_bytes = scores + 2 * _HALF * MICROBATCH * SEQUENCE * sizes["hidden"] / degree
    flops = 2 * MICROBATCH * SEQUENCE**2 * sizes["hidden"] / degree

    # Dropout of probabilities reads and writes them, and writes or reads a byte for each; as softmax does.
    dropped = sympy.Rational(5, 2) * scores if sizes.get("dropout") else 0 * scores

    def work(found: tuple[OperatorCost, ...], products: int, passes: int, drops: int) -> tuple[OperatorCost, ...]:
        return (
            *(item for item in found if not item.kind.endswith("attention")),
            OperatorCost(kind="matmul", flops=products * flops, moved_bytes=products * product_bytes, calls=products),
            OperatorCost(kind="reduction", flops=0 * flops, moved_bytes=passes * scores + drops * dropped, calls=1),
        )

    # Where attention runs again in backward its work is there twice, and probabilities are not kept.
    again = sum(item.kind.endswith("attention") for item in layer.backward_work) - 1
    kept, peak = (0, 2 * scores) if again else (scores, scores)
    return replace(
        layer,
        forward_work=work(layer.forward_work, 2, 2, 1),
        backward_work=work(layer.backward_work, 4 + 2 * again, 3 + 2 * again, 1 + again),
        saved_bytes=layer.saved_bytes + kept,
        forward_peak_bytes=layer.forward_peak_bytes + 2 * scores,
        backward_peak_bytes=layer.backward_peak_bytes + peak,
        first_backward_peak_bytes=layer.first_backward_peak_bytes + peak,
        recompute_backward_peak_bytes=layer.recompute_backward_peak_bytes + 2 * scores,
        first_recompute_backward_peak_bytes=layer.first_recompute_backward_peak_bytes + 2 * scores,
        selective=None,
        events=None,
    )


def overlapped_exchange(spec: ModelSpec, interference: float) -> ModelSpec:
    """A network of which tensor-parallel ranks reduce gradients beside products; what is left is not hidden."""
    splits = tuple(
        replace(
            split,
            layers=tuple(
                _overlapped(layer, "reduce_scatter" if split.sequence_parallel else "all_reduce", interference)
                for layer in split.layers
            ),
        )
        for split in spec.splits
    )
    return replace(spec, splits=splits)


def _overlapped(layer: LayerSpec, operation: str, interference: float) -> LayerSpec:
    left = tuple(
        replace(item, bytes=item.bytes * interference) if item.operation == operation else item
        for item in layer.backward_collectives
    )
    return replace(layer, backward_collectives=left)


def fused_keeps(spec: ModelSpec, sizes: Mapping[str, Any]) -> ModelSpec:
    """A network whose layers keep what fused ones do. Allocations are not known one by one."""
    splits = tuple(
        replace(
            split,
            layers=tuple(_keeps(layer, sizes, split.degree, split.sequence_parallel) for layer in split.layers),
        )
        for split in spec.splits
    )
    return replace(spec, layers=tuple(_keeps(layer, sizes, 1, False) for layer in spec.layers), splits=splits)


def _keeps(layer: LayerSpec, sizes: Mapping[str, Any], degree: int, is_shared: bool) -> LayerSpec:
    hidden, groups = sizes["hidden"], sizes.get("key_value_heads") or sizes["heads"]
    gated = sizes["ffn"] if sizes.get("feed_forward") == "swiglu" else 0
    repeated = 2 * (hidden - hidden // sizes["heads"] * groups)
    gathered = hidden if is_shared else 0
    of_rank = sympy.Rational(gated + repeated, degree) + 2 * gathered * sympy.Rational(degree - 1, degree)
    less, again = (_HALF * MICROBATCH * SEQUENCE * width for width in (of_rank, gathered))
    return replace(
        layer,
        saved_bytes=layer.saved_bytes - less,
        backward_peak_bytes=layer.backward_peak_bytes + again,
        first_backward_peak_bytes=layer.first_backward_peak_bytes + again,
        events=None,
    )
