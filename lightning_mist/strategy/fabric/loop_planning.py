"""From the first call of a module that a loop trains to a plan, and what is in place then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lightning_mist.errors import PlanError, TraceError
from lightning_mist.model import map_module
from lightning_mist.plan import Exclusion
from lightning_mist.plan.module_map import exclusions_of
from lightning_mist.strategy.all_ranks import everywhere, of_all_ranks
from lightning_mist.strategy.fabric.loop_engine import LoopEngine
from lightning_mist.strategy.fabric.outputs import OutputForm, as_step_result, form_of, stand_in_loss
from lightning_mist.strategy.fabric.planned_module import PlannedModule
from lightning_mist.strategy.fabric.users_loop import Call, UsersLoop, loop_exclusions
from lightning_mist.strategy.plan_installation import HoldsPlan
from lightning_mist.strategy.planning import (
    Decision,
    PlannedStep,
    decide,
    optimizer_reason,
    tried,
    write_plan,
)
from lightning_mist.strategy.training import attach_engine
from lightning_mist.tensors import leaves, rebuild

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as _Base
else:
    _Base = object


class LoopPlanning(HoldsPlan, _Base):
    """The part of a strategy that makes a plan for a module and its optimizer, and puts it in place."""

    num_loaders: int | None = None
    averages = True  # whether gradients of the next forward are averaged over ranks
    _engine: LoopEngine | None = None
    _form: OutputForm
    _dtype: torch.dtype = torch.float32
    _returns_loss: bool | None
    _modules: list[PlannedModule]
    optimizers: list[Any]
    act_for: Callable[[int | None], None]

    @property
    def lightning_module(self) -> nn.Module:
        """The module that is planned for, under the name that planning knows."""
        return next(planned.module for planned in self._modules if planned.is_trained)

    def refuse_late(self, what: str) -> None:
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
    def neutral(self) -> Iterator[None]:
        """Inside, nothing of the precision's forward context holds, in which Fabric calls modules."""
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with torch.autocast(self.root_device.type, enabled=False):
                yield
        finally:
            torch.set_default_dtype(dtype)

    def run_call(self, module: nn.Module, call: Call) -> Any:
        """Call a module in the precision's forward context."""
        with self.precision.forward_context():
            return call.to(module)

    def make_plan(self, planned: PlannedModule, call: Call) -> None:
        """Make a plan for a module, given the arguments of its first forward, and put it in place."""
        module = planned.module
        with self.neutral():
            batch = _copied(call)

            def batch_to_plan_for() -> Call:
                self._form = self._look(module, batch)
                return batch

            step = PlannedStep(
                name="forward",
                call=partial(self._step_to_plan_for, module),
                batch=batch_to_plan_for,
                at_once=None,
                restrictions=self._restrictions,
                hint=": pass each loader through fabric.setup_dataloaders",
            )
            precision = str(getattr(self.precision, "precision", "32-true"))
            loop = UsersLoop(lightning_module=module, strategy=self, precision=precision)
            decision = decide(loop, self, self._request, step, plain=self._why_plain(planned, call))
            self._install(planned, decision)
            # Only the guard needs it; replanning is for a trainer's fit.
            self._decision = replace(decision, reach=None, replan=None)
        if decision.plan_path is not None:
            write_plan(decision.plan, decision.plan_path)

    def _install(self, planned: PlannedModule, decision: Decision) -> None:
        if decision.plan.is_plain:
            # Without a trace DDP's own default counts.
            self._find_unused(bool(decision.module_map.parameters) and decision.has_unused_parameters)
            return
        engine = self._started_for(planned.module, decision, self.optimizers[:1], kind=LoopEngine)
        self._engine = cast("LoopEngine", engine)
        engine.begin(None)
        attach_engine(self.precision, engine)

    def wrap(self, planned: PlannedModule) -> nn.Module:
        """The module in torch's ``DistributedDataParallel``, where the plan is that."""
        if planned.parallel is None:
            vars(planned)["parallel"] = super().setup_module(planned.module)
        assert planned.parallel is not None
        return planned.parallel

    # What planning asks ------------------------------------------------------------------------------------------

    def _step_to_plan_for(self, module: nn.Module, call: Call) -> Any:
        output = self.run_call(module, call)
        return stand_in_loss(output) if self._form.loss is None else as_step_result(self._form, output)

    def _look(self, module: nn.Module, call: Call) -> OutputForm:
        """The form of what the module returns, the same on all ranks."""
        look = partial(_form_of_call, partial(self.run_call, module), module, call)
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
            ("a loop may run the module again before it calls backward", ("offloaded_gradients",))
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
        if has_gradient(call):
            return "an argument of the module requires a gradient"
        if (reason := optimizer_reason(self.optimizers, self.root_device)) is not None:
            return reason
        own = {id(parameter) for parameter in planned.module.parameters()}
        updated = [parameter for group in self.optimizers[0].param_groups for parameter in group["params"]]
        if any(id(parameter) not in own for parameter in updated):
            return "the optimizer updates parameters that are not the module's"
        return None


def has_gradient(call: Call) -> bool:
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
