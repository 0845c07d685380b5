"""Checks with real numbers, made once before training: the cut module against the whole.

Gradients are afterwards as before; what else steps do to the module and to random generators is the caller's to undo.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mist.errors import TraceError
from lightning_mist.plan.calls import describe_value
from lightning_mist.plan.module_map import LiveTensor, ModuleMap
from lightning_mist.runtime.gradients import WeightGradients
from lightning_mist.runtime.process_state import get_random_state, set_random_state
from lightning_mist.runtime.stage import PipelineStage, StageOutput
from lightning_mist.tensors import batch_rows, call_without_dropout, copy_batch, gradients_aside, slice_rows

Call = Callable[[Any], Any]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference relative to a parameter's largest gradient. The cut module repeats the same arithmetic, except
that gradients of shared parameters are summed in another order: some hundred roundings."""

_COARSE_TOLERANCE = 5e-2
"""The same where 16-bit numbers take part: 2^-8 per rounding, some ten of them."""


class Steady(TorchFunctionMode):
    """Inside, dropout drops nothing; it is noted whether it was to, and whether 16-bit arithmetic took part."""

    def __init__(self, device: torch.device, *, without_dropout: bool) -> None:
        super().__init__()
        self._device, self._without_dropout = device.type, without_dropout
        self.is_coarse = self.is_dropping = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.is_coarse = self.is_coarse or torch.is_autocast_enabled(self._device)
        self.is_dropping = self.is_dropping or drops(getattr(func, "__name__", ""), args, kwargs)
        return call_without_dropout(func, args, kwargs) if self._without_dropout else func(*args, **kwargs)


