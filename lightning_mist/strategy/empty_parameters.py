"""Modules that no device ever holds whole: where Lightning asks how tensors are made, and what stands in for values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mist.attributes import replaced
from lightning_mist.devices import ops_of
from lightning_mist.errors import PlanError
from lightning_mist.model import MASTERS_PRECISION
from lightning_mist.model.initialization import (
    InitialValues,
    OnRankZero,
    deferred_construction,
    empty_out,
    find_sources,
)
from lightning_mist.runtime.parameters import check_gradient_types
from lightning_mist.strategy.ranks import of_all_ranks
from lightning_mist.tensors import is_hollow


class DeferredConstructions:
    """Counts the modules that are built without values, so that each draws random numbers of its own."""

    _count, _is_open = 0, False

    @contextmanager
    def context(self, empty: bool | None) -> Iterator[None]:
        """Inside, new parameters have no values if ``empty``; else they are made in host memory."""
        if not empty or self._is_open:
            yield
            return
        self._count += 1
        with replaced(self, _is_open=True), deferred_construction(self._count - 1):
            yield


def device_limit(memory_limit: int | None, device: torch.device) -> int | None:
    """Bytes that a module's parameters may take before no device is to hold them all; ``None`` if that is unknown."""
    use = ops_of(device).memory() if memory_limit is None else None
    return memory_limit if use is None else use.total


def initial_values(
    module: nn.Module, device: torch.device, limit: int | None, *, master_weights: bool = False
) -> InitialValues | None:
    """Make parameters hollow that have no values yet, or all of them if a device cannot hold them.

    Every rank calls this at the same time.

    Args:
        module: The user's module, in the precision that it will have, or before with master weights.
        limit: Bytes that parameters may take on this rank's device, if known.
        master_weights: Whether trained ones take 4 bytes more than the two that every one takes.

    Returns:
        What gives them their values, the same on every rank; ``None`` if all have values and may have them.

    Raises:
        TraceError: If a parameter has no values and nothing says what they are.
        PlanError: If ranks have built different modules, or rank 0 has lost its values.
    """
    sources: dict[str, Any] = dict(find_sources(module))
    parameters = dict(module.named_parameters())
    others = {name: parameter for name, parameter in parameters.items() if name not in sources}
    is_absent = any(is_hollow(parameter) for parameter in others.values())
    sizes = [
        p.element_size() if not (master_weights and p.is_floating_point()) else 6 if p.requires_grad else 2
        for p in parameters.values()
    ]
    whole = sum(p.numel() * size for p, size in zip(parameters.values(), sizes, strict=True))
    is_large = limit is not None and whole > limit
    answers = of_all_ranks((tuple(sources), is_absent, is_large, torch.initial_seed()))
    for rank, (names, *_) in enumerate(answers):
        if names != answers[0][0]:
            raise PlanError(
                f"rank {rank} has {len(names)} parameters without values and rank 0 has {len(answers[0][0])}: every "
                "rank must build the module in the same way, on the meta device or not"
            )
    if any(absent or large for _, absent, large, _ in answers):
        if answers[0][1]:
            raise PlanError(
                "the parameters of the module on rank 0 have no values (they were freed): build the module anew, or "
                "load its values with ckpt_path"
            )
        is_first = dist.get_rank() == 0
        sources |= {name: OnRankZero(parameter.data if is_first else None) for name, parameter in others.items()}
    if not sources:
        return None
    return InitialValues(
        module,
        {name: sources[name] for name in parameters if name in sources},
        seed=answers[0][3],
        device=device,
        is_first=dist.get_rank() == 0,
        share=lambda tensor: dist.broadcast(tensor, 0),
    )


def has_empty_parameters(module: nn.Module) -> bool:
    """Whether some parameter of a module has no values here."""
    return any(is_hollow(parameter) for parameter in module.parameters())


def hollow_on_host(module: nn.Module) -> None:
    """Let parameters without values be on the host, where moving the module to it would give all of them memory."""
    for parameter in module.parameters():
        if is_hollow(parameter):
            empty_out(parameter, torch.device("cpu"))


def refuse_state_dict(module: nn.Module, is_away: Callable[[Tensor], bool], why: str) -> list[Any]:
    """Refuse ``state_dict`` of what holds parameters whose values are away, with PlanError; what ends that."""

    def has_away(part: nn.Module) -> bool:
        return any(map(is_away, part.parameters(recurse=False)))

    def refuse(part: nn.Module, prefix: str, keep_vars: bool) -> None:
        if has_away(part):
            raise PlanError(f"state_dict() of a {type(part).__name__} {why}")

    parts = filter(has_away, module.modules())
    return [part.register_state_dict_pre_hook(refuse) for part in parts]  # type: ignore[no-untyped-call]


# Master weights ---------------------------------------------------------------------------------------------------


def check_master_weights(precision: str) -> None:
    """Refuse master weights where they have no meaning, or cannot be had, with PlanError."""
    if precision != MASTERS_PRECISION:
        also = ", whose gradients would have to be scaled" if precision == "16-true" else ""
        mixed = ", whose parameters are their own masters" if precision.endswith("-mixed") else ""
        raise PlanError(
            f"master_weights=True with precision={precision!r}{also}{mixed}: masters are for parameters that are "
            f"computed with in bfloat16; use precision={MASTERS_PRECISION!r}, or master_weights=False"
        )
    check_gradient_types()


def take_masters(module: nn.Module, plugin: Any) -> dict[str, Tensor]:
    """The values of trained parameters in 32 bits, by canonical name; the module is converted to its precision."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad and p.is_floating_point()}
    with _StaysHollow():  # type: ignore[no-untyped-call]
        masters = {name: parameter.data.float() for name, parameter in trained.items()}
    convert(module, plugin)
    return masters


def convert(module: nn.Module, plugin: Any) -> None:
    """Convert a module to its precision; parameters without values get no memory."""
    with _StaysHollow():  # type: ignore[no-untyped-call]
        plugin.convert_module(module)


class _StaysHollow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Converts one element of what has no values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = func is torch.ops.aten._to_copy.default and not args[0].is_meta and is_hollow(args[0])
        if not is_copy or any(args[0].stride()):  # what has several values is no parameter without any
            return func(*args, **(kwargs or {}))
        one = args[0].as_strided((), ())
        return func(one, **{**(kwargs or {}), "memory_format": None}).expand(args[0].shape)
