"""A step as one tensor-parallel rank runs it, without the others: split parameters, and blocks that exchange nothing.

Collectives answer with tensors of the right shape and are written down; on fake tensors that is all that is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_mist.plan import ModuleMap, SequenceSplit, TensorSplit
from lightning_mist.tensor_parallel import (
    CountingGroup,
    SplitContext,
    SplitTensor,
    enter_sequence,
    from_local_sequence,
    present,
)

Dims = tuple[int | None, ...]
"""For every leaf of a value the dimension that it is shared out along, if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """How one rank sees the step; ``sequence`` says by position how hidden states enter in parts along the sequence."""

    group: CountingGroup
    context: SplitContext
    sequence: Mapping[int, SequenceSplit]

    @classmethod
    def of(cls, split: TensorSplit, *, sequence_parallel: bool) -> "RankView":
        """The view of rank 0 of a split."""
        group = CountingGroup(split.degree)
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


def part_of(value: Any) -> Any:
    """A leaf's part, anything else as it is."""
    return value.local if isinstance(value, SplitTensor) else value


def parts_of(value: Any) -> Any:
    """Nested containers in which every split tensor is replaced by this rank's part."""
    return tree_map(part_of, value)


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
    """Put parts in the place of substitutes, inside :func:`~lightning_mist.model.fakes.isolate.isolated` only."""
    canonical = {(owner, attribute): use.name for use in module_map.parameters for owner, attribute, _ in use.slots}
    made: dict[int, tuple[nn.Parameter, Tensor]] = {}
    for owner, item in module.named_modules(remove_duplicate=True):
        for attribute, parameter in item._parameters.items():
            if parameter is None:
                continue
            how = split.of(canonical.get((owner, attribute), ""))
            if how is None:
                continue
            if id(parameter) not in made:
                with mode:
                    shape = how.local_shape(tuple(parameter.shape), split.degree)
                    data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                part = nn.Parameter(data, requires_grad=parameter.requires_grad)
                made[id(parameter)] = (part, present(part, how, context))
            item._parameters[attribute] = made[id(parameter)][1]
    return tuple(made[id(item)][0] if id(item) in made else item for item in substitutes)
