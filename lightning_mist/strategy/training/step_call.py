"""The one place from which a plan calls the user's step: one frame stands between the schedule and the user's code.

What has to be seen of a run, or done around it, stands in a list of contexts.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from lightning_mist.runtime.communication import Microbatch
from lightning_mist.strategy.training.log_records import Finish

Around = Callable[[Microbatch], AbstractContextManager[Finish | None]]
"""Makes the context of a run. What that gives is called when all contexts have been left, the innermost's first."""


class StepCall:
    """Calls the user's step on the parts of one batch after the other.

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
        """Call another step from now on.

        Args:
            step: Is called with the value of a microbatch, and the rest.
            context: In which it runs.
        """
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
