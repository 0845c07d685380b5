"""A tensor of which every rank holds a part and that looks like the whole.

:class:`SplitTensor` acts where Python calls torch: a *rule* for the called function works on the parts, and gradients
flow through the parts by torch's own autograd. A function without a rule, or called in a way that its rule does not
know, gets the whole tensors: correct and slower, and counted in ``SplitContext.gathered``. What would be wrong with
whole tensors, because it writes into them, is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch._functorch.utils
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map

from lightning_mist.attributes import SharedPatch, is_a, replaced, set_on_class
from lightning_mist.errors import TraceError
from lightning_mist.plan.calls import leaves_of
from lightning_mist.plan.tensor_split import stripes_of
from lightning_mist.tensor_parallel import collectives
from lightning_mist.tensor_parallel.shard_layout import Layout, Outer, fits
from lightning_mist.tensors import function_name, is_writing


class SplitContext:
    """Says over which ranks tensors are split, and how.

    Args:
        sequence_parallel: Whether what is between column- and row-parallel operations is shared along the sequence.

    Attributes:
        function: The torch function whose rule is at work, for who watches the group.
        gathered: How often an operation had no way to work on parts, by its name; these are correct and slower.
        sequence: For shapes of hidden states without their last dimension: which dimension is shared along the
            sequence, and how many times it repeats a chunk per rank. Replaced, never changed, as it becomes known: who
            runs a computation again puts back what was known at its start.
    """

    def __init__(self, group: collectives.TensorGroup, sequence_parallel: bool = False) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.degree, self.rank = group.size, group.rank
        self.gathered: Counter[str] = Counter()
        self.sequence: Mapping[tuple[int, ...], tuple[int, Outer]] = {}
        self.function: Callable[..., Any] | None = None
        self._input: tuple[object, int, bool] | None = None
        self._copied: Tensor | None = None

    def forget(self) -> None:
        """Let go of the tensors kept for a next use; for the end of a step's part."""
        self._input = self._copied = None

    @property
    def adds_later(self) -> bool:
        """Whether the group leaves gradients of replicated values as summands: context parallelism."""
        return self.group.adds_later

    def copy_in(self, tensor: Tensor) -> Tensor:
        """A replicated value for computations on parts; one copy for consecutive uses of the same value.

        Query, key and value projections of one input then add up their gradients before these are added up over the
        ranks, once. Only the last input is remembered, and only until the next sum over ranks, so that nothing is kept
        alive for long and all ranks decide alike.
        """
        if self.adds_later or not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        copied = self._recall(tensor, tensor._version)
        return copied if copied is not None else self._remember(tensor, collectives.copy_in(tensor, self.group))

    def gather_input(self, key: object, part: Tensor, layout: Layout) -> Tensor:
        """The whole of a split tensor for computations on parts of something else; remembered like :meth:`copy_in`.

        Users of the same input share a ``key``.
        """
        version = 0 if part.is_inference() else part._version  # such tensors count no versions
        whole = self._recall(key, version)
        if whole is not None:
            return whole
        self._learn(layout)
        return self._remember(key, collectives.gather(part, layout, self.group, is_partial=True), version)

    def reduce(self, summand: Tensor) -> tuple[Tensor, Layout | None]:
        """The sum over ranks; in the parts of a sequence (with their layout) where such a sequence is known."""
        self.forget()
        known = self.sequence.get(tuple(summand.shape[:-1])) if self.sequence_parallel else None
        if known is not None:
            layout = Layout(tuple(summand.shape), *known)
            return collectives.reduce_scatter(summand, layout, self.group), layout
        return collectives.reduce(summand, self.group), None

    def sequence_layout(self, sizes: tuple[int, ...], dim: int) -> Layout | None:
        """How hidden states are shared along their sequence, None if it does not divide. Remembered for later sums.

        Context-parallel ranks have a chunk of every stripe of it, so that no rank has only tokens that see much.
        """
        dim %= len(sizes)
        layout = Layout(sizes, dim, stripes_of(sizes[dim], self.degree) if self.adds_later else 1)
        if not fits(layout, self.degree) or layout.is_last:
            return None
        self._learn(layout)
        return layout

    def _learn(self, layout: Layout) -> None:
        known = (layout.dim, layout.outer)
        if self.sequence.get(layout.sizes[:-1]) != known:
            self.sequence = {**self.sequence, layout.sizes[:-1]: known}

    def _recall(self, key: object, version: int) -> Tensor | None:
        if self._input is None or self._copied is None:
            return None
        known, known_version, has_grad = self._input
        is_same = known is key and known_version == version and has_grad == torch.is_grad_enabled()
        return self._copied if is_same else None

    def _remember(self, key: object, copied: Tensor, version: int | None = None) -> Tensor:
        if version is None:
            version = copied._version
        self._input, self._copied = (key, version, torch.is_grad_enabled()), copied
        return copied


