"""An engine for loops that users write: its backward may come later than its forward, or never."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.runtime.communication import Microbatch, Work, complete
from lightning_mist.runtime.parameters import works
from lightning_mist.runtime.random_state import get_random_state
from lightning_mist.strategy.training import BatchResult, Engine
from lightning_mist.tensors import gradients_aside

Gradients = list[tuple[nn.Parameter, Tensor]]


class _Pause:
    """Where a schedule waits for the user's backward."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class LoopEngine(Engine):
    """An engine that also runs a batch's forward and its backward apart, under plans of one stage and whole batches."""

    _held: Iterator[Work] | None = None

    # The whole schedule in forward -------------------------------------------------------------------------------

    def run_batch(
        self, batch: Any, step: Callable[[Any], Any], loss_scale: float | Tensor
    ) -> tuple[BatchResult, Gradients]:
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
        pause = _Pause()
        self._held = self._halves(step, pause)
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

    def _halves(self, step: Callable[[Any], Any], pause: Work) -> Iterator[Work]:
        guard = self.guard

        def run(microbatch: Microbatch) -> Any:
            with nullcontext() if guard is None else guard.run(microbatch):
                return step(microbatch.value)

        with nullcontext() if guard is None else guard.batch():
            yield from self.executor.run(self.exchange.microbatches, run, pause=pause)

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


def whole_fill(engine: Engine) -> None:
    """Give every rank the whole module, also where nothing may be differentiated later."""
    with torch.inference_mode(False), torch.no_grad():
        engine.fill()
