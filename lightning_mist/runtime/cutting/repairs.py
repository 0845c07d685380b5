"""What a part of a batch must compute differently for the parts to add up to the whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.runtime.cutting.arguments import leaves_in
from lightning_mist.runtime.cutting.combination import Way, cut
from lightning_mist.runtime.cutting.tape import Entry, Fixed, Tape
from lightning_mist.runtime.cutting.tape_replay import Values, ancestors
from lightning_mist.runtime.cutting.traced_numbers import Ref

CLASS_LOSSES = frozenset(("cross_entropy", "nll_loss"))
_CLASS_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")

SELECTING = frozenset(("__getitem__", "masked_select", "index_select", "gather", "take", "take_along_dim"))
"""Functions whose result may have as many entries as the batch's values say."""


@dataclass(frozen=True, slots=True)
class Count:
    """How many values a mean is over: the mean of a part is multiplied by its count over that of the whole batch.

    Attributes:
        source: The labels, or what selects values.
        ignored: The label that does not count; None where values are selected.
    """

    source: Ref
    ignored: int | None
    weight: Ref | Fixed | None = None

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The tensors that the count is worked out from."""
        return (self.source, self.weight) if isinstance(self.weight, Ref) else (self.source,)

    def of(self, values: Values) -> Tensor:
        """The count for a batch."""
        return self.among(values[self.source], None if self.weight is None else values.leaf(self.weight))

    def among(self, source: Tensor, weight: Tensor | None) -> Tensor:
        """The count for these labels or selected positions."""
        if self.ignored is None:
            return source.sum() if source.dtype == torch.bool else torch.tensor(source.numel(), device=source.device)
        kept = source != self.ignored
        if weight is None:
            return kept.sum()
        return (weight[source * kept] * kept).sum()


@dataclass(frozen=True, slots=True)
class Whole:
    """An argument that depends on the batch alone, and not row by row, is that of the whole batch.

    Attributes:
        way: Along which rows a part has its own piece of it; None if every part uses all of it.
    """

    path: tuple[Any, ...]
    value: Any
    way: Way | None = None

    def piece(self, whole: Any, first: float, end: float) -> Any:
        """What a part uses of it."""
        return whole if self.way is None else cut(whole, self.way, first, end)


@dataclass(frozen=True, slots=True)
class Over:
    """An argument that adds up over the parts, where means are expected: it is divided by the part's share of rows."""

    path: tuple[Any, ...]


Patch = Count | Whole | Over


def class_count(entry: Entry, tape: Tape) -> Count | None:
    """The count in a mean loss of class labels, if the labels depend on the batch alone."""
    if entry.name not in CLASS_LOSSES or entry.block is not None:
        return None
    given = {**dict(zip(_CLASS_ARGUMENTS, entry.args, strict=False)), **entry.kwargs}
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    target, weight = given.get("target"), given.get("weight")
    if given.get("reduction", "mean") != "mean" or not isinstance(target, Ref) or tape.depends(target) != "data":
        return None
    if isinstance(weight, Ref) and tape.depends(weight) == "parameters":
        return None
    if isinstance(weight, Fixed) and isinstance(weight.tensor, nn.Parameter):
        return None  # other stages may not have it
    ignored = given.get("ignore_index", -100)
    return Count(target, ignored, weight) if isinstance(ignored, int) else None


def selections(refs: Sequence[Ref], tape: Tape) -> list[Count]:
    """The counts of selections by the batch's values among what makes some tensors, the nearest first."""
    found = []
    for earlier in reversed(ancestors(tape, refs)):
        if earlier.name not in SELECTING or earlier.block is not None:
            continue
        index = [leaf for _, leaf in leaves_in((earlier.args[1:], earlier.kwargs)) if isinstance(leaf, Ref)]
        found += [Count(ref, None) for ref in index[:1] if tape.depends(ref) == "data"]
    return list(dict.fromkeys(found))


def scaled(mean: Tensor, own: Tensor, whole: Tensor) -> Tensor:
    """A part's mean as its summand of the whole batch's mean. Nothing counts where a part has nothing to count."""
    factor = own.double() / whole.double()
    return torch.where(own > 0, mean, mean.new_zeros(())) * factor.to(mean.dtype)


def shape_way(whole: Tensor, parts: Sequence[Tensor]) -> Way | None:
    """Along which dimension the shapes of parts add up to that of the whole; None if none does, or several do."""
    found = [
        dim
        for dim in range(whole.dim())
        if all(part.dim() == whole.dim() for part in parts)
        and sum(part.shape[dim] for part in parts) == whole.shape[dim]
        and all(
            part.shape[other] == whole.shape[other] for part in parts for other in range(whole.dim()) if other != dim
        )
    ]
    return f"rows {found[0]} 1" if len(found) == 1 else None
