"""What tensor parallelism changes in a stage: parameters in parts, and hidden states that enter and leave in parts.

The ranks of a tensor-parallel group run the same step on the same rows. A stage's parameters that are shared out show
their whole shape to the module while it computes; what leaves the stage is whole on every rank again, or, where the
stage is sequence parallel, in equal parts along the sequence.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_mist.plan import LiveTensor, ModuleMap, TensorSplit
from lightning_mist.runtime.boundary import Side
from lightning_mist.tensor_parallel import (
    SplitContext,
    SplitTensor,
    TensorGroup,
    enter_sequence,
    from_local_sequence,
    functions_of_wholes,
    present,
    split_sequence,
    whole,
)


class StageSplit:
    """The split of one rank's stages.

    Args:
        split: How the module's parameters are shared out.
        group: The tensor-parallel ranks.
        sequence_parallel: Whether hidden states between split layers are shared out along the sequence.

    Attributes:
        context: What the split tensors have in common.
    """

    def __init__(self, split: TensorSplit, group: TensorGroup, *, sequence_parallel: bool) -> None:
        self.context = SplitContext(group, sequence_parallel)
        self._parameters = {item.name: item for item in split.parameters}
        self._side = Side(degree=group.size, is_shared=sequence_parallel)
        self._entries = {entry.position: entry for entry in split.sequence} if sequence_parallel else {}

    @property
    def gathered(self) -> tuple[tuple[str, int], ...]:
        """How often a function needed the whole of a split tensor, by its name."""
        return tuple(self.context.gathered.items())

    @contextmanager
    def presented(
        self, module: nn.Module, module_map: ModuleMap, parameters: Mapping[str, nn.Parameter]
    ) -> Iterator[None]:
        """Inside, the module's slots show the whole shape of the parts that they hold.

        Args:
            module: The module, with ghosts in the slots of other stages.
            module_map: Says through which slots a parameter is used.
            parameters: The stage's parameters by canonical name, those that are shared out as this rank's parts.
        """
        modules = dict(module.named_modules())
        changed: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        try:
            for use in module_map.parameters:
                split, parameter = self._parameters.get(use.name), parameters.get(use.name)
                if split is None or parameter is None:
                    continue
                shown = present(parameter, split, self.context)
                for module_name, attribute, _ in use.slots:
                    space = modules[module_name]._parameters
                    if space[attribute] is parameter:
                        changed.append((space, attribute, parameter))
                        space[attribute] = shown
            yield
        finally:
            for space, attribute, parameter in changed:
                space[attribute] = parameter
            self.context.forget()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around the user's step: it begins knowing nothing of earlier ones, so that all run alike."""
        self.context.sequence = {}
        try:
            with functions_of_wholes():
                yield
        finally:
            self.context.forget()

    @contextmanager
    def recomputing(self, sequence: Mapping[tuple[int, ...], tuple[int, int]]) -> Iterator[None]:
        """Around the recomputation of a block, which began with ``sequence`` known; see :class:`SplitContext`."""
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
        return (args, kwargs) if entry is None else enter_sequence(args, kwargs, entry, self.context)

    def held_shape(self, live: LiveTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which this rank holds a tensor of ``shape`` that crosses a boundary."""
        dim = live.sequence_dim
        if dim is None:
            return shape
        start, end = self._side.held(self.context.group.rank, shape[dim])
        return (*shape[:dim], end - start, *shape[dim + 1 :])

    def arrived(self, live: LiveTensor, held: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A received tensor as the step is to see it.

        Args:
            live: What it is.
            held: What this rank holds of it.
            shape: Its whole shape.
        """
        if live.sequence_dim is None or not self._side.is_parted(shape[live.sequence_dim]):
            return held
        return from_local_sequence(held, live.sequence_dim, self.context)

    def leaving(self, live: LiveTensor, tensor: Tensor) -> Tensor:
        """What this rank holds of a tensor that the step made and that leaves the stage; differentiable."""
        dim = live.sequence_dim
        if dim is None or not self._side.is_parted(tensor.shape[dim]):
            return self.whole(tensor)  # type: ignore[no-any-return]
        if not isinstance(tensor, SplitTensor) or tensor.placement[dim] != ((tensor.shape[dim], True),):
            tensor = split_sequence(self.whole(tensor), dim, self.context)
        assert isinstance(tensor, SplitTensor)
        return tensor.local

    def whole(self, value: Any) -> Any:
        """Nested containers with every split tensor gathered; differentiable."""
        return whole(value)
