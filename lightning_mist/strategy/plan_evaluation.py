"""Validation inside a fit, while a plan is in place: by its forwards where that can be, else on the whole module."""

from collections.abc import Callable
from typing import Any

from lightning_mist.model.user_code import Reach
from lightning_mist.plan import ModuleMap, of_whole_batches, replica_ranks
from lightning_mist.runtime.communication import complete
from lightning_mist.runtime.forward_pass import evaluated_map, hindrance, is_whole
from lightning_mist.strategy.all_ranks import of_all_ranks
from lightning_mist.strategy.plan_installation import PlanInstallation
from lightning_mist.strategy.planning import EvaluatedStep, look_at_step, refuse_whole, roots_of
from lightning_mist.strategy.progress import Progress
from lightning_mist.strategy.training import FINISHED, Evaluator, StepGuard, without_values
from lightning_mist.strategy.user_code import whole_in_validation

_STEP = "validation_step"


class _Waiting:
    """A loop's fetcher that waits for other ranks where a loader ends; everything else is the fetcher's own."""

    def __init__(self, fetcher: Any, wait: Callable[[int], None]) -> None:
        self._fetcher, self._wait = fetcher, wait

    def __next__(self) -> Any:
        try:
            item = next(self._fetcher)
        except StopIteration:
            self._wait(FINISHED)
            raise
        self._wait(item[2])
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)


