"""A tensor that holds one rank's part and shows the shape of the whole.

User code that divides a width by a number of heads, views and transposes runs unchanged: every torch function that it
calls on a :class:`SplitTensor` comes here, and a rule of its own (:mod:`~lightning_mist.tensor_parallel.rules`) says
what the parts make of it. A function without a rule gets the gathered whole, which is right and slower; the context
counts them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_mist.errors import TraceError
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit
from lightning_mist.tensor_parallel import layout as layouts
from lightning_mist.tensor_parallel.collectives import (
    CopyIn,
    Gather,
    ReduceOut,
    ReduceScatter,
    Scatter,
    divided,
    joined,
)
from lightning_mist.tensor_parallel.group import TensorGroup
from lightning_mist.tensor_parallel.layout import Layout

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], "SplitContext"], Any]
"""What a torch function means for parts; gives ``NotImplemented`` where it needs the whole."""

RULES: dict[str, Rule] = {}
"""Rules by the name of the torch function; filled by the modules of rules."""


class SplitContext:
    """What all split tensors of one stage have in common.

    Args:
        group: The ranks that share the tensors.
        sequence_parallel: Whether hidden states between split layers are shared out along the sequence.

    Attributes:
        gathered: How often a function without a rule needed the whole, by its name.
        sequence: Dimension and length of the sequence of the hidden states, once they are shared out.
    """

    def __init__(self, group: TensorGroup, sequence_parallel: bool = False) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.degree = group.size
        self.gathered: Counter[str] = Counter()
        self.sequence: tuple[int, int] | None = None
        self._recent: tuple[Tensor, int, Tensor] | None = None

    def copy_in(self, value: Any) -> Any:
        """A value that every rank has, about to be used for a part of the work; anything else as it is."""
        if not isinstance(value, Tensor) or not value.requires_grad or not torch.is_grad_enabled():
            return value
        if self._recent is not None and self._recent[0] is value and self._recent[1] == value._version:
            # Query, key and value projections of one input: one sum of gradients is enough.
            return self._recent[2]
        copied = CopyIn.apply(value, self.group)  # type: ignore[no-untyped-call]
        if not value.is_leaf:
            self._recent = (value, value._version, copied)
        return copied

    def forget(self) -> None:
        """Let go of the last tensor that was copied in."""
        self._recent = None

    def reduce_out(self, value: Tensor) -> "Tensor | SplitTensor":
        """The sum over ranks of what each computed: whole, or shared along the sequence where that runs."""
        if self.sequence_parallel and self.sequence is not None:
            dim, length = self.sequence
            if value.dim() > dim + 1 and value.shape[dim] == length:
                part: Tensor = ReduceScatter.apply(value, dim, self.group)  # type: ignore[no-untyped-call]
                return SplitTensor(part, _along(value.shape, dim), self)
        return ReduceOut.apply(value, self.group)  # type: ignore[no-untyped-call,no-any-return]

    def part(self, value: Tensor, dim: int, outer: int) -> Tensor:
        """This rank's part of a value that every rank has."""
        return Scatter.apply(value, dim, outer, self.group)  # type: ignore[no-untyped-call,no-any-return]


class SplitTensor(Tensor):
    """A tensor of which this rank holds a part.

    Args:
        local: The part.
        layout: The factors of every dimension of the whole.
        context: The ranks that share it.
    """

    local: Tensor
    placement: Layout
    context: SplitContext

    @staticmethod
    def __new__(cls, local: Tensor, layout: Layout, context: SplitContext) -> "SplitTensor":
        """Wrap a part."""
        shape = layouts.shape_of(layout)
        made: SplitTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.placement, made.context = local, layout, context
        return made

    def __init__(self, local: Tensor, layout: Layout, context: SplitContext) -> None:
        if tuple(local.shape) != layouts.local_shape(layout, context.degree):
            raise TraceError(
                f"a part of shape {tuple(local.shape)} for the layout {layout} over {context.degree} ranks: "
                f"it must have the shape {layouts.local_shape(layout, context.degree)}"
            )

    @property
    def shared_dim(self) -> int:
        """The dimension that is shared out."""
        return layouts.shared_dim(self.placement)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function on parts, or on the gathered whole."""
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what passed torch functions by."""
        raise TraceError(
            f"a tensor shared out over tensor-parallel ranks reached {func} below torch's functions (through an "
            "extension or a custom autograd.Function): this layer cannot be split; use tensor_parallel_degree=1"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The layout; values are on several ranks."""
        return f"SplitTensor(shape={tuple(layouts.shape_of(self.placement))}, layout={self.placement})"


def _along(shape: Sequence[int], dim: int) -> Layout:
    """Whole dimensions, of which one is shared out."""
    return layouts.replaced(layouts.plain(shape), dim, ((shape[dim], True),))


def split_leaves(value: Any) -> list[SplitTensor]:
    """The split tensors among the leaves of nested containers."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, SplitTensor)]


_OF_LOCAL = frozenset(
    {"device", "dtype", "requires_grad", "grad_fn", "is_leaf", "layout", "is_cuda", "is_sparse", "is_quantized",
     "is_nested", "is_meta", "is_cpu", "is_mkldnn", "itemsize", "grad", "names", "retains_grad", "is_mps", "is_xpu"}
)  # fmt: skip
"""Properties that the part answers for the whole."""

_OF_SHAPE = frozenset(
    {"size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "is_contiguous", "storage_offset"}
)
"""Methods that the empty tensor of the whole shape answers."""

_OF_PART = frozenset({"is_floating_point", "is_complex", "is_signed", "get_device", "element_size", "is_inference"})


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = str(getattr(func, "__name__", func))
    with torch._C.DisableTorchFunctionSubclass():
        if name == "__get__":
            return _property(func, args[0])
        if name in _OF_SHAPE:
            return getattr(torch.empty(layouts.shape_of(args[0].placement), device="meta"), name)(*args[1:], **kwargs)
        if name in _OF_PART:
            return func(args[0].local)
        if name in ("__set__", "backward", "register_hook", "retain_grad", "requires_grad_", "detach_"):
            raise TraceError(
                f"{name} on a tensor shared out over tensor-parallel ranks: it can be computed with, and not changed "
                "or watched; use tensor_parallel_degree=1"
            )
        context = split_leaves((args, kwargs))[0].context
        rule = RULES.get(name)
        result = NotImplemented if rule is None else rule(func, args, kwargs, context)
        if result is not NotImplemented:
            return result
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], SplitTensor):
            raise TraceError(
                f"{name} changes a tensor shared out over tensor-parallel ranks in a way that has no rule for parts; "
                "use tensor_parallel_degree=1"
            )
        context.gathered[name] += 1
        args, kwargs = whole((args, kwargs))
    return func(*args, **kwargs)


