"""What a step computes, as a list of calls of torch functions that can be run again on other batches.

Calls are taken down where Python calls torch, so that sizes stay what the user wrote: numbers read from shapes or
tensors remember where they come from. The network's repeated blocks are single calls that run the blocks themselves.
"""

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from lightning_mist.attributes import replaced, set_on_class
from lightning_mist.plan.calls import intercepted, occurrence, user_line, without_caches
from lightning_mist.runtime.process_state import get_random_state
from lightning_mist.tensors import batch_tensors, function_name, is_writing

# Python numbers that remember which tensors they were read from, so that they can be worked out for other batches.


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a recorded step: by the position of the call that made it, -1 for the batch, which of its tensors."""

    entry: int
    leaf: int


BATCH = -1


@dataclass(frozen=True, slots=True)
class Read:
    """A number read from a tensor: ``"item"``, ``"numel"``, or a size with its dimension."""

    what: str
    ref: Ref
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """A number that is a multiple of the rows of the batch."""

    factor: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A number made of others."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]


Origin = Read | Rows | Computed


class _Traced:
    """A number with its origin."""

    origin: Origin

    def __new__(cls, value: Any, origin: Origin) -> Any:
        """The number."""
        number: Any = super().__new__(cls, value)  # type: ignore[call-arg]
        number.origin = origin
        return number


class TracedInt(_Traced, int):
    """An integer with its origin."""


class TracedFloat(_Traced, float):
    """A real number with its origin."""


TRACED = (TracedInt, TracedFloat)


def traced(value: Any, origin: Origin) -> Any:
    """A number with its origin; anything else, truth values too, as it is."""
    if type(value) is int:
        return TracedInt(value, origin)
    return TracedFloat(value, origin) if type(value) is float else value


def plain(value: Any) -> Any:
    """A number without its origin."""
    if isinstance(value, TracedInt):
        return int(value)
    return float(value) if isinstance(value, TracedFloat) else value


def goes_by_values(origin: Any) -> bool:
    """Whether a number goes by what tensors hold, and not by their sizes alone."""
    if isinstance(origin, Read):
        return origin.what == "item"
    return any(goes_by_values(operand) for operand in getattr(origin, "operands", ()))


def refs_of(origin: Any) -> tuple[Ref, ...]:
    """The tensors that a number was read from, or the tensor itself."""
    if isinstance(origin, (Ref, Read)):
        return (origin if isinstance(origin, Ref) else origin.ref,)
    if isinstance(origin, Computed):
        return tuple(ref for operand in origin.operands for ref in refs_of(operand))
    return ()


def number_of(origin: Any, tensor_of: Callable[[Ref], Any], rows: int) -> Any:
    """A number for another batch, from its tensors and its rows."""
    if isinstance(origin, Read):
        tensor = tensor_of(origin.ref)
        if origin.what == "item":
            return tensor.item()
        return tensor.numel() if origin.what == "numel" else tensor.shape[origin.dim]
    if isinstance(origin, Rows):
        return origin.factor * rows
    if isinstance(origin, Computed):
        return origin.function(*(number_of(operand, tensor_of, rows) for operand in origin.operands))
    return origin


def _with_arithmetic(kind: Any, base: type) -> None:
    def overloaded(name: str, function: Callable[..., Any], is_reversed: bool) -> None:
        original = getattr(base, name)

        def method(self: Any, *others: Any) -> Any:
            result = original(self, *others)
            if result is NotImplemented:
                return result
            operands = tuple(item.origin if isinstance(item, TRACED) else item for item in (self, *others))
            return traced(plain(result), Computed(function, operands[::-1] if is_reversed else operands))

        setattr(kind, name, method)

    for stem in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
        overloaded(f"__{stem}__", getattr(operator, stem), False)
        overloaded(f"__r{stem}__", getattr(operator, stem), True)
    overloaded("__neg__", operator.neg, False)
    overloaded("__pow__", operator.pow, False)


for _kind, _base in ((TracedInt, int), (TracedFloat, float)):
    _with_arithmetic(_kind, _base)


Depends = Literal["nothing", "data", "parameters"]

_RANK: dict[Depends, int] = {"nothing": 0, "data": 1, "parameters": 2}

TO_HOST = frozenset(
    ("item", "__bool__", "__int__", "__float__", "__index__", "tolist", "numpy", "__array__", "__format__", "__repr__")
)
"""Functions that take values out of torch."""

_SIZES = frozenset(("size", "numel", "nelement"))

_SKIPPED = frozenset(
    (
        *("dim", "ndimension", "is_floating_point", "is_complex", "is_contiguous", "stride", "storage_offset"),
        *("__len__", "__hash__", "data_ptr", "untyped_storage", "get_device", "element_size", "backward"),
        *("register_hook", "retain_grad", "__dlpack__", "__dlpack_device__", "is_signed", "has_names"),
    )
)
"""Functions that compute nothing."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor that is neither of the batch nor made by the step: a parameter, a buffer or a constant."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Number:
    """A number that is read or computed anew."""

    origin: Any


