"""Optimizers as objects: what somebody has put on one, what it has at hand, and others of its kind.

Two optimizers of one class can follow other rules: by options of their groups, by attributes that the constructor set
from arguments that no group keeps (bits of the state, sizes of blocks), and by methods that were put on the object.
"""

import copy
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_HOOKS = "_optimizer_"
"""How the names of torch's registries of hooks begin."""

_DEPTH = 4  # how far from an optimizer's attributes things are looked for
_OTHERS = (Tensor, nn.Module, Optimizer, type, str, bytes, int, float, complex, type(None))


def like(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """An optimizer of the same class with the same attributes over other groups, without state.

    What it does changes nothing of the original: attributes and options are copies, but for modules, parameters, other
    optimizers, tensors of state, and what cannot be copied. Methods that were put on the object, also a learning-rate
    scheduler's ``step``, would act on the original, and hooks are meant for it: they stay behind.

    Args:
        groups: Options and ``"params"`` of every group.

    Raises:
        TypeError: If its groups or its state are another object's.
    """
    own = vars(optimizer)
    if not {"param_groups", "state"} <= own.keys():
        raise TypeError(f"{type(optimizer).__name__} keeps its groups or its state in another object")
    made = object.__new__(type(optimizer))
    left = {"param_groups", "state", *_shadowing(optimizer)}
    shared: list[Any] = [item for name in own.keys() - left for item in within(own[name]) if isinstance(item, _SHARED)]
    shared += [item for item in within(list(own["state"].values())) if isinstance(item, Tensor)]
    memo: dict[int, Any] = {id(item): item for item in shared} | {id(optimizer): made}
    for name in own.keys() - left:
        vars(made)[name] = OrderedDict() if name.startswith(_HOOKS) else _copied(own[name], memo)
    made.state = defaultdict(dict)
    made.param_groups = [
        {key: list(value) if key == "params" else _copied(value, memo) for key, value in group.items()}
        for group in groups
    ]
    return made


_SHARED = (nn.Parameter, nn.Module, Optimizer)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a stream, a process group, a tensor with a history
        return value


def within(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """A value and what it leads to: keys and items of containers, attributes of objects, variables of functions."""
    yield value
    if depth == 0 or isinstance(value, _OTHERS):
        return
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    elif isinstance(value, MethodType):
        inner = [value.__self__]
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # a variable that has no value yet
                inner.append(cell.cell_contents)
    with suppress(AttributeError, ReferenceError):
        inner += object.__getattribute__(value, "__dict__").values()
    for item in inner:
        yield from within(item, depth - 1)


def at_hand(optimizer: Optimizer) -> str | None:
    """The attribute by which an optimizer has its parameters at hand beside its groups and state, if there is one.

    Their ids count as they do: what is kept by id is another's for other parameters.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = {"param_groups", "state", "defaults", *_shadowing(optimizer)}
    for name, value in vars(optimizer).items():
        for item in () if name in left or name.startswith(_HOOKS) else within(value):
            held: Sequence[Any] = [item]
            if isinstance(item, nn.Module):
                held = list(item.parameters())
            elif isinstance(item, Optimizer) and item is not optimizer:
                held = [parameter for group in item.param_groups for parameter in group["params"]]
            if any((one if type(one) is int else id(one)) in known for one in held):
                return name
    return None


def replaced_methods(optimizer: Optimizer) -> tuple[str, ...]:
    """Methods that were put on the object in place of its class's, but for what torch's schedulers put there."""
    own = vars(optimizer)
    return tuple(name for name in _shadowing(optimizer) if not _is_schedulers(own[name], type(optimizer)))


def _shadowing(optimizer: Optimizer) -> list[str]:
    """Attributes in the place of a method, but for a method of the class's own that its constructor chose."""

    def is_chosen(value: Any) -> bool:
        chosen = isinstance(value, MethodType) and value.__self__ is optimizer
        return chosen and any(value.__func__ is item for cls in type(optimizer).__mro__ for item in vars(cls).values())

    own = vars(optimizer).items()
    return [name for name, value in own if callable(getattr(type(optimizer), name, None)) and not is_chosen(value)]


def _is_schedulers(value: Any, cls: type[Optimizer]) -> bool:
    # It marks its function, and functools.wraps copies the mark on to what others put around it.
    is_torchs = isinstance(value, FunctionType) and value.__globals__.get("__name__") == "torch.optim.lr_scheduler"
    return is_torchs and getattr(value, "__wrapped__", None) is cls.step


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether an optimizer is of a class in ``torch.optim``, stepped by torch's code and by nothing around it."""
    cls = type(optimizer)
    if getattr(torch.optim, cls.__name__, None) is not cls or replaced_methods(optimizer) or has_step_hooks(optimizer):
        return False
    step: Any = cls.step
    while step is not None:
        if step.__globals__["__name__"].partition(".")[0] != "torch":
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks run around its steps, its own or those of all optimizers."""
    own = [vars(optimizer).get(f"{_HOOKS}step_{place}_hooks") for place in ("pre", "post")]
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))
