"""Blocks that answer for other blocks: the shapes of a twin that did run, without its work.

A step of 48 equal blocks is counted or timed by running one of them and letting the others imitate it: they hand on
activations and gradients of the right shapes and keep their inputs alive as a real block does.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_mist.model.trace.rank_step import part_of

_PLAIN = (int, float, bool, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class _Passed:
    """An output leaf that is the ``index``-th argument leaf itself."""

    index: int


@dataclass(frozen=True, slots=True)
class _Made:
    """An output leaf that the block made: its layout, and the value it had where one is wanted."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    value: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a block returned, leaf by leaf, and its structure."""

    leaves: tuple[_Passed | _Made | Any, ...]
    structure: TreeSpec


def record_answer(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, keep_values: bool) -> Answer | None:
    """Describe a block's output so that a twin can imitate it; ``None`` if it holds what cannot be described."""
    inputs = {id(x): i for i, x in enumerate(tree_flatten((args, kwargs))[0]) if isinstance(x, torch.Tensor)}
    flat, structure = tree_flatten(output)
    leaves: list[_Passed | _Made | Any] = []
    for leaf in flat:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in inputs:
                leaves.append(_Passed(inputs[id(leaf)]))
                continue
            layout = (tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device, leaf.requires_grad)
            leaves.append(_Made(*layout, leaf.detach() if keep_values else None))
        elif isinstance(leaf, _PLAIN):
            leaves.append(leaf)
        else:
            return None
    return Answer(tuple(leaves), structure)


class _Imitation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[[], tuple[torch.Tensor, ...]], *inputs: torch.Tensor) -> Any:
        # Activations stay alive as in a real block, whose first operator saves them; other inputs need not. Not by
        # save_for_backward: it would refuse inputs that are changed in place later, which the block may well allow.
        ctx.inputs = tuple(t if n else None for t, n in zip(inputs, ctx.needs_input_grad[1:], strict=True))
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        incoming = [g for g in gradients if g is not None and g.is_contiguous()]
        inputs, ctx.inputs = ctx.inputs, None

        def gradient(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None or isinstance(tensor, nn.Parameter):
                return None
            for index, candidate in enumerate(incoming):
                if candidate.shape == tensor.shape and candidate.dtype == tensor.dtype:
                    return incoming.pop(index)
            return torch.zeros_like(tensor)

        return (None, *map(gradient, inputs))


def _make(leaf: _Made, mode: FakeTensorMode | None) -> torch.Tensor:
    if leaf.value is not None:
        # Not detach(): a view made inside a Function may not be changed in place by the user's code.
        return leaf.value.data
    with mode if mode is not None else nullcontext():
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)


def imitate(
    answer: Answer, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode | None
) -> Any:
    """Answer for a block as its twin did; a parameter of the block stands for its share in the outputs' gradient."""
    flat = tree_flatten((args, kwargs))[0]
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    flowing = [leaf for leaf in answer.leaves if isinstance(leaf, _Made) and leaf.requires_grad]
    trained = next((p for p in block.parameters() if p.requires_grad), None)
    anchors = tensors if trained is None else [*tensors, part_of(trained)]
    make = partial(tuple, (_make(leaf, mode) for leaf in flowing))
    outputs = iter(_Imitation.apply(make, *anchors) if flowing else ())  # type: ignore[no-untyped-call]

    def leaf_value(leaf: Any) -> Any:
        if isinstance(leaf, _Passed):
            return flat[leaf.index]
        if isinstance(leaf, _Made):
            return next(outputs) if leaf.requires_grad else _make(leaf, mode)
        return leaf

    return tree_unflatten([leaf_value(leaf) for leaf in answer.leaves], answer.structure)


def echo(answer: Answer, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: int | None) -> Any:
    """Answer for a block with numbers that follow from its input, so that a loss and its gradients mean something."""
    flat = tree_flatten((args, kwargs))[0]
    source = flat[hidden] if hidden is not None else None

    def leaf_value(leaf: Any) -> Any:
        if isinstance(leaf, _Passed):
            return flat[leaf.index]
        if not isinstance(leaf, _Made):
            return leaf
        if leaf.value is None:
            raise ValueError("an answer without values cannot be echoed: record it with keep_values=True")
        if source is None or not leaf.value.is_floating_point():
            return leaf.value
        if leaf.shape == tuple(source.shape):
            return source * 0.9
        value = leaf.value.to(source.dtype)
        return value + source.mean() if leaf.requires_grad else value

    return tree_unflatten([leaf_value(leaf) for leaf in answer.leaves], answer.structure)