def _property(func: Any, tensor: SplitTensor) -> Any:
    name = func.__self__.__name__
    if name == "shape":
        return torch.Size(layouts.shape_of(tensor.placement))
    if name == "ndim":
        return len(tensor.placement)
    if name in _OF_LOCAL:
        return getattr(tensor.local, name)
    if name in ("T", "mT", "H", "mH"):
        first, second = (0, 1) if name in ("T", "H") else (-2, -1)
        return RULES["transpose"](torch.transpose, (tensor, first, second), {}, tensor.context)
    if name == "data":
        return SplitTensor(tensor.local.data, tensor.placement, tensor.context)
    tensor.context.gathered[name] += 1
    return getattr(gathered(tensor), name)


def gathered(tensor: SplitTensor, *, is_shared_work: bool = False) -> Tensor:
    """The whole tensor on every rank.

    Args:
        tensor: The split tensor.
        is_shared_work: Whether each rank does a part of the work on it, so that gradients are sums over ranks.
    """
    dim = tensor.shared_dim
    outer = layouts.pattern(tensor.placement[dim]).outer
    result: Tensor = Gather.apply(  # type: ignore[no-untyped-call]
        tensor.local, dim, outer, tensor.context.group, is_shared_work
    )
    return result


def whole(value: Any) -> Any:
    """Nested containers in which every split tensor is gathered, for work that every rank does alike."""
    return tree_map(lambda leaf: gathered(leaf) if isinstance(leaf, SplitTensor) else leaf, value)


def shard(full: Tensor, split: ParameterSplit, rank: int, degree: int) -> Tensor:
    """One rank's part of a parameter, in memory of its own.

    Raises:
        TraceError: If the degree does not divide what is shared out.
    """
    size = next(size for size, is_shared in split.factors if is_shared)
    if size % degree or full.shape[split.dim] != split.size:
        raise TraceError(
            f"{split.name} of shape {tuple(full.shape)} shared out as {split.factors} along dimension {split.dim} over "
            f"{degree} ranks: the factor of {size} must be a multiple of {degree}"
        )
    outer = layouts.pattern(split.factors).outer
    return divided(full, split.dim, outer, degree)[rank].clone(memory_format=torch.contiguous_format)


def unshard(parts: Sequence[Tensor], split: ParameterSplit) -> Tensor:
    """The whole of a parameter (or of anything shared out like it) from the parts of all ranks."""
    return joined(torch.stack(tuple(parts)), split.dim, layouts.pattern(split.factors).outer)


def present(local: Tensor, split: ParameterSplit, context: SplitContext) -> SplitTensor:
    """A parameter as the module sees it: of its whole shape."""
    sizes = list(local.shape)
    sizes[split.dim] = split.size
    layout = layouts.replaced(layouts.plain(sizes), split.dim, split.factors)
    shown = SplitTensor(local, layout, context)
    shown._is_param = True  # isinstance(_, nn.Parameter) holds, as modules expect
    return shown


def split_sequence(tensor: Tensor, dim: int, context: SplitContext) -> "Tensor | SplitTensor":
    """A tensor that every rank has, shared out along its sequence; as it is if its length cannot be divided."""
    if isinstance(tensor, SplitTensor) or tensor.shape[dim] % context.degree:
        return tensor
    context.sequence = (dim, tensor.shape[dim])
    return SplitTensor(context.part(tensor, dim, 1), _along(tensor.shape, dim), context)


def from_local_sequence(local: Tensor, dim: int, context: SplitContext) -> SplitTensor:
    """A tensor of which every rank has its part of the sequence already."""
    sizes = list(local.shape)
    sizes[dim] *= context.degree
    context.sequence = (dim, sizes[dim])
    return SplitTensor(local, _along(sizes, dim), context)


def enter_sequence(
    args: tuple[Any, ...], kwargs: dict[str, Any], split: SequenceSplit, context: SplitContext
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments with its hidden states shared out along the sequence."""
    leaves, structure = tree_flatten((args, kwargs))
    leaf = leaves[split.leaf]
    if isinstance(leaf, Tensor):
        if not isinstance(leaf, SplitTensor) and leaf.shape[split.dim] % context.degree:
            context.sequence = None
        leaves[split.leaf] = split_sequence(leaf, split.dim, context)
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs


@contextmanager
def functions_of_wholes() -> Any:
    """Inside, custom autograd functions get whole tensors in place of split ones, which would pass them unseen.

    ``torch.autograd.Function.apply`` is no torch function; there is no other place that sees its arguments.
    """
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found = split_leaves((args, kwargs))
        if found:
            found[0].context.gathered[cls.__name__] += 1
            args, kwargs = whole((args, kwargs))
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
