"""Weights that autocast casts once per batch, not once per use.

Lightning's mixed precision keeps no casts (``cache_enabled=False``): a step under it casts every weight at each use, so
a batch of many microbatches casts them as many times, and every microbatch in flight keeps casts of its own until its
backward. Values of weights are the same all the while, and so are their casts and the gradients that come through them,
to the bit: here torch's own cache of them lasts for a batch.

Autograd runs the nodes of a graph in the opposite order of their making, and what several microbatches share is older
than all of their own: gradients of weights would wait until the end of every backward. :func:`hasten` lets them go as
soon as they are there.

It is not used

* where torch keeps what was cast without a graph for uses with one (mended by pytorch#165068), or does not let the
  order of nodes be set;
* by a context of another type than the batch's first one has: the cache does not know of types;
* in layers that are recomputed, whose casts would otherwise be gone when their forward has ended;
* from ZeRO-2 on, which takes gradients and weights away layer by layer.

A step that writes into its parameters is trained by plain DDP alone, so no cast is ever older than its weight.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.runtime.patches import SharedPatch

_AT_ONCE = 2**64 - 1
"""The place in the order of nodes that torch gives to those that accumulate gradients: before all others."""


@dataclass(slots=True)
class _Keeping:
    """What a thread is inside of: how often, the type that weights are cast to, once one was, and casts of our own."""

    depth: int = 0
    dtype: torch.dtype | None = None
    detached: dict[int, Tensor] = field(default_factory=dict)


class _Here(threading.local):
    def __init__(self) -> None:
        self.keeping = _Keeping()


_HERE = _Here()


@contextmanager
def _patched() -> Iterator[None]:
    """Inside, autocast contexts of threads that keep casts use torch's cache, and no context clears it."""
    context: Any = torch.autocast
    enter, clear = context.__enter__, torch.clear_autocast_cache

    def enter_with_cache(self: Any) -> Any:
        keeping = _HERE.keeping
        if not keeping.depth:
            # A rank beside this one that keeps none, or recomputation on a thread of autograd: nothing would clear it.
            self._cache_enabled = False
        elif self._enabled:
            keeping.dtype = self.fast_dtype if keeping.dtype is None else keeping.dtype
            self._cache_enabled = self.fast_dtype == keeping.dtype
        return enter(self)

    context.__enter__ = enter_with_cache
    # Contexts clear it where they end, those of recomputation in backward included, on whatever thread that runs.
    torch.clear_autocast_cache = lambda: None
    try:
        yield
    finally:
        context.__enter__ = enter
        torch.clear_autocast_cache = clear
        clear()


_PATCH = SharedPatch(_patched)


@cache
def can_keep_casts() -> bool:
    """Whether this torch can share casts: uses with a graph after uses without one, and an order of nodes."""
    weight = nn.Parameter(torch.zeros(1, 1))
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            nn.functional.linear(weight.detach(), weight)
        product = nn.functional.linear(weight.detach(), weight)
    return product.grad_fn is not None and hasattr(product.grad_fn, "_set_sequence_nr")


@contextmanager
def kept_casts() -> Iterator[None]:
    """Inside, in this thread, a weight that was cast stays cast; at the end casts are freed."""
    # What is abandoned half-way may be closed on another thread.
    keeping = _HERE.keeping
    with _PATCH:
        keeping.depth += 1
        try:
            yield
        finally:
            keeping.depth -= 1
            if keeping.depth == 0:
                keeping.dtype = None
                keeping.detached.clear()


@contextmanager
def no_kept_casts() -> Iterator[None]:
    """Inside, casts neither come from the cache nor go there."""
    was_enabled, keeping = torch.is_autocast_cache_enabled(), _HERE.keeping
    torch.set_autocast_cache_enabled(False)
    _HERE.keeping = _Keeping()
    try:
        yield
    finally:
        _HERE.keeping = keeping
        torch.set_autocast_cache_enabled(was_enabled)


def keeps_casts() -> bool:
    """Whether this thread has cast something that stays."""
    return _HERE.keeping.dtype is not None


def detached(weight: Tensor) -> Tensor:
    """A weight without its graph, for a product: cast, where autocast would cast it and casts stay."""
    keeping, kind = _HERE.keeping, weight.device.type
    if keeping.dtype is None or not torch.is_autocast_enabled(kind) or weight.dtype is not torch.float32:
        return weight.detach()
    if torch.get_autocast_dtype(kind) is not keeping.dtype:
        return weight.detach()
    found = keeping.detached.get(id(weight))
    if found is None:
        found = keeping.detached[id(weight)] = weight.detach().to(keeping.dtype)
    return found


def hasten(values: Iterable[Any]) -> None:
    """Let gradients of weights that were cast for these values be cast and accumulated as soon as they are there.

    Args:
        values: Ends of a graph; what is no tensor of one is passed over.
    """
    seen: set[Any] = set()
    waiting = [value.grad_fn for value in values if isinstance(value, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        later = [following for following, _ in node.next_functions]
        if node.name() == "ToCopyBackward0" and later[0] is not None and hasattr(later[0], "variable"):
            node._set_sequence_nr(_AT_ONCE)  # type: ignore[attr-defined]
        waiting += later
