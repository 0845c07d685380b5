"""Modules built without their values: what constructors do to tensors is written down, and done when it is needed.

Inside :func:`deferred_construction` every new tensor is a fake: it has a shape, a type and a device, and no memory.
Operators on it are noted in order. Parameters leave the context on torch's meta device, each with a
:class:`RecordedValues` way to its values: the noted operators that led to it, done again for it alone. Buffers and
other tensors that are still there get their values at once; so do numbers that a constructor reads back.

Random operators are seeded by their number among all of the construction, so that a parameter has the same values
whatever else is made, in whatever order, on whatever rank.
"""

import gc
import hashlib
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_mist.attributes import items_replaced
from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import parameter_slots, quiet_fakes, renew_flat_weights
from lightning_mist.model.operator_costs import written
from lightning_mist.model.trace import module_key
from lightning_mist.tensors import is_hollow
from lightning_mist.without_values import become, fake_mode

RECIPE = "_mist_recipe"
"""Attribute of a parameter without values that says how they are found; it goes where the parameter goes."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor as a view of a numbered storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Constant:
    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        if self.tensor._version != self.version:
            raise TraceError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the module was built from has changed since: build "
                "the module again, or leave the tensor as it is until training has begun"
            )
        return self.tensor.clone()


@dataclass(frozen=True, slots=True)
class _Operation:
    name: tuple[str, str, str]
    call: Any
    reads: frozenset[int]
    makes: tuple[tuple[int, _Place], ...]
    is_random: bool

    def function(self) -> Any:
        return reduce(getattr, self.name, torch.ops)


class Recording:
    """The operators of a construction; random numbers differ by how many constructions there were before."""

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self.operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        self._numbers: dict[int, int] = {}
        # Kept, so that no later storage has the address of an earlier one.
        self._storages: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: fake storages cannot go there, and nothing is noted there."""
        return {**vars(self), "_numbers": {}, "_storages": []}

    def place(self, tensor: Tensor) -> _Place:
        """Where a fake tensor is."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
        return _Place(number, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a fake tensor's storage was seen before."""
        return tensor.untyped_storage()._cdata in self._numbers

    def note(self, function: Any, call: Any, written: Sequence[int], output: Any) -> None:
        """Keep an operator that wrote to storages or made one, its arguments as before it; views leave no trace."""
        makes = tuple(
            (index, self.place(leaf))
            for index, leaf in enumerate(tree_leaves(output))
            if isinstance(leaf, FakeTensor) and not self.knows(leaf)
        )
        writes = [*written, *(place.storage for _, place in makes)]
        if not writes:
            return
        reads = frozenset(leaf.storage for leaf in tree_leaves(call) if isinstance(leaf, _Place))
        namespace, _, name = function._schema.name.partition("::")
        for storage in dict.fromkeys(writes):
            self._writers.setdefault(storage, []).append(len(self.operations))
        self.operations.append(
            _Operation(
                name=(namespace, name, function._overloadname),
                call=call,
                reads=reads,
                makes=makes,
                is_random=torch.Tag.nondeterministic_seeded in function.tags,
            )
        )

    def values(self, places: Sequence[_Place], seed: int) -> list[Tensor]:
        """Real tensors for places, which share memory where the places do. torch's generators stay as they were."""
        real: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=()), _disable_current_modes(), torch.no_grad():
            for index in self._needed({place.storage for place in places}):
                self._redo(index, real, seed)
            return [_view(real, place) for place in places]

    def _needed(self, targets: set[int]) -> list[int]:
        # Backwards through the operators: what one reads is needed as it was before that operator.
        waiting = [-index for storage in targets for index in self._writers.get(storage, ())]
        heapq.heapify(waiting)
        found: list[int] = []
        asked: dict[int, int] = {}
        while waiting:
            index = -heapq.heappop(waiting)
            if found and found[-1] == index:
                continue
            found.append(index)
            for storage in self.operations[index].reads:
                # Operators come in falling order, so the first time a storage is asked for covers all later ones.
                if storage not in asked and storage not in targets:
                    asked[storage] = index
                    for writer in self._writers.get(storage, ()):
                        if writer < index:
                            heapq.heappush(waiting, -writer)
        return found[::-1]

    def _redo(self, index: int, real: dict[int, torch.UntypedStorage], seed: int) -> None:
        operation = self.operations[index]
        own_seed = construction_seed(seed, self._number, index)

        def real_one(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return _view(real, leaf)
            if isinstance(leaf, _Constant):
                return leaf.value()
            return torch.Generator(leaf.device).manual_seed(own_seed) if isinstance(leaf, _GeneratorOn) else leaf

        args, kwargs = tree_map(real_one, operation.call)
        if operation.is_random:
            torch.default_generator.manual_seed(own_seed)
        output = tree_leaves(operation.function()(*args, **kwargs))
        for position, place in operation.makes:
            made = output[position]
            if (tuple(made.stride()), made.storage_offset()) != (place.stride, place.offset):
                laid_out = torch.empty_strided(place.size, place.stride, dtype=made.dtype, device=made.device)
                made = laid_out.copy_(made)
            real[place.storage] = made.untyped_storage()


@dataclass(frozen=True, slots=True)
class _GeneratorOn:
    device: torch.device


@dataclass(frozen=True, slots=True)
class RecordedValues:
    """The values of a parameter whose construction was recorded."""

    recording: Recording
    place: _Place

    def value(self, seed: int) -> Tensor:
        """The values, in a tensor of their own on the host."""
        return self.recording.values([self.place], seed)[0]


def _view(real: Mapping[int, torch.UntypedStorage], place: _Place) -> Tensor:
    storage = real[place.storage]
    return torch.empty(0, dtype=place.dtype, device=storage.device).set_(
        storage, place.offset, place.size, place.stride
    )


def construction_seed(*key: object) -> int:
    """A seed from numbers and names: equal for equal ones, in any process."""
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators on fake tensors, and does for real what needs numbers."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changed = list(written(func, args, kwargs))
        is_real = any(not isinstance(tensor, FakeTensor) for tensor in changed)
        if is_real or torch.Tag.data_dependent_output in func.tags:
            result = self._really(func, args, kwargs)
            return changed[0] if is_real else result
        if torch.Tag.dynamic_output_shape in func.tags:
            result = self._really(func, args, kwargs)
            return tree_map(lambda leaf: self._constant(leaf) if isinstance(leaf, Tensor) else leaf, result)
        call = tree_map(self._argument, (args, kwargs))
        storages = [self.recording.place(tensor).storage for tensor in changed]
        output = func(*args, **kwargs)
        self.recording.note(func, call, storages, output)
        return output

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return self.recording.place(leaf)
        if isinstance(leaf, Tensor):
            return _Constant(leaf, leaf._version)
        if isinstance(leaf, torch.Generator):
            return _GeneratorOn(leaf.device)
        return leaf

    def _constant(self, tensor: Tensor) -> Tensor:
        clone = torch.ops.aten.clone.default
        output: Tensor = clone(tensor)
        self.recording.note(clone, ((_Constant(tensor, tensor._version),), {}), (), output)
        return output

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        places = [self.recording.place(fake) for fake in fakes]
        values = iter(self.recording.values(places, torch.initial_seed()))
        leaves = [next(values) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, structure)
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)


