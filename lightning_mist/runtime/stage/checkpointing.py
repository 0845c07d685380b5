"""Activation checkpointing of blocks, in the place of what the user's own code would checkpoint, and behind them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch.utils.checkpoint
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_mist import recomputation
from lightning_mist.plan import CheckpointingKind
from lightning_mist.recomputation import OwnFunction, selective_contexts
from lightning_mist.runtime.parameters import no_kept_casts
from lightning_mist.runtime.shared_patch import SharedPatch
from lightning_mist.runtime.stage.stage_split import StageSplit
from lightning_mist.tensor_parallel import SplitTensor


class _Block(OwnFunction):
    """A block as a function of flat arguments.

    Split tensors travel as their parts: what is kept for backward must be an ordinary tensor.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        form: TreeSpec,
        split: StageSplit | None,
        within: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(function)
        self._form, self._split, self._within = form, split, within
        self._placements = {index: leaf.placement for index, leaf in enumerate(leaves) if isinstance(leaf, SplitTensor)}
        self._sequence = {} if split is None else split.context.sequence

    def __call__(self, *leaves: Any) -> Any:
        whole = list(leaves)
        with ExitStack() as stack:
            # Recomputation runs in backward, where the step's own context is no longer entered.
            stack.enter_context(neutral_checkpointing())
            stack.enter_context(no_kept_casts())
            if self._split is not None:
                stack.enter_context(self._split.running(self._sequence))
                for index, placement in self._placements.items():
                    whole[index] = SplitTensor(leaves[index], placement, self._split.context)
            stack.enter_context(self._within())
            args, kwargs = tree_unflatten(whole, self._form)
            return self._function(*args, **kwargs)


neutral_checkpointing = SharedPatch(recomputation.neutral_checkpointing)
"""Inside, ``torch.utils.checkpoint`` runs functions as they are, except those of :func:`checkpoint_block`, and in their
thread those of :func:`behind_blocks`."""


def behind_blocks(
    split: StageSplit | None, within: Callable[[], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Behind the last block: what users checkpoint there is recomputed, in a context made by ``within``."""
    sequence = {} if split is None else split.context.sequence

    @contextmanager
    def repeating() -> Iterator[None]:
        with ExitStack() as stack:
            # Recomputation runs in backward, where the step's own context is no longer entered.
            stack.enter_context(neutral_checkpointing)
            stack.enter_context(no_kept_casts())
            if split is not None:
                stack.enter_context(split.running(sequence))
            stack.enter_context(within())
            yield

    return recomputation.users_checkpoints(repeating)


def checkpoint_block(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    split: StageSplit | None = None,
    *,
    kind: CheckpointingKind = "full",
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """Run a block so that only its arguments are kept for backward, which runs it again with the same random numbers.

    All arguments are passed by position: the states of device generators are kept only for devices of positional
    tensors.

    Args:
        split: The split of the block's stage; recomputation repeats its collectives in the same order on all ranks.
        kind: Whether also what products, convolutions and attention return is kept.
        within: A context in which it runs, also when it runs again.
    """
    leaves, form = tree_flatten((args, kwargs))
    block = _Block(function, leaves, form, split, within)
    parts = [leaf.local if isinstance(leaf, SplitTensor) else leaf for leaf in leaves]
    contexts = selective_contexts if kind == "selective" else torch.utils.checkpoint.noop_context_fn
    return torch.utils.checkpoint.checkpoint(
        block, *parts, use_reentrant=False, preserve_rng_state=True, context_fn=contexts
    )
