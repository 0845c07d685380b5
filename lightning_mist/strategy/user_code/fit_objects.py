"""The objects of a fit: which of them reach parameters of the module that is trained, and what their attributes are.

Known from what objects hold, without running anything.
"""

import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.attributes import container, entries, held, is_a, of_class, own, referent, unwrapped
from lightning_mist.model.user_code import is_library, is_lightnings, is_users_object

_DEPTH = 4
"""How deep containers and objects are looked into."""

_MOST_ENTRIES = 10_000

ROUTINES = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType, types.MethodWrapperType,
)  # fmt: skip
"""What is called without further ado; methods that are bound to an object hold it beside."""

_NOTHING = (bool, int, float, str, bytes, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


@dataclass(frozen=True, slots=True)
class Known:
    """A value that an expression of the user's code stands for when the plan is made."""

    value: Any


@dataclass(frozen=True, slots=True)
class Method:
    """A function and the object that it is called on."""

    owner: Any
    function: Any


@dataclass(frozen=True, slots=True)
class Groups:
    """An optimizer's parameter groups, or one of them."""

    is_one: bool


@dataclass(frozen=True, slots=True)
class Super:
    """What ``super()`` stands for in a function that a class of this object defines."""

    owner: Any
    function: Any


class FitObjects:
    """The objects of one fit, and what reaches the parameters of its module."""

    def __init__(self, trainer: Any, optimizers: Iterable[Any]) -> None:
        self.trainer, self.module = trainer, trainer.lightning_module
        self.strategy = trainer.strategy
        self.optimizers = list(optimizers)
        parameters = self.module.parameters() if isinstance(self.module, nn.Module) else ()
        self._parameters = {id(parameter) for parameter in parameters}
        names = dict(self.module.named_parameters()) if self._parameters else ()
        self.words = {*_WORDS, *(part for name in names for part in name.split("."))}

    def holds(self, value: Any) -> bool:
        """Whether parameters of the module can be reached from a value."""
        if isinstance(value, Known):
            value = value.value
        if isinstance(value, Method):
            return self.holds(value.owner)
        if isinstance(value, Groups):
            return True
        return not isinstance(value, Super) and self._holds(value, _DEPTH, set())

    def is_optimizer(self, value: Any) -> bool:
        """Whether a value is one of the optimizers, perhaps as Lightning wraps them."""
        inner = dict.get(own(value) or {}, "_optimizer", value)  # of what Lightning wraps it in
        return is_a(inner, torch.optim.Optimizer)

    def _holds(self, value: Any, depth: int, seen: set[int]) -> bool:
        value = referent(value)
        if value is None or is_a(value, _NOTHING) or id(value) in seen:
            return False
        seen.add(id(value))
        if value is self.trainer or value is self.strategy:
            return True
        if is_a(value, Tensor):
            return id(value) in self._parameters or id(value._base) in self._parameters
        if is_a(value, nn.Module):
            return any(id(parameter) in self._parameters for parameter in nn.Module.parameters(value))
        return depth > 0 and any(self._holds(item, depth - 1, seen) for item in self._contents(value))

    def _contents(self, value: Any) -> Iterable[Any]:
        if self.is_optimizer(value):
            return [parameter for group in value.param_groups for parameter in group["params"]]
        if is_a(value, weakref.ref):
            return [weakref.ref.__call__(value)]
        found = [item for name, item in held(value) if name not in ("trainer", "_trainer", "_fabric")]
        return found + ([item for _, item in islice(entries(value), _MOST_ENTRIES)] if container(value) else [])


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODULE_METHODS = _words(
    "log log_dict print train eval buffers named_buffers register_buffer get_buffer lr_schedulers extra_repr all_gather"
    " _get_name save_hyperparameters"
)
"""Torch's and Lightning's own methods of a module that do not reach parameters."""

_MODULE_PROPERTIES = _words(
    "device dtype current_epoch global_step global_rank local_rank logger loggers hparams hparams_initial training"
    " automatic_optimization on_gpu example_input_array strict_loading fabric device_mesh __class__"
)
_WORDS = _words(
    "parameters named_parameters state_dict param_groups modules named_modules children named_children deepcopy"
)
"""By which code gets at parameters, besides their own names."""

_OPTIMIZER_NAMES = _words("step zero_grad defaults toggle_model __class__")
_STRATEGY_NAMES = _words(
    "barrier broadcast reduce all_gather reduce_boolean_decision root_device is_global_zero global_rank local_rank"
    " world_size num_nodes precision_plugin precision accelerator checkpoint_io parallel_devices"
    " plan report estimate is_planning cluster_environment num_processes node_rank strategy_name process_group_backend"
    " distributed_sampler_kwargs is_distributed handles_gradient_accumulation batch_to_device process_dataloader"
    " restore_checkpoint_after_setup lightning_restore_optimizer launcher num_loaders __class__"
)
_PARAMETER_NAMES = _words("shape device dtype requires_grad ndim numel size is_cuda dim __class__")
_CLOSED = _words("fit_loop callbacks")
"""Attributes of the trainer that lead to the optimizers, or to other callbacks."""


class UnreadableError(Exception):
    """An attribute that reaches parameters, or may, or optimizer state."""

    def __init__(self, *, is_state: bool = False) -> None:
        super().__init__()
        self.is_state = is_state


class Resolver:
    """Attributes of objects of one fit."""

    def __init__(self, objects: FitObjects, call: Callable[[Any, Any], Any]) -> None:
        self._all, self._call = objects, call
        self._known = {"optimizers": objects.optimizers, **dict.fromkeys(("model", "lightning_module"), objects.module)}

    def attribute(self, base: Any, name: str) -> Any:
        """What ``base.name`` is; None if that is unknown and reaches nothing.

        Raises:
            UnreadableError: If it reaches parameters.
        """
        if isinstance(base, Super):
            return self._above(base, name)
        if isinstance(base, Groups):
            raise UnreadableError(is_state=True)
        return self._of_known(base, name) if isinstance(base, Known) else None

    def _of_known(self, base: Known, name: str) -> Any:
        value = referent(base.value)
        if value is self._all.trainer:
            return self._of_trainer(name)
        if value is self._all.strategy:
            return self._of_strategy(name)
        if self._all.is_optimizer(value) and self._all.holds(value):
            return self._of_optimizer(base, name)
        if is_a(value, Tensor) and self._all.holds(value):
            return _only(name, _PARAMETER_NAMES)
        if is_a(value, types.ModuleType):
            return Known(own(value)[name]) if name in own(value) else None
        return self._of_object(Known(value), name)

    def _of_trainer(self, name: str) -> Any:
        if name.startswith("_") or name in _CLOSED:
            raise UnreadableError
        known = {**self._known, "strategy": self._all.strategy}
        return Known(known[name]) if name in known else None

    def _of_strategy(self, name: str) -> Any:
        return Known(self._known[name]) if name in self._known else _only(name, _STRATEGY_NAMES)

    def _of_optimizer(self, base: Known, name: str) -> Any:
        if name == "param_groups":
            return Groups(is_one=False)
        if name in ("optimizer", "_optimizer"):
            return base
        if name not in _OPTIMIZER_NAMES:
            raise UnreadableError(is_state=True)
        return None

    def _of_object(self, base: Known, name: str) -> Any:
        value = base.value
        if name == "__dict__":
            return Known(own(value))
        known = dict(held(value))
        if is_a(value, nn.Module):
            if name == "trainer":
                return Known(self._all.trainer)
            known = {**value._modules, **value._parameters, **dict.fromkeys(value._buffers), **known}
            if value is self._all.module and name == "module" and name not in known and of_class(value, name) is None:
                return base  # What DDP wraps.
        if name in known:
            return None if known[name] is None else Known(known[name])
        return self._of_class(base, name)

    def _of_class(self, base: Known, name: str) -> Any:
        value = base.value
        found = of_class(value, name)
        if is_a(found, staticmethod):
            return Known(found.__func__)
        if is_a(found, (classmethod, *ROUTINES)):
            return Method(value, found.__func__ if is_a(found, classmethod) else found)
        if of_class(found, "__get__") is not None and not is_a(found, type):
            inner = dict(held(found))
            return self._of_property(base, name, inner.get("func") if inner.get("fget") is None else inner["fget"])
        return None if found is None else Known(found)

    def _of_property(self, base: Known, name: str, getter: Any) -> Any:
        if getter is None and self._all.holds(base) and is_users_object(of_class(base.value, name)):
            raise UnreadableError  # what a descriptor of the user's own gives
        if not is_lightnings(getter) and not is_library(getter):
            return self._call(getter, base.value)
        if is_a(base.value, nn.Module) and self._all.holds(base):
            return _only(name, _MODULE_PROPERTIES)
        return None

    def _above(self, base: Super, name: str) -> Any:
        classes = type(base.owner).__mro__
        here = base.function.__name__
        places = [i for i, cls in enumerate(classes) if unwrapped(vars(cls).get(here)) is base.function]
        for cls in classes[places[0] + 1 if places else 1 :]:
            if name in vars(cls):
                return Method(base.owner, vars(cls)[name])
        return None


def _only(name: str, allowed: frozenset[str]) -> None:
    if name not in allowed:
        raise UnreadableError
