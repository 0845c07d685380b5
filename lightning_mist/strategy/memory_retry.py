"""Out of memory in the first steps: another plan that needs less trains the same batch, or the next start makes one.

Predictions can be wrong, and something else can take memory of a device. Nobody has seen anything yet of a batch whose
forward, or whose whole schedule under a plan that the runtime executes, ran out of memory: its values, random numbers
and what it logged are put back, and it runs once more under the next plan. Where several processes would have to turn
around together, inside of collectives or not, and where hooks have seen the batch already, training ends with what to
ask for; the next start of the same training plans with less by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from lightning_mist.attributes import replaced
from lightning_mist.errors import InfeasibleError, caught_as
from lightning_mist.model.user_code import Generators, ModuleState, ReachState
from lightning_mist.runtime.parameters import at_work
from lightning_mist.strategy.planning import Decision, is_out_of_memory, remember_limit
from lightning_mist.strategy.training import gradients_are_about_to_go, recorded_logs, replay
from lightning_mist.tensors import gradients_aside
from lightning_mist.units import format_bytes

WATCHED_STEPS = 2
"""Optimizer steps after which memory has been at its peak: the first makes the optimizer's state, the second has it."""

MOST_PLANS = 3
"""How often another plan is tried."""

TIGHTER = 0.9
"""Of what a plan that ran out of memory was predicted to need: what the next one may need. Predictions that were far
lower than what was needed are rare (docs/memory-estimates.md), and three times this is 0.73."""


class _AnotherPlanError(Exception):
    """The way from inside of an optimizer's step to around it, with the batch."""


class FirstSteps:
    """What happens when memory runs out in the first steps of a plan that was made here."""

    def __init__(self, strategy: Any, decision: Decision) -> None:
        self._strategy, self._replan, self._reach = strategy, decision.replan, decision.reach
        self._tries, self._is_stepping, self._cache_place = 0, False, decision.cache_place
        self._left = 0 if decision.needs is None else WATCHED_STEPS
        self._failed: _AnotherPlanError | None = None
        self._ran_out = False

    def tried_steps(self) -> Iterator[AbstractContextManager[None]]:
        """Around an optimizer step, its batch included: one context for each plan that it is tried with.

        A context raises InfeasibleError where memory runs out and no other plan can be taken.
        """
        if not self._left:
            yield nullcontext()
            return
        hook = self._module._current_fx_name
        yield self._stepping()
        while self._failed is not None:
            (batch,), self._failed = self._failed.args, None
            self._module._current_fx_name = hook
            self._take_another(batch)
            yield self._stepping()
        self._left -= 1
        if not self._left:
            self._replan = self._reach = None

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        try:
            with replaced(self, _is_stepping=True):
                yield
        except _AnotherPlanError as error:
            self._failed = error
        except Exception as error:
            if isinstance(error, InfeasibleError) or not is_out_of_memory(error):
                raise
            raise self._ended(error) from error

    def tried_batches(self, batch: Any) -> Iterator[AbstractContextManager[None]]:
        """Around the forward, or the whole schedule, of one batch; as :meth:`tried_steps`."""
        while self._left:
            before = None if self._replan is None else self._now()
            self._ran_out = False
            yield self._running(has_state=before is not None)
            if not self._ran_out:
                return
            # Outside of the handler: the traceback held what the batch had made.
            assert before is not None
            before()
            if self._is_stepping:
                raise _AnotherPlanError(batch)
            self._take_another(batch)
        yield nullcontext()

    @contextmanager
    def _running(self, *, has_state: bool) -> Iterator[None]:
        # A plan that the engine runs logs behind its batch in any case.
        is_plain = has_state and self._strategy._engine is None
        try:
            with recorded_logs(self._module) if is_plain else nullcontext() as log:
                yield
            if log is not None:
                replay(self._module, log.take())
        except Exception as error:
            if not is_out_of_memory(error) or (not has_state and self._is_stepping):
                raise
            if not has_state:
                raise self._ended(error) from error
            self._ran_out = True

    @property
    def _module(self) -> Any:
        return self._strategy.lightning_module

    def _now(self) -> Callable[[], None] | None:
        """Puts everything that a batch changes back as it is now; None if that cannot be done."""
        keeps = not gradients_are_about_to_go(self._module)
        if keeps and any(stage.offload.gradients for stage in self._strategy.plan.stages):
            return None  # a batch adds to those in host memory
        with at_work():
            gradients = [(p, p.grad if keeps else None) for p in self._module.parameters()]
        states: list[Any] = [ModuleState(self._module, with_contents=True), Generators()]
        states += [] if self._reach is None else [ReachState(self._reach, is_start=True)]

        def restore() -> None:
            for state in states:
                state.restore()
            with at_work():
                for parameter, gradient in gradients:
                    parameter.grad = gradient

        return restore

    def _take_another(self, batch: Any) -> None:
        """Put the next plan that needs less in place."""
        failed, replan = self._strategy._decision, self._replan
        if replan is None or self._tries == MOST_PLANS:
            plans = f"{self._tries + 1} plans, each for less than the one before"
            raise InfeasibleError(f"out of memory in the first steps under {plans}{self._asking(failed)}")
        self._tries += 1
        try:
            with gradients_aside(self._module.parameters()):
                self._strategy.replace_plan(partial(_other, replan, failed, batch))
        except InfeasibleError as error:
            raise InfeasibleError(f"out of memory, and no plan needs less: {error}") from error
        self._remember(self._strategy._decision.needs)

    def _remember(self, limit: int) -> None:
        """Let later runs plan within so many bytes; training goes on where that cannot be written."""
        if self._cache_place is not None:
            with suppress(OSError):
                remember_limit(self._cache_place, limit)

    def _ended(self, error: Exception) -> Exception:
        """The error to end with where memory ran out: what to ask for."""
        decision = self._strategy._decision
        self._remember(_tighter(decision))
        rank = self._strategy.global_rank
        said = f"rank {rank} ran out of memory in its first steps ({error}){self._asking(decision)}"
        return caught_as(error, InfeasibleError(said))

    def _asking(self, decision: Decision) -> str:
        limit = _tighter(decision)
        by_itself = "" if self._cache_place is None else ", as the next start does by itself"
        limit_words = f"memory_limit={limit} ({format_bytes(limit)})"
        return f": plan with {limit_words}{by_itself}; smaller batches or more devices help as well"


def _other(replan: Callable[[int, Any], Decision], failed: Decision, batch: Any) -> Decision:
    """Another decision; of a plan that was not predicted, what it needs is known only now."""
    try:
        found = replan(_tighter(failed), batch)
    except InfeasibleError:
        assert failed.needs is not None
        found = replan(failed.needs - 1, batch)  # whatever needs less at all
    return found if found.plan.stages != failed.plan.stages else replan(_tighter(found), batch)


def _tighter(decision: Decision) -> int:
    """Bytes of each device within which the plan of a decision is not made."""
    assert decision.needs is not None
    return int(TIGHTER * decision.needs)
