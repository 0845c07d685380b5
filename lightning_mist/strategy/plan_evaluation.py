"""Evaluation while a plan is in place: by its forwards where that can be, else on the whole module.

Outside of a fit it is the plan of the last fit of such a module, or the plan that was given: there is an engine for the
time of the evaluation, without an optimizer. Where the plan was never trained here, what its engine needs to know of
the module is found from the evaluated step, on its first batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_mist.attributes import StandIn
from lightning_mist.errors import PlanError
from lightning_mist.model.user_code import Reach
from lightning_mist.plan import ModuleMap, Plan, check_plan, of_whole_batches, replica_ranks
from lightning_mist.runtime.batch_run import evaluated_map, hindrance, is_whole, without_training
from lightning_mist.runtime.communication import complete
from lightning_mist.strategy.empty_parameters import convert, device_limit, initial_values
from lightning_mist.strategy.plan_installation import PlanInstallation
from lightning_mist.strategy.planning import (
    EvaluatedStep,
    given_plan,
    is_map_of,
    look_at_step,
    refuse_whole,
    refuse_whole_alone,
    roots_of,
    splits_of_evaluated,
)
from lightning_mist.strategy.ranks import Progress, any_reason, of_all_ranks
from lightning_mist.strategy.training import FINISHED, Evaluator, StepGuard, without_values
from lightning_mist.strategy.user_code import whole_in_evaluation, whole_in_validation

CUT_DIFFERENTLY = "the plan's stages cut batches differently, and evaluation takes them whole"


class _Waiting(StandIn):
    """A loop's fetcher that waits for other ranks where a loader ends; everything else is the fetcher's own."""

    def __init__(self, fetcher: Any, wait: Callable[[int], None]) -> None:
        self.inner, self._wait = fetcher, wait

    def __next__(self) -> Any:
        try:
            item = next(self.inner)
        except StopIteration:
            self._wait(FINISHED)
            raise
        self._wait(item[2])
        return item


class PlanEvaluation(PlanInstallation):
    """The part of a strategy that validates, tests and predicts."""

    _whole: str | None = None  # why the whole module must be there, if that turned out in this run
    _maps: dict[int, ModuleMap]
    _evaluator: Evaluator | None = None
    _takes_iterator = False
    _is_in_rounds = False  # whether ranks run the step together
    _loader = 0

    def _install(self, module: Any) -> None:
        super()._install(module)
        self._whole, self._maps, self._outside = None, {}, None
        if self._engine is None or not module.trainer.enable_validation:
            return
        assert self._decision is not None
        # Hooks of callbacks may be there on some ranks only.
        self._whole = any_reason(whole_in_validation(module.trainer, self.optimizers))
        refuse_whole(self._decision.lack_for_whole, self._whole)

    # Lightning's hooks -------------------------------------------------------------------------------------------

    def _begin_evaluation(self, **more: Any) -> None:
        """From here on the plan's forwards run, or every rank gets the whole module."""
        getattr(super(), f"on_{self._kind}_start")(**more)
        engine, loop = self._engine, self._evaluation_loop
        self._loader = 0
        self._takes_iterator = type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"
        if not self._takes_iterator:
            loop._data_fetcher = _Waiting(loop._data_fetcher, self._wait)
        if (engine is None and self._outside is None) or (engine is not None and engine.is_filled):
            return
        with self.all_take_part():
            if engine is not None and is_whole(engine.plan, has_masters=engine.executor.masters is not None):
                engine.executor.flush()
            elif (reason := self._whole_reason()) is not None:
                self._make_whole(reason)
            else:
                self._is_in_rounds = True
                if engine is not None:
                    engine.executor.flush()
                    self._make_evaluator()

    on_validation_start = on_test_start = on_predict_start = _begin_evaluation

    def _end_evaluation(self, **more: Any) -> None:
        """Training goes on with this rank's part; ranks need not wait for each other any more."""
        getattr(super(), f"on_{self._kind}_end")(**more)
        self._evaluator, self._is_in_rounds = None, False
        if self._engine is not None and self._engine.has_begun and self._outside is None:
            self._engine.hollow()

    on_validation_end = on_test_end = on_predict_end = _end_evaluation

    def _evaluated(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on this rank's batch, with the buffers that DDP's forward would find."""
        whole = getattr(super(), self._step_name)
        batch, *numbers = (*args, *kwargs.values())
        if self._is_in_rounds:
            _, _, output = self._round(self._loader, batch, numbers)
            if self._is_in_rounds:
                return output
        elif not self._takes_iterator:
            self.save_if_asked()
        if self._engine is None:
            return whole(*args, **kwargs)
        complete(self._engine.buffers.before_forward())
        with self._engine.computing():
            output = whole(*args, **kwargs)
        self._engine.buffers.after_forward()
        return output

    validation_step = test_step = predict_step = _evaluated

    # By the plan's forwards --------------------------------------------------------------------------------------

    def _whole_reason(self) -> str | None:
        if self._whole is not None:
            return self._whole
        if self._takes_iterator:
            return f"{self._step_name} takes dataloader_iter"
        return CUT_DIFFERENTLY if of_whole_batches(self._plan_in_place) is None else None

    def _make_whole(self, reason: str) -> None:
        if self._outside is None:
            assert self._decision is not None
            refuse_whole(self._decision.lack_for_whole, reason)
        else:
            limit = device_limit(self._request.memory_limit, self.root_device)
            refuse_whole_alone(self._module, limit, reason, has_plan=True)
        if self._whole != reason or self._is_in_rounds:
            self._tell_whole(reason)
        self._whole, self._evaluator, self._is_in_rounds = reason, None, False
        if self._engine is not None:
            self._engine.fill()
        elif self._initial is not None:
            with torch.inference_mode(mode=False):
                self._initial.materialize(self._initial.names)
            self._initial.forget()
            self._initial = None

    def _make_evaluator(self) -> None:
        engine, module = self._engine, self._module
        assert engine is not None
        plan, guard = of_whole_batches(engine.plan), None
        assert plan is not None
        if len(replica_ranks(plan, 0)) > 1:
            reach = Reach(module, getattr(module, self._step_name), roots_of(module.trainer))
            guard = StepGuard(module, plan, self.global_rank, reach, self.act_for, records_metrics=True)
        self._evaluator = Evaluator(engine, guard, self._maps)

    def _wait(self, loader: int) -> None:
        """Serve others until all have come as far as this rank; at once where it goes on with the same loader."""
        if loader == self._loader:
            return
        self._loader = loader
        while self._is_in_rounds:
            places, has_any, _ = self._round(loader, None, None)
            if min(places) >= loader and not has_any:
                return
        if loader == FINISHED:
            self.save_if_asked(is_over=True)

    def _round(self, place: int, batch: Any, numbers: list[int] | None) -> tuple[list[int], bool, Any]:
        """One batch of every rank that has one; how far all have come, whether any had one, and this rank's output."""
        module, step_name, has_batch = self._module, self._step_name, numbers is not None
        if self._evaluator is not None:
            self.save_if_asked()

        def step(part: Any, *rest: int) -> Any:
            with self._step_context():
                return getattr(module, step_name)(part, *rest)

        with self.all_take_part():
            evaluator = self._evaluator
            notices = of_all_ranks((place, has_batch)) if evaluator is None else evaluator.meet(place, numbers)
            places = [there for there, _ in notices]
            loader = next((there for there, has in notices if has), None)
            if loader is None:
                return places, False, None
            if evaluator is None or loader not in self._maps:
                self._look(loader, batch, numbers, step)
                if evaluator is None and self._evaluator is not None:
                    self._evaluator.meet(place, numbers)
            if self._evaluator is not None and (name := self._evaluator.differing_buffer()) is not None:
                self._make_whole(f"buffer {name} is another on every rank, and ranks run steps for one another")
            if self._evaluator is None:
                return places, True, None
            return places, True, self._evaluator.run(loader, batch, numbers, step, self._step_context)

    def _look(self, loader: int, batch: Any, numbers: list[int] | None, step: Callable[..., Any]) -> None:
        """See how the step is to be evaluated on batches of a loader; all ranks come to the same."""
        engine, module, name = self._engine, self._module, self._step_name
        own: EvaluatedStep | None = None
        call = lambda part: step(part, *(numbers or ()))  # noqa: E731
        if numbers is not None:
            with nullcontext() if engine is None else without_values(engine):
                own = look_at_step(module.trainer, module, name, call, batch, self.root_device)
        looks = of_all_ranks(own)
        found = [item for item in looks if item is not None]
        reason = self._reason(found)
        if reason is None and engine is None:
            reason = self._start_by(found[0].module_map, looks.index(found[0]), call, batch)
            if reason is None:
                self._make_evaluator()
        if reason is not None:
            self._make_whole(reason)
            return
        assert self._engine is not None
        assert self._evaluator is not None
        assert found[0].module_map is not None
        self._maps[loader] = evaluated_map(self._engine.module_map, found[0].module_map)

    def _reason(self, found: list[EvaluatedStep]) -> str | None:
        """Why a step that ranks have looked at cannot be evaluated by the plan's forwards, if so."""
        plan, name = self._plan_in_place, self._step_name
        whole = of_whole_batches(plan)
        assert whole is not None
        for item in found:
            if item.module_map is None:
                return f"{name} cannot be traced: {item.failure}"
            if item.form != found[0].form:
                return f"ranks take different ways through {name}"
            if len(replica_ranks(whole, 0)) > 1 and item.only_own:
                return f"{name}: {item.only_own[0]}"
            known = item.module_map if self._engine is None else self._engine.module_map
            if plan.num_layers == len(known.blocks) and (why := hindrance(plan, known, item.module_map)) is not None:
                return f"{name}: {why}"
        return None

    # Outside of a fit --------------------------------------------------------------------------------------------

    def _set_up_outside(self, trainer: Any) -> None:
        """Put a plan in place for an evaluation of its own, or the whole module as plain data parallelism has it."""
        module, accelerator = self._module, self.accelerator
        assert accelerator is not None
        self._whole, self._maps, self._outside = None, {}, None
        accelerator.setup(trainer)
        convert(module, self.precision_plugin)
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
        self._share_start(module)
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
        """Start on what ``source`` knows of the evaluated step alone; why the plan does not fit it, if so."""
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
        kind = {"validation": "val"}.get(self._kind, self._kind)
        context: AbstractContextManager[None] = getattr(self.precision_plugin, f"{kind}_step_context")()
        return context

    @property
    def _plan_in_place(self) -> Plan:
        plan = self._outside if self._engine is None else self._engine.plan
        assert plan is not None
        return plan
