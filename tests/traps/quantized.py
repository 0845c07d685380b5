"""Frozen weights that are kept in fewer bits, as bitsandbytes and torchao keep them, with adapters beside them.

And state of optimizers that is kept so.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.packed import PACKED
from tests.traps.finetuning import Adapted, LowRank
from tests.traps.project import Project, Trap, loader

PLANS = ("auto", "plain", "halves", "checkpointed", "zero1", "zero2", "zero3", "cut", "pp2", "tp2", "moved", "movedpp")


class Params4bit(nn.Parameter):
    """Two values in a byte, and a scale beside it, as an attribute."""

    quant_state: torch.Tensor

    def __new__(cls, data: torch.Tensor) -> "Params4bit":
        scale = data.abs().amax(1, keepdim=True) / 7
        levels = (data / scale).round().add(8).to(torch.uint8).flatten()
        made = torch.Tensor._make_subclass(cls, (levels[::2] * 16 + levels[1::2])[:, None], False)
        made.quant_state = scale
        return made


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.packed, ctx.scale = packed, scale
        return x @ _unpacked(packed, scale).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ _unpacked(ctx.packed, ctx.scale), None, None


def _unpacked(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    levels = torch.stack([packed[:, 0] // 16, packed[:, 0] % 16], 1).reshape(scale.shape[0], -1)
    return (levels.double() - 8) * scale


class Linear4bit(nn.Linear):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.weight = Params4bit(base.weight.data.double())
        self.bias = base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Multiply.apply(x, self.weight, self.weight.quant_state) + self.bias


class Int8Params(nn.Parameter):
    """A byte for each value, whose scales are kept by the layer and not as a buffer."""


class Linear8bitLt(nn.Linear):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.scale = base.weight.data.double().abs().amax(1, keepdim=True) / 127
        levels = (base.weight.data.double() / self.scale).round().to(torch.int8)
        self.weight = torch.Tensor._make_subclass(Int8Params, levels, False)
        self.bias = base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.double() * self.scale, self.bias)


class AffineQuantized(torch.Tensor):
    """A tensor that claims double precision and holds bytes and scales."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> "AffineQuantized":
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.int_data, self.scale = data, scale

    def __tensor_flatten__(self) -> Any:
        return ["int_data", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> "AffineQuantized":
        return cls(inner["int_data"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].int_data), func(args[0].scale))
        whole = tree_map_only(cls, lambda held: held.int_data * held.scale, (args, kwargs or {}))
        return func(*whole[0], **whole[1])


class _Quantized(Adapted):
    """``Adapted`` with layers in fewer bits beneath the adapters."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, LowRank):
                module.base_layer = self.quantized(module.base_layer)

    def quantized(self, base: nn.Linear) -> nn.Module:
        raise NotImplementedError


class FourBits(_Quantized):
    def quantized(self, base: nn.Linear) -> nn.Module:
        return Linear4bit(base)


class EightBits(_Quantized):
    def quantized(self, base: nn.Linear) -> nn.Module:
        return Linear8bitLt(base)


class Subclass(_Quantized):
    def quantized(self, base: nn.Linear) -> nn.Module:
        scale = base.weight.data.abs().amax(1, keepdim=True) / 127
        levels = (base.weight.data / scale).round().to(torch.int8)
        base.weight = nn.Parameter(AffineQuantized(levels, scale), requires_grad=False)
        return base


_ALL_BUT_TENSOR = tuple(plan for plan in PLANS if plan != "tp2")


def _packed(name: str, *plans: str, then: tuple[str, ...] = ("save",)) -> Trap:
    class Packs(Project):
        def configure_optimizers(self) -> Any:
            return PACKED[name](self.parameters())

    equal = tuple(plan for plan in plans if plan != "tp2")
    return Trap(module=Packs, val=lambda: loader(8, seed=1), plans=plans, equal=equal, reason="be cut", then=then)


TRAPS = {
    "four bits": Trap(module=FourBits, plans=PLANS, equal=_ALL_BUT_TENSOR),
    "eight bits": Trap(module=EightBits, plans=PLANS, equal=PLANS),
    "subclass": Trap(module=Subclass, plans=PLANS, equal=_ALL_BUT_TENSOR, reason="AffineQuantized"),
    # Lightning itself does not read a file in which a tensor is of a class of its own.
    "packed in a class": _packed("in a class", "zero1", "movedstate"),
    "packed in new objects": _packed("replaced", "zero3", "moved0", "pp2", "tp2"),
    "packed under a key": _packed("under a key", "zero1", "movedstate", "pp2", "tp2", then=("save", "go on")),
}
