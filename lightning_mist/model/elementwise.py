"""Whether an optimizer treats every entry of a parameter by itself, found by stepping small ones of its kind.

Stages and ZeRO give each rank whole parameters, so there an optimizer only must not look at several parameters at once.
Tensor parallelism gives it parts of parameters: it must not look at several entries of one parameter either, as those
do that keep row and column statistics (Adafactor), scale by the norm of a parameter (LAMB, LARS) or turn its singular
values into ones (Muon).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_SIZES = (8, 6, 4, 2, 2)
"""Dimensions of the toy parameters, slowest first: different, and even, so that each can be halved."""

_STEPS = 2
"""Steps of each toy: the first makes the state, the second uses it."""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest difference relative to the largest entry: vectorised loops round the ends of a tensor differently. State may
have another precision than the toys' double; below single precision 1e-2 is more than one unit in the last place."""

State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Toy:
    """Optimizers of one group's kind: how to make one, for parameters of how many dimensions, where."""

    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ranks: tuple[int, ...]
    device: torch.device


def whole_tensor_reason(optimizer: torch.optim.Optimizer) -> str | None:
    """Why this optimizer cannot update parts of parameters, in words for the user; None if it can.

    For every group, an optimizer of the same class and options is stepped on a toy parameter, and others on its halves
    along each of its first two dimensions: parameters and state must come out the same.

    Args:
        optimizer: The user's optimizer; neither stepped nor changed.
    """
    name = type(optimizer).__name__
    for toy in _toys(optimizer):
        for rank in toy.ranks:
            values, gradients = _numbers((rank,), toy.device)
            for dim in range(min(rank, 2)):
                try:
                    (whole,) = _step(toy, values, gradients)
                    halves = [_half_step(toy, values, gradients, dim, half) for half in range(2)]
                except Exception as error:
                    return f"{name} cannot be stepped on parts of a parameter: {type(error).__name__}: {error}"
                problem = _difference(whole, halves, dim)
                if problem is not None:
                    return (
                        f"{name} needs whole parameters: {problem} when a parameter of {rank} dimensions is halved "
                        f"along dimension {dim}; an optimizer that treats every entry by itself, such as AdamW or SGD, "
                        "can update parts"
                    )
    return None


def coupling_reason(optimizer: torch.optim.Optimizer) -> str | None:
    """Why this optimizer must hold all parameters at once, in words for the user; None if it need not.

    For every group, one optimizer of the same class and options is stepped on two toy parameters, and two others on one
    of them each. An optimizer that cannot be stepped on given gradients is left to other checks.

    Args:
        optimizer: The user's optimizer; neither stepped nor changed.
    """
    for toy in _toys(optimizer):
        for rank in toy.ranks:
            values, gradients = _numbers((rank, rank), toy.device)
            try:
                together = _step(toy, values, gradients)
                apart = [_step(toy, [v], [[s[i]] for s in gradients])[0] for i, v in enumerate(values)]
            except Exception:
                return None
            for one, other in zip(together, apart, strict=True):
                if not _same(one[0], other[0]):
                    return (
                        f"{type(optimizer).__name__} couples parameters: a step on two gives other values than a step "
                        "on each, so no rank may update only a part of them"
                    )
    return None


def _toys(optimizer: torch.optim.Optimizer) -> Iterator[_Toy]:
    known = inspect.signature(type(optimizer).__init__).parameters
    seen: set[str] = set()
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.ndim > 0]
        if not parameters:
            continue
        given = {**optimizer.defaults, **group}
        options = {key: _plain(value) for key, value in given.items() if key in known and key != "params"}
        if options.get("lr") == 0:
            options["lr"] = 1e-2  # a warm-up starts at zero, where every optimizer does the same
        # What the constructor does not take as an argument belongs to the group (a mark that chooses a rule, say).
        own = {"params", "param_names", "initial_lr", *known}
        extra = {key: _plain(value) for key, value in group.items() if key not in own}
        ranks = tuple(sorted({min(parameter.ndim, len(_SIZES)) for parameter in parameters}))
        device = parameters[0].device
        kind = repr((_kind(options), _kind(extra), ranks, device))
        if kind in seen:
            continue
        seen.add(kind)
        yield _Toy(
            make=_maker(type(optimizer), options, extra),
            ranks=ranks,
            device=torch.device("cpu") if device.type == "meta" else device,
        )


def _maker(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], extra: dict[str, Any]
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return cls([{"params": parameters, **extra}], **options)

    return make


def _kind(options: dict[str, Any]) -> list[tuple[str, Any]]:
    """Options that choose the same rule are equal: of numbers it only counts whether they are zero.

    Groups often differ in their learning rates alone, one for every layer.
    """
    return [(key, value != 0 if isinstance(value, float) else value) for key, value in sorted(options.items())]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _numbers(ranks: Sequence[int], device: torch.device) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Values of parameters with these numbers of dimensions, and their gradients for each step."""
    generator = torch.Generator().manual_seed(0)
    shapes = [_SIZES[:rank] for rank in ranks]

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]

    def uneven(tensor: Tensor) -> Tensor:
        # Of different size in different places, so that a rule that averages shows.
        return tensor * torch.arange(1, len(tensor) + 1, device=device).reshape(-1, *[1] * (tensor.ndim - 1))

    return draw(), [[uneven(gradient) for gradient in draw()] for _ in range(_STEPS)]


def _half(tensor: Tensor, dim: int, index: int) -> Tensor:
    return tensor.chunk(2, dim)[index].clone()


def _step(toy: _Toy, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, State]]:
    """Values and states of parameters after one step per list of gradients."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    devices = [toy.device] if toy.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(0)
        optimizer = toy.make(parameters)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    return [(parameter.detach(), dict(optimizer.state[parameter])) for parameter in parameters]


def _half_step(
    toy: _Toy, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], dim: int, half: int
) -> tuple[Tensor, State]:
    """The same for one half of one parameter."""
    cut = [[_half(gradient, dim, half) for gradient in step] for step in gradients]
    return _step(toy, [_half(value, dim, half) for value in values], cut)[0]


def _difference(whole: tuple[Tensor, State], halves: Sequence[tuple[Tensor, State]], dim: int) -> str | None:
    value, state = whole
    if not _same(value, torch.cat([half for half, _ in halves], dim)):
        return "a step gives other values"
    for key, entry in state.items():
        parts = [part.get(key) for _, part in halves]
        if not isinstance(entry, Tensor):
            continue
        if not all(isinstance(part, Tensor) for part in parts):
            return f"its state {key!r} is another"
        if entry.shape == value.shape:
            if not _same(entry, torch.cat(parts, dim)):  # type: ignore[arg-type]
                return f"its state {key!r} is another"
        elif not all(_same(entry, part) for part in parts):  # type: ignore[arg-type]
            return f"its state {key!r} of shape {tuple(entry.shape)} is another"
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    tolerance = _TOLERANCE.get(one.dtype, 1e-2)
    largest = max(1.0, float(one.abs().max())) if one.numel() else 1.0
    return bool((one - other).abs().max() <= tolerance * largest) if one.numel() else True
