"""Other batches than the one that was looked at: padded, masked, weighted, with ties, and other parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_mist.runtime.cutting.arguments import leaves_in
from lightning_mist.runtime.cutting.tape import Tape
from lightning_mist.runtime.cutting.tape_replay import ancestors
from lightning_mist.runtime.cutting.traced_numbers import BATCH, Ref

_LOOKUPS = frozenset(
    (
        *("embedding", "gather", "index_select", "take", "take_along_dim", "scatter", "scatter_", "scatter_add"),
        *("scatter_add_", "one_hot", "index_add", "index_add_", "bincount", "index_copy", "__getitem__", "__setitem__"),
        *("cross_entropy", "nll_loss", "ctc_loss", "multi_margin_loss", "multilabel_margin_loss", "embedding_bag"),
    )
)
_COMPARISONS = {"ne": 0, "eq": 0, "__ne__": 0, "__eq__": 0, "ge": -1, "gt": 0, "lt": 0, "le": 1}
"""Comparisons with a number, and what to add to the number to get a value that does not count."""

_MOST_BYTES = 2 << 30
"""Parameters of more bytes are not perturbed: a second copy of them may not fit."""


class Perturber:
    """Makes other batches of the form of one."""

    def __init__(self, tape: Tape, leaves: Sequence[Tensor]) -> None:
        self._leaves = list(leaves)
        self._generator = torch.Generator().manual_seed(17)
        self._absent = [self._absent_values(tape, index) for index in range(len(leaves))]
        self._is_lookup = [_looks_up(tape, index) for index in range(len(leaves))]

    def _absent_values(self, tape: Tape, index: int) -> list[int]:
        """The values of a leaf that its step treats as nothing: it compares with them."""
        found = []
        for entry in tape.entries:
            if entry.name not in _COMPARISONS or entry.depends != "data":
                continue
            numbers = [leaf for _, leaf in leaves_in(entry.args) if type(leaf) in (int, float)]
            refs = [leaf for _, leaf in leaves_in(entry.args) if isinstance(leaf, Ref)]
            if len(numbers) == 1 and len(refs) == 1 and _comes_from(tape, refs[0], index):
                found.append(int(numbers[0]) + _COMPARISONS[entry.name])
        return found

    def padded(self) -> list[Tensor]:
        """Rows that end early, one of which has nothing to count, and other weights."""
        return [self._padded(index, leaf) for index, leaf in enumerate(self._leaves)]

    def shuffled(self) -> list[Tensor]:
        """Rows in another order, with other entries and padding."""
        order = torch.randperm(len(self._leaves[0]) if self._leaves[0].dim() else 1, generator=self._generator)
        made = []
        for index, leaf in enumerate(self._leaves):
            mixed = self._varied(index, leaf[order.to(leaf.device)]) if leaf.dim() else leaf
            made.append(self._scaled(mixed) if leaf.dtype.is_floating_point and leaf.dim() else mixed)
            can_be_absent = any(self._is_allowed(index, value) for value in self._absent[index])
            if not _is_mask(leaf) and can_be_absent and index % 2:
                made[-1] = self._padded(index, made[-1])
        return made

    def tied(self) -> list[Tensor]:
        """All rows equal to the first."""
        return [leaf[:1].expand_as(leaf).clone() if leaf.dim() else leaf for leaf in self._leaves]

    def _varied(self, index: int, leaf: Tensor) -> Tensor:
        """Whole numbers that are no positions, other ones where all are alike: of those nothing would be seen."""
        is_alike = not leaf.dtype.is_floating_point and leaf.numel() and bool((leaf == leaf.flatten()[0]).all())
        if not is_alike or self._is_lookup[index]:
            return leaf
        change = torch.rand(leaf.shape, generator=self._generator).to(leaf.device) < 0.5
        first = int(leaf.flatten()[0])
        return torch.where(change, torch.full_like(leaf, first - 1 if first > 0 else first + 1), leaf)

    def _is_allowed(self, index: int, value: int) -> bool:
        # An index out of bounds ends the process on a GPU.
        leaf = self._leaves[index]
        return not self._is_lookup[index] or (value >= 0 and leaf.numel() > 0 and value <= int(leaf.max()))

    def _padded(self, index: int, leaf: Tensor) -> Tensor:
        if not leaf.dim() or not leaf.numel():
            return leaf
        keeps_first = True
        if _is_mask(leaf):
            absent = 0
        elif leaf.dtype.is_floating_point:
            return self._scaled(leaf)
        else:
            values = [value for value in self._absent[index] if self._is_allowed(index, value)]
            if not values:
                return leaf
            absent, keeps_first = values[0], False
        keep = self._ends(leaf, keeps_first=keeps_first)
        return leaf.masked_fill(~keep.to(leaf.device), absent)

    def _ends(self, leaf: Tensor, *, keeps_first: bool) -> Tensor:
        """Which entries of every row count: as many as come first in it."""
        if leaf.dim() == 1:
            keep = torch.rand(leaf.shape, generator=self._generator) > 0.5
            keep[-1] = True
            return keep
        length = leaf.shape[-1]
        count = torch.randint(1 if keeps_first else 0, length + 1, leaf.shape[:-1], generator=self._generator)
        if not keeps_first:
            count[0] = 0
        count[-1] = max(1, length // 2)
        return torch.arange(length) < count.unsqueeze(-1)

    def _scaled(self, leaf: Tensor) -> Tensor:
        factor = (torch.rand(leaf.shape, generator=self._generator) * 0.8 + 0.2).to(leaf.device, leaf.dtype)
        return leaf * factor if leaf.any() else factor  # what is zero in this batch may not be in the next

    def labels(self, target: Tensor, ignored: int) -> Tensor:
        """Labels some of which are ignored, among them all of the first rows."""
        drop = torch.rand(target.shape, generator=self._generator) < 0.4
        drop[: max(1, len(target) // 4)] = True
        drop.view(-1)[-1] = False
        return target.masked_fill(drop.to(target.device), ignored)


def _is_mask(leaf: Tensor) -> bool:
    if leaf.dtype == torch.bool:
        return True
    return leaf.dim() > 1 and bool(((leaf == 0) | (leaf == 1)).all()) and bool((leaf == 1).any())


def _comes_from(tape: Tape, ref: Ref, index: int) -> bool:
    used = (leaf for entry in ancestors(tape, [ref]) for _, leaf in leaves_in((entry.args, entry.kwargs)))
    return any(isinstance(leaf, Ref) and leaf == Ref(BATCH, index) for leaf in (ref, *used))


def _looks_up(tape: Tape, index: int) -> bool:
    """Whether values of a leaf are positions in something."""
    holding = {Ref(BATCH, index)} if _is_position(tape, Ref(BATCH, index)) else set()
    for entry in tape.entries:
        used = {leaf for _, leaf in leaves_in((entry.args, entry.kwargs)) if isinstance(leaf, Ref)}
        if not used & holding:
            continue
        if entry.block is not None or entry.name in _LOOKUPS:
            return True
        holding.update(ref for ref in entry.refs if entry.depends == "data" and _is_position(tape, ref))
    return False


def _is_position(tape: Tape, ref: Ref) -> bool:
    dtype = tape.dtypes[ref]
    return not dtype.is_floating_point and dtype != torch.bool


@contextmanager
def other_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, parameters have other values, unless they are too large to be kept twice."""
    parameters = [p for p in module.parameters() if p.dtype.is_floating_point and not p.is_meta]
    if sum(p.numel() * p.element_size() for p in parameters) > _MOST_BYTES:
        yield
        return
    kept = [p.data for p in parameters]
    generator = torch.Generator().manual_seed(11)
    try:
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            size = parameter.detach().abs().mean() if parameter.numel() else 0.0
            parameter.data = parameter.data + noise * (0.3 * size + 0.02)
        yield
    finally:
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.data = values
