"""Whose recomputation counts, and recomputation by operator: all but products, convolutions and attention runs again.

Plans say which blocks are recomputed: what users checkpoint around or inside of blocks does nothing
(:func:`neutral_checkpointing`). Behind the last block, as in a loss taken in chunks, their checkpoints are what they
are (:func:`users_checkpoints`).

The contexts of recomputation by operator are for ``context_fn`` of ``torch.utils.checkpoint.checkpoint``, as those of
torch's ``create_selective_checkpoint_contexts`` are, which keep the same operators under the same policy. These do two
things that torch's do not: what is changed in place after it was kept is kept as it was before (torch's refuse it in
backward), and a forward that calls other products when it is repeated is refused (torch's hand out what has the same
number).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from lightning_mist.attributes import SharedPatch, replaced
from lightning_mist.errors import TraceError

_Signature = tuple[Any, tuple[tuple[int, ...], ...]]

Within = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a forward is repeated."""


class OwnFunction(partial[Any]):
    """A function whose checkpoint is ours, not the user's."""


class _Here(threading.local):
    within: Within | None = None
    watch: Within = nullcontext


_HERE = _Here()


def users_checkpoints(within: Within) -> AbstractContextManager[None]:
    """Inside, in this thread, :func:`neutral_checkpointing` lets users recompute, in a context made by ``within``."""
    return replaced(_HERE, within=within)


def watched_checkpoints(watch: Within) -> AbstractContextManager[None]:
    """Inside, in this thread, what :func:`neutral_checkpointing` runs once runs in a context made by ``watch``."""
    return replaced(_HERE, watch=watch)


def _repeated(function: Callable[..., Any], within: Within) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        with within(), users_checkpoints(within):
            return function(*args, **kwargs)

    return again


class _Direct:
    """Stands in for the reentrant checkpoint, which splits the backward: the other one, or the function as it is."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if _HERE.within is None:
            with _HERE.watch():
                return function(*args)
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


@SharedPatch
@contextmanager
def neutral_checkpointing() -> Iterator[None]:
    """Inside, ``torch.utils.checkpoint`` runs functions as they are, except an :class:`OwnFunction`.

    User code and libraries hold references to ``torch.utils.checkpoint.checkpoint`` itself, which looks these two names
    up at each call; there is no other place that reaches them all.
    """
    module = torch.utils.checkpoint
    generator = module._checkpoint_without_reentrant_generator

    def neutral(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        within = _HERE.within
        if isinstance(fn, OwnFunction):
            yield from generator(fn, *args, **kwargs)
        elif within is not None:
            yield from generator(_repeated(fn, within), *args, **kwargs)
        else:
            with _HERE.watch():
                yield

    with replaced(module, _checkpoint_without_reentrant_generator=neutral, CheckpointFunction=_Direct):
        yield


def is_kept(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what an operator returns is kept.

    Attention that draws random numbers is not: if it did not run again, what draws after it would draw others.
    """
    if not _multiplies(operator):
        return False
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            return not (args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


@cache
def _multiplies(operator: Any) -> bool:
    """Whether it is a product, a convolution or attention that writes a result of its own."""
    name = operator._overloadpacket.__name__ if isinstance(operator, torch._ops.OpOverload) else ""
    if not name or operator._schema.is_mutable:
        return False
    return operator._overloadpacket in flop_registry or "attention" in name or "convolution" in name


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for the forward of one block and for repeating it in backward, once."""
    kept: deque[tuple[_Signature, Any]] = deque()
    return _Keeping(kept), _Returning(kept)


def _signature(operator: Any, args: tuple[Any, ...]) -> _Signature:
    return operator, tuple(tuple(leaf.shape) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))


def _storages(value: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: deque[tuple[_Signature, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept


class _Keeping(_Mode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._kept and isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            self._keep_apart(func, args, kwargs)
        result = func(*args, **kwargs)
        if is_kept(func, args, kwargs):
            # The result itself refers to its graph, which refers to what is kept.
            self._kept.append((_signature(func, args), tree_map_only(torch.Tensor, torch.Tensor.detach, result)))
        return result

    def _keep_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy what was kept and is about to be changed."""
        changed: set[int] = set()
        for position, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                changed |= _storages(args[position] if position < len(args) else kwargs.get(argument.name))
        for index, (signature, result) in enumerate(self._kept):
            if changed & _storages(result):
                self._kept[index] = signature, tree_map_only(torch.Tensor, torch.clone, result)


class _Returning(_Mode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        signature, result = self._kept.popleft() if self._kept else ((None, ()), None)
        if signature != _signature(func, args):
            raise TraceError(
                f"{func} on tensors of {[*_signature(func, args)[1]]} in a repeated forward, where {signature[0]} on "
                f"{[*signature[1]]} ran before: a layer that is recomputed by operator does the same each time, once; "
                "use checkpointing 'full', or checkpointed_layers = 0"
            )
        return result
