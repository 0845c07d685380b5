"""Following one step of a cut module through its parts, forward and backward.

Parts are numbered in execution order: 0 is the head, ``1 .. L`` the blocks with what follows them, ``L + 1`` the tail.
Without blocks the head is the whole step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_mist.errors import TraceError
from lightning_mist.model.cuts import is_compiled_block
from lightning_mist.model.fakes import parameter_slots, put
from lightning_mist.plan import ModuleMap, SequenceSplit, TensorSplit
from lightning_mist.plan.calls import intercepted, without_caches
from lightning_mist.recomputation import OwnFunction, selective_contexts, users_checkpoints
from lightning_mist.tensor_parallel import (
    CountingGroup,
    SplitContext,
    SplitTensor,
    enter_sequence,
    from_local_sequence,
    local_of,
    present,
)
from lightning_mist.without_values import BlockAnswer, MadeLeaf, answer_of

# Blocks that answer for other blocks: the shapes of a twin that did run, without its work.
#
# A step of 48 equal blocks is counted or timed by running one of them and letting the others imitate it: they hand on
# activations and gradients of the right shapes and keep their inputs alive as a real block does.


def record_answer(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, keep_values: bool
) -> BlockAnswer | None:
    """Describe a block's output so that a twin can imitate it; ``None`` if it holds what cannot be described."""
    known = (torch.Tensor, int, float, bool, str, bytes, type(None))
    inputs = tree_flatten((args, kwargs))[0]
    return answer_of(inputs, output, lambda leaf: isinstance(leaf, known), keep_values=keep_values)


class _Imitation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[[], tuple[torch.Tensor, ...]], *inputs: torch.Tensor) -> Any:
        # Activations stay alive as in a real block, whose first operator saves them; other inputs need not. Not by
        # save_for_backward: it would refuse inputs that are changed in place later, which the block may well allow.
        ctx.inputs = tuple(t if n else None for t, n in zip(inputs, ctx.needs_input_grad[1:], strict=True))
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        incoming = [g for g in gradients if g is not None and g.is_contiguous()]
        inputs, ctx.inputs = ctx.inputs, None

        def gradient(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None or isinstance(tensor, nn.Parameter):
                return None
            for index, candidate in enumerate(incoming):
                if candidate.shape == tensor.shape and candidate.dtype == tensor.dtype:
                    return incoming.pop(index)
            return torch.zeros_like(tensor)

        return (None, *map(gradient, inputs))


def _make(leaf: MadeLeaf, mode: FakeTensorMode | None) -> torch.Tensor:
    if leaf.value is not None:
        # Not detach(): a view made inside a Function may not be changed in place by the user's code.
        return leaf.value.data
    with mode if mode is not None else nullcontext():
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)


def imitate(
    answer: BlockAnswer, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode | None
) -> Any:
    """Answer for a block as its twin did; a parameter of the block stands for its share in the outputs' gradient."""
    flat = tree_flatten((args, kwargs))[0]
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    flowing = [leaf for leaf in answer.leaves if isinstance(leaf, MadeLeaf) and leaf.requires_grad]
    trained = next((p for p in block.parameters() if p.requires_grad), None)
    anchors = tensors if trained is None else [*tensors, local_of(trained)]
    make = partial(tuple, (_make(leaf, mode) for leaf in flowing))
    outputs = iter(_Imitation.apply(make, *anchors) if flowing else ())  # type: ignore[no-untyped-call]

    return answer.again(flat, lambda leaf: next(outputs) if leaf.requires_grad else _make(leaf, mode))


def echo(answer: BlockAnswer, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: int | None) -> Any:
    """Answer for a block with numbers that follow from its input, so that a loss and its gradients mean something."""
    flat = tree_flatten((args, kwargs))[0]
    source = flat[hidden] if hidden is not None else None

    def made(leaf: MadeLeaf) -> torch.Tensor:
        if leaf.value is None:
            raise ValueError("an answer without values cannot be echoed: record it with keep_values=True")
        if source is None or not leaf.value.is_floating_point():
            return leaf.value
        if leaf.shape == tuple(source.shape):
            return source * 0.9  # type: ignore[no-any-return]
        value = leaf.value.to(source.dtype)
        return value + source.mean() if leaf.requires_grad else value

    return answer.again(flat, made)


