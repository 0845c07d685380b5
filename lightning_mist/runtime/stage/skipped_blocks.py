"""Answers for blocks that a stage does not hold: fakes of what they would return."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_mist.attributes import items_replaced
from lightning_mist.plan.calls import call_signature, is_simple, leaves_of, select
from lightning_mist.plan.module_map import ModuleMap
from lightning_mist.tensors import is_hollow, substitute
from lightning_mist.without_values import (
    INDEXING,
    BlockAnswer,
    MadeLeaf,
    answer_of,
    guess_read,
    is_known_mask,
    is_read,
    memory_rules,
    some_places,
)

_MAX_ANSWERS = 4096
"""Remembered answers, about 1 KB each; forgotten all at once beyond this."""


class _Guessed(TorchFunctionMode):
    """Reads of values that a skipped block does not have: what it returns has the same form whatever they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        tensor = next((leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, FakeTensor)), None)
        if tensor is not None and is_read(name, args, kwargs):
            return guess_read(name, args, kwargs, tensor)
        if name in INDEXING and isinstance(args[0], FakeTensor):
            known = tree_map_only(
                FakeTensor, lambda item: some_places(item.shape, 1) if item.dtype == torch.bool else item, args[1]
            )
            func, args = select(name, func, (args[0], known, *args[2:]), is_known_mask)
        return func(*args, **kwargs)


def _run(block: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _Guessed(), memory_rules():
        return block(*args, **kwargs)


class SkippedBlocks:
    """Runs a block on fakes the first time it sees arguments of some form, and answers from memory afterwards.

    Blocks of one class that gave equal answers the first time share their memory, so that batches of many lengths cost
    one block's run each. Should they differ for another form after all, the stage is given a tensor of another shape
    than it expects, which is an error.

    Args:
        leaking: Positions of blocks that have to run each time, since others read values inside them.
    """

    def __init__(self, blocks: Sequence[nn.Module], mode: FakeTensorMode, leaking: tuple[int, ...]) -> None:
        self._blocks, self._mode, self._leaking = blocks, mode, frozenset(leaking)
        self._answers: dict[Hashable, BlockAnswer | None] = {}  # None for a block that must run on fakes each time
        self._kinds: dict[int, int] = {}
        self._first: list[tuple[type[nn.Module], Hashable, BlockAnswer | None]] = []

    def answer(
        self,
        position: int,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: Hashable,
    ) -> Any:
        """What a block returns, in fakes, whose form depends on a context (autocast, training) too."""
        if position in self._leaking:
            return _run(original, args, kwargs)
        inputs, form = tree_flatten((args, kwargs))
        signature = (call_signature(inputs), form, context)
        key = self._kinds.get(position), signature
        if (answer := self._answers.get(key)) is not None:
            return answer.again(inputs, self._make)
        output = _run(original, args, kwargs)
        if key not in self._answers:
            self._remember(position, signature, answer_of(inputs, output, _is_known))
        return output

    def _remember(self, position: int, signature: Hashable, answer: BlockAnswer | None) -> None:
        if len(self._answers) >= _MAX_ANSWERS:
            self._answers.clear()
        if position not in self._kinds:
            first = (type(self._blocks[position]), signature, answer)
            if first not in self._first:
                self._first.append(first)
            self._kinds[position] = self._first.index(first)
        self._answers[self._kinds[position], signature] = answer

    def _make(self, leaf: MadeLeaf) -> Tensor:
        with self._mode:
            return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=leaf.device)


def _is_known(leaf: Any) -> bool:
    """Whether a leaf of a block's output can be given again."""
    return isinstance(leaf, FakeTensor) or (not isinstance(leaf, Tensor) and is_simple(leaf))


# Parameters of other stages replaced by fake tensors, which have their shape and no values.


class FakeParameters:
    """The places of a module where a stage has a fake instead of a parameter.

    Tied parameters are replaced only where another stage uses them: an embedding that is also the head is real in the
    head of the last stage and a fake in its embedding, which would otherwise be computed there too.
    """

    def __init__(
        self,
        module: nn.Module,
        module_map: ModuleMap,
        bounds: tuple[tuple[int, int], ...],
        index: int,
        held: frozenset[str],
        mode: FakeTensorMode,
    ) -> None:
        modules, named = dict(module.named_modules()), dict(module.named_parameters())
        self._slots: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for use in module_map.parameters:
            fake: nn.Parameter | None = None
            for module_name, attribute, regions in use.slots:
                stages = {module_map.stage_of(region, bounds) for region in regions}
                if index in stages or (not stages and use.name in held):
                    continue
                fake = fake if fake is not None else _fake_of(named[use.name], use.shape, mode)
                self._slots.append((modules[module_name]._parameters, attribute, fake))
        changed = {id(space) for space, *_ in self._slots}
        self._recurrent = [
            child for child in modules.values() if isinstance(child, nn.RNNBase) and id(child._parameters) in changed
        ]

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Inside, the slots hold fakes."""
        # Recurrent layers keep their weights in a list besides.
        flat = (
            (vars(child), "_flat_weights", [child._parameters.get(name) for name in child._flat_weights_names])
            for child in self._recurrent
        )
        with items_replaced(self._slots), items_replaced(flat):
            yield


def _fake_of(parameter: nn.Parameter, shape: tuple[int, ...], mode: FakeTensorMode) -> nn.Parameter:
    """A fake of the whole parameter, of which this rank may have a part only, or nothing."""
    with mode:
        if parameter.shape != shape or (is_hollow(parameter) and not parameter.is_meta):
            data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        else:
            data = torch.empty_strided(shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    return substitute(parameter, data, requires_grad=False)
