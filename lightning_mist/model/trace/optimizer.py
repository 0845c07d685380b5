"""What an optimizer keeps and needs, measured by stepping a small one of its kind."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import isolated, quiet_fakes, storage_of, substitute_parameters
from lightning_mist.model.operator_costs import narrow_type
from lightning_mist.model.spec import OptimizerSpec
from lightning_mist.model.trace.ledger import Ledger
from lightning_mist.optimizers import fewer, is_entrywise, like, options_of, tensors_within
from lightning_mist.without_values import fake_mode

_SIDE = 128  # parameters of 128 x 128: matrices, which may be treated differently, of more entries than blocks begin at
_MOST = 2**16  # entries of a parameter whose state is measured: larger ones have as much by entry

_Made = torch.optim.Optimizer | type[torch.optim.Optimizer]
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One metered step: bytes of parameters, of each one's state, alive at most beyond those before, and moved.

    Attributes:
        narrow: Type of state of 8 bits, if any has one.
    """

    parameters: int
    states: list[int]
    peak: int
    moved: int
    narrow: str


class _Trials:
    """Steps of optimizers like one, or of a class, on parameters of ones."""

    def __init__(
        self, make: Callable[[Any], Any], options: list[dict[str, Any]], kind: str, home: tuple[Any, Any]
    ) -> None:
        self._make, self._options, self._kind, self._home = make, options, kind, home

    def step(self, *shapes: Sequence[_Shape]) -> _Trial:
        """One on parameters of these shapes in each of its groups, or in the first."""
        device, dtype = self._home
        groups = [
            {**options, "params": [nn.Parameter(torch.ones(shape, device=device, dtype=dtype)) for shape in of]}
            for options, of in zip(self._options, shapes, strict=False)
        ]
        parameters = [parameter for group in groups for parameter in group["params"]]
        optimizer = self._make(groups)
        for group in optimizer.param_groups:
            # Torch's choice where nobody chose (``_default_to_fused_or_foreach`` in torch/optim/optimizer.py).
            is_open = group.get("foreach", False) is None and not (group.get("fused") or group.get("differentiable"))
            group.update({"foreach": True} if is_open and self._kind == "cuda" else {})
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # makes the state; the second step is like all later ones
        ledger = Ledger(1)
        with torch.no_grad(), ledger:
            optimizer.step()
        found = [{storage_of(t): t for t in tensors_within(optimizer.state.get(p))} for p in parameters]
        shared = Counter(key for state in found for key in state)
        return _Trial(
            parameters=sum(p.numel() * p.element_size() for p in parameters),
            # Tables that parameters share, and numbers, do not grow with them.
            states=[
                sum(t.untyped_storage().nbytes() for key, t in state.items() if shared[key] == 1 and t.numel() > 1)
                for state in found
            ],
            peak=max(ledger.forward[0].timeline),
            moved=ledger.forward[0].moved_bytes,
            narrow=narrow_type([t for state in found for t in state.values()], floating=False),
        )

    def spec(self, name: str, sizes: list[Counter[_Shape]]) -> OptimizerSpec:
        """What is kept and needed; state by entries of parameters of these shapes in each of the groups."""
        one, other = (_SIDE, _SIDE), (2 * _SIDE, 2 * _SIDE)
        four, eight, large = self.step([one] * 4), self.step([one] * 8), self.step([other] * 4)
        alone, large_alone = self.step([one]), self.step([other])
        sizes = sizes if any(sizes) else [Counter({other: 1})]
        held = self.step(*([shape for shape in of for _ in range(2)] for of in sizes))
        counts = [(math.prod(shape), count) for of in sizes for shape, count in of.items()]
        state = sum(bytes_ * count / entries for (entries, count), bytes_ in zip(counts, held.states[::2], strict=True))
        size = four.parameters
        # peak = total * per_total + largest * per_largest + rest. From four to eight parameters only the total grows;
        # from four small to four large ones (four times the elements) both do, by three times what they were.
        per_total = (eight.peak - four.peak) / size
        per_largest = ((large.peak - four.peak) / 3 - per_total * size) / (size / 4)
        alone_per_largest = (large_alone.peak - alone.peak) / (3 * alone.parameters) - per_total
        return OptimizerSpec(
            name=name,
            state_bytes_per_parameter_byte=state / self._home[1].itemsize / sum(count for _, count in counts),
            step_peak_bytes_per_parameter_byte=max(0.0, per_total),
            step_peak_bytes_per_largest=max(0.0, per_largest),
            step_moved_bytes_per_parameter_byte=(large.moved - four.moved) / (3 * size),
            step_left_bytes_per_parameter_byte=max(0.0, per_largest - alone_per_largest),
            narrow_state=held.narrow,
        )


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class in ``torch.optim`` of a name; a ValueError if there is none."""
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"optimizer {name!r} is not a class in torch.optim: write for example AdamW or SGD")
    return found


def describe_optimizer(
    optimizer: _Made,
    *,
    device: torch.device | None = None,
    device_kind: str | None = None,
    dtype: torch.dtype | None = None,
) -> OptimizerSpec:
    """Measure what an optimizer like this keeps and needs, per byte of parameters.

    Others are stepped under a meter: with four parameters, with eight, with four larger ones, and with one small or
    large; the differences tell what grows with all parameters, what with the largest, what one leaves to the next, and
    leave out what does not grow at all. State is measured on parameters of the sizes of its own: small ones may have
    more of it by entry.

    Args:
        optimizer: The real optimizer (neither stepped nor changed), or a class for its default options.
        device: Where to measure; by default where the optimizer's parameters are, for implementations differ.
        device_kind: Kind of the device that it will step on, if that is another one.
        dtype: Type of the parameters that it will step on, if that is another one than they have now.

    Raises:
        TraceError: If such an optimizer cannot be stepped on gradients alone.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    groups = [] if isinstance(optimizer, type) else optimizer.param_groups
    first = next((p for group in groups for p in group["params"]), torch.empty(0, dtype=torch.float32, device="cpu"))
    its = torch.device("cpu") if first.is_meta else first.device
    home = (its, dtype or first.dtype) if device is None else (device, dtype or torch.float32)
    sizes: list[Counter[_Shape]] = [Counter() for _ in groups]
    for size, group in zip(sizes, groups, strict=True):
        for parameter in group["params"]:
            size[fewer(parameter.shape, _MOST)] += parameter.numel()
    options = [options_of(group) for group in groups] or [{}]
    # Some make state when they are made, which one like another has not.
    for make in (cls,) if isinstance(optimizer, type) else (partial(like, optimizer), cls):
        try:
            found = _Trials(make, options, device_kind or home[0].type, home).spec(cls.__name__, sizes)
            return replace(found, is_entrywise=is_entrywise(cls))
        except Exception as error:
            failed = error
    raise TraceError(
        f"{cls.__name__} cannot be planned for: a step on given gradients failed with {type(failed).__name__}: "
        f"{failed}. Optimizers that evaluate a closure cannot be run in stages"
    ) from failed


