"""``MistFabricStrategy``: what Fabric talks to. Calls of the module are planned for at the first, and run by the plan.

Where the module returns its loss, a forward runs the plan's whole schedule, backwards included, and what comes back to
the loss is the factor by which the gradients count. Where the loop computes the loss of what the module returns, a
forward runs the schedule up to its backward, which goes on when gradients have come back to the outputs. Nothing of a
plan runs inside of autograd: gradients arrive at outputs, and ``fabric.backward`` goes on behind them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from lightning_mist.attributes import replaced
from lightning_mist.errors import InfeasibleError, PlanError, TraceError
from lightning_mist.hardware import Cluster
from lightning_mist.model import map_module
from lightning_mist.plan import Exclusion, Plan, SearchSpace
from lightning_mist.plan.module_map import exclusions_of
from lightning_mist.runtime.batch_run import is_whole
from lightning_mist.runtime.communication import Work, complete
from lightning_mist.runtime.parameters import works
from lightning_mist.runtime.process_state import get_random_state
from lightning_mist.strategy.fabric.users_loop import (
    Arrival,
    Call,
    OutputForm,
    OutsideLoss,
    PlannedModule,
    as_step_result,
    connected,
    form_of,
    from_step_result,
    loop_exclusions,
    stand_in_loss,
)
from lightning_mist.strategy.given_arguments import DEFAULT_TIMEOUT, refuse_unknown
from lightning_mist.strategy.plan_installation import HoldsPlan, refuse_unreduced
from lightning_mist.strategy.planning import PlannedStep, optimizer_reason, tried, write_plan
from lightning_mist.strategy.ranks import ActingRank, everywhere, of_all_ranks, same_start
from lightning_mist.strategy.training import Engine, Piece, StepCall, attach_engine, module_state
from lightning_mist.tensors import gradients_aside, leaves, rebuild

Gradients = list[tuple[nn.Parameter, Tensor]]


class LoopEngine(Engine):
    """An engine for loops that users write: a batch's backward may come later than its forward, or never.

    Forward and backward run apart under plans of one stage and whole batches.
    """

    _held: Iterator[Work] | None = None

    # The whole schedule in forward -------------------------------------------------------------------------------

    def run_batch(self, batch: Any, step: Callable[[Any], Any], loss_scale: float | Tensor) -> tuple[Piece, Gradients]:
        """Run forward and backward of one batch; its gradients are the caller's to :meth:`hand_over`, or forget."""
        result, _ = self.train_batch(batch, step, loss_scale=loss_scale)
        made, self._stash = self._stash, None
        return result, made or []

    def hand_over(self, gradients: Gradients, factor: Tensor) -> None:
        """Add gradients of :meth:`run_batch`, times a factor, to those of the parameters; once for each batch."""
        self._stash = gradients
        self.install(factor)

    # Forward and backward apart ----------------------------------------------------------------------------------

    @works
    def begin_batch(self, batch: Any, step: Callable[[Any], Any]) -> None:
        """Run the forward of a batch; one whose backward has not come is forgotten.

        Args:
            step: Runs the module on the batch; returns a scalar, in whose backward the gradients of outputs are known.
        """
        self.forget_batch()
        complete(self.buffers.before_forward())
        complete(self.exchange.run(batch, get_random_state(self.device)))
        pause: Any = object()  # where the schedule waits for the user's backward
        call = StepCall(self._guarded)
        call.begin(step)
        self._held = self._halves(call, pause)
        with self._gradients_aside():
            self._advance(pause)
        self.buffers.after_forward()

    @works
    def finish_batch(self) -> None:
        """Run the backward of the batch that was begun, and add its gradients to those of the parameters."""
        with self._gradients_aside() as made:
            self._advance(None)
        self._held = None
        self.exchange.forget()
        for parameter, gradient in made:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    @works
    def forget_batch(self) -> None:
        """Let go of a batch whose backward does not come."""
        held: Any = self._held
        self._held = None
        if held is not None:
            held.close()
            self.exchange.forget()

    def _halves(self, call: StepCall, pause: Work) -> Iterator[Work]:
        with nullcontext() if self.guard is None else self.guard.batch():
            yield from self.executor.run(self.exchange.microbatches, call.run_part, pause=pause)

    def _advance(self, end: Work | None) -> None:
        """Go on with the batch until something is to be waited for elsewhere, or to its end."""
        assert self._held is not None
        for work in self._held:
            if work is end:
                return
            work.wait()

    @contextmanager
    def _gradients_aside(self) -> Iterator[Gradients]:
        """Inside, parameters have no gradients of earlier batches; gives those that were made inside, at the end."""
        made, parameters = Gradients(), self.stages.parameters.values()
        with gradients_aside(parameters):
            yield made
            made += [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]