class _Copies(TorchFunctionMode):
    """Copies fake tensors as tensors are copied, not with the mode that they belong to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            source, memo = args
            if id(source) not in memo:
                copied = source.detach().clone().requires_grad_(source.requires_grad)
                vars(copied).update({name: value for name, value in vars(source).items() if name not in vars(copied)})
                memo[id(source)] = copied
            return memo[id(source)]
        return func(*args, **kwargs)


@contextmanager
def deferred_construction(number: int = 0) -> Iterator[None]:
    """Inside, modules are built without memory; their parameters leave it on the meta device, with a way to values.

    Constructors see tensors of the device that they ask for. Afterwards buffers and other tensors have their values.
    Weights cannot be loaded inside, only into what was built, with ``ckpt_path``.

    Args:
        number: How many such constructions there were before in this process, the same on all ranks.
    """
    recording = Recording(number)
    mode = fake_mode()
    with quiet_fakes(), _Copies(), mode, _Recorder(recording):
        plain = frozenset(vars(torch.empty(0)))
        yield
    _leave(recording, mode, plain)


def _leave(recording: Recording, mode: FakeTensorMode, plain: frozenset[str]) -> None:
    """Turn every fake that is still there into a parameter on the meta device, or into a tensor with its values."""
    gc.collect()
    fakes = [item for item in gc.get_objects() if type(item) is FakeTensor and item.fake_mode is mode]
    others = [fake for fake in fakes if not isinstance(fake, nn.Parameter)]
    for parameter in fakes:
        if isinstance(parameter, nn.Parameter):
            data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            empty = nn.Parameter(data, requires_grad=parameter.requires_grad)
            setattr(empty, RECIPE, RecordedValues(recording, recording.place(parameter)))
            _turn(parameter, empty, plain)
    by_storage: dict[int, list[Tensor]] = {}
    for item in others:
        if recording.knows(item):
            by_storage.setdefault(recording.place(item).storage, []).append(item)
    for group in by_storage.values():
        values = recording.values([recording.place(fake) for fake in group], torch.initial_seed())
        for fake, value in zip(group, values, strict=True):
            _turn(fake, value.requires_grad_(fake.requires_grad), plain)


def _turn(fake: Tensor, into: Tensor, plain: frozenset[str]) -> None:
    """Let the object that was a fake be another tensor, with the attributes that the user gave it."""
    for name, value in vars(fake).items():
        if name not in plain and name != "_is_param":
            setattr(into, name, value)
    become(fake, into)


def recipe_of(parameter: nn.Parameter) -> Any:
    """How the values of a parameter are found, if it has none yet and there is a way; ``None`` otherwise."""
    return getattr(parameter, RECIPE, None)


# Values for parameters that have none yet: found where they are needed, one parameter at a time.
#
# A module may be built on torch's meta device, or be too large for any one device. Its parameters are then *hollow*:
# they have their shape, type and device, and one element of memory. Each has a source, which gives its values whenever
# they are asked for: the recorded operators of its construction, its module's own way to initialise itself, a loaded
# checkpoint, or rank 0's host memory.


class Source(Protocol):
    """Where the values of one parameter come from."""

    def value(self, seed: int) -> Tensor:
        """The values, anywhere, from random numbers of an equal seed on every rank; whoever keeps them copies them."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Values from a checkpoint, possibly mapped from its file."""

    tensor: Tensor | None

    def value(self, seed: int) -> Tensor:
        """The values, as of any :class:`Source`."""
        assert self.tensor is not None
        return self.tensor


