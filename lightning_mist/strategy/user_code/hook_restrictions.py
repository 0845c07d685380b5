"""Hooks and callbacks of the user's own that look at parameters or gradients, and what that rules out.

Under DDP every rank has all parameters at any time, and all gradients, averaged, between backward and the next step.
Where a plan leaves a rank with a part, such code would see the part and take it for the whole. Code counts by what it
does, not by its name: a hook that only looks at a loss rules nothing out
(:mod:`lightning_mist.strategy.user_code.hook_analysis`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_mist.attributes import container, entries, held, is_a, of_class, stored, wrapped
from lightning_mist.model.user_code import Code, code_of, is_library, is_lightnings, names_in
from lightning_mist.plan import Exclusion, Feature
from lightning_mist.plan.module_map import Reasons, exclusions_of
from lightning_mist.strategy.user_code.fit_objects import FitObjects, Known
from lightning_mist.strategy.user_code.hook_analysis import ReachedError, Reader, mentions_gradients, uses_state

PARAMETERS_AWAY: tuple[Feature, ...] = ("pipeline", "tensor", "sharded_parameters", "offloaded_parameters")
"""What leaves a rank's device without some parameters while it trains."""

GRADIENTS_AWAY: tuple[Feature, ...] = (*PARAMETERS_AWAY, "sharded_gradients", "offloaded_gradients")
"""What leaves a rank's device without some averaged gradients between backward and step."""

STATE_AWAY: tuple[Feature, ...] = (*GRADIENTS_AWAY, "offloaded_optimizer")

_HOOKED: tuple[Feature, ...] = (*PARAMETERS_AWAY, "microbatches")
"""What gives hooks on single parameters other gradients than those of a whole batch on this rank."""

_AT_GRADIENTS = (
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "optimizer_step", "optimizer_zero_grad",
    "backward", "configure_gradient_clipping", "lr_scheduler_step",
)  # fmt: skip
"""Hooks that run where there are gradients, and are there for their sake."""

_OF_BATCHES = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")

_IN_TRAINING = (
    "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start",
    "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end", "on_validation_start",
    "on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad", "on_save_checkpoint",
    "on_train_end", *_OF_BATCHES, "backward",
    "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step",
)  # fmt: skip
"""Hooks of modules, data modules and callbacks that run while ranks have what the plan leaves them."""

_IN_VALIDATION = (
    "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end",
)  # fmt: skip
"""Hooks for which every rank gets all parameters, under any plan, where one of them may use some; not all gradients."""

_OF_EVALUATION = (
    "on_{}_start", "on_{}_model_eval", "on_{}_model_train", "on_{}_epoch_start", "on_{}_batch_start", "on_{}_batch_end",
    "on_{}_epoch_end", "on_{}_end",
)  # fmt: skip

_OF_SCHEDULES = ("step", "get_lr", "_get_closed_form_lr")
"""What runs in training of a learning-rate schedule, if its class has its own; of an optimizer ``zero_grad`` does."""

_OF_WRITERS = ("write_on_batch_end", "write_on_epoch_end")
"""What Lightning's writers of predictions call of their own."""

BUT_PLAIN: tuple[Feature, ...] = (*STATE_AWAY, "offloaded_activations", "microbatches", "checkpointing", "sequence")
"""All that plans can do beside plain data parallelism."""

_FEATURES: Mapping[str, tuple[Feature, ...]] = MappingProxyType(
    {
        "parameters": PARAMETERS_AWAY,
        "parameters, and put hooks on them": _HOOKED,
        "parameters between a batch's forward and backward": BUT_PLAIN,
        "gradients": GRADIENTS_AWAY,
        "gradients, and optimizer state": STATE_AWAY,
        "gradients as they are accumulated": BUT_PLAIN,
        "optimizer state": STATE_AWAY,
    }
)
"""By what of the whole module is used, what is ruled out."""

