"""Values for parameters that have none yet: found where they are needed, one parameter at a time.

A module may be built on torch's meta device, or be too large for any one device. Its parameters are then *hollow*: they
have their shape, type and device, and one element of memory. Each has a source, which gives its values whenever they
are asked for: the recorded operators of its construction, its module's own way to initialise itself, a loaded
checkpoint, or rank 0's host memory.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import renew_flat_weights
from lightning_mist.model.initialization.construction import RECIPE, construction_seed, recipe_of
from lightning_mist.model.trace import module_key
from lightning_mist.tensors import is_hollow
from lightning_mist.without_values import become


class Source(Protocol):
    """Where the values of one parameter come from."""

    def value(self, seed: int) -> Tensor:
        """The values, anywhere, from random numbers of an equal seed on every rank; whoever keeps them copies them."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Values from a checkpoint, possibly mapped from its file."""

    tensor: Tensor

    def value(self, seed: int) -> Tensor:
        """The values, as of any :class:`Source`."""
        return self.tensor


@dataclass(frozen=True, slots=True)
class OnRankZero:
    """Values that rank 0 has; the other ranks get them from there."""

    tensor: Tensor | None

    def value(self, seed: int) -> Tensor:
        """The values, as of any :class:`Source`; on rank 0 only."""
        assert self.tensor is not None
        return self.tensor


@dataclass(frozen=True, slots=True)
class Reset:
    """Values that a module gives itself, its random numbers seeded by its qualified name."""

    owner: nn.Module
    name: str
    attribute: str
    run: Callable[[], Any]

    def value(self, seed: int) -> Tensor:
        """The values, as of any :class:`Source`."""
        held = {name: p for name, p in self.owner._parameters.items() if p is not None}
        data = {name: p.data for name, p in held.items()}
        state = torch.get_rng_state()
        try:
            for p in held.values():
                p.data = torch.empty(p.shape, dtype=p.dtype)
            torch.default_generator.manual_seed(construction_seed(seed, self.name))
            with torch.no_grad():
                self.run()
            return held[self.attribute].data
        finally:
            torch.set_rng_state(state)
            for name, p in held.items():
                p.data = data[name]


def empty_out(parameter: Tensor, device: torch.device | None = None) -> None:
    """Free a parameter's memory; it keeps its shape. What computes with it all the same is not a number."""
    fill = math.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    device = parameter.device if device is None else device
    nothing = torch.full((), fill, dtype=parameter.dtype, device=device).expand(parameter.shape)
    if parameter.is_meta:
        hollow = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
        vars(hollow).update(vars(parameter))
        become(parameter, hollow)
    else:
        parameter.data = nothing


def find_sources(module: nn.Module) -> dict[str, Source]:
    """The source of every parameter on the meta device or with a recipe, by canonical name.

    Buffers on the meta device get their values at once.

    Raises:
        TraceError: If a parameter or buffer has none; names it and its module.
    """
    owners = _owners(module)
    sources: dict[str, Source] = {}
    for name, parameter in module.named_parameters():
        recipe = recipe_of(parameter) if is_hollow(parameter) else None
        if recipe is not None:
            sources[name] = recipe
        elif parameter.is_meta:
            sources[name] = _reset(module, *owners[id(parameter)], "parameter", name)
    for owner_name, owner in module.named_modules():
        missing = [name for name, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
        if missing:
            reset = _reset(module, owner_name, owner, missing[0], "buffer", f"{owner_name}.{missing[0]}".lstrip("."))
            _reset_buffers(owner, reset)
    return sources


def _owners(module: nn.Module) -> dict[int, tuple[str, nn.Module, str]]:
    found: dict[int, tuple[str, nn.Module, str]] = {}
    for name, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (name, owner, attribute))
    return found


def _reset(module: nn.Module, owner_name: str, owner: nn.Module, attribute: str, what: str, name: str) -> Reset:
    """A module's own way to initialise itself, or that of a library's model around it."""
    own = getattr(owner, "reset_parameters", None)
    if callable(own):
        return Reset(owner, owner_name, attribute, own)
    # Models of Hugging Face transformers initialise their modules from outside, by this method.
    path = owner_name.split(".") if owner_name else []
    for length in range(len(path), -1, -1):
        around = getattr(module.get_submodule(".".join(path[:length])), "_init_weights", None)
        if callable(around):
            return Reset(owner, owner_name, attribute, partial(around, owner))
    raise TraceError(
        f"{what} {name} is on the meta device, and nothing says what its values are: {type(owner).__name__} has no "
        "reset_parameters(). Build the module inside `with trainer.init_module(empty_init=True)`, which remembers how "
        "it is initialised, or give the class reset_parameters(), or load values with ckpt_path"
    )


