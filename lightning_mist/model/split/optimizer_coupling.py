"""Whether an optimizer treats every entry of a parameter by itself, found by stepping small ones of its kind.

Stages and ZeRO give each rank whole parameters, so there an optimizer only must not look at several parameters at once.
Tensor parallelism gives it parts of parameters: it must not look at several entries of one parameter either, as those
do that keep row and column statistics (Adafactor), scale by the norm of a parameter (LAMB, LARS) or turn its singular
values into ones (Muon).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SIZES = (8, 6, 4, 2, 2)
"""Dimensions of the toy parameters, slowest first: different, and even, so that each can be halved."""

_FIRST_STEPS = 2  # steps of each toy: the first makes the state, the second uses it
_LATER_STEPS = 14  # further steps of a class that is not torch's: what looks at more than one entry may begin late
_LATE = 100_000  # how many steps a toy of such a class is taken to have made before its last ones
_SCALES = (1.0, 1e3, 1e-3, 30.0)  # of gradients, by step: what clips does nothing to small ones

_ENTRYWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop"}
)
"""Torch's own that treat every entry by itself; they need no trial."""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest difference relative to the largest entry: vectorised loops round the ends of a tensor differently. State may
have another precision than the toys' double; below single precision 1e-2 is more than one unit in the last place."""

State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Toy:
    """Optimizers of one group's kind: how to make one, for parameters of how many dimensions, where."""

    make: Callable[[list[nn.Parameter]], Optimizer]
    ranks: tuple[int, ...]
    device: torch.device
    steps: int


def whole_tensor_reason(optimizer: Optimizer) -> str | None:
    """Why this optimizer cannot update parts of parameters, in words for the user; None if it can.

    For every group, an optimizer of the same class and options is stepped on a toy parameter, and others on its halves
    along each of its first two dimensions: parameters and state must come out the same. The optimizer itself is neither
    stepped nor changed.
    """
    name = type(optimizer).__name__
    for toy, values, gradients in _trials(optimizer, parameters=1):
        rank = values[0].ndim
        for dim in range(min(rank, 2)):
            try:
                (whole,) = _step(toy, values, gradients)
                halves = [_half_step(toy, values, gradients, dim, half) for half in range(2)]
            except Exception as error:
                return f"{name} cannot be stepped on parts of a parameter: {type(error).__name__}: {error}"
            problem = _difference(whole, halves, dim)
            if problem is not None:
                return (
                    f"{name} needs whole parameters: {problem} when a parameter of {rank} dimensions is halved along "
                    f"dimension {dim}; an optimizer that treats every entry by itself, such as AdamW or SGD, can "
                    "update parts"
                )
    return None


def coupling_reason(optimizer: Optimizer) -> str | None:
    """Why this optimizer must hold all parameters at once, in words for the user; None if it need not.

    For every group, one optimizer of the same class and options is stepped on two toy parameters, and two others on one
    of them each: several times, as if for the first time and as if after many steps, if its class is not torch's. The
    optimizer itself is neither stepped nor changed.
    """
    name = type(optimizer).__name__
    reason = None if _is_entrywise(optimizer) else _looks_around(optimizer)
    if reason is not None:
        return reason
    for toy, values, gradients in _trials(optimizer, parameters=2):
        try:
            together = _step(toy, values, gradients)
            apart = [_step(toy, [v], [[s[i]] for s in gradients])[0] for i, v in enumerate(values)]
        except CalledAgainError as error:
            return f"{name} calls its closure {error}: the step would run several times for one update"
        except Exception as error:
            if _is_torchs(optimizer):
                return None
            return (
                f"{name} cannot be stepped on parameters of a trial ({type(error).__name__}: {error}), so that it was "
                "not shown to treat each parameter by itself"
            )
        if not all(_same(one, other) for (one, _), (other, _) in zip(together, apart, strict=True)):
            return (
                f"{name} couples parameters: a step on two gives other values than a step on each, so no rank may "
                "update only a part of them"
            )
    return None


def counting_reason(optimizer: Optimizer) -> str | None:
    """Why this optimizer's step cannot be taken in several calls, a part of the parameters in each; None if it can.

    For every group, one optimizer of the same class and options is stepped on two toy parameters at once, and another
    on one after the other: parameters, state and options of the group must come out the same.
    """
    name = type(optimizer).__name__
    for toy, values, gradients in _trials(optimizer, parameters=2):
        try:
            (together, options), (apart, others) = (_stepped(toy, values, gradients, n) for n in (2, 1))
        except Exception as error:
            return f"{name} cannot be stepped on one parameter after the other: {type(error).__name__}: {error}"
        if not all(_same(one, other) for one, other in zip(together, apart, strict=True)) or options != others:
            return (
                f"{name} counts its steps for all parameters together: where they are updated one layer after the "
                "other it would count every layer"
            )
    return None


def _trials(optimizer: Optimizer, *, parameters: int) -> Iterator[tuple[_Toy, list[Tensor], list[list[Tensor]]]]:
    """Toys with values and gradients for so many parameters of each number of dimensions; none for entrywise rules."""
    for toy in () if _is_entrywise(optimizer) else _toys(optimizer):
        for rank in toy.ranks:
            yield toy, *_numbers((rank,) * parameters, toy)


