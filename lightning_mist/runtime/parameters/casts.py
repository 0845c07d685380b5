"""Weights that autocast casts once per batch, not once per use.

Lightning's mixed precision keeps no casts (``cache_enabled=False``): a step under it casts every weight at each use, so
a batch of many microbatches casts them as many times, and every microbatch in flight keeps casts of its own until its
backward. Values of weights are the same all the while, and so are their casts and the gradients that come through them,
to the bit: here torch's own cache of them lasts for a batch.

Autograd runs the nodes of a graph in the opposite order of their making, and what several microbatches share is older
than all of their own: gradients of weights would wait until the end of every backward. :func:`follow` lets them go as
soon as they are there.

It is not used

* where a microbatch uses a weight several times: gradients of one cast are added up in 16 bits, those of several casts
  in 32. The first batch shows that, in which nothing is kept, and every later one looks again;
* where torch keeps what was cast without a graph for uses with one (mended by pytorch#165068), or does not let the
  order of nodes be set;
* by a context of another type than the batch's first one has: the cache does not know of types;
* in layers that are recomputed, whose casts would otherwise be gone when their forward has ended;
* from ZeRO-2 on, which takes gradients and weights away layer by layer.

A step that writes into its parameters is trained by plain DDP alone, so no cast is ever older than its weight.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_mist.attributes import SharedPatch

_AT_ONCE = 2**64 - 1
"""The place in the order of nodes that torch gives to those that accumulate gradients: before all others."""


@dataclass(slots=True)
class _Keeping:
    """What a thread is inside of.

    Attributes:
        is_stopped: Whether nothing is kept any more until it has left.
        dtype: The type that weights are cast to, once one was.
        detached: Casts of our own, by the ``id`` of the weight.
    """

    depth: int = 0
    is_stopped: bool = False
    dtype: torch.dtype | None = None
    detached: dict[int, Tensor] = field(default_factory=dict)


class _Here(threading.local):
    def __init__(self) -> None:
        self.keeping = _Keeping()


_HERE = _Here()
_clear = torch.clear_autocast_cache


@SharedPatch
@contextmanager
def _patched() -> Iterator[None]:
    """Inside, autocast contexts of threads that keep casts use torch's cache, and no context clears it."""
    context: Any = torch.autocast
    enter = context.__enter__

    def enter_with_cache(self: Any) -> Any:
        keeping, is_asked = _HERE.keeping, self._cache_enabled
        if not keeping.depth or keeping.is_stopped:
            # A rank beside this one that keeps none, or recomputation on a thread of autograd: nothing would clear it.
            self._cache_enabled = False
        elif self._enabled:
            keeping.dtype = self.fast_dtype if keeping.dtype is None else keeping.dtype
            self._cache_enabled = self.fast_dtype == keeping.dtype
        try:
            return enter(self)
        finally:
            self._cache_enabled = is_asked

    context.__enter__ = enter_with_cache
    # Contexts clear it where they end, those of recomputation in backward included, on whatever thread that runs.
    torch.clear_autocast_cache = lambda: None
    try:
        yield
    finally:
        context.__enter__ = enter
        torch.clear_autocast_cache = _clear


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
    with _patched():
        keeping.depth += 1
        try:
            yield
        finally:
            keeping.depth -= 1
            if keeping.depth == 0:
                keeping.dtype, keeping.is_stopped = None, False
                keeping.detached.clear()
                _clear()


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
    if keeping.dtype is None or keeping.is_stopped or weight.dtype is not torch.float32:
        return weight.detach()
    if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) is not keeping.dtype:
        return weight.detach()
    found = keeping.detached.get(id(weight))
    if found is None:
        found = keeping.detached[id(weight)] = weight.detach().to(keeping.dtype)
    return found


def follow(values: Iterable[Any]) -> int:
    """How often a weight was cast, or its one cast used, for these values: of that which was most often.

    Gradients of weights whose casts are kept are from now on cast and accumulated as soon as they are there.
    """
    keeps, uses, seen = keeps_casts(), Counter[Any](), set[Any]()
    waiting = [value.grad_fn for value in values if isinstance(value, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        later = [following for following, _ in node.next_functions if following is not None]
        for following in later:
            weight = _weight_of_cast(following)
            if weight is not None:
                uses[weight] += 1
                if keeps:
                    following._set_sequence_nr(_AT_ONCE)  # type: ignore[attr-defined]
        waiting += later
    return max(uses.values(), default=0)


def _weight_of_cast(node: Any) -> Any:
    """What accumulates the gradient of the weight that a node casts; ``None`` if it casts none."""
    if node.name() != "ToCopyBackward0":
        return None
    ((found, _),) = node.next_functions
    return found if hasattr(found, "variable") else None


class CastKeeper:
    """Whether a rank keeps casts, from batch to batch.

    Attributes:
        first: Number of the batch in which nothing is kept.
        most_uses: How often a microbatch used a weight's cast, of all that were looked at.
    """

    first = 1

    def __init__(self, *, may_keep: bool) -> None:
        self._may_keep = may_keep and can_keep_casts()
        self._batches, self.most_uses = 0, 0
        self._looked_at: set[int] = set()

    def batch(self) -> AbstractContextManager[None]:
        """Inside, a batch runs, whose casts of weights are kept if the batches before allow it."""
        self._batches += 1
        self._looked_at.clear()
        keeps = self._may_keep and self._batches > self.first and self.most_uses <= 1
        return kept_casts() if keeps else nullcontext()

    def look(self, stage: int, values: Any) -> None:
        """A stage's forward has given these values; they are looked at if it is the batch's first."""
        if not self._may_keep or stage in self._looked_at or not (self._batches == self.first or keeps_casts()):
            return
        self._looked_at.add(stage)
        self.most_uses = max(self.most_uses, follow(tree_leaves(values)))
        _HERE.keeping.is_stopped = _HERE.keeping.depth > 0 and self.most_uses > 1
