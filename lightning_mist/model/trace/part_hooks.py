"""Following one step of a cut module through its parts, forward and backward.

Parts are numbered in execution order: 0 is the head, ``1 .. L`` the blocks with what follows them, ``L + 1`` the tail.
Without blocks the head is the whole step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_mist.errors import TraceError
from lightning_mist.model.cuts import is_compiled_block
from lightning_mist.model.fakes import intercepted
from lightning_mist.model.trace.rank_step import Dims, RankView, dims_of, parts_of
from lightning_mist.model.trace.twins import Answer, imitate, record_answer
from lightning_mist.plan.calls import without_caches
from lightning_mist.recomputation import OwnFunction, selective_contexts, users_checkpoints

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
        self.answers: dict[int, Answer | None] = {}
        self._blocks, self._twins, self._enter = blocks, twins, enter
        self._recompute, self._mode, self._keep_values = recompute, mode, keep_values
        self._natural = [natural and is_compiled_block(block) for block in blocks]
        self._contexts = selective_contexts if selective else noop_context_fn
        self._view, self._given, self._repeating = view, given, repeating
        self._shared: dict[int, Dims] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._behind = ExitStack()
        self._backward_part = len(blocks) + 1
        self._is_forward = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Forward and backward of one step happen inside."""
        try:
            with intercepted(self._blocks, self._block), self._behind:
                if not self._blocks:
                    self._let_users_recompute()
                yield
        finally:
            for hook in self._hooks:
                hook.remove()
            self.answers.clear()

    def begin_backward(self) -> None:
        """The step's forward has ended and its backward follows."""
        self._is_forward = False
        self._behind.close()
        self._enter(len(self._blocks) + 1 if self._blocks else 0, True)

    def _block(self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
                self._hooks.append(leaf.register_hook(partial(arrived, slot)))  # type: ignore[no-untyped-call]


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
