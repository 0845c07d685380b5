"""Many ranks in one process, each in a thread of its own, taking turns: exactly one runs at a time.

A rank runs until what it waits for is not complete, be it a work that its generator yields or one whose ``wait`` is
called deep inside its forward or backward. Then the next rank that can go on does. So collectives between ranks may lie
anywhere in a rank's computation, and everything happens in one order that is the same in every run.

Threads share what a process has once. The default generator is exchanged with the turn: every rank draws from a stream
of its own, as in a process of its own. Modes that torch keeps per thread start as they are where :func:`drive` is
called; process-wide patches that span a wait are for their authors to share
(:class:`~lightning_mist.attributes.SharedPatch`).
"""

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_mist.errors import ScheduleError
from lightning_mist.runtime.communication.transport import Work

_HERE = threading.local()


def _is_completed(work: Any) -> bool:
    """Whether waiting for a work would take no turns: those of transports in memory say so, others take none."""
    return not hasattr(work, "is_completed") or bool(work.is_completed())


class _Ended(BaseException):
    """Leaves a rank that will not get another turn."""


class _Modes:
    """What torch keeps per thread and a caller may have set."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self._dispatch = _get_current_dispatch_mode_stack()

    def enter(self, stack: ExitStack) -> None:
        """Set them in this thread."""
        for mode in self._dispatch:
            stack.enter_context(mode)
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        if self._autocast[0]:
            # Only then: an outer context, even a disabled one, keeps the casts of parameters from step to step.
            stack.enter_context(torch.autocast("cpu", dtype=self._autocast[1]))
        # Of a device too, backward runs here and not in a thread that all ranks share.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))


class _Seat:
    """One rank in its thread."""

    def __init__(self, run: Iterator[Work], modes: _Modes) -> None:
        self._run, self._modes = run, modes
        self.waiting: Work | None = None
        self.is_done, self.result = False, None
        self.error: BaseException | None = None
        self._is_ended = False
        self._random_state = torch.get_rng_state()
        self._mine, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=copy_context().run, args=(self._live,), daemon=True)

    @property
    def can_go_on(self) -> bool:
        """Whether what the rank waits for is complete."""
        return self.waiting is None or _is_completed(self.waiting)

    @property
    def random_state(self) -> torch.Tensor:
        """The state of the rank's generator when its last turn ended."""
        return self._random_state

    def take_turn(self) -> None:
        """Let the rank run until it waits for something or is done."""
        torch.set_rng_state(self._random_state)
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._mine.release()
        self._back.acquire()
        self._random_state = torch.get_rng_state()

    def end(self) -> None:
        """Leave the rank wherever it is."""
        self._is_ended = True
        if self._thread.ident is None:
            self.is_done = True
        while not self.is_done:
            self.take_turn()
        if self._thread.ident is not None:
            self._thread.join()
        if isinstance(self._run, Generator):
            self._run.close()

    def wait(self, work: Work) -> None:
        """Let others run until a work is complete; called by the rank itself."""
        while not _is_completed(work):
            self.waiting = work
            self._pause()
            self.waiting = None

    def _pause(self) -> None:
        if not self._is_ended:
            self._back.release()
            self._mine.acquire()
        if self._is_ended:
            raise _Ended

    def _live(self) -> None:
        _HERE.seat = self
        try:
            with ExitStack() as stack:
                self._modes.enter(stack)
                while True:
                    try:
                        work = next(self._run)
                    except StopIteration as stop:
                        self.result = stop.value
                        return
                    self.wait(work)
                    # A work may hold the tensor it moved; the next one may be long in coming.
                    del work
        except _Ended:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.is_done = True
            self._back.release()


def wait_in_turn(work: Work) -> None:
    """Let other ranks run until a work is complete.

    Returns at once outside of :func:`drive`, where there are none.
    """
    seat: _Seat | None = getattr(_HERE, "seat", None)
    if seat is not None:
        seat.wait(work)


def drive(runs: Sequence[Iterator[Work]]) -> list[Any]:
    """Run the generators of all ranks in turn, each for as long as what it waits for is complete.

    Every rank starts with the state of the default generator at the call; the first rank's is left at the end.

    Args:
        runs: One generator of pending works per rank.

    Returns:
        What each generator returned.

    Raises:
        ScheduleError: If no rank can go on; the message names what each one waits for.
        BaseException: What a rank raised; the others are left where they are.
    """
    modes = _Modes()
    seats = [_Seat(run, modes) for run in runs]
    try:
        left = list(seats)
        while left:
            moved = False
            for seat in tuple(left):
                if not seat.can_go_on:
                    continue
                moved = True
                seat.take_turn()
                if seat.error is not None:
                    raise seat.error
                if seat.is_done:
                    left.remove(seat)
            if not moved:
                raise ScheduleError("deadlock: every rank waits. " + "; ".join(str(seat.waiting) for seat in left))
    finally:
        for seat in seats:
            seat.end()
        if seats:
            torch.set_rng_state(seats[0].random_state)
    return [seat.result for seat in seats]
