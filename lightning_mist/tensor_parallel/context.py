"""What split tensors of one stage share: their ranks, the sequence they split, and what had to be gathered."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_mist.plan.tensor_split import stripes_of
from lightning_mist.tensor_parallel import collectives
from lightning_mist.tensor_parallel.group import TensorGroup
from lightning_mist.tensor_parallel.shard_layout import Layout, Outer, fits


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

    def __init__(self, group: TensorGroup, sequence_parallel: bool = False) -> None:
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