Rule = Callable[[SplitContext, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Computes a torch function on parts: context, function, args, kwargs; NotImplemented where it cannot."""

RULES: dict[Callable[..., Any], Rule] = {}
"""The rule of every torch function that has one; filled by the modules ``rules_*``."""

_NAMESPACES = (torch, Tensor, F, torch._C._nn, torch.special)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of all torch functions and methods of some names."""

    def register(function: Rule) -> Rule:
        for name in names:
            for space in _NAMESPACES:
                if hasattr(space, name):
                    RULES[getattr(space, name)] = function
        return function

    return register


def rule_of_wrapped(func: Any) -> Rule | None:
    """The rule of what a function stands in for: a library or a test may have replaced one by ``functools.wraps``."""
    while hasattr(func, "__wrapped__"):
        func = func.__wrapped__
        if func in RULES:
            return RULES[func]
    return None


class SplitTensor(Tensor):
    """A tensor whose parts lie on several ranks.

    Made by ``present``, ``split_sequence`` or :func:`wrap`.
    """

    local: Tensor
    placement: Layout
    context: SplitContext

    @staticmethod
    def __new__(cls, local: Tensor, layout: Layout, context: SplitContext) -> "SplitTensor":
        """A part as the whole tensor; see :func:`wrap`."""
        if tuple(local.shape) != layout.local_sizes(context.degree):
            raise TraceError(
                f"a part of shape {tuple(local.shape)} of a tensor with {layout} over {context.degree} ranks: it must "
                f"be of {layout.local_sizes(context.degree)}"
            )
        tensor: SplitTensor = Tensor._make_wrapper_subclass(cls, layout.sizes, dtype=local.dtype, device=local.device)
        tensor.local, tensor.placement, tensor.context = local, layout, context
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_no_function()
        found = RULES.get(func) or rule_of_wrapped(func)
        if found is not None:
            context = first_of(args, kwargs).context
            context.function = func
            result = found(context, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return gather_and_call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TraceError(
            f"{func}: a split tensor reached code below torch's Python functions (a C++ extension or an autograd "
            "function that was bound before): use tensor_parallel_degree 1 for this layer"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SplitTensor({self.placement}, part={self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TraceError(
            "a split tensor was pickled or copied deeply: each rank has only a part of it. Copy the module "
            "before it is split"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(4)

    @property
    def shared_dim(self) -> int:
        """The dimension that is shared out."""
        return self.placement.dim

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Shape of the whole."""
        return torch.Size(self.placement.sizes)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dimensions."""
        return len(self.placement.sizes)

    dtype = property(attrgetter("local.dtype"), doc="Element type.")
    device = property(attrgetter("local.device"), doc="Device of the part.")
    grad_fn = property(attrgetter("local.grad_fn"), doc="The part's node of the graph.")
    is_leaf = property(attrgetter("local.is_leaf"), doc="Whether the part is a leaf.")

    @property
    def requires_grad(self) -> bool:
        """Whether the part requires a gradient."""
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad = value

    @property
    def data(self) -> Tensor:
        """The same values outside of the graph."""
        return wrap(self.local.data, self.placement, self.context)

    @data.setter
    def data(self, value: Tensor) -> NoReturn:
        raise TraceError(
            f"the data of a split tensor of shape {tuple(self.shape)} was replaced: each rank has only a part of it. "
            "Use tensor_parallel_degree 1"
        )

    @property
    def grad(self) -> Tensor | None:
        """The gradient, split in the same way."""
        gradient = self.local.grad
        return None if gradient is None else wrap(gradient, self.placement, self.context)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None or (isinstance(value, SplitTensor) and value.placement == self.placement):
            self.local.grad = None if value is None else value.local
            return
        raise TraceError("the gradient of a split tensor was set to one that is not split alike: set it to None")

    def __len__(self) -> int:
        return self.placement.sizes[0]

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.placement.sizes)

    def size(self, dim: int | None = None) -> Any:
        """Shape of the whole, or one size of it."""
        return self.shape if dim is None else self.placement.sizes[dim]

    def register_hook(self, hook: Any) -> NoReturn:
        """Refused: the hook would see a part of the gradient."""
        raise TraceError(
            "a hook was registered on a split tensor: it would see a part of the gradient. Register it on "
            "the module's parameter or use tensor_parallel_degree 1"
        )

    def retain_grad(self) -> None:
        """Keep the part's gradient."""
        self.local.retain_grad()

    def requires_grad_(self, requires_grad: bool = True) -> "SplitTensor":
        """Make the part require a gradient."""
        self.local.requires_grad_(requires_grad)
        return self


def wrap(local: Tensor, layout: Layout, context: SplitContext) -> SplitTensor:
    """A part as the whole tensor."""
    return SplitTensor(local, layout, context)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part; a plain tensor is its own part."""
    return tensor.local if isinstance(tensor, SplitTensor) else tensor


def layout_of(tensor: Tensor) -> Layout | None:
    """How a tensor is shared out, None if all ranks hold it whole."""
    return tensor.placement if isinstance(tensor, SplitTensor) else None


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor on every rank, differentiable where all ranks do alike with it; one not split as it is."""
    if not isinstance(tensor, SplitTensor):
        return tensor
    return collectives.gather(tensor.local, tensor.placement, tensor.context.group)


def whole(value: Any) -> Any:
    """A nested value with every split tensor gathered; what follows must be computed alike by all ranks."""
    return tree_map(lambda leaf: gathered(leaf) if is_a(leaf, SplitTensor) else leaf, value)


def check_no_function() -> None:
    """Raise inside the forward of a custom autograd function, where gradients of parts would be lost without a word.

    Only such a forward switches forward-mode gradients off (torch/csrc/autograd/python_function.cpp).
    """
    if not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled():
        raise TraceError(
            "a split tensor was given to a custom autograd.Function, which knows nothing of parts: enter "
            "functions_of_wholes() around the computation, so that it gets whole ones"
        )


def first_of(args: Iterable[Any], kwargs: dict[str, Any]) -> SplitTensor:
    """The first split tensor among arguments."""
    for value in args:
        if isinstance(value, SplitTensor):
            return value
    return next(leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, SplitTensor))


def gather_and_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with whole tensors.

    Raises:
        TraceError: If it would write into them.
    """
    name = function_name(func)
    writes = is_writing(name) or name in ("__set__", "__delete__") or bool(kwargs.get("inplace"))
    written = (args[:1] if writes else ()) + (kwargs.get("out"),)
    if any(isinstance(leaf, SplitTensor) for leaf in leaves_of(written)):
        raise TraceError(
            f"{name} writes into a tensor of shape {tuple(first_of(written, {}).shape)} of which every rank has a "
            "part: there is no rule for it. Use tensor_parallel_degree 1 for this layer, or write it out of place"
        )
    context = first_of(args, kwargs).context
    context.function = func
    context.gathered[name] += 1
    return func(*whole(args), **whole(kwargs))


@SharedPatch
@contextmanager
def functions_of_wholes() -> Iterator[None]:
    """Inside, custom autograd functions get whole tensors in place of split ones; outside these are refused.

    ``Function.apply`` hands its arguments to C++, which knows nothing of parts: a gradient would be lost. It is
    replaced, and so is ``torch._functorch.utils.unwrap_dead_wrappers``, which methods ``apply`` that user code bound
    long before look up at each call.
    """
    apply_, unwrap_ = Function.__dict__["apply"], torch._functorch.utils.unwrap_dead_wrappers

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        split = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, SplitTensor)]
        if split:
            split[0].context.gathered[cls.__name__] += 1
            # Modes that watch the computation must see what its author wrote and nothing else.
            with torch._C.DisableTorchFunction():
                args, kwargs = whole(args), whole(kwargs)
        return apply_.__get__(None, cls)(*args, **kwargs)

    def unwrap(args: tuple[Any, ...]) -> tuple[Any, ...]:
        for arg in args:
            if isinstance(arg, SplitTensor):
                arg.context.gathered["autograd.Function"] += 1
        with torch._C.DisableTorchFunction():
            args = tuple(gathered(arg) if isinstance(arg, SplitTensor) else arg for arg in args)
        return unwrap_(args)

    wholes = set_on_class(Function, "apply", classmethod(apply))
    with wholes, replaced(torch._functorch.utils, unwrap_dead_wrappers=unwrap):
        yield
