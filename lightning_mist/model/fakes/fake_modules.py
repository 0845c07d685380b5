"""What stands in for the user's tensors where a step is looked at: fakes, smaller batches, numbers for parameters."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from lightning_mist.attributes import replaced
from lightning_mist.model.user_code import unchanged
from lightning_mist.plan.calls import is_simple
from lightning_mist.recomputation import neutral_checkpointing
from lightning_mist.tensors import (
    batch_rows,
    batch_tensors,
    call_without_dropout,
    is_hollow,
    is_row_list,
    rebuild,
    sequence_length,
    substitute,
)
from lightning_mist.without_values import memory_rules, without_warnings


def parameter_slots(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every place that holds a parameter: a module's name, the module, the attribute, and the parameter."""
    for name, child in module.named_modules():
        for attribute, parameter in child._parameters.items():
            if parameter is not None:
                yield name, child, attribute, parameter


def renew_flat_weights(module: nn.Module) -> None:
    """Let recurrent layers, which keep their weights in a list besides, know what their parameter slots hold now."""
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child.__dict__["_flat_weights"] = [child._parameters.get(name) for name in child._flat_weights_names]


def has_values(module: nn.Module) -> bool:
    """Whether every parameter has numbers of its own."""
    return not any(map(is_hollow, module.parameters()))


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Inside, torch neither warns of hooks or of gradients of tensors that meet a fake, nor logs what a fake cannot do.

    An operator that fails on fakes is in the reason that the map gives; one that there is a rule for follows it.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with replaced(log, disabled=True), without_warnings(), warnings.catch_warnings():
        # Our global hooks fire twice for a wrapper of compiled code and what is in it, which is what they are for.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        with memory_rules():
            yield


_HOST = torch.device("cpu")


def fake_like(tensor: Tensor, mode: FakeTensorMode, home: torch.device = _HOST) -> Tensor:
    """A fake of the same form; contiguous if the original has no storage of its own, at ``home`` if it is nowhere."""
    device = home if tensor.is_meta else tensor.device
    with mode:
        if is_hollow(tensor) and not tensor.is_meta:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


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


# Batches of other sizes made from a real one: rows repeated, sequences thinned out.


def convert_batch(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch in containers of its own with every tensor changed."""
    return rebuild(batch, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else None)


def _taken(leaf: Any, dim: int, positions: Tensor) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.index_select(dim, positions.to(leaf.device))
    return leaf.take(positions.numpy(), axis=dim)


def resize_batch(batch: Any, rows: int, length: int | None) -> Any:
    """A batch of ``rows`` rows, the rows of the given one over and over, thinned out to ``length`` positions.

    Positions are taken evenly from the first to the last, so that padding at either end stays: a model may well run
    other operators on a batch without any. Every dimension after the first that is as long as the sequence is thinned,
    so that masks of several dimensions fit too.

    Raises:
        ValueError: If it is not certain what the rows of the batch are.
    """
    have, full = batch_rows(batch), sequence_length(batch)
    if have is None:
        raise ValueError(
            f"rows of a batch of type {type(batch).__name__} cannot be counted: its tensors must share dimension 0"
        )
    again = torch.arange(rows) % have
    thinned = length is not None and full is not None and length < full
    evenly = torch.arange(length or 0) * ((full or 1) - 1) // max(1, (length or 0) - 1)

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, (Tensor, np.ndarray)):
            return type(leaf)(leaf[i % have] for i in range(rows)) if is_row_list(leaf, have) else None
        changed = _taken(leaf, 0, again) if leaf.ndim and rows != have else leaf
        for dim in range(1, changed.ndim if thinned else 0):
            if changed.shape[dim] == full:
                changed = _taken(changed, dim, evenly)
        return changed.contiguous() if isinstance(changed, Tensor) and changed.ndim else changed

    return rebuild(batch, change)


def device_of(batch: Any) -> torch.device:
    """Where a batch is: the device of its first tensor that is not on the host, if any."""
    devices = [tensor.device for tensor in batch_tensors(batch)]
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


# Numbers in the place of parameters, so that a block can be tried whether or not its own values are there.
#
# Inside :func:`isolated` only, which puts the user's tensors back.

Slot = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""


def slots_of(module: nn.Module) -> dict[str, tuple[nn.Parameter, tuple[Slot, ...]]]:
    """Every parameter by its first name inside the module, with all slots that hold it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, tuple[nn.Parameter, tuple[Slot, ...]]] = {}
    for _, child, attribute, parameter in parameter_slots(module):
        _, slots = found.get(names[id(parameter)], (parameter, ()))
        found[names[id(parameter)]] = parameter, (*slots, (child, attribute))
    return found


