"""Fake tensors in the place of parameters."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_mist.attributes import replaced
from lightning_mist.model.operators import memory_rules
from lightning_mist.plan.calls import is_simple
from lightning_mist.tensors import is_hollow, substitute


def fake_parameters(module: nn.Module, mode: FakeTensorMode) -> dict[int, tuple[str, str]]:
    """Put a fake in the place of every parameter, another one for each slot, so that uses of tied slots differ.

    Parameters without storage of their own (expanded from one element) are understood as contiguous.

    Returns:
        Module name and attribute of each fake by its ``id``. The module keeps the fakes alive.
    """
    found = [
        (module_name, child, name, parameter)
        for module_name, child in module.named_modules()
        for name, parameter in child._parameters.items()
        if parameter is not None
    ]
    with mode:
        data = [form_of(parameter, parameter.device) for *_, parameter in found]
    slots: dict[int, tuple[str, str]] = {}
    for (module_name, child, name, parameter), tensor in zip(found, data, strict=True):
        fake = substitute(parameter, tensor, requires_grad=parameter.requires_grad)
        child._parameters[name] = fake
        slots[id(fake)] = (module_name, name)
    renew_flat_weights(module)
    return slots


def renew_flat_weights(module: nn.Module) -> None:
    """Let recurrent layers, which keep their weights in a list besides, know what their parameter slots hold now."""
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child.__dict__["_flat_weights"] = [child._parameters.get(name) for name in child._flat_weights_names]


def has_values(module: nn.Module) -> bool:
    """Whether every parameter has numbers of its own."""
    return not any(map(is_hollow, module.parameters()))


def form_of(tensor: Tensor, device: torch.device) -> Tensor:
    """An uninitialised tensor of the same form; contiguous if the original has no storage of its own."""
    if is_hollow(tensor) and not tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Inside, torch neither warns of hooks or of gradients of tensors that meet a fake, nor logs what a fake cannot do.

    It looks at ``.grad`` of a real tensor when making its fake, and hides its own warning only where warnings are shown
    and not where they are errors. An operator that fails on fakes is in the reason that the map gives; one that there
    is a rule for follows it.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with replaced(log, disabled=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
        # Our global hooks fire twice for a wrapper of compiled code and what is in it, which is what they are for.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        with memory_rules():
            yield


def fake_like(fake: FakeTensor, tensor: Tensor) -> Tensor:
    """A fake of the same mode as ``fake`` with the form of ``tensor``."""
    with fake.fake_mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def address_of(tensor: Tensor) -> int:
    """Address of a real tensor's storage; 0 for a fake."""
    if isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def storage_of(tensor: Tensor) -> int:
    """Identity of a tensor's storage, fake or not."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def state_of(leaf: Any) -> Any:
    """Something that differs after an argument was changed in a way that others can see."""
    if isinstance(leaf, Tensor):
        return id(leaf), 0 if isinstance(leaf, FakeTensor) or leaf.is_inference() else leaf._version
    if is_simple(leaf):
        return leaf
    return id(leaf), tuple((name, id(value)) for name, value in getattr(leaf, "__dict__", {}).items())