# A step as one tensor-parallel rank runs it, without the others: split parameters, and blocks that exchange nothing.
#
# Collectives answer with tensors of the right shape and are written down; on fake tensors that is all that is needed.


Dims = tuple[int | None, ...]
"""For every leaf of a value the dimension that it is shared out along, if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """How one rank sees the step; ``sequence`` says by position how hidden states enter in parts along the sequence."""

    group: CountingGroup
    context: SplitContext
    sequence: Mapping[int, SequenceSplit]

    @classmethod
    def of(cls, split: TensorSplit, *, sequence_parallel: bool, adds_later: bool = False) -> "RankView":
        """The view of rank 0 of a split, or of rows that are shared out."""
        group = CountingGroup(split.degree, adds_later=adds_later)
        entries = {item.position: item for item in split.sequence} if sequence_parallel else {}
        return cls(group=group, context=SplitContext(group, sequence_parallel), sequence=entries)

    def enter(
        self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A block's arguments as it gets them."""
        found = self.sequence.get(position)
        return (args, kwargs) if found is None else enter_sequence(args, kwargs, found, self.context)

    def show(self, value: Any, dims: Dims) -> Any:
        """Parts as the whole tensors that :func:`dims_of` saw."""
        leaves, structure = tree_flatten(value)
        shown = [
            leaf if dim is None else from_local_sequence(leaf, dim, self.context)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        return tree_unflatten(shown, structure)


def parts_of(value: Any) -> Any:
    """Nested containers in which every split tensor is replaced by this rank's part."""
    return tree_map(local_of, value)


def dims_of(value: Any) -> Dims:
    """Along which dimension each leaf is shared out."""

    def dim(leaf: SplitTensor) -> int:
        return next((dim for dim in range(leaf.dim()) if leaf.shape[dim] != leaf.local.shape[dim]), 0)

    return tuple(dim(leaf) if isinstance(leaf, SplitTensor) else None for leaf in tree_flatten(value)[0])


def present_parts(
    module: nn.Module,
    substitutes: Sequence[nn.Parameter],
    module_map: ModuleMap,
    split: TensorSplit,
    context: SplitContext,
    mode: FakeTensorMode,
) -> tuple[nn.Parameter, ...]:
    """Put parts in the place of substitutes, inside :func:`~lightning_mist.model.fakes.fake_modules.isolated` only."""
    canonical = {(owner, attribute): use.name for use in module_map.parameters for owner, attribute, _ in use.slots}
    made: dict[int, tuple[nn.Parameter, Tensor]] = {}
    for owner, item, attribute, parameter in parameter_slots(module):
        how = split.of(canonical.get((owner, attribute), ""))
        if how is None:
            continue
        if id(parameter) not in made:
            with mode:
                shape = how.local_shape(tuple(parameter.shape), split.degree)
                data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            part = nn.Parameter(data, requires_grad=parameter.requires_grad)
            made[id(parameter)] = (part, present(part, how, context))
        put(((item, attribute),), made[id(parameter)][1])
    return tuple(made[id(item)][0] if id(item) in made else item for item in substitutes)


InputSignature = tuple[object, ...]
"""Shape, strides, type and need of a gradient of every tensor that enters a block; plain values as they are."""


class Walk:
    """Stands in front of every block during one step: says which part begins, and runs the block or answers for it.

    Args:
        twins: For every block ``None`` to run it, or the position of an earlier block to imitate.
        enter: Told ``(part, backward)`` when a part begins; the first forward part is not announced.
        given: Told ``(tensor, part, is gradient, index)`` of every tensor that enters a part, forward and backward.
        selective: Whether products, convolutions and attention are kept where blocks are recomputed.
        natural: Whether blocks that are compiled run compiled, and not eagerly as all around them.
        repeating: Makes the context in which the forward of a block is repeated, or what the user checkpoints behind
            the last one.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        twins: Sequence[int | None],
        enter: Callable[[int, bool], None],
        *,
        recompute: bool,
        selective: bool = False,
        natural: bool = False,
        mode: FakeTensorMode | None,
        keep_values: bool,
        view: RankView | None = None,
        given: Callable[[torch.Tensor, int, bool, int], None] = lambda *_: None,
        repeating: Callable[[nn.Module | None], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.inputs: list[InputSignature] = []
        self.entering: list[tuple[tuple[int, ...], ...]] = []
        self.answers: dict[int, BlockAnswer | None] = {}
        self._blocks, self._twins, self._enter = blocks, twins, enter
        self._recompute, self._mode, self._keep_values = recompute, mode, keep_values
        self._natural = [natural and is_compiled_block(block) for block in blocks]
        self._contexts = selective_contexts if selective else noop_context_fn
        self._view, self._given, self._repeating = view, given, repeating
        self._shared: dict[int, Dims] = {}
        self._hooks, self._behind = ExitStack(), ExitStack()
        self._backward_part = len(blocks) + 1
        self._is_forward = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Forward and backward of one step happen inside."""
        try:
            with self._hooks, intercepted(self._blocks, lambda *called: partial(self._block, *called)), self._behind:
                if not self._blocks:
                    self._let_users_recompute()
                yield
        finally:
            self.answers.clear()

    def begin_backward(self) -> None:
        """The step's forward has ended and its backward follows."""
        self._is_forward = False
        self._behind.close()
        self._enter(len(self._blocks) + 1 if self._blocks else 0, True)

    def _block(self, position: int, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._is_forward:
            return original(*args, **kwargs)
        args, kwargs = without_caches(args, kwargs)
        if self._view is not None:
            args, kwargs = self._view.enter(position, args, kwargs)
        parts, named_parts = parts_of((args, kwargs))
        leaves = tree_flatten((parts, named_parts))[0]
        self.inputs.append(tuple(map(_signature, leaves)))
        self.entering.append(tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)))
        self._watch(leaves, position)
        self._enter(position + 1, False)
        twin = self._twins[position]
        if twin is None:
            output = self._run(position, original, args, kwargs)
            self._shared[position] = dims_of(output)
            answered = parts_of(output)
            self.answers[position] = record_answer(parts, named_parts, answered, keep_values=self._keep_values)
        else:
            answer = self.answers[twin]
            if answer is None:
                raise TraceError(f"block {position} cannot be answered for: its twin {twin} returns unknown objects")
            output = imitate(answer, self._blocks[position], parts, named_parts, self._mode)
            if self._view is not None:
                output = self._view.show(output, self._shared[twin])
        if position == len(self._blocks) - 1:
            self._watch(tree_flatten(parts_of(output))[0], position + 1)
            self._enter(position + 2, False)
            self._let_users_recompute()
        return output

    def _let_users_recompute(self) -> None:
        """No block follows: what the user checkpoints from here on is no plan's to decide."""
        self._behind.enter_context(users_checkpoints(partial(self._repeating, None)))

    def _run(self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._recompute:
            with torch.compiler.set_stance("default") if self._natural[position] else nullcontext():
                return original(*args, **kwargs)
        # All by position: checkpoint keeps the states of device generators only for devices of positional tensors.
        leaves, structure = tree_flatten((args, kwargs))

        def block(*flat: Any) -> Any:
            positional, named = tree_unflatten(flat, structure)
            if self._is_forward:
                return original(*positional, **named)
            with self._repeating(self._blocks[position]):
                return original(*positional, **named)

        return checkpoint(
            OwnFunction(block), *leaves, use_reentrant=False, preserve_rng_state=True, context_fn=self._contexts
        )

    def _watch(self, leaves: Sequence[Any], part: int) -> None:
        """What leaves ``part`` enters the next; once its gradient is complete, the backward of ``part`` begins."""

        def arrived(slot: int, gradient: torch.Tensor | None) -> None:
            if part < self._backward_part:
                self._backward_part = part
                self._enter(part, True)
            if gradient is not None:
                self._given(gradient, part, True, slot)

        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for slot, leaf in enumerate(tensors):
            self._given(leaf, part + 1, False, slot)
            if leaf.requires_grad:
                self._hooks.enter_context(leaf.register_hook(partial(arrived, slot)))  # type: ignore[no-untyped-call]


def _signature(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (int, float, bool, str, type(None))) else type(leaf).__name__


def loss_of(value: Any) -> torch.Tensor:
    """The loss that a step returned, itself or as ``"loss"``; a :class:`TraceError` if no gradient flows from one."""
    loss = value.get("loss") if isinstance(value, Mapping) else value
    if not isinstance(loss, torch.Tensor):
        raise TraceError(
            f"the step returned {type(value).__name__} without a loss: a training step that can be planned returns a "
            "tensor or a mapping with the key 'loss'"
        )
    if not loss.requires_grad:
        raise TraceError("the loss does not depend on any trained parameter: there is no backward to plan")
    return loss
