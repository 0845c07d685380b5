"""The optimizer that trains a module where nobody names one: what its own ``configure_optimizers`` makes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.fakes import isolated, quiet_fakes, substitute_parameters

_INHERITED = "LightningModule.configure_optimizers"
"""Lightning's own method, which makes nothing, by its qualified name: this room does not import Lightning."""

_MANUAL = (
    "automatic_optimization is off: training_step is taken for one forward whose loss is then differentiated, and one "
    "optimizer step; what the module does by hand beyond that (several backwards or optimizers) is not in these figures"
)


def optimizer_to_describe(
    module: nn.Module,
    given: torch.optim.Optimizer | type[torch.optim.Optimizer] | None,
    context: Callable[[], AbstractContextManager[Any]],
) -> tuple[torch.optim.Optimizer | type[torch.optim.Optimizer] | None, tuple[str, ...]]:
    """What is supposed to train a module, and what to say about that.

    The module's ``configure_optimizers`` is asked with stand-ins without values in its parameters' places, so that
    nothing of the module changes.

    Args:
        module: The module.
        given: What the user named; it is taken as it is.
        context: Makes the context of the module's precision.

    Returns:
        The optimizer, None if nobody says one, and notes.
    """
    notes: tuple[str, ...] = (_MANUAL,) if getattr(module, "automatic_optimization", True) is False else ()
    configure = getattr(module, "configure_optimizers", None)
    if given is not None or not callable(configure) or getattr(configure, "__qualname__", "") == _INHERITED:
        return given, notes
    with isolated(module), quiet_fakes(), context():
        substitute_parameters(module, FakeTensorMode(allow_non_fake_inputs=True), {})
        try:
            made = configure()
        except Exception as error:
            why = (
                f"configure_optimizers cannot be asked ({type(error).__name__}: {error}); name the optimizer, as in "
                "optimizer=torch.optim.SGD or --optimizer SGD"
            )
            return None, (*notes, why)
    found = list(_optimizers_in(made))
    if not found:
        return None, (*notes, f"configure_optimizers returned {type(made).__name__} without an optimizer")
    largest = max(found, key=_elements)
    if len(found) > 1:
        several = ", ".join(type(optimizer).__name__ for optimizer in found)
        notes += (
            f"configure_optimizers makes {len(found)} optimizers ({several}): all parameters are counted as if "
            f"{type(largest).__name__}, which has most of them, trained them all",
        )
    return largest, notes


def _optimizers_in(made: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in anything that Lightning allows ``configure_optimizers`` to return."""
    if isinstance(made, torch.optim.Optimizer):
        yield made
    elif isinstance(made, dict):
        yield from _optimizers_in(made.get("optimizer"))
    elif isinstance(made, (list, tuple)):
        for item in made:
            yield from _optimizers_in(item)


def _elements(optimizer: torch.optim.Optimizer) -> int:
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
