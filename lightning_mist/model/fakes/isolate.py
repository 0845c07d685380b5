"""Run a user's step without leaving a trace in the module: all but gradients, which the caller keeps, comes back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.fakes.fake_modules import form_of, renew_flat_weights
from lightning_mist.model.user_code import Generators, ModuleState
from lightning_mist.recomputation import neutral_checkpointing

_HOST = torch.device("cpu")

Handler = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a block's forward with its position, its own forward, and its arguments."""


@contextmanager
def isolated(module: nn.Module) -> Iterator[None]:
    """Whatever happens to the module inside the ``with`` is undone at its end.

    Covers attributes of every submodule, buffers, hooks, training flags, parameters put into other slots, and random
    state. Inside, compiled functions run eagerly, so that operators stay visible, and the user's own activation
    checkpointing is off (see :mod:`lightning_mist.recomputation`).
    """
    state, generators = ModuleState(module, with_contents=True), Generators()
    try:
        with neutral_checkpointing(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        state.restore()
        generators.restore()


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
    for name, item in module.named_modules(remove_duplicate=True):
        for attribute, parameter in item._parameters.items():
            if parameter is None:
                continue
            key = (id(parameter), owners.get((name, attribute)))
            if key not in made:
                data = _fake_like(parameter, mode, home) if mode is not None else parameter.detach()
                made[key] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            item._parameters[attribute] = made[key]
        if mode is not None:
            for attribute, buffer in item._buffers.items():
                if buffer is not None and buffer.is_meta:
                    item._buffers[attribute] = _fake_like(buffer, mode, home)
    renew_flat_weights(module)
    return tuple(made.values())


@contextmanager
def intercepted(blocks: Sequence[nn.Module], handler: Handler) -> Iterator[None]:
    """Let ``handler`` be called instead of the forward of each block, inside :func:`isolated` only."""

    def wrap(position: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return handler(position, original, args, kwargs)

        return forward

    own = [block.__dict__.get("forward") for block in blocks]
    for position, block in enumerate(blocks):
        block.__dict__["forward"] = wrap(position, block.forward)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            if forward is None:
                block.__dict__.pop("forward", None)
            else:
                block.__dict__["forward"] = forward