_OF_MASTERS: Mapping[Feature, Feature] = {
    "sharded_parameters": "sharded_gradients",
    "offloaded_parameters": "offloaded_optimizer",
}
"""What leaves a rank's device without some masters, by what leaves it without some parameters."""

_BEFORE_BACKWARD = ("on_before_backward", "on_before_zero_grad", "optimizer_zero_grad", "zero_grad", "backward")
"""Hooks that run between forward and backward, which are one under every plan but plain data parallelism."""


def user_exclusions(trainer: Any, optimizers: list[Any], *, master_weights: bool = False) -> tuple[Exclusion, ...]:
    """What the hooks of a trainer's module, data module and callbacks rule out, and hooks on parameters.

    Args:
        master_weights: Whether parameters outside of steps are masters, which are with who updates them and where
            their optimizer's state is.
    """
    objects = FitObjects(trainer, optimizers)
    found = exclusions_of(chain(_looks(trainer, objects), _parameter_hooks(objects.module), _aliases(objects.module)))
    away = [item for item in found if master_weights and item.feature in _OF_MASTERS]
    return tuple(dict.fromkeys((*found, *(replace(item, feature=_OF_MASTERS[item.feature]) for item in away))))


def whole_in_validation(trainer: Any, optimizers: list[Any]) -> str | None:
    """Why all parameters must be on every rank around validation, if so: a hook of the user's that may use some."""
    return _user_of_parameters(trainer, _IN_VALIDATION, FitObjects(trainer, optimizers))


def whole_in_evaluation(trainer: Any, kind: str) -> str | None:
    """The same of an evaluation outside of a fit, whose kind is as in the names of hooks, for all hooks of it."""
    names = (*(name.format(kind) for name in _OF_EVALUATION), *_OF_BATCHES, *_OF_WRITERS)
    return _user_of_parameters(trainer, names, FitObjects(trainer, ()))


def _user_of_parameters(trainer: Any, names: Iterable[str], objects: FitObjects) -> str | None:
    for item in _with_hooks(trainer):
        for name in names:
            used = _look(item, name, objects)
            if used is not None and used[0].startswith("parameters"):
                return f"{name} of {type(item).__name__} may use parameters ({used[1]})"
    return None


def _with_hooks(trainer: Any) -> list[Any]:
    found = (trainer.lightning_module, getattr(trainer, "datamodule", None), *trainer.callbacks)
    return [item for item in found if item is not None]


def _looks(trainer: Any, objects: FitObjects) -> Reasons:
    schedules = [config.scheduler for config in getattr(objects.strategy, "lr_scheduler_configs", ())]
    own = [(item, name) for item in schedules for name in _OF_SCHEDULES]
    own += [(item, "zero_grad") for item in objects.optimizers]
    # Those of packages set rates, and clear gradients.
    beside = [(item, (name,)) for item, name in own if not is_library(of_class(item, name))]
    for item, names in (*((item, (*_IN_TRAINING, *_IN_VALIDATION)) for item in _with_hooks(trainer)), *beside):
        for name in names:
            used = _look(item, name, objects)
            if used is not None and (name not in _IN_VALIDATION or not used[0].startswith("parameters")):
                whole, code = used
                where = f"{name} of {type(item).__name__}"
                reason = f"{where} may use {whole} ({code}), which would not all be on every rank's device"
                yield reason, _FEATURES[whole]


def _look(item: Any, name: str, objects: FitObjects) -> tuple[str, str] | None:
    """What of the whole module a hook may use, if it is not Lightning's own, and the code that does and its place."""
    hook: Any = None if stored(item, name) is None else getattr(item, name)
    function = hook.__func__ if is_a(hook, MethodType) else hook
    if not callable(function) or is_lightnings(function):
        return None
    owner, given = hook.__self__ if is_a(hook, MethodType) else None, _arguments(item, name, objects)
    if is_a(function, partial):
        owner, given = None, [*(Known(value) for value in function.args), *given]
        function = function.func
    elif code_of(function) is None:
        owner, function = function, of_class(function, "__call__")
    reader = Reader(objects)
    try:
        reader.call(function, owner, given)
    except ReachedError as error:
        return _kind(error, reader, name), error.what
    return None


