"""Gradients of one computation against those of another, in the memory of one set of them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

FLOOR = 1e-3
"""Gradients below this part of the module's largest are compared as if they were that large."""


class GradientDifferences:
    """What gradients of one computation differ by from those of another, in the memory of one set of gradients.

    After :meth:`turn` the gradients of the first are there with the opposite sign: what the second adds to them leaves
    the difference. Inside, gradients belong to this object; afterwards there are none.

    Args:
        keeps_at_home: Whether gradients are kept in host memory, and are on the device one at a time.
    """

    def __init__(self, module: nn.Module, *, keeps_at_home: bool = False) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._keeps_at_home = keeps_at_home
        self._home: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self._sizes: dict[str, float] = {}

    def __enter__(self) -> "GradientDifferences":
        if self._keeps_at_home:
            for name, parameter in self._parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(partial(self._bring, name))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        self._home.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _bring(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.cpu(), None
        self._home[name] = self._home[name].add_(gradient) if name in self._home else gradient

    def _gradients(self) -> dict[str, Tensor]:
        if self._keeps_at_home:
            return self._home
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def turn(self) -> None:
        """The first computation's gradients are complete."""
        with torch.no_grad():
            for name, gradient in self._gradients().items():
                self._sizes[name] = _size(gradient)
                gradient.neg_()

    def each(self) -> Iterator[tuple[str, float, float]]:
        """Of each gradient its name, the largest difference, and its size in the first computation.

        Gradients below a thousandth of the largest count as that large: they are mostly noise.
        """
        scale = max(self._sizes.values(), default=0.0)
        for name, gradient in self._gradients().items():
            yield name, _size(gradient), max(self._sizes.get(name, 0.0), FLOOR * scale)

    def largest(self, tolerance: float) -> str | None:
        """The gradient that differs most, in words; None if all are within the tolerance."""
        worst, text = tolerance, None
        for name, difference, size in self.each():
            relative = difference / size if size else (0.0 if difference == 0 else float("inf"))
            if relative > worst:
                worst = relative
                text = f"the gradient of {name} differs by {relative:.1e} of its size, the tolerance is {tolerance:.0e}"
        return text


def _size(gradient: Tensor) -> float:
    return float(gradient.detach().abs().max()) if gradient.numel() else 0.0
