"""Optimizers as objects: what somebody has put on one, what it has at hand, and others of its kind.

Two optimizers of one class can follow other rules: by options of their groups, by attributes that the constructor set
from arguments that no group keeps (bits of the state, sizes of blocks), and by methods that were put on the object.
"""

import copy
import gc
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_HOOKS = "_optimizer_"
"""How the names of torch's registries of hooks begin."""

_DEPTH = 8  # how far things are looked for: an object's dictionary, and a variable of a function, are a step each
_ENDS = (Tensor, nn.Module, ModuleType, type, str, bytes, int, float, complex, type(None))


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
    kept = {name: value for name, value in own.items() if name not in ("param_groups", "state", *_shadowing(optimizer))}
    shared = [item for item in within(kept) if isinstance(item, (nn.Parameter, nn.Module, Optimizer))]
    memo: dict[int, Any] = {id(item): item for item in (*shared, *tensors_within(own["state"]))} | {id(optimizer): made}
    for name, value in kept.items():
        vars(made)[name] = OrderedDict() if name.startswith(_HOOKS) else _copied(value, memo)
    made.state = defaultdict(dict)
    made.param_groups = [
        {key: list(value) if key == "params" else _copied(value, memo) for key, value in group.items()}
        for group in groups
    ]
    return made


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a stream, a process group, a tensor with a history
        return value


def within(value: Any, depth: int = _DEPTH, seen: frozenset[int] | set[int] = frozenset()) -> Iterator[Any]:
    """A value and what it leads to, but for ids in ``seen``: items, attributes, functions' variables, inner tensors."""
    yield value
    seen = seen if isinstance(seen, set) else set(seen)
    if _is_wrapper(value):
        inner = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    elif depth == 0 or isinstance(value, _ENDS) or id(value) in seen:
        return
    else:
        inner = list(value.__closure__ or ()) if isinstance(value, FunctionType) else gc.get_referents(value)
    seen.add(id(value))
    for item in inner:
        yield from within(item, depth - 1, seen)


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__")


def tensors_within(value: Any) -> list[Tensor]:
    """The tensors that a value leads to; in place of those of wrapper classes what these are made of."""
    return [item for item in within(value) if isinstance(item, Tensor) and not _is_wrapper(item)]


def _at_hand(optimizer: Optimizer) -> str | None:
    """The attribute by which an optimizer has its parameters at hand beside its groups and state, if there is one.

    Their ids count as they do: what is kept by id is another's for other parameters.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, value in own_attributes(optimizer).items():
        for item in within(value, seen={id(optimizer)}):
            held = item.parameters() if isinstance(item, nn.Module) else [item]
            if any((each if type(each) is int else id(each)) in known for each in held):
                return name
    return None


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer has beside groups, state and their defaults, hooks, and methods that were put on it."""
    left = {"param_groups", "state", "defaults", *_shadowing(optimizer)}
    return {k: value for k, value in vars(optimizer).items() if k not in left and not k.startswith(_HOOKS)}


def looks_around(optimizer: Optimizer) -> str | None:
    """Why an optimizer may look at all parameters at once, if it can be seen without stepping one like it."""
    name, replaced, attribute = type(optimizer).__name__, replaced_methods(optimizer), _at_hand(optimizer)
    if replaced:
        why = f"{', '.join(replaced)} was put on the {name} object in place of its class's own"
    elif step_hooks(optimizer):
        why = f"hooks run around the steps of {name}"
    elif attribute is not None:
        why = f"{name} has all parameters at hand in its attribute {attribute}"
    else:
        return None
    return f"{why}, and may look at all parameters at once"


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group has beside parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def fewer(shape: Sequence[int], most: int) -> tuple[int, ...]:
    """A shape of at most so many entries: the largest dimension is halved until it is one."""
    sizes = list(shape)
    while math.prod(sizes) > most:
        sizes[sizes.index(max(sizes))] //= 2
    return tuple(sizes)


def replaced_methods(optimizer: Optimizer) -> tuple[str, ...]:
    """Methods that were put on the object in place of its class's, but for what torch's schedulers put there."""

    def is_schedulers(value: Any) -> bool:
        # It marks its function, and functools.wraps copies the mark on to what others put around it.
        is_torchs = isinstance(value, FunctionType) and value.__globals__["__name__"] == "torch.optim.lr_scheduler"
        return is_torchs and getattr(value, "__wrapped__", None) is type(optimizer).step

    return tuple(name for name in _shadowing(optimizer) if not is_schedulers(vars(optimizer)[name]))


def _shadowing(optimizer: Optimizer) -> list[str]:
    """Attributes in the place of a method, but for a method of the class's own that its constructor chose."""
    methods = {id(item) for cls in type(optimizer).__mro__ for item in vars(cls).values()}
    return [
        name
        for name, value in vars(optimizer).items()
        if callable(getattr(type(optimizer), name, None))
        and not (isinstance(value, MethodType) and value.__self__ is optimizer and id(value.__func__) in methods)
    ]


ENTRYWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop"}
)
"""Torch's own that treat every entry by itself."""


def is_entrywise(cls: type[Optimizer]) -> bool:
    """Whether optimizers of a class are torch's own and treat every entry by itself."""
    return cls.__name__ in ENTRYWISE and getattr(torch.optim, cls.__name__, None) is cls


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether an optimizer is of a class in ``torch.optim``, stepped by torch's code and by nothing around it."""
    step: Any = type(optimizer).step
    while step is not None and _is_torchs_code(step):
        step = getattr(step, "__wrapped__", None)
    is_its_class = getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)
    return step is None and is_its_class and not replaced_methods(optimizer) and not step_hooks(optimizer)


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """The hooks around its steps: its own and, but for those of torch's profiler, those of all optimizers."""
    own = [vars(optimizer).get(f"{_HOOKS}step_{place}_hooks") or {} for place in ("pre", "post")]
    everyones = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    found = [hook for registry in own for hook in registry.values()]
    return found + [hook for hook in everyones if not _is_torchs_code(hook)]


def _is_torchs_code(function: Any) -> bool:
    return str(getattr(function, "__globals__", {}).get("__name__")).partition(".")[0] == "torch"
