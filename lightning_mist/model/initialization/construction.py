"""Modules built without their values: what constructors do to tensors is written down, and done when it is needed.

Inside :func:`deferred_construction` every new tensor is a fake: it has a shape, a type and a device, and no memory.
Operators on it are noted in order. Parameters leave the context on torch's meta device, each with a :class:`Recorded`
way to its values: the noted operators that led to it, done again for it alone. Buffers and other tensors that are still
there get their values at once; so do numbers that a constructor reads back.

Random operators are seeded by their number among all of the construction, so that a parameter has the same values
whatever else is made, in whatever order, on whatever rank.
"""

import gc
import hashlib
import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import quiet_fakes
from lightning_mist.model.operator_costs import written
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

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
        state = torch.get_rng_state()
        try:
            with _disable_current_modes(), torch.no_grad():
                for index in self._needed({place.storage for place in places}):
                    self._redo(index, real, seed)
                return [_view(real, place) for place in places]
        finally:
            torch.set_rng_state(state)

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
class Recorded:
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
            setattr(empty, RECIPE, Recorded(recording, recording.place(parameter)))
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
