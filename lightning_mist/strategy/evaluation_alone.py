"""Evaluation outside of a fit: by the plan of the last fit of such a module, or the plan that was given.

There is an engine for the time of the evaluation, without an optimizer. Where the plan was never trained here, what its
engine needs to know of the module is found from the evaluated step, on its first batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_mist.errors import PlanError
from lightning_mist.plan import ModuleMap, Plan, check_plan, of_whole_batches
from lightning_mist.runtime.forward_pass import is_whole, without_training
from lightning_mist.strategy.all_ranks import any_reason, of_all_ranks, same_start
from lightning_mist.strategy.empty_parameters import device_limit, initial_values
from lightning_mist.strategy.plan_installation import PlanInstallation
from lightning_mist.strategy.planning import given_plan, is_map_of, refuse_whole_alone, splits_of_evaluated
from lightning_mist.strategy.progress import Progress
from lightning_mist.strategy.user_code import whole_in_evaluation

CUT_DIFFERENTLY = "the plan's stages cut batches differently, and evaluation takes them whole"


class EvaluationAlone(PlanInstallation):
    """The part of a strategy that puts a plan in place for an evaluation of its own."""

    _whole: str | None = None  # why the whole module must be there, if that turned out in this run
    _maps: dict[int, ModuleMap]

    def _set_up_outside(self, trainer: Any) -> None:
        """Put a plan in place for an evaluation of its own, or the whole module as plain data parallelism has it."""
        module, accelerator = self._module, self.accelerator
        assert accelerator is not None
        self._whole, self._maps, self._outside = None, {}, None
        accelerator.setup(trainer)
        self.precision_plugin.convert_module(module)
        limit = device_limit(self._request.memory_limit, self.root_device)
        plan, known = self._plan_outside(module)
        reason = self._why_whole(trainer, plan)
        if plan is None or reason is not None:
            self._whole, why = reason, reason or "there is no plan to share it out by"
            refuse_whole_alone(module, limit, why, has_plan=plan is not None)
            if (initial := initial_values(module, self.root_device, None)) is not None:
                initial.materialize(initial.names)
                initial.forget()
            super().setup(trainer)
            return
        self.model, self._outside = module, without_training(plan)
        self._initial = initial_values(module, self.root_device, limit)
        self.model_to_device()
        same_start(module, () if self._initial is None else self._initial.names)
        self.setup_precision_plugin()
        if known is not None:
            self._start(known)

    def _plan_outside(self, module: Any) -> tuple[Plan | None, ModuleMap | None]:
        """The plan to evaluate by, if there is one, and what is known of the module's step from its fit."""
        decision = self._decision
        is_known = decision is not None and is_map_of(decision.module_map, module)
        if all(of_all_ranks(is_known)) and decision is not None:
            return decision.plan, decision.module_map
        return (None if self._request.plan == "auto" else given_plan(self._request.plan)), None

    def _why_whole(self, trainer: Any, plan: Plan | None) -> str | None:
        """Why every rank gets the whole module for an evaluation outside of a fit; None where it goes by the plan."""
        if plan is None:
            return None
        if is_whole(plan, has_masters=False):
            return "the plan leaves all of it on every device"
        reason: str | None = None
        loaders = self._request.loaders or self.world_size
        if (plan.world_size, plan.num_loaders) != (self.world_size, loaders):
            reason = (
                f"the plan is for {plan.world_size} processes with {plan.num_loaders} data loaders, and here are "
                f"{self.world_size} with {loaders}"
            )
        elif of_whole_batches(plan) is None:
            reason = CUT_DIFFERENTLY
        else:
            reason = any_reason(whole_in_evaluation(trainer, self._kind))
        if reason is not None:
            self._tell_whole(reason)
        return reason

    def _start(self, module_map: ModuleMap) -> None:
        """Share the module out by the plan for an evaluation outside of a fit; on all ranks at once."""
        module = self._module
        assert self._outside is not None
        # What parameters are given in here stays when the evaluation is over.
        with torch.inference_mode(mode=False):
            self._engine = self._started(module, self._outside, module_map)
            # As where nothing wraps the module: buffers are those of rank 0 at the start, and then each rank's own.
            self._engine.buffers.is_enabled = False
            self._engine.begin(self._initial)
        if self._initial is not None:
            self._initial.forget()

    def _start_by(
        self, module_map: ModuleMap | None, source: int, call: Callable[[Any], Any], batch: Any
    ) -> str | None:
        """Start on what is known of the evaluated step alone; why the plan does not fit it, if so.

        Args:
            source: A rank that has a batch.
        """
        plan, module = self._outside, self._module
        assert plan is not None
        assert module_map is not None
        module_map = splits_of_evaluated(plan, module, call, batch, module_map, source, self.root_device)
        try:
            check_plan(
                plan,
                world_size=self.world_size,
                batch_rows=None,
                num_layers=len(module_map.blocks),
                module_map=module_map,
            )
        except PlanError as error:
            return f"{self._step_name}: {error}"
        self._start(module_map)
        return None

    def _tell_whole(self, reason: str) -> None:
        kind = "prediction" if self._kind == "predict" else self._kind
        Progress(enabled=self.is_global_zero).tell(f"every rank gets the whole module for {kind}: {reason}")

    # Which evaluation it is --------------------------------------------------------------------------------------

    @property
    def _kind(self) -> str:
        trainer = self._trainer
        return "predict" if trainer.predicting else "test" if trainer.testing else "validation"

    @property
    def _step_name(self) -> str:
        return f"{self._kind}_step"

    @property
    def _evaluation_loop(self) -> Any:
        trainer = self._trainer
        return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop

    def _step_context(self) -> AbstractContextManager[None]:
        kind = self._kind
        context: Callable[[], AbstractContextManager[None]] = getattr(
            self.precision_plugin, f"{'val' if kind == 'validation' else kind}_step_context"
        )
        return context()

    @property
    def _plan_in_place(self) -> Plan:
        plan = self._outside if self._engine is None else self._engine.plan
        assert plan is not None
        return plan