def _reset_buffers(owner: nn.Module, reset: Reset) -> None:
    for name, buffer in owner._buffers.items():
        if buffer is not None and buffer.is_meta:
            owner._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    parameters = {name: p for name, p in owner._parameters.items() if p is not None}
    try:
        for name, p in parameters.items():
            owner._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=False)
        with torch.random.fork_rng(devices=()), torch.no_grad():
            reset.run()
    finally:
        owner._parameters.update(parameters)


def load_hollow(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load a state into a module with hollow parameters: those remember where their values are.

    Parameters keep their identity, and tied ones stay tied. Tensors of the state are kept, not copied.
    """
    slots = [
        (owner._parameters, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]
    module.load_state_dict(state, strict=strict, assign=True)
    for space, name, parameter in slots:
        loaded, space[name] = space[name], parameter
        if loaded is None or loaded is parameter:
            continue
        if is_hollow(parameter):
            setattr(parameter, RECIPE, Loaded(loaded.data))
        else:
            parameter.data.copy_(loaded.data)


def _form(block: nn.Module) -> Any:
    """Equal for blocks whose parameters may stand in for one another."""
    return module_key(block), tuple(name for name, _ in block.named_modules())


@contextmanager
def blocks_alike(
    module: nn.Module, blocks: Sequence[str], parameters: Iterable[nn.Parameter] | None = None
) -> Iterator[None]:
    """Inside, blocks of one form all use the parameters of the first of them, and so make its gradients only."""
    found = [module.get_submodule(name) for name in blocks]
    firsts: dict[Any, nn.Module] = {}
    pairs = [(block, firsts.setdefault(_form(block), block)) for block in found]
    replaceable = {id(parameter) for parameter in (module.parameters() if parameters is None else parameters)}
    changed: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for block, first in pairs:
        for part, model in zip(block.modules(), first.modules(), strict=True):
            for name, parameter in part._parameters.items():
                if parameter is not None and id(parameter) in replaceable and block is not first:
                    changed.append((part._parameters, name, parameter))
                    part._parameters[name] = model._parameters[name]
    renew_flat_weights(module)
    try:
        yield
    finally:
        for space, name, parameter in changed:
            space[name] = parameter
        renew_flat_weights(module)


class InitialValues:
    """Gives hollow parameters of a module their values.

    Args:
        sources: Where values come from, by canonical name, for the same names on every rank.
        seed: Of random numbers, equal on every rank.
        share: Gives every rank rank 0's content of a tensor; called by all ranks at the same time.
    """

    def __init__(
        self,
        module: nn.Module,
        sources: Mapping[str, Source],
        *,
        seed: int,
        device: torch.device,
        is_first: bool = True,
        share: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._module, self._sources, self._seed, self._device = module, dict(sources), seed, device
        self._is_first, self._share = is_first, share
        self._parameters = dict(module.named_parameters())
        for name in self._sources:
            empty_out(self._parameters[name], device)

    @property
    def names(self) -> frozenset[str]:
        """The parameters that have no values of their own."""
        return frozenset(self._sources)

    def materialize(
        self, names: Collection[str], *, alone: bool = False, then: Callable[[str], None] | None = None
    ) -> None:
        """Give parameters their values, contiguous in memory, one after the other.

        All ranks call this at the same time, each with its own names.

        Args:
            names: Canonical names; those that have values already are left alone.
            then: Called after each with its name.
        """
        for name, source in self._sources.items():
            parameter = self._parameters[name]
            is_shared = isinstance(source, OnRankZero) and not alone
            if not is_shared and name not in names:
                continue
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            if self._is_first or not is_shared:
                value.copy_(source.value(self._seed))
            if is_shared:
                assert self._share is not None
                self._share(value)
            if name in names:
                parameter.data = value
                if then is not None:
                    then(name)

    def free(self, names: Collection[str]) -> None:
        """Make parameters hollow again."""
        for name in names:
            empty_out(self._parameters[name])

    def forget(self) -> None:
        """Let go of all sources: from now on values are where they were given."""
        for name in self._sources:
            vars(self._parameters[name]).pop(RECIPE, None)
        self._sources.clear()

    @contextmanager
    def lean(self, blocks: Sequence[str], *, alone: bool = False) -> Iterator[None]:
        """Inside, the module can run, and holds little: of blocks of one form all use the parameters of the first."""
        with blocks_alike(self._module, blocks, [self._parameters[name] for name in self._sources]):
            in_use = {id(parameter) for parameter in self._module.parameters()}
            names = [name for name in self._sources if id(self._parameters[name]) in in_use]
            try:
                self.materialize(names, alone=alone)
                yield
            finally:
                self.free(names)