class OnRankZero(Loaded):
    """Values that rank 0 has; the other ranks, which have none, get them from there."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Values that a module gives itself, its random numbers seeded by its qualified name."""

    owner: nn.Module
    name: str
    attribute: str
    run: Callable[[], Any]
    forms: Mapping[str, Tensor]

    def value(self, seed: int) -> Tensor:
        """The values, as of any :class:`Source`."""
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(construction_seed(seed, self.name))
            return self.fill()[self.attribute].data

    def fill(self) -> dict[str, nn.Parameter]:
        """Let the module initialise itself: its buffers, and parameters of its own ones' forms, which are returned."""
        # What is in their place may be a part by now, or of the type that is computed in.
        made = {name: torch.empty(form.shape, dtype=form.dtype) for name, form in self.forms.items()}
        parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in made.items()}
        for name, parameter in parameters.items():
            # Users' own ways to initialise ask for what they have noted there.
            vars(parameter).update(vars(self.owner._parameters[name]))
        with items_replaced([(self.owner._parameters, *item) for item in parameters.items()]), torch.no_grad():
            self.run()
        return parameters


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
    owners: dict[int, tuple[str, nn.Module, str]] = {}
    for owner_name, owner, attribute, parameter in parameter_slots(module):
        owners.setdefault(id(parameter), (owner_name, owner, attribute))
    sources: dict[str, Source] = {}
    for name, parameter in module.named_parameters():
        recipe = recipe_of(parameter) if is_hollow(parameter) else None
        if recipe is not None:
            sources[name] = recipe
        elif parameter.is_meta:
            sources[name] = _reset(module, *owners[id(parameter)], "parameter", name)
    for owner_name, owner in module.named_modules():
        missing = {name: b for name, b in owner._buffers.items() if b is not None and b.is_meta}
        if missing:
            first = next(iter(missing))
            reset = _reset(module, owner_name, owner, first, "buffer", f"{owner_name}.{first}".lstrip("."))
            owner._buffers.update((name, torch.empty(b.shape, dtype=b.dtype)) for name, b in missing.items())
            with torch.random.fork_rng(devices=()):
                reset.fill()
    return sources