def drops(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch drops something at random."""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if name == "multi_head_attention_forward":
        return bool(kwargs.get("training", True) and (args[10] if len(args) > 10 else kwargs.get("dropout_p", 0.0)))
    if "dropout" not in name or not args or not isinstance(args[0], Tensor):
        return False
    share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return bool(share and kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True)))


def check_stages(
    module: nn.Module,
    module_map: ModuleMap,
    bounds: tuple[tuple[int, int], ...],
    call: Call,
    batch: Any,
    *,
    splits_backwards: bool = False,
    divided: Collection[int] = (),
    keeps_at_home: bool = False,
) -> None:
    """Compare the whole module with the same module run stage by stage, in loss and in every gradient.

    Stages run alone, so it makes no difference which of them will share devices as chunks. Gradients are afterwards as
    before; what else steps do to the module and to random generators is the caller's to undo.

    Args:
        splits_backwards: Whether gradients of weights are made after those of all inputs, as zero-bubble schedules do.
        divided: The stages whose ranks share out rows otherwise than those of the next stage.
        keeps_at_home: As in :class:`GradientDifferences`.

    Raises:
        TraceError: If they differ; names the parameter that differs most.
    """
    cut, device = _Cut(module, module_map, bounds, call), device_of(module)
    with gradients_aside(module.parameters()), torch.enable_grad(), Steady(device, without_dropout=False) as steady:
        state = get_random_state(device)
        loss = loss_of(call(copy_batch(batch)))
        expected_loss = loss.detach()
        with GradientDifferences(module, keeps_at_home=keeps_at_home) as differences:
            loss.backward()  # type: ignore[no-untyped-call]
            differences.turn()
            found_loss = cut.again(batch, state, splits_backwards=splits_backwards)
            largest = differences.largest(_tolerance(module, is_coarse=steady.is_coarse))
        with torch.no_grad(), Steady(device, without_dropout=True):
            cut.check_row_order(batch, divided)
    what = f"the module cut into {len(bounds)} stages differs from the whole"
    way_out = "Use schedule = '1f1b' or a plan with one stage" if splits_backwards else "Use a plan with one stage"
    tolerance = _tolerance(module, is_coarse=steady.is_coarse)
    if not _is_close(found_loss, expected_loss, tolerance):
        raise TraceError(
            f"{what}: its loss is {found_loss.item():.8g} instead of {expected_loss.item():.8g}. {way_out}"
        )
    if largest is not None:
        raise TraceError(f"{what}: {largest}. {way_out}")


@dataclass(frozen=True, slots=True)
class _Cut:
    """A module cut into stages, and the user's step on it."""

    module: nn.Module
    module_map: ModuleMap
    bounds: tuple[tuple[int, int], ...]
    call: Call

    def again(self, batch: Any, state: Tensor, *, splits_backwards: bool) -> Tensor:
        """Forward and backward stage by stage; the loss."""
        set_random_state(state, device_of(self.module))
        deferral = WeightGradients(dict(self.module.named_parameters())) if splits_backwards else None
        outputs = self.run(batch, deferral)
        loss = loss_of(outputs[-1][1].value)
        if deferral is None:
            _run_backward(loss, outputs)
        else:
            with deferral.collecting(None):
                _run_backward(loss, outputs)
            deferral.run(None)
        return loss.detach()

    def run(self, batch: Any, deferral: WeightGradients | None = None) -> list[tuple[list[Tensor], StageOutput]]:
        """Forward through all stages in turn; what each stage received and gave."""
        outputs: list[tuple[list[Tensor], StageOutput]] = []
        sent: tuple[Tensor, ...] = ()
        for index in range(len(self.bounds)):
            stage = PipelineStage(self.module, self.module_map, self.bounds, index)
            stage.deferral = deferral

            def step() -> Any:
                return self.call(copy_batch(batch))

            with stage.attached():
                received = [tensor.detach().clone() for tensor in sent]
                specs = stage.input_specs(step, None)
                for spec, tensor in zip(specs, received, strict=True):
                    if spec.shape != tuple(tensor.shape) or spec.dtype != tensor.dtype:
                        raise TraceError(
                            f"stage {index} expects {spec.dtype} of shape {spec.shape} and would receive "
                            f"{tensor.dtype} of shape {tuple(tensor.shape)}. Use a plan with one stage"
                        )
                output = stage.forward(step, received)
            outputs.append((received, output))
            sent = output.tensors
        return outputs

    def check_row_order(self, batch: Any, divided: Collection[int]) -> None:
        """Check that a row's entries lie together where a tensor that crosses has several entries per row.

        Stages of different data-parallel degree exchange rows, so the first entries must be those of the first row.
        """
        rows = batch_rows(batch)
        lives = [self.module_map.cuts[end - 1] for _, end in self.bounds[:-1]]
        common = [live for stage in divided for live in lives[stage] if live.batch_dim is None]  # one for all rows
        if not common and all(_has_one_entry_per_row(live, self.module_map) for cut in lives for live in cut):
            return
        if rows is None or rows < 2:
            if common:
                raise TraceError(_divides(common[0]))
            return
        whole = self.run(batch)
        first = self.run(slice_rows(batch, 0, 1))
        for stage, (cut, (_, of_all), (_, of_first)) in enumerate(zip(lives, whole, first, strict=False)):
            for live, tensor, part in zip(cut, of_all.tensors, of_first.tensors, strict=True):
                if stage in divided and live.batch_dim is None and not torch.equal(tensor, part):
                    raise TraceError(_divides(live))
                if _has_one_entry_per_row(live, self.module_map) or live.batch_dim is None:
                    continue
                found = tensor.narrow(live.batch_dim, 0, part.shape[live.batch_dim])
                if found.shape != part.shape or not _is_close(found, part, _COARSE_TOLERANCE):
                    raise TraceError(
                        f"the {describe_value(live.key)} crosses between stages with shape {tuple(tensor.shape)} for "
                        f"{rows} rows, and the entries of a row do not lie together: rows could not be exchanged. Use "
                        "a plan with one stage"
                    )


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def loss_of(output: Any) -> Tensor:
    """The loss among what a training step returned; a TraceError if there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise TraceError(
            f"the step returned {type(output).__name__} without a loss that requires a gradient: return the loss, or a "
            "dictionary with an entry 'loss'"
        )
    return loss


def refuse_unchecked(module_map: ModuleMap, bounds: tuple[tuple[int, int], ...], divided: Collection[int]) -> None:
    """Raise a TraceError at values that only :func:`check_stages`, not asked here, could show the same for all rows."""
    for stage in divided:
        for live in module_map.cuts[bounds[stage][1] - 1]:
            if live.batch_dim is None:
                raise TraceError(_divides(live))


def _divides(live: LiveTensor) -> str:
    return (
        f"the {describe_value(live.key)} crosses between stages that share out rows differently, and is one value for "
        "all rows of a batch (an auxiliary loss, say), of which ranks would have that of their rows only. Use stages "
        "of equal data_parallel_degree"
    )


def _has_one_entry_per_row(live: LiveTensor, module_map: ModuleMap) -> bool:
    return live.batch_dim is None or live.shape[live.batch_dim] == module_map.batch_rows


def _run_backward(loss: Tensor, outputs: list[tuple[list[Tensor], StageOutput]]) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    for (received, _), (_, output) in zip(outputs[:0:-1], outputs[-2::-1], strict=True):
        pairs = [
            (sent, leaf.grad if leaf.grad is not None else torch.zeros_like(leaf))
            for sent, leaf in zip(output.tensors, received, strict=True)
            if sent.requires_grad
        ]
        if pairs:
            torch.autograd.backward([sent for sent, _ in pairs], [gradient for _, gradient in pairs])


def _tolerance(module: nn.Module, *, is_coarse: bool) -> float:
    if is_coarse:
        return _COARSE_TOLERANCE
    tolerances = [
        _TOLERANCES.get(parameter.dtype, _COARSE_TOLERANCE)
        for parameter in module.parameters()
        if parameter.dtype.is_floating_point
    ]
    return max(tolerances, default=_COARSE_TOLERANCE)


def _is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance * FLOOR, equal_nan=True)


FLOOR = 1e-3
"""Gradients below this part of the module's largest are compared as if they were that large."""


class GradientDifferences:
    """What gradients of one computation differ by from those of another, in the memory of one set of gradients.

    After :meth:`turn` the gradients of the first are there with the opposite sign: what the second adds to them leaves
    the difference. Inside, gradients belong to this object; afterwards there are none.

    Args:
        keeps_at_home: Whether gradients are kept in host memory, and are on the device one at a time.
    """

    def __init__(self, module: nn.Module, *, keeps_at_home: bool = False) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._keeps_at_home = keeps_at_home
        self._home: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self._sizes: dict[str, float] = {}

    def __enter__(self) -> "GradientDifferences":
        if self._keeps_at_home:
            for name, parameter in self._parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(partial(self._bring, name))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        self._home.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _bring(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.cpu(), None
        self._home[name] = self._home[name].add_(gradient) if name in self._home else gradient

    def _gradients(self) -> dict[str, Tensor]:
        if self._keeps_at_home:
            return self._home
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def turn(self) -> None:
        """The first computation's gradients are complete."""
        with torch.no_grad():
            for name, gradient in self._gradients().items():
                self._sizes[name] = _size(gradient)
                gradient.neg_()

    def each(self) -> Iterator[tuple[str, float, float]]:
        """Of each gradient its name, the largest difference, and its size in the first computation.

        Gradients below a thousandth of the largest count as that large: they are mostly noise.
        """
        scale = max(self._sizes.values(), default=0.0)
        for name, gradient in self._gradients().items():
            yield name, _size(gradient), max(self._sizes.get(name, 0.0), FLOOR * scale)

    def largest(self, tolerance: float) -> str | None:
        """The gradient that differs most, in words; None if all are within the tolerance."""
        worst, text = tolerance, None
        for name, difference, size in self.each():
            relative = difference / size if size else (0.0 if difference == 0 else float("inf"))
            if relative > worst:
                worst = relative
                text = f"the gradient of {name} differs by {relative:.1e} of its size, the tolerance is {tolerance:.0e}"
        return text


def _size(gradient: Tensor) -> float:
    return float(gradient.detach().abs().max()) if gradient.numel() else 0.0
