"""How calls of a module run that a user's loop trains: planned at the first, and by the plan from then on.

Where the module returns its loss, a forward runs the plan's whole schedule, backwards included, and what comes back to
the loss is the factor by which the gradients count. Where the loop computes the loss of what the module returns, a
forward runs the schedule up to its backward, which goes on when gradients have come back to the outputs. Nothing of a
plan runs inside of autograd: gradients arrive at outputs, and ``fabric.backward`` goes on behind them.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from lightning_mist.errors import InfeasibleError, TraceError
from lightning_mist.runtime.communication import complete
from lightning_mist.runtime.forward_pass import is_whole
from lightning_mist.strategy.fabric.loop_engine import Gradients, LoopEngine, whole_fill
from lightning_mist.strategy.fabric.loop_planning import LoopPlanning, has_gradient
from lightning_mist.strategy.fabric.outputs import (
    Arrival,
    OutsideLoss,
    as_step_result,
    connected,
    connected_output,
    from_step_result,
)
from lightning_mist.strategy.fabric.planned_module import PlannedModule
from lightning_mist.strategy.fabric.users_loop import Call

_NOT_TRAINED = (
    "backward through a forward that the plan does not train: the module was in eval() mode; call model.train() before "
    "it, as gradients are averaged and sharded for forwards in train() mode only"
)


class LoopTraining(LoopPlanning):
    """The part of a strategy that runs a module's calls."""

    _pending: Arrival | None = None  # whose batch the engine is within
    _arrived: list[Arrival]
    _is_unaveraged = False
    _steps = 0
    _forwards = 0

    def run_module(self, planned: PlannedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a module that was set up."""
        trains = planned.is_trained and planned.module.training and torch.is_grad_enabled()
        if trains and self._decision is None:
            self.make_plan(planned, Call.of(args, kwargs))
        engine = self._engine
        if not planned.is_trained or (engine is not None and planned.module is not engine.module):
            return planned.module(*args, **kwargs)
        if self._decision is not None and engine is None:
            parallel: Any = self.wrap(planned)
            # What DDP's no_sync does.
            parallel.require_backward_grad_sync = self.averages
            return parallel(*args, **kwargs)
        if not trains:
            output = planned.module(*args, **kwargs) if engine is None else self._evaluated(engine, args, kwargs)
            return connected_output(output, Arrival(refusal=_NOT_TRAINED)) if torch.is_grad_enabled() else output
        assert engine is not None
        call = Call.of(args, kwargs)
        if planned.redirects or has_gradient(call):
            what = "an argument requires a gradient" if has_gradient(call) else "another method than forward is called"
            raise TraceError(
                f"{what} in this call of the module, which was not so when the plan was made: in its first "
                "call it would have led to plain data parallelism, which can train it"
            )
        engine.hollow()
        averaging: AbstractContextManager[None] = nullcontext() if self.averages else engine.buffers.accumulating()
        with self.neutral(), averaging:
            return self._halted(engine, call) if self._form.loss is None else self._scheduled(engine, call)

    def finish_arrivals(self) -> None:
        """Hand over the gradients of all forwards through which a backward has come."""
        arrived, self._arrived = sorted(self._arrived, key=lambda arrival: arrival.number), []
        for arrival in arrived:
            if arrival.steps != self._steps:
                raise TraceError(
                    "the optimizer stepped between a forward and its backward, whose gradients would be of other "
                    "parameters: call fabric.backward before optimizer.step"
                )
            arrival.is_over = True
            with self.neutral():
                arrival.finish(arrival)
            self._is_unaveraged = not arrival.averages

    def refuse_unaveraged(self) -> None:
        """Refuse a step on gradients that ranks would not have averaged under DDP, and note that there is one.

        Raises:
            TraceError: If the last backward was of a forward inside ``no_backward_sync``.
        """
        if self._is_unaveraged:
            raise TraceError(
                "optimizer.step after a forward inside no_backward_sync: under DDP each rank would step on gradients "
                "of its own, and parameters would part; run the last forward and backward before a step outside of it "
                "(enabled=False)"
            )
        self._steps += 1
        self._let_go("the optimizer stepped before its backward came")

    # The whole schedule in forward -------------------------------------------------------------------------------

    def _scheduled(self, engine: LoopEngine, call: Call) -> Any:
        form, scaler = self._form, getattr(self.precision, "scaler", None)
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.root_device))

        def step(part: Call) -> Any:
            return as_step_result(form, self.run_call(engine.module, part))

        result, made = engine.run_batch(call, step, scale)
        arrival = self._arrival(partial(self._hand_over, made, scale))
        leaves = from_step_result(form, result.loss, result.extras)
        return tree_unflatten(connected(leaves, form.differentiable, arrival), form.spec)

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
            found[:] = self._form.check(self.run_call(engine.module, part))
            ends = [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
            return OutsideLoss.apply(arrival, *ends)  # type: ignore[no-untyped-call]

        engine.begin_batch(call, step)
        self._pending = arrival
        flags = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in found]
        return tree_unflatten(connected(found, flags, arrival), self._form.spec)

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
            whole_fill(engine)
        complete(engine.buffers.before_forward())
        output = engine.module(*args, **kwargs)
        engine.buffers.after_forward()
        return output