def _reset(module: nn.Module, owner_name: str, owner: nn.Module, attribute: str, what: str, name: str) -> Reset:
    """A module's own way to initialise itself, or that of a library's model around it."""
    own = getattr(owner, "reset_parameters", None)
    forms = {n: torch.empty_like(p, device="meta") for n, p in owner._parameters.items() if p is not None}
    if callable(own):
        return Reset(owner, owner_name, attribute, own, forms)
    # Models of Hugging Face transformers initialise their modules from outside, by this method.
    path = owner_name.split(".") if owner_name else []
    for length in range(len(path), -1, -1):
        around = getattr(module.get_submodule(".".join(path[:length])), "_init_weights", None)
        if callable(around):
            return Reset(owner, owner_name, attribute, partial(around, owner), forms)
    raise TraceError(
        f"{what} {name} is on the meta device, and nothing says what its values are: {type(owner).__name__} has no "
        "reset_parameters(). Build the module inside `with trainer.init_module(empty_init=True)`, which remembers how "
        "it is initialised, or give the class reset_parameters(), or load values with ckpt_path"
    )


def load_hollow(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load a state into a module with hollow parameters: those remember where their values are.

    Parameters keep their identity, and tied ones stay tied. Tensors of the state are kept, not copied.
    """
    slots = [(owner._parameters, name, parameter) for _, owner, name, parameter in parameter_slots(module)]
    module.load_state_dict(state, strict=strict, assign=True)
    for space, name, parameter in slots:
        loaded, space[name] = space[name], parameter
        if loaded is None or loaded is parameter:
            continue
        if is_hollow(parameter):
            setattr(parameter, RECIPE, Loaded(loaded.data))
        else:
            parameter.data.copy_(loaded.data)


@contextmanager
def blocks_alike(
    module: nn.Module, blocks: Sequence[str], parameters: Iterable[nn.Parameter] | None = None
) -> Iterator[None]:
    """Inside, blocks of one form all use the parameters of the first of them, and so make its gradients only."""
    found = [module.get_submodule(name) for name in blocks]
    firsts: dict[Any, nn.Module] = {}
    forms = [(module_key(block), tuple(name for name, _ in block.named_modules())) for block in found]
    pairs = [(block, firsts.setdefault(form, block)) for block, form in zip(found, forms, strict=True)]
    replaceable = {id(parameter) for parameter in (module.parameters() if parameters is None else parameters)}
    shared = [
        (part._parameters, name, model._parameters[name])
        for block, first in pairs
        for part, model in zip(block.modules(), first.modules(), strict=True)
        for name, parameter in part._parameters.items()
        if parameter is not None and id(parameter) in replaceable and block is not first
    ]
    try:
        with items_replaced(shared):
            renew_flat_weights(module)
            yield
    finally:
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
        self._shapes = {name: self._parameters[name].shape for name in self._sources}
        for name in self._sources:
            empty_out(self._parameters[name], device)

    @property
    def names(self) -> frozenset[str]:
        """The parameters that have no values of their own."""
        return frozenset(self._sources)

    def materialize(self, names: Collection[str], *, give: Callable[[str, Tensor], None] | None = None) -> None:
        """Give parameters their values, contiguous in memory, one after the other.

        All ranks call this at the same time, each with its own names.

        Args:
            names: Canonical names; those that have values already are left alone.
            give: Takes each name and its values, in place of the parameter.
        """
        for name, source in self._sources.items():
            parameter = self._parameters[name]
            is_shared = isinstance(source, OnRankZero)
            if not is_shared and name not in names:
                continue
            value = torch.empty(self._shapes[name], dtype=parameter.dtype, device=self._device)
            if self._is_first or not is_shared:
                value.copy_(source.value(self._seed))
            if is_shared:
                assert self._share is not None
                self._share(value)
            if name in names and give is None:
                parameter.data = value
            elif name in names and give is not None:
                give(name, value)
            del value  # before the next one is made

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
    def lean(self, blocks: Sequence[str]) -> Iterator[None]:
        """Inside, the module can run, and holds little: of blocks of one form all use the parameters of the first."""
        with blocks_alike(self._module, blocks, [self._parameters[name] for name in self._sources]):
            in_use = {id(parameter) for parameter in self._module.parameters()}
            names = [name for name in self._sources if id(self._parameters[name]) in in_use]
            try:
                self.materialize(names)
                yield
            finally:
                self.free(names)
