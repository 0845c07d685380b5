"""What sharing rows changes in a stage: parameters in parts, and hidden states that enter and leave in parts.

Tensor- and context-parallel ranks run the same step on the same rows. A stage's parameters that are shared out show
their whole shape to the module while it computes; what leaves the stage is whole on every rank again, or, where the
stage is sequence or context parallel, in equal parts along the sequence.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_mist.attributes import items_replaced
from lightning_mist.plan import CheckpointingKind, LiveTensor, ModuleMap, TensorSplit
from lightning_mist.plan.mesh import Side
from lightning_mist.recomputation import OwnFunction, Within, neutral_checkpointing, selective_contexts
from lightning_mist.runtime.communication import Transport
from lightning_mist.runtime.parameters import no_kept_casts
from lightning_mist.tensor_parallel import (
    SplitContext,
    SplitTensor,
    TensorGroup,
    enter,
    enter_sequence,
    from_local_sequence,
    functions_of_wholes,
    leaving,
    present,
    to_local_sequence,
)
from lightning_mist.tensor_parallel.collectives import Reduction
from lightning_mist.tensor_parallel.shard_layout import Outer

Slot = tuple[dict[str, Any], str, str]
"""A module's parameters, one of its names there, and the parameter's canonical name."""


class StageSplit:
    """The split of one rank's stages."""

    def __init__(self, split: TensorSplit, group: TensorGroup, *, sequence_parallel: bool) -> None:
        self.context = SplitContext(group, sequence_parallel)
        self._parameters = {item.name: item for item in split.parameters}
        self._side = Side(degree=group.size, is_shared=sequence_parallel)
        self._entries = {entry.position: entry for entry in split.sequence} if sequence_parallel else {}

    def given(self, value: Any) -> Any:
        """What the step returned, whole on every rank."""
        return leaving(value, self.context)

    def slots_of(self, module: nn.Module, module_map: ModuleMap) -> tuple[Slot, ...]:
        """The places of a module that hold a parameter which is shared out."""
        modules = dict(module.named_modules())
        return tuple(
            (modules[module_name]._parameters, attribute, use.name)
            for use in module_map.parameters
            if use.name in self._parameters
            for module_name, attribute, _ in use.slots
        )

    @contextmanager
    def presented(self, slots: Sequence[Slot], parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Inside, slots show the whole shape of the parts that they hold; those with a fake stay as they are."""
        here = [slot for slot in slots if slot[2] in parameters and slot[0][slot[1]] is parameters[slot[2]]]
        shown = {name: present(parameters[name], self._parameters[name], self.context) for _, _, name in here}
        try:
            with items_replaced((space, attribute, shown[name]) for space, attribute, name in here):
                yield
        finally:
            self.context.forget()

    @contextmanager
    def running(self, sequence: Mapping[tuple[int, ...], tuple[int, Outer]]) -> Iterator[None]:
        """Around the user's step, which begins knowing nothing of earlier ones, so that all run alike.

        Or around the recomputation of a block, which began with ``sequence`` known; see :class:`SplitContext`.
        """
        self.context.forget()
        self.context.sequence = sequence
        try:
            with functions_of_wholes():
                yield
        finally:
            self.context.forget()

    def enter_block(
        self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A block's arguments as the block is to see them: with hidden states in parts, where it takes such."""
        self.context.forget()
        entry = self._entries.get(position)
        if entry is None:
            return args, kwargs
        # Modes that watch the user's step for values must not see what is done here.
        with torch._C.DisableTorchFunction():
            return enter_sequence(args, kwargs, entry, self.context)

    def held_shape(self, live: LiveTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which this rank holds a tensor of ``shape`` that crosses a boundary."""
        dim = live.sequence_dim
        if dim is None:
            return shape
        start, end = self._side.held(self.context.group.rank, shape[dim])
        return (*shape[:dim], end - start, *shape[dim + 1 :])

    def arrived(self, live: LiveTensor, held: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A received tensor as the step is to see it."""
        if live.sequence_dim is None or not self._side.is_parted(shape[live.sequence_dim]):
            return enter(held, self.context.group)
        with torch._C.DisableTorchFunction():
            return from_local_sequence(held, live.sequence_dim, self.context)

    def leaving(self, live: LiveTensor, tensor: Tensor) -> Tensor:
        """What this rank holds of a tensor that the step made and that leaves the stage; differentiable."""
        dim = live.sequence_dim
        if dim is None or not self._side.is_parted(tensor.shape[dim]):
            return leaving(tensor, self.context)  # type: ignore[no-any-return]
        return to_local_sequence(tensor, dim, self.context)


class TransportGroup:
    """A :class:`~lightning_mist.tensor_parallel.TensorGroup` of global ranks that waits for every collective."""

    def __init__(self, transport: Transport, ranks: Sequence[int], *, adds_later: bool = False) -> None:
        self.adds_later = adds_later
        self._transport, self._group = transport, tuple(sorted(ranks))
        self.rank, self.size = tuple(ranks).index(transport.rank), len(ranks)
        # A transport's groups are sorted by global rank, the plan's devices need not be.
        self._places = [self._group.index(rank) for rank in ranks]
        self._indices = [tuple(ranks).index(rank) for rank in self._group]
        self._is_sorted = self._places == list(range(self.size))

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        """The sum or maximum over the ranks, a new tensor."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._transport.all_reduce(result, self._group, reduction).wait()
        return result

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, stacked along a new first dimension in the order of ranks."""
        result = self._transport.all_gather(tensor.detach(), self._group).result()
        return result if self._is_sorted else result[self._places]

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Of a tensor with one entry per rank along its first dimension: the sum over ranks of this rank's entry."""
        tensor = tensor.detach()
        if not self._is_sorted:
            tensor = tensor[self._indices]
        return self._transport.reduce_scatter(tensor, self._group).result()


# Activation checkpointing of blocks, in the place of what the user's own code would checkpoint, and behind them.


def repeating_in(split: StageSplit | None, within: Within) -> Within:
    """Makes contexts of what runs again in backward, where the step's own context is no longer entered."""
    sequence = {} if split is None else split.context.sequence

    @contextmanager
    def repeating() -> Iterator[None]:
        running = nullcontext() if split is None else split.running(sequence)
        with neutral_checkpointing(), no_kept_casts(), running, within():
            yield

    return repeating


def checkpoint_block(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split: StageSplit | None = None,
    *,
    kind: CheckpointingKind = "full",
    within: Within = nullcontext,
) -> Any:
    """Run a block so that only its arguments are kept for backward, which runs it again with the same random numbers.

    All arguments are passed by position: the states of device generators are kept only for devices of positional
    tensors. Split tensors travel as their parts: what is kept for backward must be an ordinary tensor.

    Args:
        split: The split of the block's stage; recomputation repeats its collectives in the same order on all ranks.
        kind: Whether also what products, convolutions and attention return is kept.
        within: A context in which it runs, also when it runs again.
    """
    leaves, form = tree_flatten((args, kwargs))
    placements = {index: leaf.placement for index, leaf in enumerate(leaves) if isinstance(leaf, SplitTensor)}
    parts = [leaf.local if isinstance(leaf, SplitTensor) else leaf for leaf in leaves]
    repeating = repeating_in(split, within)

    def block(*given: Any) -> Any:
        whole = list(given)
        for index, placement in placements.items():
            assert split is not None
            whole[index] = SplitTensor(whole[index], placement, split.context)
        with repeating():
            args, kwargs = tree_unflatten(whole, form)
            return function(*args, **kwargs)

    contexts = selective_contexts if kind == "selective" else torch.utils.checkpoint.noop_context_fn
    return torch.utils.checkpoint.checkpoint(
        OwnFunction(block), *parts, use_reentrant=False, preserve_rng_state=True, context_fn=contexts
    )