def _kind(error: ReachedError, reader: Reader, name: str) -> str:
    if name in _BEFORE_BACKWARD:
        return "parameters between a batch's forward and backward"
    names = set[str]().union(*(names_in(each.__code__) for each, _ in _functions(reader)))
    if "register_post_accumulate_grad_hook" in names:
        return "gradients as they are accumulated"
    callee = error.callee
    is_opaque = callee is not None and code_of(callee) is None and not is_a(callee, nn.Module)
    if (
        any(mentions_gradients(function, owner) for function, owner in reader.read)
        or (callee is not None and mentions_gradients(callee))
        or (is_opaque and name in _AT_GRADIENTS)
    ):
        start = [Code.of(each, () if owner is None else (owner,)) for each, owner in _functions(reader)]
        return "gradients, and optimizer state" if uses_state(start) else "gradients"
    if "register_hook" in names:
        return "parameters, and put hooks on them"
    return "optimizer state" if error.is_state else "parameters"


def _functions(reader: Reader) -> list[tuple[FunctionType, Any]]:
    """The functions that were read, with whose they are."""
    return [(each, owner) for item, owner in reader.read for each in wrapped(item) if is_a(each, FunctionType)]


def _arguments(item: Any, name: str, objects: FitObjects) -> list[Any]:
    """What Lightning calls a hook with, as far as it reaches anything."""
    is_module = is_a(item, nn.Module) or stored(item, "on_sanity_check_start") is None
    first = [] if is_module else [Known(objects.trainer), Known(objects.module)]
    optimizer = Known(objects.optimizers[0]) if objects.optimizers else None
    if name in ("on_before_optimizer_step", "on_before_zero_grad", "configure_gradient_clipping"):
        return [*first, optimizer]
    if name in ("optimizer_step", "optimizer_zero_grad"):
        return [None, None, optimizer]
    return first


def _parameter_hooks(module: Any) -> Reasons:
    """Hooks that autograd runs for single parameters."""
    if not isinstance(module, nn.Module):
        return
    for place, does, features in (
        (
            "_post_accumulate_grad_hooks",
            "runs whenever a gradient of {} is accumulated",
            _FEATURES["gradients as they are accumulated"],
        ),
        ("_backward_hooks", "changes or reads the gradient of {}", ("pipeline", "tensor", "microbatches")),
    ):
        for name, parameter in module.named_parameters():
            if getattr(parameter, place, None):
                yield f"a hook {does.format(name)}, which would be of a part of the batch or of the module", features
                return


def _aliases(module: Any) -> Reasons:
    """Tensors of the module's that lie in the memory of a parameter, which follow it only as long as it stays there."""
    if not isinstance(module, nn.Module):
        return
    there = [(name, p) for name, p in module.named_parameters() if p.layout is torch.strided and not is_lazy(p)]
    names = {p.untyped_storage()._cdata: name for name, p in there}
    for place, child in module.named_modules():
        # Torch's makes the weight anew in every forward, and leaves the first one here till then.
        anew = {hook.name for hook in child._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)}
        for key, value in (item for item in held(child) if item[0] not in anew):
            items = [item for _, item in entries(value)] if container(value) else [value]
            tensors = [item for item in items if is_a(item, Tensor) and not isinstance(item, nn.Parameter)]
            for tensor in (item for item in tensors if item.layout is torch.strided):
                if (name := names.get(tensor.untyped_storage()._cdata)) is not None:
                    what = f"a tensor in {key} of {place or 'the module'}"
                    yield f"{what} lies in the memory of {name}, which its values would leave", PARAMETERS_AWAY
