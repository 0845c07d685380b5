"""How rules are written down."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_mist.tensor_parallel import layout as layouts
from lightning_mist.tensor_parallel.layout import Layout, Pattern
from lightning_mist.tensor_parallel.tensor import RULES, Rule, SplitContext, SplitTensor


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def bind(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Arguments by name; ``names`` are those of the positions."""
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def dims_from_right(tensor: Tensor) -> int:
    """The shared dimension of a split tensor, counted from the last: -1, -2.."""
    assert isinstance(tensor, SplitTensor)
    return tensor.shared_dim - len(tensor.placement)


def pattern_of(tensor: SplitTensor) -> Pattern:
    """Which entries of its shared dimension a rank holds."""
    return layouts.pattern(tensor.placement[tensor.shared_dim])


def like(local: Tensor, layout: Layout, context: SplitContext) -> SplitTensor:
    """The result of a rule."""
    return SplitTensor(local, layout, context)
