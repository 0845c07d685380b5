"""Parameters of other stages replaced by fake tensors, which have their shape and no values."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.plan.module_map import ModuleMap
from lightning_mist.tensors import is_hollow, substitute


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
        self._slots: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        for use in module_map.parameters:
            fake: nn.Parameter | None = None
            for module_name, attribute, regions in use.slots:
                stages = {module_map.stage_of(region, bounds) for region in regions}
                if index in stages or (not stages and use.name in held):
                    continue
                fake = fake if fake is not None else _fake_of(named[use.name], use.shape, mode)
                self._slots.append((modules[module_name]._parameters, attribute, fake, named[use.name]))
        changed = {id(space) for space, *_ in self._slots}
        self._recurrent = [
            child for child in modules.values() if isinstance(child, nn.RNNBase) and id(child._parameters) in changed
        ]

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Inside, the slots hold fakes."""
        for space, name, fake, _ in self._slots:
            space[name] = fake
        weights = [(child, child._flat_weights) for child in self._recurrent]
        for child in self._recurrent:
            # Recurrent layers keep their weights in a list besides.
            child.__dict__["_flat_weights"] = [child._parameters.get(name) for name in child._flat_weights_names]
        try:
            yield
        finally:
            for child, flat in weights:
                child.__dict__["_flat_weights"] = flat
            for space, name, _, parameter in self._slots:
                space[name] = parameter


def _fake_of(parameter: nn.Parameter, shape: tuple[int, ...], mode: FakeTensorMode) -> nn.Parameter:
    """A fake of the whole parameter, of which this rank may have a part only, or nothing."""
    with mode:
        if parameter.shape != shape or (is_hollow(parameter) and not parameter.is_meta):
            data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        else:
            data = torch.empty_strided(shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    return substitute(parameter, data, requires_grad=False)


def free_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Free the storage of parameters; they keep their shape.

    Where there is such a value they are not a number, so that whoever computes with them all the same sees it.
    """
    for parameter in parameters:
        fill = math.nan if parameter.is_floating_point() or parameter.is_complex() else 0
        nothing = torch.full((), fill, dtype=parameter.dtype, device=parameter.device)
        parameter.data = nothing.expand(parameter.shape)
        parameter.grad = None
