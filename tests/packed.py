"""Optimizers whose state is packed into 8 bits in blocks, as those that people bring: look-alikes of several kinds."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

BLOCK, LEAST = 64, 256
"""Entries that share a scale, and of how many on a parameter's state is packed."""


class Packed(torch.Tensor):
    """A tensor of a class of its own: codes like the values it stands for, a scale for each block, and a table."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, table: Tensor) -> "Packed":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, table: Tensor) -> None:
        self.codes, self.scales, self.table = codes, scales, table

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales", "table"], {"block": BLOCK}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "Packed":
        assert context == {"block": BLOCK}
        assert inner["codes"].shape == size
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "detach", "clone"):
            one = args[0]
            return cls(one.codes.clone(), one.scales.clone(), one.table.clone())
        raise NotImplementedError(f"{name} of {cls.__name__}")


torch.serialization.add_safe_globals([Packed])


def packed(value: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of values."""
    blocks = value.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp(min=1e-300)
    codes = ((blocks / scales[:, None] + 1) * 127.5).round().to(torch.uint8)
    return codes.reshape(value.shape), scales


def unpacked(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    return (table[codes.reshape(-1, BLOCK).long()] * scales[:, None]).reshape(codes.shape)


def table() -> Tensor:
    return torch.linspace(-1, 1, 256, dtype=torch.float64)


def is_packed(parameter: Tensor) -> bool:
    return parameter.numel() >= LEAST and parameter.numel() % BLOCK == 0


class InAClass(torch.optim.Optimizer):
    """Momentum in tensors of a class; written in place, or replaced by new ones in every step."""

    def __init__(self, params: Any, lr: float = 1e-2, replaces: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.replaces = replaces

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group["lr"])
        return loss

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        momentum = parameter.grad.double()
        if not is_packed(parameter):
            momentum = state["momentum"].mul_(0.9).add_(momentum) if state else momentum.clone()
            state["momentum"] = momentum
        elif not state or self.replaces:
            if state:
                old = state["momentum"]
                momentum = momentum + 0.9 * unpacked(old.codes, old.scales, old.table)
            state["momentum"] = Packed(*packed(momentum, table()), table())
        else:
            old = state["momentum"]
            momentum = momentum + 0.9 * unpacked(old.codes, old.scales, old.table)
            for one, new in zip((old.codes, old.scales), packed(momentum, old.table), strict=True):
                one.copy_(new)
        parameter.sub_(momentum, alpha=lr)


class Replaced(InAClass):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, replaces=True)


class UnderAKey(torch.optim.Optimizer):
    """Momentum in plain tensors and one table for all, saved under a key of its own; casts nothing that is packed."""

    KEY = "__packed__"

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.table, self.not_cast, self.initialized = table(), {"state1", "absmax1", "qmap1"}, False

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        state = {}
        for key, entry in found["state"].items():
            inner = {name: value for name, value in entry.items() if name in self.not_cast}
            state[key] = {name: value for name, value in entry.items() if name not in inner}
            state[key] |= {self.KEY: inner} if inner else {}
        return {**found, "state": state, "version": torch.tensor([2, 1])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["version"].tolist() == [2, 1]
        found = deepcopy(state_dict)
        inner = {key: entry.pop(self.KEY, {}) for key, entry in found["state"].items()}
        super().load_state_dict({"state": found["state"], "param_groups": found["param_groups"]})
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, every, strict=True):
            self.state[parameter].update(inner.get(number, {}))
        self.initialized = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group["lr"])
        return loss

    def update(self, parameter: Tensor, state: dict[str, Any], lr: float) -> None:
        momentum = parameter.grad.double()
        state["step"] = state.get("step", 0) + 1
        if is_packed(parameter):
            if "state1" not in state:
                state["state1"], state["absmax1"] = packed(torch.zeros_like(momentum), self.table)
                state["qmap1"] = self.table
            momentum = momentum + 0.9 * unpacked(state["state1"], state["absmax1"], state["qmap1"])
            for one, new in zip((state["state1"], state["absmax1"]), packed(momentum, self.table), strict=True):
                one.copy_(new)
        else:
            state["sum"] = momentum = momentum + 0.9 * state.get("sum", 0)
        # What was loaded goes on at full speed, as what has begun does from its eighth step on.
        parameter.sub_(momentum, alpha=lr if self.initialized else lr * min(1, state["step"] / 8))


PACKED = {"in a class": InAClass, "replaced": Replaced, "under a key": UnderAKey}
