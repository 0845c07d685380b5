"""What a step computes, as a list of calls of torch functions that can be run again on other batches.

Calls are taken down where Python calls torch, so that sizes stay what the user wrote: numbers read from shapes or
tensors remember where they come from. The network's repeated blocks are single calls that run the blocks themselves.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from lightning_mist.attributes import replaced
from lightning_mist.plan.calls import intercepted, occurrence, user_line, without_caches
from lightning_mist.runtime.cutting.arguments import is_writing, rebuilt
from lightning_mist.runtime.cutting.traced_numbers import (
    BATCH,
    TRACED,
    Read,
    Ref,
    goes_by_values,
    plain,
    refs_of,
    traced,
)
from lightning_mist.runtime.random_state import get_random_state
from lightning_mist.tensors import batch_tensors

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


def name_of(func: Any) -> str:
    """Name of a torch function; that of the attribute where one is read."""
    name = getattr(func, "__name__", type(func).__name__)
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else str(name)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor that is neither of the batch nor made by the step: a parameter, a buffer or a constant."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Number:
    """A number that is read or computed anew."""

    origin: Any


@dataclass(slots=True, kw_only=True)
class Entry:
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
    """

    device: torch.device
    rows: int
    entries: list[Entry] = field(default_factory=list)
    kinds: dict[Ref, Depends] = field(default_factory=dict)
    dtypes: dict[Ref, torch.dtype] = field(default_factory=dict)
    stray: str | None = None

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


class Recorder(TorchFunctionMode):
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
        name = name_of(func)
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
        entry = Entry(
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

    def _finish(self, entry: Entry, args: Any, output: Any) -> Any:
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

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def draws_for_itself(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws from a generator of the user's own, which must go on as under whole batches."""
    return isinstance(kwargs.get("generator"), torch.Generator)
