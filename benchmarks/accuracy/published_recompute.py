"""What published runs recompute of their layers, where a plan's kinds of recomputation keep something else.

A plan recomputes layers whole or all but their products and attention. Programs of others choose otherwise: torchtitan
keeps attention and every second product (``_save_list`` and ``mm_count`` of its ``apply_ac``), which is what a network
can be said to keep where layers are recomputed by operator. Megatron repeats attention alone
(``--recompute-activations``, which keeps what attention was given, and what it returned for the product behind it):
more work of a backward that recomputes no layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy

from benchmarks.accuracy.published_rows import UnpredictableError
from lightning_mist.model.spec import MICROBATCH, SEQUENCE, LayerSpec, ModelSpec

_HALF = 2


def recomputed(spec: ModelSpec, recompute: str, sizes: Mapping[str, Any]) -> ModelSpec:
    """A network whose layers cost what a run's do that are recomputed; the same where plans say what it does.

    Args:
        recompute: What a run recomputes, in words.
    """
    again = _AGAIN.get(recompute)
    if again is None:
        return spec
    splits = tuple(
        replace(split, layers=tuple(again(layer, sizes, split.degree) for layer in split.layers))
        for split in spec.splits
    )
    return replace(spec, layers=tuple(again(layer, sizes, 1) for layer in spec.layers), splits=splits)


def _attention_again(layer: LayerSpec, sizes: Mapping[str, Any], degree: int) -> LayerSpec:
    """Attention runs twice, and nothing else: part of backward, as nothing is kept for less or exchanged again."""
    again = tuple(item for item in layer.forward_work if item.kind.endswith("attention"))
    return replace(layer, backward_work=(*layer.backward_work, *again))


def _half_of_products(layer: LayerSpec, sizes: Mapping[str, Any], degree: int) -> LayerSpec:
    """The second, fourth, ... product runs again too.

    They are of queries, keys, values, the output, the gate, what it gates, and down: half of the products of each size.
    What they return is not kept, and there while the layer is recomputed. Allocations are not known one by one.
    """
    found = layer.selective
    if found is None or (sizes.get("feed_forward"), sizes.get("positions")) != ("swiglu", "rotary"):
        raise UnpredictableError("which product is every second one is known of blocks like Llama's only")
    products = tuple(
        replace(item, flops=item.flops * share, moved_bytes=item.moved_bytes * share, calls=item.calls // _HALF)
        for item in layer.forward_work
        if item.kind == "matmul" and item.calls >= _HALF
        for share in [sympy.Rational(item.calls // _HALF, item.calls)]
    )
    hidden = sizes["hidden"]
    keys = hidden // sizes["heads"] * sizes.get("key_value_heads", sizes["heads"])
    left = _HALF * MICROBATCH * SEQUENCE * (hidden + sympy.Rational(keys + sizes["ffn"], degree))
    return replace(
        layer,
        events=None,
        selective=replace(
            found,
            saved_bytes=found.saved_bytes - left,
            backward_peak_bytes=found.backward_peak_bytes + left,
            first_backward_peak_bytes=found.first_backward_peak_bytes + left,
            work=(*found.work, *products),
            events=None,
        ),
    )


_AGAIN: Mapping[str, Callable[[LayerSpec, Mapping[str, Any], int], LayerSpec]] = {
    "attention": _attention_again,
    "selective op": _half_of_products,
}