def _stepped(
    toy: _Toy, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], at_once: int
) -> tuple[list[Tensor], dict[str, Any]]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = toy.make(parameters)
    (group,) = optimizer.param_groups
    for step in gradients:
        for first in range(0, len(parameters), at_once):
            group["params"] = parameters[first : first + at_once]
            _one_step(optimizer, group["params"], step[first : first + at_once])
    own = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
    return [parameter.detach() for parameter in parameters], own


class CalledAgainError(Exception):
    """An optimizer called its closure more than once in a step."""


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _is_entrywise(optimizer: Optimizer) -> bool:
    return _is_torchs(optimizer) and type(optimizer).__name__ in _ENTRYWISE and not _hooks(optimizer)


def _hooks(optimizer: Optimizer) -> bool:
    own = vars(optimizer)
    return any(own.get(name) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))


def _looks_around(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if _hooks(optimizer):
        return f"hooks run around the steps of {name}, which may look at all parameters at once"
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for attribute, value in vars(optimizer).items():
        if attribute not in _REGISTRIES and _reaches(value, known, 3):
            return f"{name} has all parameters at hand in its attribute {attribute}, and may look at them at once"
    return None


_REGISTRIES = ("param_groups", "state", "defaults", "step", "_patched_step_functions")


def _reaches(value: Any, known: set[int], depth: int) -> bool:
    if isinstance(value, Tensor):
        return id(value) in known
    if isinstance(value, nn.Module):
        return any(id(parameter) in known for parameter in value.parameters())
    if isinstance(value, Optimizer):
        return any(id(parameter) in known for group in value.param_groups for parameter in group["params"])
    if depth == 0 or callable(value):
        return False
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    return any(_reaches(item, known, depth - 1) for item in [*inner, *getattr(value, "__dict__", {}).values()])


def _toys(optimizer: Optimizer) -> Iterator[_Toy]:
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
            make=partial(_make, type(optimizer), options, extra),
            ranks=ranks,
            device=torch.device("cpu") if device.type == "meta" else device,
            steps=_FIRST_STEPS if _is_torchs(optimizer) else _FIRST_STEPS + _LATER_STEPS,
        )


def _make(cls: Any, options: dict[str, Any], extra: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    made: Optimizer = cls([{"params": parameters, **extra}], **options)
    return made


def _kind(options: dict[str, Any]) -> list[tuple[str, Any]]:
    """Options that choose the same rule are equal: of numbers (learning rates, say) it counts whether they are zero."""
    return [(key, value != 0 if isinstance(value, float) else value) for key, value in sorted(options.items())]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _numbers(ranks: Sequence[int], toy: _Toy) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Values of parameters with these numbers of dimensions, and their gradients for each step."""
    generator, device = torch.Generator().manual_seed(0), toy.device
    shapes = [_SIZES[:rank] for rank in ranks]

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]

    def uneven(tensor: Tensor, scale: float) -> Tensor:
        # Of different size in different places, so that a rule that averages shows.
        return scale * tensor * torch.arange(1, len(tensor) + 1, device=device).reshape(-1, *[1] * (tensor.ndim - 1))

    values = draw()
    return values, [[uneven(item, _SCALES[step % len(_SCALES)]) for item in draw()] for step in range(toy.steps)]


def _step(toy: _Toy, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, State]]:
    """Values and states of parameters after one step per list of gradients."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    devices = [] if toy.device.type == "cpu" else [toy.device]
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(0)
        optimizer = toy.make(parameters)
        counters: list[dict[tuple[int, Any], Any]] = []
        for number, step in enumerate(gradients):
            _one_step(optimizer, parameters, step)
            if number < _FIRST_STEPS:
                counters.append({key: value for key, (_, value) in _counted(optimizer).items()})
            if number == toy.steps - _LATER_STEPS // 2:
                _make_late(optimizer, *counters)
    return [(parameter.detach(), dict(optimizer.state[parameter])) for parameter in parameters]


def _one_step(optimizer: Optimizer, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        return 0.0

    closure()
    calls = 0
    optimizer.step(closure)
    if calls > 1:
        raise CalledAgainError(f"{calls} times")


def _counted(optimizer: Optimizer) -> dict[tuple[int, Any], tuple[Any, float]]:
    spaces = [vars(optimizer), *optimizer.param_groups, *optimizer.state.values()]
    found = {}
    for place, space in enumerate(spaces):
        for key, value in space.items():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if is_number or (isinstance(value, Tensor) and value.ndim == 0):
                found[place, key] = (space, float(value))
    return found


def _make_late(optimizer: Optimizer, first: dict[tuple[int, Any], Any], second: dict[tuple[int, Any], Any]) -> None:
    for key, (space, _) in _counted(optimizer).items():
        if key in first and second.get(key) == first[key] + 1:
            space[key[1]] = space[key[1]] + _LATE


def _half_step(
    toy: _Toy, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], dim: int, half: int
) -> tuple[Tensor, State]:
    value, *cut = ([item.chunk(2, dim)[half].clone() for item in step] for step in (values, *gradients))
    return _step(toy, value, cut)[0]


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
