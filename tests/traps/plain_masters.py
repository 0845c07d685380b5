"""The arithmetic of master weights under torch's and Lightning's own means: what traps are held against."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn


class MastersPrecision(HalfPrecision):
    """Trained parameters are in 32 bits outside of steps, and their casts to 16 from a step's start to its backward."""

    def __init__(self) -> None:
        super().__init__("bf16-true")
        self.masters: dict[nn.Parameter, Tensor] = {}
        self.types: dict[nn.Parameter, torch.dtype] = {}

    def convert_module(self, module: nn.Module) -> nn.Module:
        values = {p: p.data.float() for p in module.parameters() if p.requires_grad}
        super().convert_module(module)
        for parameter, value in values.items():
            self.types[parameter] = parameter.dtype
            parameter.grad_dtype = torch.float32
            parameter.data = value
        return module

    def _compute(self) -> None:
        for parameter, dtype in self.types.items():
            self.masters[parameter] = parameter.data
            parameter.data = parameter.data.to(dtype, copy=True)

    def _rest(self) -> None:
        for parameter, value in self.masters.items():
            parameter.data = value
        self.masters.clear()

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        self._compute()
        with super().train_step_context():
            yield

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        self._compute()
        with super().val_step_context():
            yield
        self._rest()

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        earlier = {parameter: parameter.grad for parameter in self.types}
        for parameter in earlier:
            parameter.grad = None
        super().backward(tensor, model, optimizer, *args, **kwargs)
        self._rest()
        for parameter, gradient in earlier.items():
            mine = self._over_ranks(parameter)
            parameter.grad = mine if gradient is None else gradient if mine is None else gradient + mine

    def _over_ranks(self, parameter: nn.Parameter) -> Tensor | None:
        """The mean of a gradient, rounded to 16 bits before it travels; None if no rank has it."""
        gradient, world = parameter.grad, dist.get_world_size()
        has = torch.tensor(float(gradient is not None))
        dist.all_reduce(has)
        if not has:
            return None
        scaled = (torch.zeros_like(parameter) if gradient is None else gradient / world).to(self.types[parameter])
        dist.all_reduce(scaled)
        return scaled.float()


class PlainMasters(DDPStrategy):
    """Data parallelism with master weights."""

    def __init__(self) -> None:
        super().__init__(precision_plugin=MastersPrecision())

    def configure_ddp(self) -> None:
        """Nothing: gradients are averaged behind backward."""
