"""An unmodified optimizer's step taken unit by unit.

A step of the user's optimizer begins wherever Lightning or a gradient scaler calls it, with or without a closure.
Behind the closure, in place of its update of everything, comes its update of one unit after another: each a call of
the class's own ``step`` while the groups hold that unit's parameters only. Hooks around the step run once, as without
units, and so does what a learning-rate scheduler has put around it.

A step may be *frozen*: gradients and options are kept as they are when it is asked for, and units are updated with
them later, whatever a scheduler, a gradient scaler or ``zero_grad`` does meanwhile. What nobody clears is still there
behind it, as under DDP.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mist.optimizers import options_of
from lightning_mist.runtime.parameters import AbsentGradient, KeptGradient, given_back, shared_out, unversioned


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A step that was asked for: options of every group, the optimizer's own attributes, and gradients that are here.

    ``having`` says of every gradient, wherever it is, whether it was zeros in host memory. Attributes are also what a
    gradient scaler lends an optimizer that unscales gradients itself. What makes tensors without saying of which type
    makes them of the type that is usual where the step was asked for, as in DDP.
    """

    options: tuple[dict[str, Any], ...]
    attributes: dict[str, Any]
    gradients: dict[nn.Parameter, Tensor]
    having: dict[nn.Parameter, bool]
    fates: dict[nn.Parameter, list[str]]
    default_dtype: torch.dtype


def behind_closure(args: tuple[Any, ...], kwargs: dict[str, Any], work: Callable[[], None]) -> Any:
    """Arguments of an optimizer's step, itself the first, with work behind its closure; now, and None, without one."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        work()
        return None

    def then() -> Any:
        # The step calls it with gradients on, wherever they are.
        result = closure()
        with torch.no_grad():
            work()
        return result

    return ((args[0], then, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then})


class UnitSteps:
    """Steps of one optimizer by units.

    Args:
        update: Takes the whole step by calls of :meth:`of`.

    Attributes:
        cleared: Parameters whose gradients the step itself has cleared.
    """

    def __init__(self, optimizer: Optimizer, update: Callable[[], None]) -> None:
        self._optimizer, self._update = optimizer, update
        step = type(optimizer).step
        # Torch puts the hooks' call around the step of every class of which there is an object.
        self._step: Callable[[Any], Any] = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
        self._is_inside = False
        self._whole: list[list[nn.Parameter]] | None = None
        self._frozen: _Frozen | None = None
        self.cleared = set[nn.Parameter]()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._behind),
        ]
        # The user's own find the groups as they were.
        behind: Any = optimizer._optimizer_step_post_hooks
        behind.move_to_end(self._hooks[1].id, last=False)

    def of(self, parameters: Collection[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Update these parameters alone.

        Args:
            gradients: Gradients of some parameters, which have stand-ins in their place.
        """
        chosen = set(parameters)
        with ExitStack() as stack:
            stack.enter_context(self._groups(lambda whole: [item for item in whole if item in chosen]))
            if self._frozen is not None:
                stack.enter_context(self._as_frozen(self._frozen, chosen))
                stack.enter_context(unversioned(tuple(chosen)))  # within a batch; no write of the step's
            for parameter, gradient in (gradients or {}).items():
                stack.callback(setattr, parameter, "grad", parameter.grad)
                parameter.grad = gradient
            if had := [parameter for parameter in chosen if parameter.grad is not None]:
                self._step(self._optimizer)
                self.cleared.update(parameter for parameter in had if parameter.grad is None)
        for parameter in self.cleared & chosen:
            parameter.grad = None
            if self._frozen is not None:
                self._frozen.fates.get(parameter, []).append("cleared")

    def had_zeros(self, parameter: nn.Parameter) -> bool | None:
        """Whether the gradient when the step was asked for was one in host memory, cleared; None without any."""
        return _is_zero(parameter.grad) if self._frozen is None else self._frozen.having.get(parameter)

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient with which a parameter is to be updated; of a frozen step it is given once."""
        return parameter.grad if self._frozen is None else self._frozen.gradients.pop(parameter, None)

    def freeze(self) -> None:
        """Keep gradients and options as they are for all calls of :meth:`of` to come, whatever is cleared till then."""
        groups = self._optimizer.param_groups
        given = {p: p.grad for group in groups for p in group["params"] if p.grad is not None}
        self._frozen = _Frozen(
            tuple({key: as_now(value) for key, value in options_of(group).items()} for group in groups),
            {key: as_now(value) for key, value in vars(self._optimizer).items() if isinstance(value, _PLAIN)},
            {p: gradient for p, grad in given.items() if (gradient := shared_out(grad)) is not None},
            {p: _is_zero(gradient) is True for p, gradient in given.items()},
            {p: [] for p in given},
            torch.get_default_dtype(),
        )
        self.cleared.clear()
        for parameter, gradient in given.items():
            if type(gradient) is not AbsentGradient:
                parameter.grad = stand_in = KeptGradient.of(parameter)
                stand_in.piece = gradient
            parameter.grad.is_asked, parameter.grad.fate = True, self._frozen.fates[parameter]

    def thaw(self) -> None:
        """All of what was frozen is done."""
        for parameter in () if self._frozen is None else self._frozen.having:
            parameter.grad = given_back(parameter.grad)
        self._frozen = None

    @contextmanager
    def _as_frozen(self, frozen: _Frozen, parameters: Collection[nn.Parameter]) -> Iterator[None]:
        groups, own = self._optimizer.param_groups, vars(self._optimizer)
        now = [options_of(group) for group in groups]
        current, dtype = {key: own[key] for key in frozen.attributes if key in own}, torch.get_default_dtype()
        for group, options in zip(groups, frozen.options, strict=True):
            group.update(options)
        own.update(frozen.attributes)
        before = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = frozen.gradients.pop(parameter, None)
        torch.set_default_dtype(frozen.default_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            for parameter, gradient in before:
                parameter.grad = gradient
            for key in frozen.attributes:
                del own[key]
            own.update(current)
            for group, options in zip(groups, now, strict=True):
                group.update(options)

    def end(self) -> None:
        """Let the optimizer step as it did before."""
        self._restore()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def _groups(self, choose: Callable[[Sequence[nn.Parameter]], list[nn.Parameter]]) -> Iterator[None]:
        groups = self._optimizer.param_groups
        kept = [group["params"] for group in groups]
        # A hook of the step itself may ask, while the groups are empty.
        for group, whole in zip(groups, self._whole or kept, strict=True):
            group["params"] = choose(whole)
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
            for group, whole in zip(groups, kept, strict=True):
                group["params"] = whole

    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_inside or self._whole is not None:
            return None  # A class's step that calls that of its base class, which has the hooks around it too.
        return behind_closure(args, kwargs, self._take)

    def _take(self) -> None:
        if self._whole is not None:
            return
        self.cleared.clear()
        self._update()
        groups = self._optimizer.param_groups
        self._whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []

    def _behind(self, *_: Any) -> None:
        if not self._is_inside:
            self._restore()

    def _restore(self) -> None:
        whole, self._whole = self._whole, None
        for group, parameters in zip(self._optimizer.param_groups, whole or (), strict=False):
            group["params"] = parameters


def _is_zero(gradient: Tensor | None) -> bool | None:
    return None if gradient is None else isinstance(gradient, AbsentGradient) and gradient.is_zero


_PLAIN = (bool, int, float, str, Tensor)


def as_now(value: Any) -> Any:
    """A value as it is now."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, (list, dict)) else value
