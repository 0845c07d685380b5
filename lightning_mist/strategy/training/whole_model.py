"""The whole model as optimizer and precision plugin see it, wherever its gradients and their state are.

Lightning asks its precision plugin for clipping and loss scaling. The plugin object keeps its identity and the name of
its class, because checkpoints store the plugin's state under that name; only its class is replaced by a subclass that
asks the engine. The user's optimizer updates what this rank owns, its state where the plan wants it.
"""

import ast
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache, partial
from hashlib import blake2b
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mist.errors import PlanError
from lightning_mist.leaves import on_host
from lightning_mist.model.user_code import is_lightnings
from lightning_mist.optimizers import replaced_methods, step_hooks
from lightning_mist.plan import ModuleMap
from lightning_mist.runtime.communication import DistributedTransport, Transport, complete
from lightning_mist.runtime.executor import Executor
from lightning_mist.runtime.offload import UnitSteps, behind_closure, offload_optimizer_state
from lightning_mist.runtime.parameters import (
    AnyPart,
    Part,
    at_work,
    gather_optimizer_state,
    load_full_optimizer_state,
    own_state_dict,
    restrict_optimizer,
    shown,
)
from lightning_mist.strategy.given_arguments import refuse_unknown
from lightning_mist.strategy.user_code import body_of


class OwnedOptimizer:
    """One rank's part of the user's optimizer: cut to what the rank owns, parts of parameters by canonical name."""

    def __init__(
        self,
        optimizer: Any,
        executor: Executor,
        parts: Mapping[str, Part],
        module_map: ModuleMap,
        *,
        device: torch.device,
    ) -> None:
        parameters, mesh = executor.stages.parameters, executor.mesh
        self._even = executor.even
        every: dict[str, AnyPart] = {**parts, **self._even.parts}
        pieces = {parameters[name]: part for name, part in every.items()}
        self.cut = restrict_optimizer(optimizer, executor.updated, pieces)
        self._transport, self._device = executor.transport, device
        self._hooks = []
        if executor.written.compares and executor.masters is None:
            compare = partial(executor.written.compare, executor.transport)
            # Before that of an update by units, which begins behind the closure.
            self._hooks.append(optimizer.register_step_pre_hook(lambda _, args, kw: behind_closure(args, kw, compare)))
        shares = any(stage.zero_stage or stage.mesh.num_row_peers > 1 for stage in mesh.plan.stages)
        if shares or mesh.plan.num_stages > 1:
            options = _GroupOptions(optimizer, executor.transport)
            before = optimizer.register_step_pre_hook(lambda _, args, kw: behind_closure(args, kw, options.compare))
            self._hooks += [before, optimizer.register_step_post_hook(options.keep)]
        self._offloaded = offload_optimizer_state(
            *(optimizer, mesh, module_map, parameters, executor.streams, executor.state_pool, executor.shards),
            *(executor.gradients, executor.transport, executor.masters, self._even),
        )
        if self._offloaded is not None:
            executor.take_update(self._offloaded)
        self._steps = UnitSteps(optimizer, self._update) if self._even.shards and self._offloaded is None else None
        self._known = step_hooks(optimizer) if shares or mesh.plan.num_stages > 1 else None

    def _update(self) -> None:
        assert self._steps is not None
        with at_work(), shown(self._even.trained):
            self._steps.of({parameter for group in self.cut.optimizer.param_groups for parameter in group["params"]})

    def release(self, timeout: timedelta | None) -> Callable[[], dict[str, Any]]:
        """Give the optimizer all its parameters back.

        Returns:
            What :meth:`state` would have given, on rank 0, whenever all ranks call it, also when the engine's groups of
            processes are gone. Until then each keeps in host memory the state of what it updated.
        """
        for hook in self._hooks:
            hook.remove()
        if self._offloaded is not None:
            self._offloaded.end()
        if self._steps is not None:
            self._steps.end()
        self._even.end()
        cut, device = self.cut, self._device
        kept = on_host(own_state_dict(cut)["state"])
        cut.restore()

        def ask() -> dict[str, Any]:
            transport = DistributedTransport((), device, timeout=timeout)
            try:
                mine = {**own_state_dict(cut), "state": kept}  # groups may have been changed since, as under DDP
                return complete(gather_optimizer_state(cut, transport, mine=mine, device=device)) or {}
            finally:
                transport.close()

        return ask

    def check(self) -> None:
        """Raise PlanError if somebody has put a method on the optimizer, or hooks, since the plan was made."""
        late = [] if self._known is None else [h for h in step_hooks(self.cut.optimizer) if h not in self._known]
        hooks = [f"hook {getattr(hook, '__qualname__', hook)}" for hook in late]
        if names := ", ".join((*replaced_methods(self.cut.optimizer), *hooks)):
            raise PlanError(
                f"{names} was put on the {type(self.cut.optimizer).__name__} object in training: it would see this "
                "rank's part of the parameters; put it there in configure_optimizers, where the plan respects it, or "
                "train with strategy='ddp'"
            )

    def flush(self) -> None:
        """Take the step now if it is left to the next batch."""
        if self._offloaded is not None:
            self._offloaded.flush()

    def settle(self) -> None:
        """Wait until all state in host memory has its values: before anybody reads it."""
        if self._offloaded is not None:
            self._offloaded.settle()

    def state(self) -> dict[str, Any]:
        """The state in the layout of the whole model on rank 0; empty on the others."""
        self.settle()
        return complete(gather_optimizer_state(self.cut, self._transport)) or {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of state in the layout of the whole model."""
        self.settle()
        if self._offloaded is None:
            load_full_optimizer_state(self.cut, state)
        else:
            apart, home = self._offloaded.offloaded, self._offloaded.send_home
            load_full_optimizer_state(self.cut, state, apart=apart, loaded=home)


class _GroupOptions:
    """Sees that options of an optimizer's groups change alike on all ranks, but for what a step changes itself."""

    def __init__(self, optimizer: Any, transport: Transport) -> None:
        self._optimizer, self._transport = optimizer, transport
        self._kept: dict[tuple[int, str], str] = {}

    def _found(self) -> dict[tuple[int, str], str]:
        return {
            (place, key): repr(value.tolist() if isinstance(value, Tensor) else value)
            for place, group in enumerate(self._optimizer.param_groups)
            for key, value in group.items()
            # What is on a device would have to be waited for.
            if isinstance(value, (int, float, tuple)) or (isinstance(value, Tensor) and value.is_cpu)
        }

    def keep(self, *_: Any) -> None:
        """A step is over: a rank that updates nothing of a group may have counted otherwise."""
        self._kept = self._found()

    def compare(self) -> None:
        """Raise PlanError, on all ranks, if what was changed since the last step is not the same on all."""
        every = tuple(range(self._transport.world_size))
        changed = self._found().items() - self._kept.items()
        digest = blake2b(repr(sorted(changed)).encode(), digest_size=7).digest()
        noted = self._transport.all_gather(torch.tensor([int.from_bytes(digest, "little")]), every).result()
        if len(set(noted.flatten().tolist())) > 1:
            found = self._transport.all_gather_object(changed, every)
            (place, key), _ = min(set().union(*found) - set.intersection(*found))
            raise PlanError(
                f"{key!r} of parameter group {place} was set to another value on one rank than on others, which under "
                "data parallelism would go on with weights of their own, where this plan has ranks update for one "
                "another: decide by what all have, such as a value logged with sync_dist=True, or use strategy='ddp'"
            )


def gradients_are_about_to_go(module: Any) -> bool:
    """Whether Lightning clears a module's gradients right after this step, and nobody looks at them before that."""
    trainer = module.trainer
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_idx % trainer.accumulate_grad_batches != 0:
        return False
    watching = [module, *trainer.callbacks]
    hooks = [getattr(type(item), "on_before_zero_grad", None) for item in watching]
    own = getattr(type(module), "optimizer_zero_grad", None)
    torchs = all(getattr(item.zero_grad, "__func__", None) is Optimizer.zero_grad for item in trainer.optimizers)
    return torchs and all(map(is_lightnings, hooks)) and (is_lightnings(own) or _clears_all(own))


@cache
def _clears_all(own: Any) -> bool:
    """Whether all that a module's own clearing does is to let gradients go, as Lightning's documentation shows it."""
    if type(own) is not FunctionType or own.__code__.co_argcount != 4:
        return False
    body, name = body_of(own.__code__) or [], own.__code__.co_varnames[3]
    is_text = [isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) for item in body]
    written = [ast.unparse(item) for item, skipped in zip(body, is_text, strict=True) if not skipped]
    return written in ([f"{name}.zero_grad()"], [f"{name}.zero_grad(set_to_none=True)"])


