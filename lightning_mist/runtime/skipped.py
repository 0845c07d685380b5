"""Answers for blocks that a stage does not hold: ghosts of what they would return."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_mist.plan.calls import call_signature, is_simple

_MAX_RECIPES = 16384
"""Remembered answers, about 1 KB each; forgotten all at once beyond this."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to answer for a block; without structure the block must run on ghosts each time."""

    leaves: tuple[tuple[Any, ...], ...]
    structure: TreeSpec | None


class SkippedBlocks:
    """Runs a block on ghosts the first time it sees arguments of some form, and answers from memory afterwards.

    Args:
        mode: Makes the ghosts.
        leaking: Positions of blocks that have to run each time, since others read values inside them.
    """

    def __init__(self, mode: FakeTensorMode, leaking: tuple[int, ...]) -> None:
        self._mode, self._leaking = mode, frozenset(leaking)
        self._recipes: dict[Hashable, _Recipe] = {}

    def answer(
        self,
        position: int,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: Hashable,
    ) -> Any:
        """What a block returns, in ghosts.

        Args:
            position: The block.
            original: Its ``forward``.
            args: Its positional arguments.
            kwargs: Its other arguments.
            context: What else its output's form depends on (autocast, training).
        """
        if position in self._leaking:
            return original(*args, **kwargs)
        inputs = tree_flatten((args, kwargs))[0]
        key = (position, call_signature(inputs), context)
        recipe = self._recipes.get(key)
        if recipe is None:
            output = original(*args, **kwargs)
            if len(self._recipes) >= _MAX_RECIPES:
                self._recipes.clear()
            self._recipes[key] = _recipe(output, inputs)
            return output
        if recipe.structure is None:
            return original(*args, **kwargs)
        return tree_unflatten([self._leaf(leaf, inputs) for leaf in recipe.leaves], recipe.structure)

    def _leaf(self, leaf: tuple[Any, ...], inputs: list[Any]) -> Any:
        if leaf[0] == "input":
            return inputs[leaf[1]]
        if leaf[0] == "value":
            return leaf[1]
        _, shape, stride, dtype, device = leaf
        with self._mode:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _recipe(output: Any, inputs: list[Any]) -> _Recipe:
    """How to give a block's output again for equal arguments."""
    positions = {id(leaf): index for index, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
    leaves, structure = tree_flatten(output)
    described: list[tuple[Any, ...]] = []
    for leaf in leaves:
        if id(leaf) in positions:
            described.append(("input", positions[id(leaf)]))
        elif isinstance(leaf, FakeTensor):
            described.append(("tensor", tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device))
        elif not isinstance(leaf, Tensor) and is_simple(leaf):
            described.append(("value", leaf))
        else:
            return _Recipe((), None)
    return _Recipe(tuple(described), structure)
