"""Run a user's step without leaving a trace in the module: all but gradients, which the caller keeps, comes back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.fakes.fake_modules import form_of, parameter_slots, renew_flat_weights
from lightning_mist.model.user_code import unchanged
from lightning_mist.recomputation import neutral_checkpointing
from lightning_mist.tensors import substitute

_HOST = torch.device("cpu")


@contextmanager
def isolated(module: nn.Module) -> Iterator[None]:
    """As :func:`~lightning_mist.model.user_code.unchanged`; inside, every operator of a step can be seen.

    Compiled functions run eagerly, and the user's own activation checkpointing is off (see
    :mod:`lightning_mist.recomputation`).
    """
    with unchanged(module), neutral_checkpointing(), torch.compiler.set_stance("force_eager"):
        yield


def _fake_like(tensor: torch.Tensor, mode: FakeTensorMode, home: torch.device) -> torch.Tensor:
    with mode:
        return form_of(tensor, home if tensor.is_meta else tensor.device)


def substitute_parameters(
    module: nn.Module, mode: FakeTensorMode | None, owners: Mapping[tuple[str, str], object], home: torch.device = _HOST
) -> tuple[nn.Parameter, ...]:
    """Put substitutes into every parameter slot, inside :func:`isolated` only.

    Args:
        mode: Makes fake substitutes; ``None`` for substitutes that share the real values.
        owners: For a slot ``(module name, attribute name)``, who uses it: slots of one parameter with different owners
            get different substitutes. Slots that are not named count as one owner.

    Returns:
        The substitutes, in the order of the slots that they fill first.
    """
    made: dict[tuple[int, object], nn.Parameter] = {}
    for name, item, attribute, parameter in parameter_slots(module):
        key = (id(parameter), owners.get((name, attribute)))
        if key not in made:
            data = _fake_like(parameter, mode, home) if mode is not None else parameter.detach()
            made[key] = substitute(parameter, data, requires_grad=parameter.requires_grad)
        item._parameters[attribute] = made[key]
    for item in module.modules():
        for attribute, buffer in item._buffers.items():
            if mode is not None and buffer is not None and buffer.is_meta:
                item._buffers[attribute] = _fake_like(buffer, mode, home)
    renew_flat_weights(module)
    return tuple(made.values())


def fake_parameters(module: nn.Module, mode: FakeTensorMode) -> dict[int, tuple[str, str]]:
    """Put a fake in the place of every parameter, another one for each slot, so that uses of tied slots differ.

    Returns:
        Module name and attribute of each fake by its ``id``. The module keeps the fakes alive.
    """
    slots = [(name, attribute) for name, _, attribute, _ in parameter_slots(module)]
    fakes = substitute_parameters(module, mode, dict(zip(slots, slots, strict=True)), torch.device("meta"))
    return {id(fake): slot for fake, slot in zip(fakes, slots, strict=True)}