class _Mixed:
    """What is mixed into the class of an object while it works for an engine, for which no copy of it works."""

    _mist_engine: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        get = getattr(self, "__getstate__", None)
        state = {**(vars(self) if get is None else get())}
        del state["_mist_engine"]
        return object.__new__, (type(self).__bases__[1],), state


class _Whole(_Mixed):
    """Gradients made, and clipped, over all stages and shards; mixed into the plugin's class."""

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        with self._mist_engine.around_backward():
            return super().backward(*args, **kwargs)  # type: ignore[misc]

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float, **more: Any) -> None:
        refuse_unknown(more, "module")
        self._mist_engine.clip_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float, **more: Any) -> None:
        refuse_unknown(more, "module")
        self._mist_engine.clip_by_value(optimizer, clip_val)


class _AgreeingScaler(_Mixed):
    """Every rank skips a step if any rank saw a gradient that is not finite; mixed into the scaler's class."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, *args: Any, **kwargs: Any) -> Any:
        with self._mist_engine.unscaling(optimizer, inv_scale):
            found = super()._unscale_grads_(optimizer, inv_scale, *args, **kwargs)  # type: ignore[misc]
        return self._mist_engine.agree_on_overflow(found)


def attach_engine(plugin: Any, engine: Any | None) -> None:
    """Let a precision plugin (and its gradient scaler) work for an engine, or be as they were for none."""
    for instance, mixin in ((plugin, _Whole), (getattr(plugin, "scaler", None), _AgreeingScaler)):
        cls = type(instance)
        if engine is None and issubclass(cls, mixin):
            instance.__class__ = cls.__bases__[1]
            del instance._mist_engine  # type: ignore[union-attr]
        elif engine is not None and instance is not None:
            if not issubclass(cls, mixin):
                names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
                instance.__class__ = type(cls.__name__, (mixin, cls), names)
            instance._mist_engine = engine