def put(slots: tuple[Slot, ...], value: Tensor) -> None:
    """Let slots hold a tensor, be it a parameter or not."""
    for module, attribute in slots:
        module._parameters[attribute] = value  # type: ignore[assignment]


def thin(parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A tensor of a parameter's shape that takes the memory of one row: random, all rows equal."""
    shape = parameter.shape
    row = torch.randn(shape[-1:], generator=generator).to(dtype)
    return (row * 0.1 + (1.0 if len(shape) < 2 else 0.0)).expand(shape)


def filled(parameter: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values for a parameter in a floating-point type on the host: near its own, or random ones of common size.

    Its own are disturbed a little, since zeros, with which some layers start, would hide what flows through them.
    """
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype) if is_hollow(parameter) else parameter.detach().cpu()
    noise = torch.randn(parameter.shape, generator=generator).to(dtype)
    if not is_hollow(parameter):
        return parameter.detach().to("cpu", dtype) + 0.02 * noise
    if parameter.dim() < 2:
        return 1 + 0.1 * noise
    scale: float = parameter.shape[-1] ** -0.5
    return noise * scale


def convert(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy on a device, in a floating-point type if it is of one; numbers for one that has none."""
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=kept, device=device)
    return tensor.detach().to(device, kept, copy=True)


def convert_plain_tensors(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace buffers and tensors kept as attributes by copies on a device, in a floating-point type.

    Attributes that name a device name this one too: steps make tensors there (``self.device`` of a LightningModule).
    """
    for child in module.modules():
        for space in (child._buffers, vars(child)):
            for name, value in list(space.items()):
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    space[name] = convert(value, dtype, device)
                elif isinstance(value, torch.device):
                    space[name] = device  # type: ignore[assignment]


class WithoutDropout(TorchFunctionMode):
    """Inside, dropout drops nothing, and the coarsest floating-point type that was computed in is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest = torch.float64

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = call_without_dropout(func, args, kwargs or {})
        if args and result is args[0]:
            return result  # nothing was computed
        if isinstance(result, Tensor) and type(result) in (Tensor, nn.Parameter) and result.is_floating_point():
            self.coarsest = max(self.coarsest, result.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result


# Running a user's step without leaving a trace in the module: all but gradients, which the caller keeps, comes back.


@contextmanager
def isolated(module: nn.Module) -> Iterator[None]:
    """As :func:`~lightning_mist.model.user_code.unchanged`; inside, every operator of a step can be seen.

    Compiled functions run eagerly, and the user's own activation checkpointing is off (see
    :mod:`lightning_mist.recomputation`).
    """
    with unchanged(module), neutral_checkpointing(), torch.compiler.set_stance("force_eager"):
        yield


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
            data = fake_like(parameter, mode, home) if mode is not None else parameter.detach()
            made[key] = substitute(parameter, data, requires_grad=parameter.requires_grad)
        item._parameters[attribute] = made[key]
    for item in module.modules():
        for attribute, buffer in item._buffers.items():
            if mode is not None and buffer is not None and buffer.is_meta:
                item._buffers[attribute] = fake_like(buffer, mode, home)
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