if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as _Base
else:
    _Base = object

_NOT_TRAINED = (
    "backward through a forward that the plan does not train: the module was in eval() mode; call model.train() before "
    "it, as gradients are averaged and sharded for forwards in train() mode only"
)


class MistFabricBase(ActingRank, HoldsPlan, _Base):
    """Trains as DDP would in a loop of the user's own, on a plan that fits and is fast.

    At the first forward of the module in training mode the module and the machine are profiled, and a plan is chosen.
    If the module returns its loss, a plan may be anything that ``MistStrategy`` plans, and a forward runs the plan's
    whole schedule. If it returns something else, of which the loop computes the loss, plans have one stage that takes
    whole batches: data parallelism with ZeRO, recomputation and offloading. Losses, gradients and parameters are those
    of DDP. See docs/fabric.md. Arguments that are not described here are those of ``MistStrategy``.

    Args:
        accelerator: Fabric's accelerator; set by Fabric.
        parallel_devices: Devices of this node; set by Fabric.
        cluster_environment: How processes find each other; set by Fabric.
        checkpoint_io: Fabric's checkpoint reader and writer.
        precision: Fabric's precision plugin.
        returns_loss: Whether the module returns the loss that is trained, which ranks multiply by the same factor if by
            any; by default it does if one scalar of what it returns can be differentiated, or is called ``loss``, and
            no loss is scaled (``16-mixed``).
        plan_path: Where the plan is written, if anywhere.
        correct_profile: Whether what earlier runs measured corrects what is predicted for this machine.
    """

    num_loaders: int | None = None
    averages = True  # whether gradients of the next forward are averaged over ranks
    _engine: LoopEngine | None = None
    _form: OutputForm
    _dtype: torch.dtype = torch.float32
    _pending: Arrival | None = None  # whose batch the engine is within
    _is_unaveraged = False
    _steps = 0
    _forwards = 0

    def __init__(
        self,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision: Any | None = None,
        plan: str | Plan = "auto",
        memory_limit: str | int | None = None,
        host_memory_limit: str | int | None = None,
        offload_directory: str | None = None,
        search: SearchSpace | None = None,
        cluster: str | Cluster | None = None,
        blocks: str | None = None,
        returns_loss: bool | None = None,
        plan_path: str | None = None,
        profile_directory: str | None = None,
        correct_profile: bool = True,
        self_check: bool = True,
        verbose: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        find_unused_parameters: bool | None = None,
        gradient_as_bucket_view: bool = True,
        **kwargs: Any,
    ) -> None:
        self._take_options({**locals()})
        given = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision)
        super().__init__(
            *given,
            process_group_backend,
            timeout,
            start_method,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **kwargs,
        )
        self._backward_sync_control: Any = self  # which Fabric asks for ``no_backward_sync``
        self._returns_loss = returns_loss
        self._modules: list[PlannedModule] = []
        self.optimizers: list[Any] = []
        self._arrived: list[Arrival] = []

    # Setting up --------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> Any:
        """Give every rank the values of rank 0, as DDP does; the plan is made when the module is first trained."""
        planned = PlannedModule(module, self._run_module)
        if planned.is_trained:
            self._refuse_late("module")
        self._dtype = torch.get_default_dtype()
        same_start(module, ())
        self._modules.append(planned)
        return planned

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Remember an optimizer: the plan is made for it."""
        self._refuse_late("optimizer")
        self.optimizers.append(optimizer)
        return optimizer

    # Training ----------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward through the user's loss, and then through the plan where gradients have arrived."""
        super().backward(tensor, module, *args, **kwargs)
        arrived, self._arrived = sorted(self._arrived, key=lambda arrival: arrival.number), []
        for arrival in arrived:
            if arrival.steps != self._steps:
                raise TraceError(
                    "the optimizer stepped between a forward and its backward, whose gradients would be of other "
                    "parameters: call fabric.backward before optimizer.step"
                )
            with self._neutral():
                arrival.finish(arrival)
            self._is_unaveraged = not arrival.averages

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step the owned parameters and distribute what was updated."""
        engine = self._engine
        if engine is None:
            for planned in self._modules:
                refuse_unreduced(planned.parallel)
            return super().optimizer_step(optimizer, **kwargs)
        if self._is_unaveraged:
            raise TraceError(
                "optimizer.step after a forward inside no_backward_sync: under DDP each rank would step on gradients "
                "of its own, and parameters would part; run the last forward and backward before a step outside of it "
                "(enabled=False)"
            )
        self._steps += 1
        self._let_go("the optimizer stepped before its backward came")
        engine.owned(optimizer).check()
        engine.hollow()
        output = super().optimizer_step(optimizer, **kwargs)
        complete(engine.executor.gather_parameters())
        # What the loop does next is not known: it may look at parameters.
        engine.executor.flush()
        return output

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
        **more: Any,
    ) -> Tensor:
        """Clip by the norm of the whole model's gradients."""
        if self._engine is None:
            clipped: Tensor = super().clip_gradients_norm(
                module, optimizer, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite, **more
            )
            return clipped
        refuse_unknown(more)
        self.precision.unscale_gradients(optimizer)
        return self._engine.clip_by_norm(
            optimizer, float(max_norm), norm_type=float(norm_type), error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float, **more: Any) -> None:
        """Clamp every entry of gradients."""
        if self._engine is None:
            super().clip_gradients_value(module, optimizer, clip_val, **more)
            return
        refuse_unknown(more)
        self.precision.unscale_gradients(optimizer)
        self._engine.clip_by_value(optimizer, float(clip_val))

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Inside, gradients are only added up: forwards are of batches whose gradients ranks do not average yet."""
        if enabled and not isinstance(module, PlannedModule):
            raise TypeError(
                f"no_backward_sync of a {type(module).__name__}: it takes a module that was set up by fabric.setup or "
                "fabric.setup_module"
            )
        with replaced(self, averages=False) if enabled else nullcontext():
            yield

    # Calls of the module -----------------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> nn.Module:
        """The module that is planned for, under the name that planning knows."""
        return next(planned.module for planned in self._modules if planned.is_trained)

    def _refuse_late(self, what: str) -> None:
        """Refuse what comes after a plan that was not made for it.

        Raises:
            PlanError: If there is such a plan.
        """
        if self._engine is not None:
            raise PlanError(
                f"a further {what} is set up after the plan was made, in the first forward: set up everything that is "
                "trained before it"
            )

    @contextmanager
    def _neutral(self) -> Iterator[None]:
        """Inside, nothing of the precision's forward context holds, in which Fabric calls modules."""
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with torch.autocast(self.root_device.type, enabled=False):
                yield
        finally:
            torch.set_default_dtype(dtype)

    def _run_call(self, module: nn.Module, call: Call) -> Any:
        """Call a module in the precision's forward context."""
        with self.precision.forward_context():
            return call.to(module)

    def _make_plan(self, planned: PlannedModule, call: Call) -> None:
        """Make a plan for a module, given the arguments of its first forward, and put it in place."""
        module = planned.module
        with self._neutral():
            batch = _copied(call)

            def batch_to_plan_for() -> Call:
                self._form = self._look(module, batch)
                return batch

            def step_to_plan_for(part: Call) -> Any:
                output = self._run_call(module, part)
                return stand_in_loss(output) if self._form.loss is None else as_step_result(self._form, output)

            step = PlannedStep(
                name="forward",
                call=step_to_plan_for,
                batch=batch_to_plan_for,
                at_once=None,
                restrictions=self._restrictions,
                hint=": pass each loader through fabric.setup_dataloaders",
            )
            precision = str(getattr(self.precision, "precision", "32-true"))
            # What planning asks of a trainer, where there is none.
            known: dict[str, Any] = {"callbacks": [], "loggers": [], "datamodule": None, "gradient_clip_val": None}
            known |= {"lightning_module": module, "strategy": self, "precision": precision}
            loop = SimpleNamespace(accumulate_grad_batches=1, **known)
            from lightning_mist.strategy.planning import decide

            decision = decide(loop, self, self._request, step, plain=self._why_plain(planned, call))
            if decision.plan.is_plain:
                # Without a trace DDP's own default counts.
                self._find_unused(bool(decision.module_map.parameters) and decision.has_unused_parameters)
            else:
                engine = self._started_for(module, decision, kind=LoopEngine)
                self._engine = cast("LoopEngine", engine)
                engine.take_optimizer(self.optimizers[0])
                engine.begin(None)
                attach_engine(self.precision, engine)
            # Only the guard needs it; replanning is for a trainer's fit.
            self._decision = replace(decision, reach=None, replan=None)
        if decision.plan_path is not None:
            write_plan(decision.plan, decision.plan_path)

    def _run_module(self, planned: PlannedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a module that was set up."""
        trains = planned.is_trained and planned.module.training and torch.is_grad_enabled()
        if trains and self._decision is None:
            self._make_plan(planned, Call.of(args, kwargs))
        engine = self._engine
        if not planned.is_trained or (engine is not None and planned.module is not engine.module):
            return planned.module(*args, **kwargs)
        if self._decision is not None and engine is None:
            if planned.parallel is None:
                vars(planned)["parallel"] = super().setup_module(planned.module)
            parallel: Any = planned.parallel
            # What DDP's no_sync does.
            parallel.require_backward_grad_sync = self.averages
            return parallel(*args, **kwargs)
        if not trains:
            output = planned.module(*args, **kwargs) if engine is None else self._evaluated(engine, args, kwargs)
            return connected(output, Arrival(refusal=_NOT_TRAINED)) if torch.is_grad_enabled() else output
        assert engine is not None
        call = Call.of(args, kwargs)
        if planned.redirects or _has_gradient(call):
            what = "an argument requires a gradient" if _has_gradient(call) else "another method than forward is called"
            raise TraceError(
                f"{what} in this call of the module, which was not so when the plan was made: in its first "
                "call it would have led to plain data parallelism, which can train it"
            )
        engine.hollow()
        averaging: AbstractContextManager[None] = nullcontext() if self.averages else engine.buffers.accumulating()
        with self._neutral(), averaging:
            return self._halted(engine, call) if self._form.loss is None else self._scheduled(engine, call)

    # The whole schedule in forward -------------------------------------------------------------------------------

    def _scheduled(self, engine: LoopEngine, call: Call) -> Any:
        form, scaler = self._form, getattr(self.precision, "scaler", None)
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.root_device))

        def step(part: Call) -> Any:
            return as_step_result(form, self._run_call(engine.module, part))

        result, made = engine.run_batch(call, step, scale)
        arrival = self._arrival(partial(self._hand_over, made, scale))
        leaves = from_step_result(form, result.loss, result.extras)
        return connected(tree_unflatten(leaves, form.spec), arrival, form.differentiable)

    def _hand_over(self, made: Gradients, scale: float | Tensor, arrival: Arrival) -> None:
        engine, form = self._engine, self._form
        assert engine is not None
        assert arrival.gradients is not None
        assert form.loss is not None
        position = sum(form.differentiable[: form.loss])
        if any(item is not None for index, item in enumerate(arrival.gradients) if index != position):
            raise TraceError(
                "the loop's loss depends on another output of the module than its loss, of which the plan has trained "
                "the backward already: pass returns_loss=False, by which the loop's own loss is trained"
            )
        factor = arrival.gradients[position]
        assert factor is not None
        engine.hand_over(made, self._everybodys(factor / scale))

    def _everybodys(self, factor: Tensor) -> Tensor:
        """The factor by which all ranks multiply their losses; gradients are averages over ranks already."""
        if self.world_size == 1:
            return factor
        ends = torch.stack((factor, -factor))
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if bool(ends[0] == -ends[1]):
            return factor
        if not bool(ends.isfinite().all()):
            return torch.full_like(factor, torch.nan)
        raise TraceError(
            f"ranks multiply the module's loss by {-ends[1].item():g} to {ends[0].item():g}, and its gradients are "
            "averages over ranks already: multiply by the same everywhere, or pass returns_loss=False, by which the "
            "loop's own loss is trained"
        )

    # Forward and backward apart ----------------------------------------------------------------------------------

    def _halted(self, engine: LoopEngine, call: Call) -> Any:
        self._let_go("the module ran again before its backward came")
        arrival, found = self._arrival(self._go_on), list[Any]()

        def step(part: Call) -> Any:
            found[:] = self._form.check(self._run_call(engine.module, part))
            ends = [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
            return OutsideLoss.apply(arrival, *ends)  # type: ignore[no-untyped-call]

        engine.begin_batch(call, step)
        self._pending = arrival
        return connected(tree_unflatten(found, self._form.spec), arrival)

    def _go_on(self, arrival: Arrival) -> None:
        assert self._engine is not None
        self._pending = None
        self._engine.finish_batch()

    def _let_go(self, why: str) -> None:
        """Forget a batch whose backward has not come; if it comes, it is refused."""
        pending, self._pending = self._pending, None
        if pending is None or self._engine is None:
            return
        pending.refusal = (
            f"backward through a forward that was let go: {why}. Under this plan a forward lives until the next: call "
            "fabric.backward before it (gradients add up), run the module once on both batches, or train by plain data "
            "parallelism (zero_stage = 0, nothing recomputed or offloaded)"
        )
        self._engine.forget_batch()

    def _arrival(self, finish: Any) -> Arrival:
        self._forwards += 1
        return Arrival(
            finish=finish, number=self._forwards, steps=self._steps, tell=self._arrived.append, averages=self.averages
        )

    # Outside of training -----------------------------------------------------------------------------------------

    def _evaluated(self, engine: LoopEngine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the whole module, for which all ranks meet where a plan has it in parts."""
        if not engine.is_filled and not is_whole(engine.plan, has_masters=False):
            assert self._decision is not None
            if self._decision.lack_for_whole is not None:
                raise InfeasibleError(
                    f"{self._decision.lack_for_whole}. The loop runs the module outside of training: save it and "
                    "evaluate it in a run of its own, or raise memory_limit"
                )
            self._let_go("the module was evaluated before its backward came")
            with torch.inference_mode(False), torch.no_grad():  # a loop may evaluate in inference mode
                engine.fill()
        complete(engine.buffers.before_forward())
        output = engine.module(*args, **kwargs)
        engine.buffers.after_forward()
        return output

    # What planning asks ------------------------------------------------------------------------------------------

    def _look(self, module: nn.Module, call: Call) -> OutputForm:
        """The form of what the module returns, the same on all ranks."""
        look = partial(_form_of_call, partial(self._run_call, module), module, call)
        form = everywhere(lambda: tried(look, self.root_device))
        forms = of_all_ranks((form.loss, form.differentiable, repr(form.spec)))
        if any(found != forms[0] for found in forms):
            raise TraceError("the module returns other things on one rank than on another, by which no plan can go")
        if self._returns_loss is False or (self._returns_loss is None and self._scales):
            return replace(form, loss=None)
        if self._returns_loss and form.loss is None:
            raise PlanError(
                "returns_loss=True: not one scalar of what the module returns can be differentiated, nor is one called "
                "'loss'; leave returns_loss out, or return the loss"
            )
        return form

    @property
    def _scales(self) -> bool:
        """Whether losses are scaled, by which it depends on their size whether gradients overflow in 16 bits."""
        return getattr(self.precision, "scaler", None) is not None

    def _restrictions(self) -> tuple[Exclusion, ...]:
        reasons: list[tuple[str, Any]] = [
            ("a loop may run the module again before it calls backward", ("offloaded_gradients",)),
            ("a loop asks for what the module returns before it calls backward", ("tail_chunks",)),
            ("a loop of the user's own steps the optimizer", ("even_shards",)),
        ]
        if self._form.loss is None:
            why = "the loop computes the loss of what the module returns, so each rank runs whole batches of its own"
            if self._scales and self._returns_loss is None:
                # What overflows depends on the factor in front of the loss, which is known behind the forward only.
                why = (
                    "losses are scaled by what the loop makes of them; returns_loss=True scales what the module returns"
                )
            reasons.append((why, ("pipeline", "tensor", "microbatches")))
        return (*exclusions_of(reasons), *loop_exclusions())

    def _why_plain(self, planned: PlannedModule, call: Call) -> str | None:
        """Why only plain data parallelism can serve the loop, if so."""
        trained = [item for item in self._modules if item.is_trained]
        if len(trained) > 1:
            return f"{len(trained)} modules are trained side by side; plans are for one"
        if planned.redirects:
            return "another method of the module than forward is called (mark_forward_method, or a step of Lightning's)"
        if _has_gradient(call):
            return "an argument of the module requires a gradient"
        if (reason := optimizer_reason(self.optimizers, self.root_device)) is not None:
            return reason
        own = {id(parameter) for parameter in planned.module.parameters()}
        updated = [parameter for group in self.optimizers[0].param_groups for parameter in group["params"]]
        if any(id(parameter) not in own for parameter in updated):
            return "the optimizer updates parameters that are not the module's"
        return None

    # Saving and loading, as DDP does whatever the plan; on every rank at once --------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """All weights in the module's own layout; complete on global rank 0."""
        plain = module.module if isinstance(module, PlannedModule) else module
        if self._engine is None or plain is not self._engine.module:
            return plain.state_dict()
        return module_state(plain, self._engine)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Take weights in the module's own layout."""
        plain, engine = module.module if isinstance(module, PlannedModule) else module, self._engine
        if engine is None or plain is not engine.module or engine.is_filled:
            plain.load_state_dict(state_dict, strict=strict)
            return
        engine.forget_batch()
        engine.fill()
        plain.load_state_dict(state_dict, strict=strict)
        engine.hollow()

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """All optimizer state in DDP's layout; complete on global rank 0."""
        if self._engine is None or optimizer is not self.optimizers[0]:
            state: dict[str, Any] = super().get_optimizer_state(optimizer)
            return state
        return self._engine.optimizer_state()

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None, **more: Any
    ) -> dict[str, Any]:
        """Read a checkpoint; of an optimizer's state each rank takes its part."""
        engine, given = self._engine, () if weights_only is None else (weights_only,)  # which Lightning knows since 2.6
        is_ours = engine is not None and isinstance(state, (dict, type(self.optimizers[0])))
        if not is_ours:
            found: dict[str, Any] = super().load_checkpoint(path, state, strict, *given, **more)
            return found
        assert engine is not None
        optimizer = self.optimizers[0]
        if state is optimizer:
            engine.load_optimizer_state(super().load_checkpoint(path, None, strict, *given, **more))
            return {}
        own = [name for name, value in state.items() if value is optimizer]
        rest = {name: value for name, value in state.items() if name not in own}
        remainder: dict[str, Any] = super().load_checkpoint(path, rest, strict, *given, **more)
        state.update(rest)
        for name in own:
            if name in remainder:
                engine.load_optimizer_state(remainder.pop(name))
            elif strict:
                raise KeyError(
                    f"the checkpoint has no {name!r}, which is to be loaded: it has what it was saved with; leave it "
                    "out, or pass strict=False"
                )
        return remainder

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, before anything is set up."""
        return {**vars(self), "_decision": None, "_engine": None}


def _has_gradient(call: Call) -> bool:
    """Whether gradients are to come back to an argument."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves(call))


def _copied(call: Call) -> Call:
    return rebuild(call, lambda node: node.detach().clone() if isinstance(node, Tensor) else None)  # type: ignore[no-any-return]


def _form_of_call(run: Callable[[Call], Any], module: nn.Module, call: Call) -> OutputForm:
    """What a module returns for a call, without values."""
    seen: list[OutputForm] = []

    def watched(part: Call) -> Any:
        output = run(part)
        seen.append(form_of(output))
        return stand_in_loss(output)

    found = map_module(module, watched, call)
    if not seen:
        raise TraceError((*found.excludes("pipeline"), "the module does not come to its end on fake tensors")[0])
    if not any(seen[-1].differentiable):
        raise TraceError("nothing that the module returns can be differentiated, so no gradient could come back to it")
    return seen[-1]
