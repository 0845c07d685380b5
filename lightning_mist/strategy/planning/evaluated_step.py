"""What a step that is only evaluated does, tried on a batch: where it can be cut, and whether others may run it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_mist.errors import MistError
from lightning_mist.model import map_module
from lightning_mist.plan import ModuleMap
from lightning_mist.strategy.planning.trial_step import TriedStep, tried
from lightning_mist.strategy.training import recorded_logs
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
    step = TriedStep(trainer, module, call, name=name)
    rows = batch_rows(batch)
    smaller = slice_rows(batch, 0, rows - 1) if rows is not None and rows > 1 else None

    def look() -> EvaluatedStep:
        found, told = step.learn(partial(map_module, module, step, batch, second_batch=smaller, step=name))
        return EvaluatedStep(module_map=found, only_own=tuple(step.only_own(told)))

    try:
        with recorded_logs(module), torch.compiler.set_stance("force_eager"):
            return tried(look, device)
    except MistError as error:
        return EvaluatedStep(failure=str(error))
