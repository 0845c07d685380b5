"""Saving before a scheduler takes the machines away: between two steps, on all ranks, whichever of them was told.

Lightning saves in its handler of SLURM's signal, wherever that finds a rank. One that is in a step then waits to save
with others that wait for it in the step, and has values in it that are of no step. So here the signal is kept until all
ranks begin the next batch after an update.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class Preemption(_Base):
    """The part of the strategy that saves when SLURM asks for it."""

    _save_and_requeue: Callable[[int, Any], None] | None = None
    _asked_by: int | None = None
    _asking: Any = None

    def setup_environment(self) -> None:
        """Make the process group, and hear SLURM's signal in Lightning's place."""
        super().setup_environment()
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        # Lightning's own name of it; other environments have no such thing.
        if trainer is None or not getattr(self.cluster_environment, "auto_requeue", False):
            return
        connector: Any = trainer._signal_connector
        self._save_and_requeue = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
        connector._slurm_sigusr_handler_fn = self._hear
        self._asked_by = None
        self._asking = dist.new_group(backend="gloo")

    def teardown(self) -> None:
        """Leave Lightning's handler as it was."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None:
            vars(trainer._signal_connector).pop("_slurm_sigusr_handler_fn", None)
        self._save_and_requeue = None
        if self._asking is not None:
            dist.destroy_process_group(self._asking)
            self._asking = None
        super().teardown()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Save, and have the job requeued, if any rank was told to since the update before."""
        super().on_train_batch_start(batch, batch_idx)
        if self._save_and_requeue is None or self._is_within_a_step(batch_idx):
            return
        number = torch.tensor(self._asked_by or 0)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._asking)
        if number:
            self._asked_by = None
            self._save_and_requeue(int(number), None)

    def _hear(self, number: int, frame: Any) -> None:
        self._asked_by = int(number)

    def _is_within_a_step(self, batch_idx: int) -> bool:
        """Whether gradients of earlier batches wait for their update, which no checkpoint holds."""
        assert self.lightning_module is not None
        return batch_idx % self.lightning_module.trainer.accumulate_grad_batches != 0
