"""What operators and reads return in runs on tensors without values, alike in the trace and in stages that run.

Such runs see shapes only. An operator without a kernel for fake tensors, or whose result is as large as the values of
its input say, stops them; a rule says which shapes to go on with, by the word of whoever uses it. What reads values
into Python is answered by a guess.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lightning_mist.attributes import SharedPatch

Result = Callable[..., Any]
"""Called with an operator's arguments; returns its results as new tensors (``torch.empty``), which take no memory."""

Workspace = Callable[..., int]
"""Called with an operator's arguments; returns the bytes that it needs while it runs, beside its results."""


def fake_mode() -> FakeTensorMode:
    """A mode for tensors without values, which leaves the process one that can be copied."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if getattr(mode, "avoid_device_init", False):
        _count_devices()
    return mode


@cache
def _count_devices() -> None:
    # The first backward makes a thread for each device, and where there is none the mode lets torch find some (2.15).
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        torch.autograd.backward(torch.zeros((), device="cpu", requires_grad=True))


def become(target: Tensor, source: Tensor) -> None:
    """Turn the object ``target`` into the tensor ``source``, wherever it is referred to, and the other way round.

    torch.utils.swap_tensors refuses objects with weak references; the ones here lead from a fake tensor mode's memory
    to an object that is not used under its old meaning again.
    """
    target.__class__, source.__class__ = source.__class__, target.__class__
    target.__dict__, source.__dict__ = source.__dict__, target.__dict__
    torch._C._swap_tensor_impl(target, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """What is known of one operator."""

    operator: str
    result: Result
    workspace: Workspace | None


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """With bins for all that there may be; torch knows no size at all."""
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return x.new_empty(minlength, dtype=dtype) if minlength else NotImplemented


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Any:
    """In all types: torch's kernel for fakes takes bfloat16 only, devices take others too."""
    if a.dtype == torch.bfloat16:
        return NotImplemented
    # Along the dimension that is summed over there is a result for each group.
    groups = (a.shape[0],) if a.ndim == 3 else () if offs is None or b.ndim == 3 else (len(offs),)
    return a.new_empty(*(groups if a.ndim == b.ndim else ()), a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)


_BUILT_IN = {
    "aten::bincount": MemoryRule(operator="aten::bincount", result=_bincount, workspace=None),
    "aten::_grouped_mm": MemoryRule(operator="aten::_grouped_mm", result=_grouped_mm, workspace=None),
}
"""Rules that hold where nobody has given another; ``NotImplemented`` leaves an operator to torch."""

_RULES: dict[str, list[MemoryRule]] = {}  # the rules of each operator; the last one holds


class RegisteredRule:
    """A rule that holds until it is removed, or until the end of a ``with``."""

    def __init__(self, rule: MemoryRule) -> None:
        self._rule = rule

    def remove(self) -> None:
        """Let the rule hold no longer."""
        rules = _RULES.get(self._rule.operator, [])
        if self._rule in rules:
            rules.remove(self._rule)
        if not rules:
            _RULES.pop(self._rule.operator, None)

    def __enter__(self) -> "RegisteredRule":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def register_memory_rule(operator: str, result: Result, *, workspace: Workspace | None = None) -> RegisteredRule:
    """Say what an operator returns, so that steps that call it can be traced.

    For example for a kernel of one's own, and for a selection of which about half is expected to remain::

        register_memory_rule("mylib::attend", lambda q, k, v: torch.empty_like(q))
        register_memory_rule("aten::index.Tensor", lambda x, mask: x.new_empty(x.shape[0] // 2, *x.shape[1:]))

    Args:
        operator: Its name, as ``"package::operator"``, with the overload behind a dot if it is not the default one.
        result: Called with the operator's arguments, of which the tensors have no values; returns new tensors of the
            shapes and types of its results.
        workspace: Called in the same way; bytes that the operator needs while it runs.

    Returns:
        What removes the rule again.

    Raises:
        ValueError: If the name is not one of an operator.
    """
    package, colons, name = operator.partition("::")
    if not (package and colons and name):
        raise ValueError(f"operator {operator!r}: a rule is for an operator by its full name; write mylib::{operator}")
    rule = MemoryRule(operator=operator.removesuffix(".default"), result=result, workspace=workspace)
    _RULES.setdefault(rule.operator, []).append(rule)
    return RegisteredRule(rule)


def rule_of(operator: Any, args: Any, kwargs: Any) -> MemoryRule | None:
    """The rule for a call of an operator, if there is one and values are missing."""
    name = operator.name()
    found = _RULES[name][-1] if name in _RULES else _BUILT_IN.get(name)
    if found is None or not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
        return None
    return found


