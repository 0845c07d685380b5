"""Numbers in the place of parameters, so that a block can be tried whether or not its own values are there.

Inside :func:`~lightning_mist.model.fakes.isolate.isolated` only, which puts the user's tensors back.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mist.tensors import is_hollow

Slot = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter."""

_POOL = 4_194_301
"""Random numbers that are drawn; larger tensors repeat them. A prime, so that no row or column of a matrix repeats."""


def slots_of(module: nn.Module) -> dict[str, tuple[nn.Parameter, tuple[Slot, ...]]]:
    """Every parameter by its first name inside the module, with all slots that hold it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, tuple[nn.Parameter, tuple[Slot, ...]]] = {}
    for child in module.modules():
        for attribute, parameter in child._parameters.items():
            if parameter is not None:
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
    count = parameter.numel()
    pool = torch.randn(min(count, _POOL), generator=generator).to(dtype)
    noise = pool if count == len(pool) else pool.repeat(-(-count // len(pool)))[:count]
    noise = noise.view(parameter.shape)
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


@contextmanager
def kept_slots(module: nn.Module) -> Iterator[None]:
    """Afterwards the module's parameter slots, buffers and attributes are as before."""
    before = [(child, dict(vars(child)), dict(child._parameters), dict(child._buffers)) for child in module.modules()]
    try:
        yield
    finally:
        for child, space, parameters, buffers in before:
            vars(child).clear()
            vars(child).update(space)
            for own, contents in ((child._parameters, parameters), (child._buffers, buffers)):
                own.clear()
                own.update(contents)  # type: ignore[arg-type]


class WithoutDropout(TorchFunctionMode):
    """Inside, dropout drops nothing, and the coarsest floating-point type that was computed in is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest = torch.float64

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name and args and isinstance(args[0], Tensor):
            return args[0]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            given = {key: 0.0 if key == "dropout_p" else value for key, value in given.items()}
        elif name == "multi_head_attention_forward":
            given["training"] = False
        result = func(*args, **given)
        if isinstance(result, Tensor) and type(result) in (Tensor, nn.Parameter) and result.is_floating_point():
            self.coarsest = max(self.coarsest, result.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result