def describe_given(
    optimizer: _Made | None, home: torch.device, device_kind: str
) -> tuple[OptimizerSpec, tuple[str, ...]]:
    """What an optimizer, AdamW if there is none, keeps and needs, and what was assumed.

    Args:
        home: Where to measure AdamW.
    """
    if optimizer is None:
        note = "no optimizer was given: AdamW's needs are assumed"
        return describe_optimizer(torch.optim.AdamW, device=home, device_kind=device_kind), (note,)
    found = describe_optimizer(optimizer, device_kind=device_kind)
    note = f"{found.name} keeps state in {found.narrow_state}: its bytes are an average over all parameters"
    return found, (note,) if found.narrow_state else ()


_INHERITED = "LightningModule.configure_optimizers"
"""Lightning's own method, which makes nothing, by its qualified name: this room does not import Lightning."""

_MANUAL = (
    "automatic_optimization is off: training_step is taken for one forward whose loss is then differentiated, and one "
    "optimizer step; what the module does by hand beyond that (several backwards or optimizers) is not in these figures"
)


def optimizer_to_describe(
    module: nn.Module, given: _Made | None, context: Callable[[], AbstractContextManager[Any]]
) -> tuple[_Made | None, tuple[str, ...]]:
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
        substitute_parameters(module, fake_mode(), {})
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