def workspace_bytes(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that an operator needs while it runs, by a rule."""
    rule = rule_of(operator, args, kwargs)
    return 0 if rule is None or rule.workspace is None else int(rule.workspace(*args, **kwargs))


class _Rules(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = rule_of(func, args, kwargs)
        if rule is None:
            return func(*args, **kwargs)
        fake = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
        with fake.fake_mode, torch.no_grad():
            result = rule.result(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


@SharedPatch
@contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, torch does not warn about the gradients of tensors that meet a fake.

    It looks at ``.grad`` of a real tensor when making its fake, and hides its own warning only where warnings are shown
    and not where they are errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
        yield


@contextmanager
def memory_rules() -> Iterator[None]:
    """Inside, operators on fake tensors follow the rules that there are."""
    with _Rules():  # type: ignore[no-untyped-call]
        yield


INDEXING = frozenset(("__getitem__", "__setitem__", "masked_select"))


def is_known_mask(item: Any) -> bool:
    """Whether an index is a mask with values."""
    return isinstance(item, Tensor) and item.dtype == torch.bool and not isinstance(item, FakeTensor)


_TRUTHS = frozenset(("__bool__", "is_nonzero", "equal", "allclose", "__contains__"))
_NUMBERS = frozenset(("item", "__float__", "__int__", "__index__", "__complex__"))

READS = _TRUTHS | _NUMBERS | {"tolist", "numpy", "__array__", "__format__", "nonzero", "argwhere"}
"""Functions that turn a tensor's values into Python values or sizes."""


def is_read(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function turns values of its tensor into Python values or sizes."""
    return name in READS or (name == "where" and len(args) + len(kwargs) == 1)


def guess_read(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tensor: Tensor,
    *,
    truth: bool = False,
    number: float = 1.0,
    every: int = 1,
) -> Any:
    """Something of the type that reading ``tensor`` by the function ``name`` gives; of places one of ``every``."""
    value: Any = truth if tensor.dtype == torch.bool else 1
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        value = number
    full = torch.full(tensor.shape, value, dtype=tensor.dtype)
    if name in _TRUTHS:
        answer: Any = truth
    elif name in _NUMBERS:
        answer = {"item": type(value), "__float__": float, "__complex__": complex}.get(name, int)(value)
    elif name == "__format__":
        answer = format(value, args[1]) if tensor.ndim == 0 else "tensor"
    elif name in ("nonzero", "argwhere", "where"):
        as_tuple = name == "where" or kwargs.get("as_tuple", False)
        answer = some_places(tensor.shape, every).nonzero(as_tuple=as_tuple)
    else:
        answer = full.tolist() if name == "tolist" else full.numpy()
    return answer


def some_places(shape: Sequence[int], every: int) -> Tensor:
    """A mask with one place of ``every`` that a mask without values may choose."""
    return (torch.arange(math.prod(shape)) % every == 0).view(tuple(shape))


@dataclass(frozen=True, slots=True)
class Passed:
    """A leaf of a block's output that is the ``index``-th leaf of its arguments itself."""

    index: int


@dataclass(frozen=True, slots=True)
class MadeLeaf:
    """A leaf of a block's output that the block made: its layout, and the value it had where one is wanted."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = field(compare=False)
    value: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockAnswer:
    """What a block returned, leaf by leaf, and its structure."""

    leaves: tuple[Passed | MadeLeaf | Any, ...]
    structure: TreeSpec

    def again(self, inputs: Sequence[Any], make: Callable[[MadeLeaf], Tensor]) -> Any:
        """The same for other arguments of the form; ``make`` gives what the block made."""

        def given(leaf: Any) -> Any:
            return (
                inputs[leaf.index] if isinstance(leaf, Passed) else make(leaf) if isinstance(leaf, MadeLeaf) else leaf
            )

        return tree_unflatten([given(leaf) for leaf in self.leaves], self.structure)


def answer_of(
    inputs: Sequence[Any], output: Any, is_known: Callable[[Any], bool], *, keep_values: bool = False
) -> BlockAnswer | None:
    """Describe what a block makes of leaves, to answer for it; ``None`` if it made something that is not known."""
    places = {id(leaf): index for index, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
    leaves, structure = tree_flatten(output)
    found: list[Any] = []
    for leaf in leaves:
        if id(leaf) in places:
            found.append(Passed(places[id(leaf)]))
        elif not is_known(leaf):
            return None
        elif isinstance(leaf, Tensor):
            layout = (tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device, leaf.requires_grad)
            found.append(MadeLeaf(*layout, leaf.detach() if keep_values else None))
        else:
            found.append(leaf)
    return BlockAnswer(tuple(found), structure)
