"""What an optimizer keeps and needs, measured by stepping a small one of its kind."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import isolated, quiet_fakes, substitute_parameters
from lightning_mist.model.operators import narrow_type, plain_tensors, storage_key, tensors_in
from lightning_mist.model.spec import OptimizerSpec
from lightning_mist.model.trace.ledger import Ledger

_SIDE = 64  # parameters of 64 x 64: small, and a matrix, so that optimizers which treat matrices differently do so


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One metered step: bytes of parameters, of state after it, alive at most beyond those before, and moved.

    Attributes:
        narrow: Type of state of 8 bits, if any has one.
    """

    parameters: int
    state: int
    peak: int
    moved: int
    narrow: str


def _options(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> dict[str, Any]:
    """The options of the first group that the constructor takes."""
    if isinstance(optimizer, type):
        return {}
    known = inspect.signature(type(optimizer).__init__).parameters
    group = {**optimizer.defaults, **{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}}
    options = {name: value for name, value in group.items() if name in known}
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _as_on(device_kind: str, cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """Options with torch's choice where nobody chose (``_default_to_fused_or_foreach`` in torch/optim/optimizer.py)."""
    chosen = options.get("foreach") is not None or options.get("fused") or options.get("differentiable")
    if device_kind != "cuda" or chosen or "foreach" not in inspect.signature(cls.__init__).parameters:
        return options
    return {**options, "foreach": True}


def _home(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> tuple[torch.device, torch.dtype]:
    if isinstance(optimizer, type):
        return torch.device("cpu"), torch.float32
    parameter = next((p for group in optimizer.param_groups for p in group["params"]), None)
    if parameter is None:
        return torch.device("cpu"), torch.float32
    return torch.device("cpu") if parameter.is_meta else parameter.device, parameter.dtype


def _try(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], shapes: list[tuple[int, int]], home: tuple[Any, Any]
) -> _Trial:
    device, dtype = home
    parameters = [nn.Parameter(torch.ones(shape, device=device, dtype=dtype)) for shape in shapes]
    optimizer = cls(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the state; the second step is like all later ones
    ledger = Ledger(1)
    with torch.no_grad(), ledger:
        optimizer.step()
    found = [t for s in optimizer.state.values() for t in plain_tensors(tensors_in(list(s.values())))]
    states = {storage_key(t): t for t in found}
    timeline = ledger.forward[0].timeline
    return _Trial(
        parameters=sum(p.numel() * p.element_size() for p in parameters),
        state=sum(t.untyped_storage().nbytes() for t in states.values()),
        peak=max(timeline),
        moved=ledger.forward[0].moved_bytes,
        narrow=narrow_type(found, floating=False),
    )


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class in ``torch.optim`` of a name; a ValueError if there is none."""
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"optimizer {name!r} is not a class in torch.optim: write for example AdamW or SGD")
    return found


def describe_optimizer(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer],
    *,
    device: torch.device | None = None,
    device_kind: str | None = None,
    dtype: torch.dtype | None = None,
) -> OptimizerSpec:
    """Measure what an optimizer of this class with these options keeps and needs, per byte of parameters.

    Small instances are stepped under a meter: with four parameters, with eight, with four larger ones, and with one
    small or large; the differences tell what grows with all parameters, what with the largest, what one leaves to the
    next, and leave out what does not grow at all.

    Args:
        optimizer: The real optimizer (neither stepped nor changed), or a class for its default options.
        device: Where to measure; by default where the optimizer's parameters are, for implementations differ.
        device_kind: Kind of the device that it will step on, if that is another one.
        dtype: Type of the parameters that it will step on, if that is another one than they have now.

    Raises:
        TraceError: If such an optimizer cannot be stepped on gradients alone.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    home = _home(optimizer) if device is None else (device, torch.float32)
    home = home[0], dtype or home[1]
    options = _as_on(device_kind or home[0].type, cls, _options(optimizer))
    try:
        four = _try(cls, options, [(_SIDE, _SIDE)] * 4, home)
        eight = _try(cls, options, [(_SIDE, _SIDE)] * 8, home)
        large = _try(cls, options, [(2 * _SIDE, 2 * _SIDE)] * 4, home)
        alone, large_alone = (_try(cls, options, [(side, side)], home) for side in (_SIDE, 2 * _SIDE))
    except Exception as error:
        raise TraceError(
            f"{cls.__name__} cannot be planned for: a step on given gradients failed with {type(error).__name__}: "
            f"{error}. Optimizers that evaluate a closure cannot be run in stages"
        ) from error
    size = four.parameters
    # peak = total * per_total + largest * per_largest + rest. From four to eight parameters only the total grows; from
    # four small to four large ones (four times the elements) both do, by three times what they were.
    per_total = (eight.peak - four.peak) / size
    per_largest = ((large.peak - four.peak) / 3 - per_total * size) / (size / 4)
    alone_per_largest = (large_alone.peak - alone.peak) / (3 * alone.parameters) - per_total
    return OptimizerSpec(
        name=cls.__name__,
        state_bytes_per_parameter_byte=(large.state - four.state) / (3 * size),
        step_peak_bytes_per_parameter_byte=max(0.0, per_total),
        step_peak_bytes_per_largest=max(0.0, per_largest),
        step_moved_bytes_per_parameter_byte=(large.moved - four.moved) / (3 * size),
        step_left_bytes_per_parameter_byte=max(0.0, per_largest - alone_per_largest),
        narrow_state=large.narrow,
    )


def describe_given(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None, home: torch.device, device_kind: str
) -> tuple[OptimizerSpec, tuple[str, ...]]:
    """What an optimizer, AdamW if there is none, keeps and needs, and what was assumed.

    Args:
        home: Where to measure AdamW.
    """
    if optimizer is None:
        note = "no optimizer was given: AdamW's needs are assumed"
        return describe_optimizer(torch.optim.AdamW, device=home, device_kind=device_kind), (note,)
    found = describe_optimizer(optimizer, device_kind=device_kind)
    note = f"{found.name} keeps state in {found.narrow_state}: its bytes are those of a small one of its kind"
    return found, (note,) if found.narrow_state else ()


_INHERITED = "LightningModule.configure_optimizers"
"""Lightning's own method, which makes nothing, by its qualified name: this room does not import Lightning."""

_MANUAL = (
    "automatic_optimization is off: training_step is taken for one forward whose loss is then differentiated, and one "
    "optimizer step; what the module does by hand beyond that (several backwards or optimizers) is not in these figures"
)


def optimizer_to_describe(
    module: nn.Module,
    given: torch.optim.Optimizer | type[torch.optim.Optimizer] | None,
    context: Callable[[], AbstractContextManager[Any]],
) -> tuple[torch.optim.Optimizer | type[torch.optim.Optimizer] | None, tuple[str, ...]]:
    """What is supposed to train a module, and what to say about that.

    The module's ``configure_optimizers`` is asked with substitutes without values in its parameters' places, so that
    nothing of the module changes.

    Args:
        given: What the user named; it is taken as it is.

    Returns:
        The optimizer, None if nobody says one, and notes.
    """
    notes: tuple[str, ...] = (_MANUAL,) if getattr(module, "automatic_optimization", True) is False else ()
    configure = getattr(module, "configure_optimizers", None)
    if given is not None or not callable(configure) or getattr(configure, "__qualname__", "") == _INHERITED:
        return given, notes
    with isolated(module), quiet_fakes(), context():
        substitute_parameters(module, FakeTensorMode(allow_non_fake_inputs=True), {})
        try:
            made = configure()
        except Exception as error:
            why = (
                f"configure_optimizers cannot be asked ({type(error).__name__}: {error}); name the optimizer, as in "
                "optimizer=torch.optim.SGD or --optimizer SGD"
            )
            return None, (*notes, why)
    found = list(_optimizers_in(made))
    if not found:
        return None, (*notes, f"configure_optimizers returned {type(made).__name__} without an optimizer")
    largest = max(found, key=lambda item: sum(p.numel() for group in item.param_groups for p in group["params"]))
    if len(found) > 1:
        several = ", ".join(type(optimizer).__name__ for optimizer in found)
        notes += (
            f"configure_optimizers makes {len(found)} optimizers ({several}): all parameters are counted as if "
            f"{type(largest).__name__}, which has most of them, trained them all",
        )
    return largest, notes


def _optimizers_in(made: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in anything that Lightning allows ``configure_optimizers`` to return."""
    if isinstance(made, torch.optim.Optimizer):
        yield made
    elif isinstance(made, dict):
        yield from _optimizers_in(made.get("optimizer"))
    elif isinstance(made, (list, tuple)):
        for item in made:
            yield from _optimizers_in(item)
