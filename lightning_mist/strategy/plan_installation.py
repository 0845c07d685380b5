"""Putting plans in place of a fit, one after the other, and what a strategy says of the one that is there."""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from lightning_mist.attributes import replaced, set_on_class
from lightning_mist.devices import ops_of
from lightning_mist.errors import TraceError
from lightning_mist.model.initialization import InitialValues
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.runtime.stage import no_caches
from lightning_mist.strategy.given_arguments import Namespace, check_arguments
from lightning_mist.strategy.memory_retry import FirstSteps
from lightning_mist.strategy.monitor import Monitor
from lightning_mist.strategy.planning import Decision, PlanRequest, write_plan
from lightning_mist.strategy.ranks import Progress, same_start
from lightning_mist.strategy.run_report import RunReport
from lightning_mist.strategy.training import EndsTogether, Engine, ManualEngine, StepGuard, attach_engine, connected

if TYPE_CHECKING:
    from lightning_mist.estimate import MemoryEstimate


class HoldsPlan:
    """What strategies have for trainers and for loops alike: the user's options, what was decided, and its engine."""

    # What the user asked for.
    _request: PlanRequest
    _find_unused_parameters: bool | None
    # What is put in place; None before.
    _decision: Decision | None = None
    _engine: Engine | None = None

    def _take_options(self, given: Mapping[str, Any]) -> None:
        """Look at the arguments of a constructor, by name, and remember what they ask of planning."""
        check_arguments(given)
        self._request, self._find_unused_parameters = PlanRequest.of(given), given["find_unused_parameters"]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: the names are registered when Lightning, or Fabric, is imported."""

    @property
    def plan(self) -> Plan | None:
        """The plan of the current or last fit, or of the loop, once there is one."""
        return None if self._decision is None else self._decision.plan

    @property
    def estimate(self) -> "MemoryEstimate | None":
        """What the plan needs of every device, where that is known."""
        return None if self._decision is None else self._decision.estimate

    def _find_unused(self: Any, found: bool) -> None:
        """Let DDP look for parameters without gradients where the user says so, or else where there are some."""
        given = self._find_unused_parameters
        self._ddp_kwargs["find_unused_parameters"] = found if given is None else given

    def _started(
        self: Any, module: nn.Module, plan: Plan, module_map: ModuleMap, kind: type[Engine] = Engine, **more: Any
    ) -> Engine:
        """This rank's engine for a plan on the strategy's device; see its kind for the rest."""
        host = self._request.host_of_each(self.num_processes, self.root_device)
        transport = connected(plan, module_map, self.root_device, self._timeout)
        return kind(module, plan, module_map, transport, device=self.root_device, host=host, **more)

    def _started_for(self: Any, module: nn.Module, decision: Decision, **more: Any) -> Engine:
        """This rank's engine for the plan that was decided on, which guards its step; optimizers are to be taken."""
        engine: Engine = self._started(module, decision.plan, decision.module_map, rules=decision.rules, **more)
        self._engine = engine  # whatever fails from here on, it is closed
        # As DDP gives every rank the buffers of rank 0 before forwards.
        options, now = self._ddp_kwargs, self._ddp_kwargs.get("forward_sync_buffers")
        engine.buffers.is_enabled = bool(options.get("broadcast_buffers", True) if now is None else now)
        engine.records_metrics = decision.records_metrics and not engine.exchange.is_own
        if decision.reach is not None:
            engine.guard = StepGuard(
                *(module, decision.plan, self.global_rank, decision.reach, self.act_for),
                records_metrics=engine.records_metrics,
            )
        return engine


