"""The module that ``fabric.setup`` gives back in place of the user's: the strategy decides how its calls run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Run = Callable[["PlannedModule", tuple[Any, ...], dict[str, Any]], Any]


class PlannedModule(nn.Module):
    """A module whose calls go through the strategy.

    Attributes:
        module: The user's module, as under ``DistributedDataParallel``.
        parallel: The module wrapped in that, where the plan is plain data parallelism.
    """

    parallel: nn.Module | None

    def __init__(self, module: nn.Module, run: Run) -> None:
        super().__init__()
        self.module = module
        self.train(module.training)
        # No children: what they hold is held once.
        vars(self)["parallel"], vars(self)["_run"] = None, run

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters is."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def redirects(self) -> bool:
        """Whether this call is of another method of the module than ``forward``, as Fabric lets them pass."""
        return getattr(vars(self.module).get("forward"), "__name__", "") == "wrapped_forward"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return _uncompiled(vars(self)["_run"])(self, args, kwargs)


def _uncompiled(function: Run) -> Run:
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]
