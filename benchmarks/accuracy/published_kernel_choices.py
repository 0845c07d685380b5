"""What kernels of published runs make of a network's costs where they are neither torch's nor those of a stack.

*Unfused attention*, as Megatron-LM had it before FlashAttention: scores by one batched product, a softmax with scale
and mask in one kernel, a second product. Every score counts, also those that the mask hides. Forward writes and reads
scores and probabilities once each, backward reads probabilities and their gradient and writes that of scores
(``megatron/fused_kernels/scaled_upper_triang_masked_softmax.h``); probabilities are kept.

*Exchanges beside products*, as Megatron-LM has them with sequence parallelism and ``CUDA_DEVICE_MAX_CONNECTIONS=1``:
in backward the gradient of a column-split product's input is scattered while the gradient of its weights is made
(``LinearWithGradAccumulationAndAsyncCommunication``). Both take longer by the machine's interference.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy

from lightning_mist.model.spec import MICROBATCH, SEQUENCE, LayerSpec, ModelSpec, OperatorCost

_HALF = 2
"""Bytes of a score."""


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

    # Dropout of probabilities reads and writes them, and writes or reads a byte for each; a kernel like softmax's.
    dropped = sympy.Rational(5, 2) * scores if sizes.get("dropout") else 0 * scores

    def work(found: tuple[OperatorCost, ...], products: int, passes: int) -> tuple[OperatorCost, ...]:
        return (
            *(item for item in found if not item.kind.endswith("attention")),
            OperatorCost(kind="matmul", flops=products * flops, moved_bytes=products * product_bytes, calls=products),
            OperatorCost(kind="reduction", flops=0 * flops, moved_bytes=passes * scores, calls=1),
            *((OperatorCost(kind="reduction", flops=0 * flops, moved_bytes=dropped, calls=1),) if dropped else ()),
        )

    return replace(
        layer,
        forward_work=work(layer.forward_work, 2, 2),
        backward_work=work(layer.backward_work, 4, 3),
        saved_bytes=layer.saved_bytes + scores,
        forward_peak_bytes=layer.forward_peak_bytes + 2 * scores,
        backward_peak_bytes=layer.backward_peak_bytes + scores,
        first_backward_peak_bytes=layer.first_backward_peak_bytes + scores,
        recompute_backward_peak_bytes=layer.recompute_backward_peak_bytes + 2 * scores,
        first_recompute_backward_peak_bytes=layer.first_recompute_backward_peak_bytes + 2 * scores,
        selective=None,
        events=None,
    )


def overlapped_exchange(spec: ModelSpec, interference: float) -> ModelSpec:
    """A network of which tensor-parallel ranks scatter gradients beside products; what is left is not hidden."""
    splits = tuple(
        replace(split, layers=tuple(_overlapped(layer, interference) for layer in split.layers))
        for split in spec.splits
    )
    return replace(spec, splits=splits)


def _overlapped(layer: LayerSpec, interference: float) -> LayerSpec:
    left = tuple(
        replace(item, bytes=item.bytes * interference) if item.operation == "reduce_scatter" else item
        for item in layer.backward_collectives
    )
    return replace(layer, backward_collectives=left)
