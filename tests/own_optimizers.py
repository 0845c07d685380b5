"""Optimizers that people bring, each in a few lines: what they look at together, and where they keep it."""

import random
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing


class Own(torch.optim.Optimizer):
    """Updates every parameter that has a gradient by :meth:`rule`; a moment of a tenth and a rate are there."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, p.grad, self.state[p], group)
        return loss

    def begin(self) -> None:
        pass

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.add_(moment(s, g), alpha=-group["lr"])


def moment(s: Any, g: Any) -> torch.Tensor:
    s.setdefault("m", torch.zeros_like(g)).lerp_(g, 0.1)
    return s["m"]


# State in few bits ------------------------------------------------------------------------------------------------


def encoded(value: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 8 bits in the value's shape, and the largest entry of every block."""
    flat = value.flatten()
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scale = rows.abs().amax(1).clamp(min=1e-30)
    return (rows / scale[:, None] * 127).round().add(128).to(torch.uint8).view(-1)[: len(flat)].view(value.shape), scale


def decoded(codes: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    return ((codes.flatten().to(scale) - 128) / 127 * scale.repeat_interleave(block)[: codes.numel()]).view(codes.shape)


class Codes(torch.Tensor):
    """A tensor of another class, made of codes and scales."""

    @staticmethod
    def __new__(cls, codes: Any, scale: Any, block: int) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: Any, scale: Any, block: int) -> None:
        self.codes, self.scale, self.block = codes, scale, block

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], self.block

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, block: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"], block)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [decoded(x.codes, x.scale, x.block) if isinstance(x, Codes) else x for x in args]
        return return_and_correct_aliasing(func, args, kwargs or {}, func(*plain, **(kwargs or {})))


class Eight(Own):
    """Moments in 8 bits, in blocks of consecutive entries, of parameters that are large enough; bits are no option."""

    def __init__(self, params: Any, lr: float = 1e-2, bits: int = 8, block: int = 256, least: int = 4096) -> None:
        super().__init__(params, lr)
        self.bits, self.block, self.least = bits, block, least

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if self.bits_of(group) == 32 or p.numel() < self.least:
            first, second = (s.setdefault(key, torch.zeros_like(p)) for key in ("m", "v"))
        else:
            first, second = (
                self.kept(s.get(key)) if key in s else torch.zeros_like(p, memory_format=torch.contiguous_format)
                for key in ("m", "v")
            )
        first.lerp_(g, 0.1)
        second.lerp_(g.abs(), 0.01)
        if s.get("m") is not first:
            s["m"], s["v"] = (self.keep(value) for value in (first, second))
        s["step"] = s.get("step", torch.zeros(())) + 1
        p.addcdiv_(first, second + 1e-8, value=-group["lr"])

    def bits_of(self, group: Any) -> int:
        return self.bits

    def keep(self, value: torch.Tensor) -> Any:
        return [*encoded(value, self.block)]

    def kept(self, state: Any) -> torch.Tensor:
        return decoded(*state, self.block)


class EightWrapped(Eight):
    """The same behind a tensor class."""

    def keep(self, value: torch.Tensor) -> Any:
        return Codes(*encoded(value, self.block), self.block)

    def kept(self, state: Any) -> torch.Tensor:
        return decoded(state.codes, state.scale, state.block)


class EightByGroup(Eight):
    """Bits are an option of groups; the constructor's default is another."""

    def __init__(self, params: Any, lr: float = 1e-2, bits: int = 32) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("bits", bits)

    def bits_of(self, group: Any) -> int:
        return int(group["bits"])


class Momentum8(Eight):
    """Keeps the momentum in groups under another name, and does not do without."""

    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.0) -> None:
        if momentum == 0.0:
            raise ValueError("SGD without momentum is not supported")
        super().__init__(params, lr)
        self.defaults["betas"] = (momentum, 0.0)
        for group in self.param_groups:
            group["betas"] = (momentum, 0.0)


# Rules that need whole parameters, or look at several together -----------------------------------------------------


class Orthogonal(Own):
    """Turns a matrix round until its singular values are alike."""

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        x = moment(s, g)
        if x.ndim == 2:
            x = x / x.norm()
            for _ in range(2):
                x = 1.5 * x - 0.5 * x @ x.T @ x
        p.add_(x, alpha=-group["lr"])


class Factored(Own):
    """Second moments by row and column, of matrices that are large enough."""

    def __init__(self, params: Any, lr: float = 1e-2, least: int = 128) -> None:
        super().__init__(params, lr, least=least)

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        if p.ndim < 2 or min(p.shape[:2]) < group["least"]:
            p.addcdiv_(g, g.abs() + 1e-8, value=-group["lr"])
            return
        rows, columns = (s.setdefault(dim, (g * g).mean(dim)).lerp_((g * g).mean(dim), 0.1) for dim in (1, 0))
        p.addcdiv_(g, (rows[:, None] * columns / rows.mean()).sqrt() + 1e-8, value=-group["lr"])