class PlanEvaluation(PlanInstallation):
    """The part of a strategy that validates inside a fit.

    Evaluation of its own, outside of a fit, finds no plan in place, and runs as under DDP.
    """

    _evaluator: Evaluator | None = None
    _loader = 0
    _whole: str | None = None  # why the whole module must be there, if that turned out in this fit
    _maps: dict[int, ModuleMap]

    def _install(self, module: Any) -> None:
        super()._install(module)
        self._whole, self._maps = None, {}
        if self._engine is None or not module.trainer.enable_validation:
            return
        assert self._decision is not None
        # Hooks of callbacks may be there on some ranks only.
        found = of_all_ranks(whole_in_validation(module.trainer, self.optimizers))
        self._whole = next((reason for reason in found if reason is not None), None)
        refuse_whole(self._decision.lack_for_whole, self._whole)

    def on_validation_start(self) -> None:
        """From here on the plan's forwards run, or every rank gets the whole module."""
        super().on_validation_start()
        if self._engine is None or self._engine.is_filled:
            return
        with self.all_take_part():
            if is_whole(self._engine.plan, has_masters=self._engine.executor.masters is not None):
                self._engine.executor.flush()
            elif (reason := self._whole_reason()) is not None:
                self._make_whole(reason)
            else:
                self._begin_rounds()

    def on_validation_end(self) -> None:
        """Training goes on with this rank's part."""
        super().on_validation_end()
        self._evaluator = None
        if self._engine is not None and self._engine.has_begun:
            self._engine.hollow()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on this rank's batch, with the buffers that DDP's forward would find."""
        if self._engine is None:
            return super().validation_step(*args, **kwargs)
        batch, *numbers = (*args, *kwargs.values())
        if self._evaluator is not None:
            _, _, output = self._round(self._loader, batch, numbers)
            if self._evaluator is not None:
                return output
        complete(self._engine.buffers.before_forward())
        with self._engine.computing():
            output = super().validation_step(*args, **kwargs)
        self._engine.buffers.after_forward()
        return output

    # By the plan's forwards --------------------------------------------------------------------------------------

    def _whole_reason(self) -> str | None:
        engine = self._engine
        assert engine is not None
        if self._whole is not None:
            return self._whole
        if type(self._validation_loop()._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
            return f"{_STEP} takes dataloader_iter"
        if of_whole_batches(engine.plan) is None:
            return "the plan's stages cut batches differently, and evaluation takes them whole"
        return None

    def _make_whole(self, reason: str) -> None:
        assert self._decision is not None
        assert self._engine is not None
        refuse_whole(self._decision.lack_for_whole, reason)
        if self._whole != reason or self._evaluator is not None:
            progress = Progress(enabled=self.is_global_zero)
            progress.tell(f"every rank gets the whole module for validation: {reason}")
        self._whole, self._evaluator = reason, None
        self._engine.fill()

    def _validation_loop(self) -> Any:
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        return trainer.fit_loop.epoch_loop.val_loop

    def _begin_rounds(self) -> None:
        engine, module = self._engine, self.lightning_module
        assert engine is not None
        assert module is not None
        engine.executor.flush()
        plan, guard = of_whole_batches(engine.plan), None
        assert plan is not None
        if len(replica_ranks(plan, 0)) > 1:
            reach = Reach(module, module.validation_step, roots_of(module.trainer))
            guard = StepGuard(module, plan, self.global_rank, reach, self.act_for)
        self._evaluator, self._loader = Evaluator(engine, guard), 0
        for loader, found in self._maps.items():
            self._evaluator.learn(loader, found)
        loop = self._validation_loop()
        loop._data_fetcher = _Waiting(loop._data_fetcher, self._wait)

    def _wait(self, loader: int) -> None:
        """Serve others until all have come as far as this rank; at once where it goes on with the same loader."""
        if loader == self._loader:
            return
        self._loader = loader
        while self._evaluator is not None:
            places, has_any, _ = self._round(loader, None, None)
            if min(places) >= loader and not has_any:
                return

    def _round(self, place: int, batch: Any, numbers: list[int] | None) -> tuple[list[int], bool, Any]:
        """One batch of every rank that has one; how far all have come, whether any had one, and this rank's output."""
        evaluator, module = self._evaluator, self.lightning_module
        assert evaluator is not None
        assert module is not None
        context = self.precision_plugin.val_step_context

        def step(part: Any, *rest: int) -> Any:
            with context():
                return module.validation_step(part, *rest)

        with self.all_take_part():
            notices = evaluator.meet(place, has_batch=numbers is not None)
            places = [there for there, _ in notices]
            loader = next((there for there, has in notices if has), None)
            if loader is None:
                return places, False, None
            if not evaluator.knows(loader):
                self._look(loader, batch, numbers, step)
            if self._evaluator is None:
                return places, True, None
            return places, True, evaluator.run(loader, batch, numbers, step)

    def _look(self, loader: int, batch: Any, numbers: list[int] | None, step: Callable[..., Any]) -> None:
        """See how the step is to be evaluated on batches of a loader; all ranks come to the same."""
        engine, evaluator, module = self._engine, self._evaluator, self.lightning_module
        assert engine is not None
        assert evaluator is not None
        assert module is not None
        own: EvaluatedStep | None = None
        if numbers is not None:
            call = lambda part: step(part, *numbers)  # noqa: E731
            with without_values(engine):
                own = look_at_step(module.trainer, module, _STEP, call, batch, self.root_device)
        found = [item for item in evaluator.everybodys(own) if item is not None]
        reason = self._reason(found, shares=evaluator.shares)
        if reason is not None:
            self._make_whole(reason)
            return
        assert found[0].module_map is not None
        self._maps[loader] = evaluated_map(engine.module_map, found[0].module_map)
        evaluator.learn(loader, self._maps[loader])

    def _reason(self, found: list[EvaluatedStep], *, shares: bool) -> str | None:
        """Why a step that ranks have looked at cannot be evaluated by the plan's forwards, if so."""
        assert self._engine is not None
        for item in found:
            if item.module_map is None:
                return f"{_STEP} cannot be traced: {item.failure}"
            if item.form != found[0].form:
                return f"ranks take different ways through {_STEP}"
            if shares and item.only_own:
                return f"{_STEP}: {item.only_own[0]}"
            if (why := hindrance(self._engine.plan, self._engine.module_map, item.module_map)) is not None:
                return f"{_STEP}: {why}"
        return None