@dataclass(slots=True, kw_only=True)
class TapeEntry:
    """One call.

    Attributes:
        args: Its positional arguments, with :class:`Ref`, :class:`Fixed` and :class:`Number` in them.
        key: What tells it from other calls in every run.
        autocast: Whether, and to what, operations were cast automatically.
        block: Position of the block that it is, if it is one.
        outputs: How many tensors it made.
        read: The value that it took out of torch, if it did.
    """

    index: int
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    depends: Depends
    key: tuple[Hashable, ...]
    line: str
    has_grad: bool
    autocast: tuple[bool, torch.dtype]
    is_random: bool = False
    block: int | None = None
    outputs: int = 0
    read: Any = None

    @property
    def refs(self) -> list[Ref]:
        """The tensors that it made."""
        return [Ref(self.index, leaf) for leaf in range(self.outputs)]

    @property
    def is_read(self) -> bool:
        """Whether it takes a value out of torch."""
        return self.name in TO_HOST


@dataclass(slots=True)
class Tape:
    """The calls of one run of a step, in their order.

    Attributes:
        kinds: For every tensor that was made, what it depends on.
        stray: Where a value is used that depends on parameters and was made where nothing is taken down.
        lap: As in :class:`~lightning_mist.runtime.cutting.rules.CutRules`.
    """

    device: torch.device
    rows: int
    lap: int | None = None
    entries: list[TapeEntry] = field(default_factory=list)
    kinds: dict[Ref, Depends] = field(default_factory=dict)
    dtypes: dict[Ref, torch.dtype] = field(default_factory=dict)
    stray: str | None = None

    @property
    def last(self) -> int:
        """The last call of a layer; -1 if there is none."""
        return max((entry.index for entry in self.entries if entry.block is not None), default=-1)

    def depends(self, ref: Ref) -> Depends:
        """What a tensor depends on."""
        return "data" if ref.entry == BATCH else self.kinds[ref]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nesting, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def made_by(name: str, args: Sequence[Any], output: Any) -> list[Tensor]:
    """The tensors that a call made or wrote into, and those of which they are views."""
    if name == "__setitem__":
        made = [args[0]]
    elif is_writing(name) and args and isinstance(args[0], Tensor):
        made = [*tensors_in(output)]
    else:
        return tensors_in(output)
    return [*made, *(tensor._base for tensor in made[:1] if tensor._base is not None)]


