"""Parameters whose values are on other ranks: whoever uses them outside of the engine is told so.

Such a parameter has its shape and no memory. For as long as it is so its class is :class:`AbsentParameter`, which lets
shapes and types be asked for and refuses everything else; the class of parameters that a rank computes with stays
torch's own, so that computing costs nothing more.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_mist.errors import PlanError
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.plan_tables import ranges

_FORM = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "names", "nbytes"),
        *("itemsize", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
        *("size", "dim", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex"),
        *("is_contiguous", "get_device", "storage_offset", "requires_grad_", "is_inference", "is_shared", "_version"),
        *("__hash__", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "__len__"),
    }
)
"""What may be asked of a parameter without values."""

_OURS = __name__.partition(".")[0]

_WORKING: list[None] = []
"""One entry for each context in which the engine moves values."""


@contextmanager
def at_work() -> Iterator[None]:
    """Inside, the engine moves values: parameters without any may be used in every way."""
    _WORKING.append(None)
    try:
        yield
    finally:
        _WORKING.pop()


works = at_work()
"""Decorates functions of the engine's, which run inside of one."""


class AbsentParameter(nn.Parameter):
    """A parameter whose values are on another rank."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is asked of its form; refuse what is asked of its values, saying where these are."""
        name = _name_of(func)
        if name == "__repr__":
            return _described(args[0])
        values = (*args, *(kwargs or {}).values())
        if not (name in _FORM or _is_gradient(name, args) or _package(sys._getframe(1)) == _OURS):
            for arrive in {found for item in _flat(values) if (found := _arrive_of(item))}:
                arrive()
            is_there = not any(type(item) is AbsentParameter for item in _flat(values))
            if not (is_there or _WORKING or _is_ours(name)):
                raise PlanError(_refusal(values, name))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse to be copied without values."""
        if arrive := _arrive_of(self):
            arrive()
            return copy.deepcopy(self, memo)
        if not _WORKING:
            raise PlanError(_refusal((self,), "deepcopy"))
        return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be stored without values."""
        if arrive := _arrive_of(self):
            arrive()
            return self.__reduce_ex__(protocol)
        if not _WORKING:
            raise PlanError(_refusal((self,), "pickle"))
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class AbsentGradient(Tensor):
    """Stands in for a gradient that is in host memory, or shared out: nobody but the package may look at its values.

    Attributes:
        piece: What of it this rank has, where ranks share it out; None in host memory.
        is_asked: Whether a step that was asked for, and is not taken yet, needs the piece as it is.
        is_zero: Whether somebody has cleared what is in host memory.
        fate: What the step that it was asked for has done to it: nothing, or cleared it.
    """

    piece: Tensor | None = None
    is_asked = is_zero = False
    fate: Sequence[str] = ()

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "AbsentGradient":
        """The stand-in for a parameter's gradient."""
        return _zero(parameter.dtype, parameter.device).expand(parameter.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is asked of its form; refuse what is asked of its values, naming the way out."""
        name = _name_of(func)
        if name not in _FORM and name != "grad =" and _package(sys._getframe(1)) != _OURS:
            if name in ("zero_", "_foreach_zero_"):
                # Beside stand-ins a list has gradients that are here.
                for item in _flat(args):
                    item.clear() if isinstance(item, AbsentGradient) else item.zero_()
                return args[0]
            found = next(item for item in _flat(args) if isinstance(item, AbsentGradient))
            where, way = "shared out over ranks", "zero_stage"
            if found.piece is None:
                where, way = "in host memory", "offload.gradients"
            elif isinstance(found, KeptGradient):
                where, way = "kept for a step that the next batch takes", "offload.optimizer"
            raise PlanError(
                f"{name} of a gradient while its values are {where}: read gradients, or clear them other than by "
                f"zero_grad, under a plan with {way} = 0"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def clear(self) -> None:
        """Let the gradient be zeros from now on."""
        if self.piece is None:
            self.is_zero = True
        elif self.is_asked:
            self.piece, self.is_asked = torch.zeros_like(self.piece), False
        else:
            self.piece.zero_()


class KeptGradient(AbsentGradient):
    """Stands in for a whole gradient on the device that a step needs as it is; ``piece`` is that gradient."""


@lru_cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    # Everybody gets the same.
    with torch.inference_mode(False), _disable_current_modes():
        return torch.zeros((), dtype=dtype, device=device)


def shared_out(gradient: Tensor | None) -> Tensor | None:
    """A gradient, or what this rank has of it; None if its values are in host memory."""
    return gradient.piece if isinstance(gradient, AbsentGradient) else gradient


def given_back(gradient: Tensor | None) -> Tensor | None:
    """A gradient that no step needs any more as it was; None if the step has cleared it."""
    if isinstance(gradient, AbsentGradient) and gradient.fate:
        return None
    return gradient.piece if type(gradient) is KeptGradient else gradient


def make_absent(
    parameters: Mapping[str, nn.Parameter],
    where: Callable[[str], str],
    *,
    keeps_gradient: bool = False,
    arrive: Callable[[], None] | None = None,
) -> None:
    """Let parameters be absent from now on.

    Args:
        parameters: The parameters by name; those of classes other than torch's own stay what they are.
        where: Says where the values of one are, for people.
        keeps_gradient: Whether their gradients are here all the same.
        arrive: Lets them come back, whenever somebody uses one.
    """
    for name, parameter in parameters.items():
        if type(parameter) is nn.Parameter:
            parameter.__class__ = AbsentParameter
            parameter.__dict__["_mist_absent"] = (name, where(name))
            parameter.__dict__["_mist_keeps_gradient"] = keeps_gradient
            parameter.__dict__["_mist_arrive"] = arrive


def is_awaited(parameter: nn.Parameter) -> bool:
    """Whether a parameter's values come back when somebody uses it."""
    return _arrive_of(parameter) is not None


def held_at(plan: Plan, module_map: ModuleMap, name: str) -> str:
    """Where a parameter of another stage is, for people."""
    stage = module_map.owners(plan.bounds)[name][0]
    devices = plan.stages[stage].devices
    ranks = f"rank {devices[0]}" if len(devices) == 1 else f"ranks {ranges(devices)}"
    return f"on {ranks} (stage {stage} of {plan.num_stages})"


def make_present(parameters: Iterable[nn.Parameter]) -> None:
    """Let parameters be ordinary ones again."""
    for parameter in parameters:
        if type(parameter) is AbsentParameter:
            object.__setattr__(parameter, "__class__", nn.Parameter)
            parameter.__dict__.pop("_mist_absent", None)
            parameter.__dict__.pop("_mist_keeps_gradient", None)
            parameter.__dict__.pop("_mist_arrive", None)


@contextmanager
def present_meanwhile(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, absent parameters are ordinary ones without values."""
    absent = [(item, dict(item.__dict__)) for item in parameters if type(item) is AbsentParameter]
    make_present(item for item, _ in absent)
    try:
        yield
    finally:
        for item, said in absent:
            item.__class__ = AbsentParameter
            item.__dict__.update(said)


def _name_of(function: Any) -> str:
    """What is called: ``shape`` for the getter of ``Tensor.shape``."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        return attribute if name == "__get__" or attribute == "requires_grad" else f"{attribute} ="
    return str(name)


def _is_ours(name: str) -> bool:
    """Whether this package asks, itself or through torch, or somebody clears gradients that are not there."""
    frame = sys._getframe(2)
    if name == "grad" and frame.f_code.co_name == "zero_grad":
        return True
    while frame.f_back is not None and _package(frame) == "torch":
        frame = frame.f_back
    return _package(frame) == _OURS


def _is_gradient(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a parameter is asked for, or given, a gradient that is here."""
    return name in ("grad", "grad =") and bool(args[0].__dict__.get("_mist_keeps_gradient"))


def _arrive_of(item: Any) -> Callable[[], None] | None:
    return item.__dict__.get("_mist_arrive") if type(item) is AbsentParameter else None


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _described(parameter: Tensor) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        name, where = parameter.__dict__["_mist_absent"]
        return f"Parameter {name} of shape {tuple(parameter.shape)}, whose values are {where}"


def _refusal(values: Iterable[Any], name: str) -> str:
    absent = next((item for item in _flat(values) if type(item) is AbsentParameter), None)
    parameter, where = ("a parameter", "elsewhere") if absent is None else absent.__dict__["_mist_absent"]
    return (
        f"{name} of {parameter} while it is trained: its values are {where}. Read the module after fit, "
        "where it is whole on every rank, save it with trainer.save_checkpoint(path) or fabric.save on every rank, "
        "or train by a plan that leaves every rank all parameters (one stage, zero_stage = 2 or less, "
        "offload.parameters = 0)"
    )
