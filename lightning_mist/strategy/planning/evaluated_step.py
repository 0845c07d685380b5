"""What a step that is only evaluated does, tried on a batch: where it can be cut, and whether others may run it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_mist.errors import MistError
from lightning_mist.model import derive_contexts, derive_splits, map_module
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.strategy.all_ranks import everywhere, of_all_ranks
from lightning_mist.strategy.planning.division_proofs import degrees_of
from lightning_mist.strategy.planning.trial_step import TriedStep, tried
from lightning_mist.strategy.training import MetricRecorder, named_metrics, recorded_logs, standing_in
from lightning_mist.tensors import batch_rows, slice_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedStep:
    """What a rank found of a step.

    Attributes:
        module_map: Where it can be cut; None if that cannot be told.
        only_own: Why ranks may run it for batches of their own only.
        failure: Why it cannot be told.
    """

    module_map: ModuleMap | None = None
    only_own: tuple[str, ...] = ()
    failure: str = ""

    @property
    def form(self) -> Any:
        """What is equal where ranks can evaluate together."""
        found = self.module_map
        if found is None:
            return None
        uses = tuple((use.name, use.regions) for use in found.parameters)
        return found.blocks, uses, tuple(tuple(live.key for live in cut) for cut in found.cuts)


def look_at_step(
    trainer: Any, module: Any, name: str, call: Callable[[Any], Any], batch: Any, device: torch.device
) -> EvaluatedStep:
    """Try a step on a batch, without a trace of it; parameters need no values.

    Args:
        name: The step's name in the module.
        call: Runs it on a batch.
    """
    step = TriedStep(trainer, module, call, name=name, records_metrics=True)
    rows = batch_rows(batch)
    smaller = slice_rows(batch, 0, rows - 1) if rows is not None and rows > 1 else None

    def look() -> EvaluatedStep:
        made = partial(map_module, module, step, batch, second_batch=smaller, step=name)
        found, told = step.learn(partial(made, kept=step.given))
        return EvaluatedStep(module_map=found, only_own=tuple(step.only_own(told)))

    try:
        with recorded_logs(module), torch.compiler.set_stance("force_eager"):
            return tried(look, device, clock=step.clock)
    except MistError as error:
        return EvaluatedStep(failure=str(error))


def is_map_of(module_map: ModuleMap, module: nn.Module) -> bool:
    """Whether a map that a fit made of a module's step is one of this module, by its parameters in their order."""
    shapes = [(use.name, tuple(use.shape)) for use in module_map.parameters]
    return bool(shapes) and shapes == [(name, tuple(item.shape)) for name, item in module.named_parameters()]


def splits_of_evaluated(
    plan: Plan,
    module: nn.Module,
    call: Callable[[Any], Any],
    batch: Any,
    found: ModuleMap,
    source: int,
    device: torch.device,
) -> ModuleMap:
    """The map of an evaluated step with the ways to share layers that a plan asks for; on all ranks at once.

    Args:
        call: Runs the step on a batch.
        batch: A batch on the rank ``source``.
    """
    tensor, context = degrees_of(plan)
    if not (tensor and not found.excludes("tensor")) and not context:
        return found

    def derive() -> ModuleMap:
        metrics = named_metrics(module)

        def recorded(part: Any) -> Any:
            recorder = MetricRecorder(metrics, lambda call: None, has_loss=False)
            with recorder.recording():
                output = call(part)
            return recorder.finished(output)

        def look() -> ModuleMap:
            stands_in = standing_in(metrics.values())
            with torch.inference_mode(mode=False), torch.enable_grad(), recorded_logs(module), stands_in:
                made = derive_splits(module, recorded, batch, found, tensor)
                return derive_contexts(module, recorded, batch, made, context)

        return tried(look, device)

    made = of_all_ranks(everywhere(lambda: derive() if dist.get_rank() == source else None))[source]
    assert made is not None
    return replace(
        found,
        splits=made.splits,
        unsplit=made.unsplit,
        contexts=made.contexts,
        uncontexts=made.uncontexts,
        exclusions=made.exclusions,
    )