class PlanInstallation(HoldsPlan, EndsTogether):
    """The part of a strategy that holds the plan of a fit: installs and replaces it, and answers what was decided."""

    # What a fit puts in place; None before the first.
    _monitor: Monitor | None = None
    _initial: InitialValues | None = None
    _masters: dict[str, Tensor] | None = None
    _outside: Plan | None = None  # the plan of an evaluation outside of a fit, which has no optimizer
    _first_steps: FirstSteps
    _is_planning = False
    _is_over = False  # after a dry run
    _names: ClassVar[Namespace]
    _fitting: ExitStack
    _report_path: str | None
    _timeout: timedelta | None
    act_for: Callable[[int | None], None]
    save_if_asked: Callable[..., None]

    @property
    def report(self) -> RunReport | None:
        """Predicted against measured of the current or last fit, once enough steps have run."""
        return None if self._monitor is None else self._monitor.report

    @property
    def is_planning(self) -> bool:
        """Whether the step is being tried before training.

        What a step does beside computing (a line in a file, a message) can be left out then:
        ``if not getattr(self.trainer.strategy, "is_planning", False): ...``.
        """
        return self._is_planning

    def _end_dry_run(self) -> NoReturn:
        """End the fit as soon as there is a plan; the process ends once Lightning has cleared up."""
        assert self._decision is not None
        said = "nothing was trained"
        if self._request.plan_path is not None and self._decision.plan_path is not None:
            write_plan(self._decision.plan, self._decision.plan_path)
            said += f", the plan is in {self._decision.plan_path}"
        Progress(enabled=self.is_global_zero).tell(f"dry_run=True: {said}")
        self._is_over = True
        raise self._names.ends_quietly

    # Installing --------------------------------------------------------------------------------------------------

    def _install(self, module: Any) -> None:
        assert self._decision is not None
        if self._decision.plan.is_plain and self._masters is None:
            if self._initial is not None:
                self._initial.materialize(self._initial.names)
            self._find_unused(self._decision.has_unused_parameters)
            self.configure_ddp()
            self._fitting.enter_context(no_caches(module, self._decision.module_map))
            if isinstance(self._ddp_comm_state, PostLocalSGDState):
                self._enable_model_averaging()
            return
        kind = Engine if module.automatic_optimization else ManualEngine
        self._engine = self._started_for(module, self._decision, masters=self._masters, kind=kind)
        if self._masters is not None:
            self._masters = None  # the engine has what this rank keeps
            self._share_start(module)
        for optimizer in self.optimizers:
            self._engine.take_optimizer(optimizer)
        self._fitting.enter_context(as_wrapped(module))
        if self._initial is not None:
            self._engine.begin(self._initial)

    def _share_start(self, module: nn.Module) -> None:
        same_start(module, () if self._initial is None else self._initial.names)

    def _watch(self, module: nn.Module) -> None:
        """Let what is in place be served and watched."""
        assert self._decision is not None
        attach_engine(self.precision_plugin, self._engine)
        # Only these need it; it leads to what cannot be pickled, and trainers can be after a fit.
        self._decision = replace(self._decision, reach=None, replan=None)
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
        with replaced(self, _is_planning=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what steps that are only tried warn of is said when they are trained
            yield

    def replace_plan(self, decide: Callable[[], Decision]) -> None:
        """Put another plan in place between two steps; of a fit of one process."""
        module, optimizer = self._module, self.optimizers[0]
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
            write_plan(self._decision.plan, self._decision.plan_path)

    def _withdraw(self, module: Any) -> dict[str, Any]:
        """Leave the module whole and the optimizer the user's; its state in the layout of the whole model."""
        engine, self._engine = self._engine, None
        ops_of(self.root_device).synchronize()
        state: dict[str, Any] = self.optimizers[0].state_dict()
        if engine is not None:
            engine.fill()
            released = engine.release_optimizers(self._timeout)
            state = released[0]() if released else {}
            engine.transport.close()
        attach_engine(self.precision_plugin, None)
        self._fitting.close()
        assert self._monitor is not None
        self._monitor.close()
        self.model = module
        return state

    # The whole module, as under DDP ------------------------------------------------------------------------------

    def on_train_start(self, **more: Any) -> None:
        """From here on each rank has its part; until here, and while a fit is prepared, it has the whole module."""
        super().on_train_start(**more)
        if self._engine is not None and not self._engine.has_begun:
            self._engine.begin(None)
        # If it was made here: loggers have their directories now.
        if self._decision is not None and self._decision.plan_path is not None:
            write_plan(self._decision.plan, self._decision.plan_path)

    def post_backward(self, closure_loss: Tensor, **more: Any) -> None:
        """See that DDP's reductions came to their end, which of several backwards only the last one may bring."""
        super().post_backward(closure_loss, **more)
        if self.lightning_module is not None and self.lightning_module.automatic_optimization:
            refuse_unreduced(self.model)

    @contextmanager
    def block_backward_sync(self, **more: Any) -> Iterator[None]:
        """Around batches whose gradients are only accumulated: the forward after them finds buffers as they are."""
        if self._engine is None:
            with super().block_backward_sync(**more):
                yield
        else:
            with self._engine.buffers.accumulating():
                yield


@contextmanager
def as_wrapped(module: nn.Module) -> Iterator[None]:
    """Inside, a module is its own ``module``, so that ``trainer.model.module`` is the user's as where DDP wraps it."""
    try:
        has_one = hasattr(module, "module")
    except Exception:  # what its own __getattr__ makes of that
        has_one = True
    with nullcontext() if has_one else set_on_class(type(module), "module", _Itself(id(module))):
        yield


class _Itself:
    """Gives one object of a class itself; others have no such attribute."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __get__(self, instance: Any, owner: type) -> Any:
        if id(instance) != self._number:
            raise AttributeError
        return instance


def refuse_unreduced(model: Any) -> None:
    """Behind a backward, raise TraceError where DDP waits for gradients that did not come."""
    try:
        if isinstance(model, DistributedDataParallel):
            model.reducer._check_reducer_finalized()
    except RuntimeError as error:
        missing = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
        raise TraceError(
            f"{', '.join(missing[:1]) or 'a parameter'} took no part in this batch's loss on this rank, though all did "
            "before: DDP waits for its gradient for ever. Give the strategy find_unused_parameters=True"
        ) from error
