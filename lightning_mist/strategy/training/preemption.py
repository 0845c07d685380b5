"""Saving before a scheduler takes the machines away: on all ranks at the same place, whichever of them was told.

Lightning saves in its handler of SLURM's signal, wherever that finds a rank. One that is in a step then waits to save
with others that wait for it in the step, and has values in it that are of no step. So here the signal is kept until all
ranks begin the next batch after an update, or the next batch of an evaluation, or have come to the end of one or of
training. It is heard from the beginning of planning on.
"""

import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_mist.strategy.training.failure_handling import EndsTogether


class Preemption(EndsTogether):
    """The part of the strategy that saves when SLURM asks for it."""

    _save_and_requeue: Callable[[int, Any], None] | None = None
    _asked_by: int | None = None
    _asking: Any = None

    def setup_environment(self, **more: Any) -> None:
        """Make the process group, and hear SLURM's signal in Lightning's place."""
        super().setup_environment(**more)
        trainer: Any = self._trainer
        environment: Any = self.cluster_environment
        # Lightning's own name of it; other environments have no such thing.
        if trainer is None or not getattr(environment, "auto_requeue", False):
            return
        connector: Any = trainer._signal_connector
        self._save_and_requeue = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
        connector._slurm_sigusr_handler_fn = self._hear
        self._asked_by = None
        self._asking = dist.new_group(backend="gloo")
        number = environment.requeue_signal
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and number is not None and signal.getsignal(number) is signal.SIG_DFL:
            # Lightning hears signals only when training is set up, and planning takes longer than what DDP does then.
            signal.signal(number, self._hear)
            connector.register_signal_handlers = partial(self._hand_over, connector, number)

    def _hand_over(self, connector: Any, number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        type(connector).register_signal_handlers(connector)

    def teardown(self, **more: Any) -> None:
        """Leave Lightning's handlers as they were."""
        if self._trainer is not None:
            connector = vars(self._trainer._signal_connector)
            connector.pop("_slurm_sigusr_handler_fn", None)
            if (registering := connector.pop("register_signal_handlers", None)) is not None:
                number = registering.args[1]
                if signal.getsignal(number) == self._hear:
                    signal.signal(number, signal.SIG_DFL)  # where the fit has ended before it began
        self._save_and_requeue = None
        if self._asking is not None:
            dist.destroy_process_group(self._asking)
            self._asking = None
        super().teardown(**more)

    def on_train_batch_start(self, batch: Any, batch_idx: int, *args: Any, **more: Any) -> None:
        """Save, and have the job requeued, if any rank was told to since the update before."""
        super().on_train_batch_start(batch, batch_idx, *args, **more)
        if not self._is_within_a_step(batch_idx):
            self.save_if_asked()

    def on_train_end(self, **more: Any) -> None:
        """Save if any rank was told to in the last step."""
        super().on_train_end(**more)
        self.save_if_asked()

    def save_if_asked(self, *, is_over: bool = False) -> None:
        """Save, and have the job requeued, if any rank was told to; on all ranks at once, wherever they are.

        Args:
            is_over: Whether this rank has come to the end of an evaluation: it takes part until all have.
        """
        while self._save_and_requeue is not None:
            said = torch.tensor([self._asked_by or 0, not is_over])
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self._asking)
            number, goes_on = said.tolist()
            if number:
                self._asked_by = None
                self._save_and_requeue(number, None)
            if not (is_over and goes_on):
                return

    def _hear(self, number: int, frame: Any) -> None:
        self._asked_by = int(number)

    def _is_within_a_step(self, batch_idx: int) -> bool:
        """Whether gradients of earlier batches wait for their update, which no checkpoint holds."""
        return bool(batch_idx % self._trainer.accumulate_grad_batches)