class RateByShape(Own):
    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"] * (p.shape[0] / p.shape[-1]) ** 0.5 if p.ndim > 1 else -group["lr"])


class SignOfLarge(Own):
    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.add_(g.sign() if p.numel() > 2000 else g, alpha=-group["lr"])


class Lion(Own):
    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.add_(moment(s, g).sign(), alpha=-group["lr"])


class Begun(Own):
    """Makes its state when it is made."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.1)

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.addcdiv_(g, s["sum"].addcmul_(g, g).sqrt(), value=-group["lr"])


class Clipping(Own):
    """Scales all updates by the norm of all gradients."""

    def begin(self) -> None:
        own = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.total = torch.stack(own).norm() if own else 1.0

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.add_(g / self.total, alpha=-group["lr"])


class Rounding(Own):
    """Rounds at random."""

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.add_(g + 1e-3 * torch.rand_like(g), alpha=-group["lr"])


class RoundingByItself(Own):
    """Rounds at random by a generator of its own."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.source = random.Random(0)

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"] * (1 + 1e-3 * self.source.random()))


class ReadsLoss(Own):
    """Takes steps as long as the loss says."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(None) if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-float(loss) * group["lr"])
        return loss


# State elsewhere ----------------------------------------------------------------------------------------------------


class InAttribute(Own):
    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        own = self.__dict__.setdefault("moments", {}).setdefault(id(p), {})
        p.add_(moment(own, g), alpha=-group["lr"])


class InGroup(Own):
    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.add_(moment(group.setdefault("kept", {}).setdefault(len(p), {}), g), alpha=-group["lr"])


class Counts(Own):
    """Counts its steps in the group, and steps by them."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"] / group["steps"])


STEPS = [0]


class CountsForAll(Own):
    """Counts the steps of all of its kind."""

    def begin(self) -> None:
        STEPS[0] += 1

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"] / STEPS[0])


class Evaluated(Own):
    """Gives parameters other values for evaluation, as those do that need no schedule."""

    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(self.state[p]["m"])


# A step that somebody has put on the object -------------------------------------------------------------------------


def clips_first(optimizer: torch.optim.Optimizer, way: str = "function") -> torch.optim.Optimizer:
    """An optimizer whose ``step`` first clips the gradients of all parameters, put there in one of several ways."""
    plain = optimizer.step

    def step(*args: Any, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        every = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(every, 0.05)
        plain()
        return loss

    if way == "function":
        optimizer.step = step  # type: ignore[method-assign]
    elif way == "method":
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    else:

        class Clipped(type(optimizer)):  # type: ignore[misc]
            def step(self, closure: Any = None) -> Any:
                loss = None if closure is None else closure()
                torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
                super().step()
                return loss

        optimizer.__class__ = Clipped
    return optimizer


# Further rules -------------------------------------------------------------------------------------------------------


class Lamb(Own):
    """Scales each update by the norm of its parameter."""

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * float(p.norm() / g.norm().clamp(min=1e-12)))


class Rows(Own):
    """Its step is one entry by another, but it keeps a state per row."""

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        s["rows"] = g.flatten(1).sum(1) if p.ndim > 1 else g.sum()
        p.sub_(g, alpha=group["lr"])


class Coupled(torch.optim.Optimizer):
    """Scales all updates by the norm of all gradients, which all parameters must have."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad / norm, alpha=1e-3)


class Late(torch.optim.Optimizer):
    """Clips by the norm of all gradients after some steps, counted somewhere."""

    def __init__(self, params: Any, lr: float = 1e-3, place: str = "group", late: int = 5) -> None:
        super().__init__(params, {"lr": lr, "place": place, "late": late})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure()
        group = self.param_groups[0]
        self.steps += 1
        group["steps"] = group.get("steps", 0) + 1
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        state = self.state[every[0]]
        state["step"] = state.get("step", torch.zeros(())) + 1
        count = {"own": self.steps, "group": group["steps"], "state": int(state["step"])}[group["place"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm() if count > group["late"] else torch.ones(())
        for p in every:
            p.sub_(p.grad / norm.clamp(min=1.0), alpha=group["lr"])


class NormLate(Own):
    """Clips each parameter by the norm of its own gradient after many steps."""

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        s["step"] = s.get("step", 0) + 1
        p.sub_(g / g.norm().clamp(min=1.0) if s["step"] > 1000 else g, alpha=group["lr"])


class Twice(torch.optim.SGD):
    """Takes the gradient at a point that all gradients lead to, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        super().step()
        return super().step(closure)


class CountsIdly(Counts):
    """Counts its steps in the group, and does nothing with that."""

    def rule(self, p: Any, g: Any, s: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"])


class NeedsMore(Own):
    """Steps along what it was given for each parameter."""

    def __init__(self, params: Any, count: int) -> None:
        super().__init__(params)
        self.rates = [0.1] * count

    def begin(self) -> None:
        for group in self.param_groups:
            for index, _ in enumerate(group["params"], 2):
                self.rates[index].real  # noqa: B018
