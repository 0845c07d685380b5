"""What plans rely on while they train: that the step does for a batch what it did when it was tried.

Every run of the user's step is looked at: whose batch it sees, whether it changes what is beside its arguments, whether
it talks to other processes. Before a batch runs it is seen to that no parameter was unfrozen or added, and that ranks
that share batches hold the same values. What does not hold ends training on this rank before the optimizer's step, and
with it on all others, which wait for this one.
"""

import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from lightning_mist.errors import PlanError
from lightning_mist.model.user_code import Reach
from lightning_mist.plan import Plan, parts_of, replica_of, replica_ranks
from lightning_mist.runtime.communication import Microbatch
from lightning_mist.runtime.stage import Talk, watched_processes
from lightning_mist.strategy.training.log_records import Finish, held_by, named_metrics
from lightning_mist.strategy.user_code import Survey, changed, unlike
from lightning_mist.tensors import batch_signature

_PATIENCE = 3
"""Batches of new sizes at which the same name may change: what grows with the longest batch is no state."""


class StepGuard:
    """Watches the runs of a step under a plan, on one rank; the module is as it was when the plan was made.

    Args:
        acting: Is told whose rows the step sees from now on; ``None`` for this rank's own.
        records_metrics: Whether calls of the module's metrics are recorded: what they hold is each rank's own.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        rank: int,
        reach: Reach,
        acting: Callable[[int | None], None],
        *,
        records_metrics: bool = False,
    ) -> None:
        self._module, self._acting = module, acting
        self.shares = len(replica_ranks(plan, replica_of(plan, rank))) > 1
        self._recomputes = any(stage.checkpointing.layers for stage in plan.stages)
        self._repeats = self.shares or max(parts_of(plan)) > 1
        # Where every rank runs whole batches of its own they are updated where the step runs, and where it recomputes.
        self._watches_metrics = self._recomputes and not (records_metrics or self._repeats)
        without = named_metrics(module).values() if records_metrics else ()
        self._survey = Survey(reach, without=without, beside=self._held)
        self._parameters = [(name, parameter, parameter.requires_grad) for name, parameter in module.named_parameters()]
        self._names = {name for name, _, _ in self._parameters}
        self._buffers = list(module.named_buffers())
        self._norms = [
            (name, child)
            for name, child in module.named_modules()
            if getattr(child, "running_mean", None) is not None and not child.training
        ]
        self._batches = 0
        self._seen: set[Hashable] = set()
        self._is_new = False
        self._grown: dict[str, int] = {}
        self._last: dict[str, Hashable] = {}
        self._stepped: list[str] = []
        self._calls_backward = False
        self._broken: PlanError | None = None

    # Before a batch ----------------------------------------------------------------------------------------------

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Around a batch; raises PlanError if something that the plan relies on does not hold, inside or afterwards."""
        self._batches += 1
        self._is_new = False
        self._check_parameters()
        with ExitStack() as stack:
            if self._repeats:
                stack.enter_context(watched_processes(self._noticed))
            if self._repeats or self._recomputes:
                self._last = self._look()
            yield
            if self._recomputes and not self._calls_backward:
                self._check_recomputed()
        self._stepped, self._calls_backward = [], False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward that the step calls itself, in :meth:`batch`."""
        if not self._recomputes:
            yield
            return
        self._calls_backward, now = True, self._look()
        self._stepped += changed(self._last, now)
        self._last = now
        yield
        self._last = self._check_recomputed()

    def _check_recomputed(self) -> dict[str, Hashable]:
        """See that backward has not changed what forward has changed, and tell how things are now."""
        now = self._look()
        again = next((name for name in changed(self._last, now) if name in self._stepped), None)
        if again is None:
            return now
        raise self._error(
            f"{again} is changed by a layer that is recomputed in backward, and so twice",
            "a plan that recomputes nothing (checkpointed_layers = 0)",
        )

    def _check_parameters(self) -> None:
        for name, parameter, required in self._parameters:
            if parameter.requires_grad and not required:
                raise self._error(f"parameter {name} was unfrozen after the plan was made: plan again with it unfrozen")
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self._names:
                raise self._error(f"parameter {name} was added after the plan was made: add it before fit")
        for name, child in self._norms if self._repeats else ():
            if child.training:
                raise self._error(
                    f"{name} ({type(child).__name__}) was set to train() and keeps running statistics, which it did "
                    "not when the plan was made"
                )

    def note(self) -> int:
        """What ranks that share batches must agree on."""
        return self._survey.digest() if self.shares else 0

    def compare(self, notes: Sequence[int], details: Callable[[Any], Sequence[Any]]) -> None:
        """Compare what the ranks that share batches noted; ``details``, called by all or none, gathers a value of each.

        Raises:
            PlanError: If they differ, with the name of what differs.
        """
        if all(note == notes[0] for note in notes):
            return
        name = next(iter(unlike(details(self._survey.details()))), "something")
        raise self._error(f"{name}, which the step may read, is another on every rank")

    # Around a run ------------------------------------------------------------------------------------------------

    @contextmanager
    def run(self, microbatch: Microbatch) -> Iterator[None]:
        """Around one run of the step; raises PlanError if it did what the plan relies on it not to do."""
        outside, versions = self._drawn(), self._versions()
        self._acting(microbatch.owner if self.shares else None)
        try:
            yield
        finally:
            self._acting(None)
            if self._broken is not None:
                # The step may have gone on in spite of it.
                raise self._broken
            if self._repeats or self._recomputes:
                self._check_run(microbatch, outside, versions)

    def _check_run(self, microbatch: Microbatch, outside: Hashable, versions: list[int]) -> None:
        for (name, _), before, after in zip(self._buffers, versions, self._versions(), strict=True):
            if before != after and self._repeats:
                raise self._error(f"the step changed buffer {name}, which it did not when the plan was made")
        if self._drawn() != outside:
            raise self._error("the step drew from Python's or numpy's generator, which it did not when it was tried")
        now = self._look()
        names, self._last = changed(self._last, now), now
        self._stepped += names
        # What a backward of new sizes has filled shows behind the next run, whatever the sizes of that are.
        signature = batch_signature(microbatch.value)
        self._is_new |= signature not in self._seen
        if self._repeats:
            for name in names:
                self._grown[name] = self._grown.get(name, 0) + self._is_new
                if not self._is_new or self._grown[name] > _PATIENCE:
                    raise self._error(f"the step changed {name}, which it did not when the plan was made")
        self._seen.add(signature)

    def _held(self) -> dict[str, Any]:
        """What metrics hold; user code may put others in their place."""
        every = named_metrics(self._module).items() if self._watches_metrics else ()
        return {f"{of} of metric {name}": value for name, item in every for of, value in held_by(item).items()}

    def _look(self) -> dict[str, Hashable]:
        return {**self._survey.look(), **{f"buffer {name}": buffer._version for name, buffer in self._buffers}}

    def _versions(self) -> list[int]:
        return [buffer._version for _, buffer in self._buffers] if self._repeats or self._recomputes else []

    def _drawn(self) -> Hashable:
        """Where the generators stand that do not travel with batches."""
        if not self._repeats:
            return None
        numpy = sys.modules.get("numpy")
        state = None if numpy is None else numpy.random.get_state(legacy=False)["state"]
        return hash(random.getstate()), None if state is None else (state["pos"], hash(state["key"].tobytes()))

    def _noticed(self, kind: Talk, what: str) -> bool:
        verb = "asked which process it runs in" if kind == "rank" else "talked to other processes"
        if kind == "rank" and not self.shares:
            return False
        self._broken = self._error(f"the step {verb} ({what}), which it did not when the plan was made")
        raise self._broken

    def _error(
        self, what: str, instead: str = "a plan with one stage and whole batches (zero_stage = 0 always works)"
    ) -> PlanError:
        return PlanError(
            f"batch {self._batches} of this fit: {what}. From here on the plan would not train as data parallelism "
            f"does; use {instead}, or let the step do so from its first batch on, so that the plan is made for it"
        )


Around = Callable[[Microbatch], AbstractContextManager[Finish | None]]
"""Makes the context of a run. What that gives is called when all contexts have been left, the innermost's first."""


class StepCall:
    """Calls the user's step on the parts of one batch after the other; no plan calls it from anywhere else.

    One frame stands between the schedule and the user's code. What has to be seen of a run, or done around it, stands
    in a list of contexts.

    Args:
        around: What stands around every run, the outermost first.
    """

    def __init__(self, *around: Around) -> None:
        self._around = around

    def begin(
        self,
        step: Callable[..., Any],
        rest: Sequence[Any] = (),
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """From now on call another step, with a microbatch's value and the rest, in contexts made by ``context``."""
        self._step, self._rest, self._context = step, rest, context

    def run_part(self, microbatch: Microbatch) -> Any:
        """What the step gives for a part, as the schedule is to take it."""
        with ExitStack() as stack:
            finishes = [stack.enter_context(each(microbatch)) for each in self._around]
            stack.enter_context(self._context())
            output = self._step(microbatch.value, *self._rest)
        for finish in reversed(finishes):
            output = output if finish is None else finish(output)
        return output
