"""Activation checkpointing of blocks, in the place of what the user's own code would checkpoint."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.utils.checkpoint
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_mist.runtime.patches import SharedPatch


class _Block:
    """A block as a function of flat arguments. Its class tells our checkpoints from the user's."""

    def __init__(self, function: Callable[..., Any], structure: TreeSpec) -> None:
        self._function, self._structure = function, structure

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, self._structure)
        # Recomputation runs in backward, where the step's own context is no longer entered.
        with neutral_checkpointing():
            return self._function(*args, **kwargs)


class _Direct:
    """Stands in for the reentrant checkpoint: runs the function as it is."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def neutral_checkpointing() -> AbstractContextManager[None]:
    """Inside, ``torch.utils.checkpoint`` runs functions as they are, except those of :func:`checkpoint_block`.

    The plan says which blocks are recomputed. User code and libraries hold references to
    ``torch.utils.checkpoint.checkpoint`` itself, which looks these two names up at each call; there is no other place
    that reaches them all.
    """
    return _NEUTRAL


@contextmanager
def _neutralise() -> Iterator[None]:
    module = torch.utils.checkpoint
    generator, function = module._checkpoint_without_reentrant_generator, module.CheckpointFunction

    def neutral(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if isinstance(fn, _Block):
            yield from generator(fn, *args, **kwargs)
        else:
            yield

    module._checkpoint_without_reentrant_generator = neutral
    module.CheckpointFunction = _Direct  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = generator
        module.CheckpointFunction = function  # type: ignore[misc]


_NEUTRAL = SharedPatch(_neutralise)


def checkpoint_block(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block so that only its arguments are kept for backward, which runs it again with the same random numbers.

    All arguments are passed by position: the states of device generators are kept only for devices of positional
    tensors.
    """
    leaves, structure = tree_flatten((args, kwargs))
    return torch.utils.checkpoint.checkpoint(
        _Block(function, structure), *leaves, use_reentrant=False, preserve_rng_state=True
    )
