"""What a plan puts in place of a fit, and another plan in its place."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_mist.devices import ops_of
from lightning_mist.model.initialization import InitialValues
from lightning_mist.runtime.stage import no_caches
from lightning_mist.strategy.memory_retry import FirstSteps
from lightning_mist.strategy.monitor import Monitor
from lightning_mist.strategy.planning import Decision, PlanRequest, publishing
from lightning_mist.strategy.training import (
    WholeEvaluation,
    as_wrapped,
    attach_engine,
    broadcasts_buffers,
    later,
    start_engine,
)
from lightning_mist.strategy.user_rank import guarded


class Installs(WholeEvaluation):
    """The part of the strategy that puts plans in place."""

    _decision: Decision | None
    _monitor: Monitor | None
    _first_steps: FirstSteps
    _initial: InitialValues | None
    _request: PlanRequest
    _fitting: ExitStack
    _report_path: str | None
    _find_unused_parameters: bool | None
    _timeout: timedelta | None

    def _install(self, module: Any) -> None:
        """Put what was decided in place."""
        assert self._decision is not None
        if self._decision.is_plain:
            if self._initial is not None:
                self._initial.materialize(self._initial.names)
            given, found = self._find_unused_parameters, self._decision.has_unused_parameters
            self._ddp_kwargs["find_unused_parameters"] = found if given is None else given
            self.configure_ddp()
            self._fitting.enter_context(no_caches(module, self._decision.module_map))
            if isinstance(self._ddp_comm_state, PostLocalSGDState):
                self._enable_model_averaging()
            return
        self._engine = start_engine(
            *(module, self._decision.plan, self._decision.module_map),
            device=self.root_device,
            timeout=self._timeout,
            rules=self._decision.rules,
            host=self._request.host_of_each(self.num_processes, self.root_device),
        )
        self._engine.buffers.is_enabled = broadcasts_buffers(self._ddp_kwargs)
        self._engine.guard = guarded(self, module, self._decision)
        self._engine.take_optimizer(self.optimizers[0])
        self._fitting.enter_context(as_wrapped(module))
        if self._initial is not None:
            self._engine.begin(self._initial)

    def _watch(self, module: nn.Module) -> None:
        """Let what is in place be served and watched."""
        assert self._decision is not None
        attach_engine(self.precision_plugin, self._engine)
        # Only these need it; it leads to what cannot be pickled, and trainers can be after a fit.
        self._decision = replace(self._decision, reach=None, again=None)
        self._monitor = Monitor(
            self._decision,
            device=self.root_device,
            module=module,
            report_path=self._report_path,
            recorder=None if self._engine is None else self._engine.executor.recorder,
            verbose=self._request.verbose,
        )

    @contextmanager
    def _planning(self) -> Iterator[None]:
        self._is_planning = True
        try:
            yield
        finally:
            self._is_planning = False

    def replace_plan(self, decide: Callable[[], Decision]) -> None:
        """Put another plan in place between two steps; of a fit of one process.

        Args:
            decide: Makes it, while the module is whole and the optimizer the user's.
        """
        module, optimizer = self.lightning_module, self.optimizers[0]
        assert module is not None
        state = self._withdraw(module)
        gc.collect()
        ops_of(self.root_device).release_cached()
        with self._planning():
            self._decision = decide()
        self._install(module)
        self._watch(module)
        if self._engine is not None:
            self._engine.begin(None)
        if state["state"]:
            self.load_optimizer_state_dict({"optimizer_states": [state]})
        elif self._engine is None:
            optimizer.state.clear()
        if self._decision.plan_path is not None:
            publishing.write(self._decision.plan, self._decision.plan_path)

    def _withdraw(self, module: Any) -> dict[str, Any]:
        """Leave the module whole and the optimizer the user's; its state in the layout of the whole model."""
        engine, self._engine = self._engine, None
        ops_of(self.root_device).synchronize()
        state: dict[str, Any] = self.optimizers[0].state_dict()
        if engine is not None:
            engine.fill()
            asked = later(engine.release_optimizer(), self.root_device, self._timeout)
            state = {} if asked is None else asked()
            engine.transport.close()
        attach_engine(self.precision_plugin, None)
        self._fitting.close()
        assert self._monitor is not None
        self._monitor.close()
        self.model = module
        return state
