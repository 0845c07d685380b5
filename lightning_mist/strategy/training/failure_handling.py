"""How a fit ends when something fails: on all ranks, soon, with what failed first.

The other ranks must hear of a failure before Lightning's callbacks do: a callback may save a checkpoint, for which the
values of all ranks are gathered, while the others still wait in the batch. So what Lightning's launcher runs is watched
itself, and while this rank fails nothing waits for ranks that may be gone.
"""

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_mist.attributes import replaced
from lightning_mist.errors import PeerError
from lightning_mist.runtime.communication import FailureWatcher, begin_anew, start_watcher

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base

    from lightning_mist.strategy.training.engine import Engine
else:
    _Base = object

_log = logging.getLogger(__name__)


def watched(
    strategy: "EndsTogether", launched_by: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run what a launcher of some process runs; errors are told to the other ranks before Lightning handles them."""
    if os.getpid() != launched_by:
        # A process group that an earlier fit left to the garbage collector would wait for its threads, which a forked
        # process does not have.
        gc.freeze()
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        # Lightning's tuners end a trial of theirs so, on all ranks.
        is_over = type(error).__name__ == "_TunerExitException"
        caused = None if is_over else strategy.failing(error)
        if caused is None:
            raise
        raise caused.with_traceback(error.__traceback__)  # noqa: B904  what caused it is known


def _launch(launcher: Any, strategy: "EndsTogether", function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return type(launcher).launch(launcher, partial(watched, strategy, os.getpid(), function), *args, **kwargs)


class EndsTogether(_Base):
    """The part of the strategy that hears of failures and tells of them."""

    _watcher: FailureWatcher | None = None
    _engine: "Engine | None" = None
    _begun: int = 0
    _ended: int = 0
    _is_told: bool = False
    _timeout: timedelta | None

    @property
    def _module(self) -> Any:
        """The user's module; there is one from ``setup`` on."""
        return self.lightning_module

    @property
    def _trainer(self) -> Any:
        """The trainer of the module, if there is one."""
        return getattr(self.lightning_module, "_trainer", None)

    def _configure_launcher(self, **more: Any) -> None:
        super()._configure_launcher(**more)
        launcher: Any = self._launcher
        # Lightning asks what class a launcher is of, so it stays the one that it was.
        launcher.launch = partial(_launch, launcher, self)

    def setup_environment(self, **more: Any) -> None:
        """Make the process group, and watch for failures of other ranks from now on."""
        begin_anew(self._timeout)
        super().setup_environment(**more)
        self.stop_watching()  # where an earlier fit was never torn down
        self._begun = self._ended = 0
        if self.world_size > 1:
            self._watcher = start_watcher(is_one_machine=self.num_nodes == 1)
        if self._watcher is not None and self._trainer is not None:
            connector: Any = self._trainer._signal_connector
            connector._sigterm_notifier_fn = partial(_told, self, connector)

    def stop_watching(self) -> None:
        """Nobody waits for this rank any longer."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()
        if self._trainer is not None:
            vars(self._trainer._signal_connector).pop("_sigterm_notifier_fn", None)

    def on_exception(self, exception: BaseException, **more: Any) -> None:
        """Tell the other ranks, which may be waiting for this one where nothing would ever wake them."""
        super().on_exception(exception, **more)
        self.failing(exception)

    def failing(self, error: BaseException) -> Exception | None:
        """Tell the other ranks that this one fails; what is to be raised in its place if another one made it fail."""
        if self._watcher is None or self._watcher.has_failed:
            return None
        caused = self._watcher.cause(error)
        self._watcher.report(caused or error, None if caused else self._place())
        return caused

    # While this rank fails ---------------------------------------------------------------------------------------

    @contextmanager
    def all_take_part(self) -> Iterator[None]:
        """Around work that ranks do together: what is left by an error was not done to its end."""
        self._begun += 1
        yield
        self._ended += 1

    def _place(self) -> str | None:
        """What all ranks have come to if they can still work together; ``None`` in the middle of a pipeline."""
        if self._begun == self._ended:
            return str(self._begun)
        if self._engine is None or self._engine.plan.num_stages > 1:
            return None
        # Ranks of one stage run the same collectives: having run as many they wait for none.
        return f"{self._begun} {self._engine.transport.posted}"

    @property
    def _is_failing(self) -> bool:
        return self._watcher is not None and self._watcher.has_failed

    def refuse_without_the_others(self, what: str) -> None:
        """Raise if this takes ranks that have failed or gone, rather than wait for them."""
        watcher = self._watcher
        if watcher is None or (watcher.all_failed_together() if watcher.has_failed else watcher.failure() is None):
            return
        failure = watcher.failure()
        first = "not all ranks failed, or not at the same place" if failure is None else failure.strip()
        raise PeerError(
            f"{what} takes what every rank has, and rank {self.global_rank} cannot have it of the others any more: "
            f"{first}. Checkpoints that were written before are whole"
        )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; not while this one fails, since the others may be gone."""
        if not self._is_failing:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0, **more: Any) -> Any:
        """Give all ranks what one has; while this rank fails it keeps its own."""
        return obj if self._is_failing else super().broadcast(obj, src, **more)


def _told(strategy: EndsTogether, connector: Any, number: int, frame: Any) -> None:
    """Handle SIGTERM as Lightning does, but wait for the other ranks to be told no longer than they have a chance to.

    Lightning's handler broadcasts: where only some ranks are told (by a person, or by a scheduler that ends one task)
    they wait in it until the timeout of the process group, and so do the others in their next collective.
    """
    if strategy._is_told:
        return
    with replaced(strategy, _is_told=True):
        _log.info("rank %d received signal %d", strategy.global_rank, number)
        launcher: Any = strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(number)
        if strategy._watcher is not None:
            strategy._watcher.told_together(number)
        connector.received_sigterm = True


class Preemption(EndsTogether):
    """The part of the strategy that saves before SLURM takes the machines away: on all ranks at the same place.

    Lightning saves in its handler of SLURM's signal, wherever that finds a rank. One that is in a step then waits to
    save with others that wait for it in the step, and has values in it that are of no step. So here the signal is kept
    until all ranks begin the next batch after an update, or the next batch of an evaluation, or have come to the end of
    one or of training. It is heard from the beginning of planning on.
    """

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
        # In between, gradients of earlier batches wait for their update, which no checkpoint holds.
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
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