class TapeRecorder(TorchFunctionMode):
    """Takes down a run of the step."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], batch: Any, rows: int, device: torch.device
    ) -> None:
        super().__init__()
        self.tape = Tape(device=device, rows=rows)
        self._blocks, self._device = blocks, device
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._refs: dict[int, Ref] = {}
        self._alive: list[Tensor] = []
        self._counts: dict[Hashable, int] = {}
        self._is_quiet = False
        self._read: set[int] = set()
        for leaf, tensor in enumerate(batch_tensors(batch)):
            self._bind(tensor, Ref(BATCH, leaf))

    def ref_of(self, value: Any) -> Ref | None:
        """Which tensor of the recorded step this is, if it is one."""
        return self._refs.get(id(value))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, calls of torch and of the module's blocks are taken down."""
        with intercepted(self._blocks, self._wrap), _custom_functions(self._custom), self:
            yield

    def _wrap(self, position: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = without_caches(args, kwargs)
            if self._is_quiet:
                return original(*args, **kwargs)
            with replaced(self, _is_quiet=True):
                return self._called(f"layer {position}", original, args, kwargs, block=position)

        return forward

    def _custom(self, kind: type, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Take down a custom autograd function as one call."""
        if self._is_quiet:
            self._read.update(map(id, tensors_in((args, kwargs))))
            return apply(*args, **kwargs)
        with replaced(self, _is_quiet=True):
            return self._called(kind.__name__, apply, args, kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_quiet:
            self._read.update(map(id, tensors_in((args, kwargs))))
            return func(*args, **kwargs)
        name = function_name(func)
        is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
        if name in _SKIPPED:
            return func(*args, **kwargs)
        if name in _SIZES or (is_attribute and name == "shape"):
            return self._sized(name, func, args, kwargs)
        return self._called(name, func, args, kwargs)

    def _sized(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        result, ref = func(*args, **kwargs), self.ref_of(args[0])
        if ref is None:
            return result
        if isinstance(result, tuple):
            return torch.Size([traced(int(size), Read("size", ref, dim)) for dim, size in enumerate(result)])
        if name == "size":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            return traced(int(result), Read("size", ref, int(dim) % args[0].dim()))
        return traced(int(result), Read("numel", ref))

    def _called(self, name: str, func: Any, args: Any, kwargs: Any, *, block: int | None = None) -> Any:
        depends: Depends = "nothing" if block is None else "parameters"

        def encode(path: tuple[Any, ...], leaf: Any) -> Any:
            nonlocal depends
            if isinstance(leaf, Tensor):
                ref = self.ref_of(leaf)
                own: Depends = "parameters" if id(leaf) in self._parameters or leaf.requires_grad else "nothing"
                kind = own if ref is None else self.tape.depends(ref)
                if ref is None and leaf.grad_fn is not None and self.tape.stray is None:
                    self.tape.stray = user_line()
                depends = max(depends, kind, key=_RANK.__getitem__)
                return Fixed(leaf) if ref is None else ref
            if isinstance(leaf, TRACED):
                # Sizes do not depend on parameters, but for what these select.
                for ref in refs_of(leaf.origin) if goes_by_values(leaf.origin) else ():
                    depends = max(depends, self.tape.depends(ref), key=_RANK.__getitem__)
                return Number(leaf.origin)
            return leaf

        encoded = rebuilt((args, kwargs), encode)
        args, kwargs = rebuilt((args, kwargs), lambda path, leaf: plain(leaf))
        entry = TapeEntry(
            index=len(self.tape.entries),
            name=name,
            function=func,
            args=encoded[0],
            kwargs=encoded[1],
            depends=depends,
            key=(name, block) if block is not None else occurrence(self._counts, name),
            line=user_line(),
            has_grad=torch.is_grad_enabled(),
            autocast=(torch.is_autocast_enabled(self._device.type), torch.get_autocast_dtype(self._device.type)),
            block=block,
        )
        before, self._read = get_random_state(self._device), set()
        output = func(*args, **kwargs)
        if block is not None:
            # An argument that the layer lets lie is none.
            read = self._read.union(map(id, tensors_in(output)))
            entry.args, entry.kwargs = rebuilt(
                (args, kwargs),
                lambda path, leaf: (
                    Fixed(leaf) if isinstance(leaf, Tensor) and id(leaf) not in read else encode(path, leaf)
                ),
            )
        entry.is_random = not torch.equal(before, get_random_state(self._device)) or draws_for_itself(kwargs)
        return self._finish(entry, args, output)

    def _finish(self, entry: TapeEntry, args: Any, output: Any) -> Any:
        made = made_by(entry.name, args, output)
        if not made and not entry.is_read:
            return output  # dtypes, devices and the like
        self.tape.entries.append(entry)
        entry.outputs = len(made)
        for leaf, tensor in enumerate(made):
            self.tape.kinds[Ref(entry.index, leaf)] = entry.depends
            self._bind(tensor, Ref(entry.index, leaf))
        if entry.is_read:
            entry.read = output if isinstance(output, (bool, int, float)) else None
            if entry.name == "item" and isinstance(entry.args[0], Ref):
                return traced(output, Read("item", entry.args[0]))
        return output

    def _bind(self, tensor: Tensor, ref: Ref) -> None:
        self._refs[id(tensor)] = ref
        self.tape.dtypes[ref] = tensor.dtype
        self._alive.append(tensor)  # its identity stays its own


@contextmanager
def _custom_functions(called: Callable[[type, Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
    """Inside, calls of custom autograd functions, which torch's modes do not see, are made by ``called``."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        return called(kind, partial(original.__func__, kind), args, kwargs)

    with set_on_class(torch.autograd.Function, "apply", classmethod(apply)):
        yield


def draws_for_itself(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws from a generator of the user's own, which must go on as under whole batches."""
    return isinstance(kwargs.get("generator"), torch.Generator)


# Looking into the arguments of calls of torch functions.


def first_slice(index: Any) -> tuple[Any, Any] | None:
    """From where to where an indexing takes a tensor's first dimension, step by step; None if it does not."""
    first = index[0] if isinstance(index, tuple) and index else index
    return (first.start, first.stop) if isinstance(first, slice) and first.step in (None, 1) else None


def takes_all(ends: tuple[Any, Any], rows: int) -> bool:
    """Whether a slice by numbers leaves none of so many rows out; what is no number may be theirs."""
    first, end = ends
    return first in (None, 0) and (type(end) is not int or end >= rows)


def leaves_in(value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """All leaves of an argument, with their paths."""
    found: list[tuple[tuple[Any, ...], Any]] = []
    rebuilt(value, lambda path, leaf: found.append((path, leaf)))
    return found


def rebuilt(value: Any, replace: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    """An argument with other leaves."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuilt(item, replace, (*path, key)) for key, item in enumerate(value)))
    if isinstance(value, (tuple, list)) and value:
        items = [rebuilt(item, replace, (*path, key)) for key, item in enumerate(value)]
        if isinstance(value, torch.Size) and not all(isinstance(item, int) for item in items):
            return tuple(items)
        return type(value)(items)
    if isinstance(value, dict) and value:
        return {key: rebuilt(item, replace, (*path, key)) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(rebuilt(getattr(value, key), replace, (*path, key)) for key in ("start", "stop", "step")))
    return replace(path, value)


# Running a recorded step again: on other batches, call by call.


class UncuttableError(Exception):
    """Why a batch stays whole."""


class Values(dict[Ref, Tensor]):
    """The tensors of a step for one batch, into whose own, the leaves, calls may write."""

    def __init__(self, leaves: Sequence[Tensor], rows: int) -> None:
        super().__init__({Ref(BATCH, index): leaf for index, leaf in enumerate(leaves)})
        self.rows = rows

    def number(self, origin: Any) -> Any:
        """A number read from these tensors."""
        return number_of(origin, self.__getitem__, self.rows)

    def leaf(self, leaf: Any) -> Any:
        """What stands for a leaf of an entry's arguments."""
        if isinstance(leaf, Ref):
            return self[leaf]
        if isinstance(leaf, Fixed):
            return leaf.tensor
        return self.number(leaf.origin) if isinstance(leaf, Number) else leaf


def run_entry(
    entry: TapeEntry,
    values: Values,
    device: torch.device,
    change: Callable[[tuple[Any, ...], Any], Any] | None = None,
) -> list[Tensor]:
    """Run one call, its arguments changed by path and value; the tensors that it makes, which values then have too."""

    def argument(path: tuple[Any, ...], leaf: Any) -> Any:
        value = values.leaf(leaf)
        return value if change is None else change(path, value)

    args, kwargs = rebuilt((entry.args, entry.kwargs), argument)
    enabled, dtype = entry.autocast
    is_cast = enabled == torch.is_autocast_enabled(device.type)
    casts = nullcontext() if is_cast else torch.autocast(device.type, dtype=dtype, enabled=enabled)
    # Gradients are off where they were off when the call was taken down, and casts as they were.
    with torch.set_grad_enabled(entry.has_grad and torch.is_grad_enabled()), casts:
        made = made_by(entry.name, args, entry.function(*args, **kwargs))
    if len(made) != entry.outputs:
        raise ReplayError(f"{entry.name} at {entry.line} made {len(made)} tensors in place of {entry.outputs}")
    for leaf, tensor in enumerate(made):
        values[Ref(entry.index, leaf)] = tensor
    return made


class ReplayError(Exception):
    """The recorded calls do not run on another batch."""


def sources(entry: TapeEntry) -> set[Ref]:
    """The tensors that a call uses."""
    found = set()
    for _, leaf in leaves_in((entry.args, entry.kwargs)):
        if isinstance(leaf, Ref):
            found.add(leaf)
        elif isinstance(leaf, Number):
            found.update(refs_of(leaf.origin))
    return found


def ancestors(tape: Tape, wanted: Sequence[Ref]) -> list[TapeEntry]:
    """The calls that make some tensors, in their order."""
    needed: set[int] = set()
    left = list(wanted)
    while left:
        ref = left.pop()
        if ref.entry == BATCH or ref.entry in needed:
            continue
        needed.add(ref.entry)
        left.extend(sources(tape.entries[ref.entry]))
    return [tape.entries[index] for index in sorted(needed)]


class Slice:
    """Works out some tensors that depend on the batch alone, for any batch."""

    def __init__(self, entries: Sequence[TapeEntry], device: torch.device) -> None:
        self.entries, self.device = tuple(entries), device
        self._writes = any(is_writing(entry.name) for entry in self.entries)

    def run(self, leaves: Sequence[Tensor], rows: int) -> Values:
        """The tensors for a batch."""
        values = Values([leaf.clone() for leaf in leaves] if self._writes else leaves, rows)
        with torch.no_grad():
            for entry in self.entries:
                run_entry(entry, values, self.device)
        return values
