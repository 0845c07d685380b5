"""One failing rank ends all ranks, also where the backend would wait for its watchdog.

A rank that raises, or whose process ends, while others wait for it in a collective leaves them waiting: gloo notices
when a connection breaks (not if a loader's worker still holds it), NCCL after its timeout of many minutes. So every
process has a thread that listens to the other ranks. A rank that fails tells them what happened; the others have some
seconds to end by themselves (a broken connection gives them a traceback of their own), then their watchers end them.
A process that ends without a word is a failure unless it has said that its part of this fit is done.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_mist.runtime.communication.peers import Peers

POLL_SECONDS = 0.5
"""Time between looks at what has been heard."""

GRACE_SECONDS = 15.0
"""Time for a rank to end by itself once another one has failed: gloo's broken connections took 7 to 11 seconds to end
all of two and four processes."""

PATIENCE_SECONDS = 600.0
"""Time for a rank that has failed itself to end, which may be writing a checkpoint that others no longer wait for."""

AGREE_SECONDS = 10.0
"""How long a rank that fails waits to hear that all others fail with it."""

TOLD_SECONDS = 25.0
"""How long a rank that was told to end waits to hear that all others were told."""

_REPORT_CHARACTERS = 12000
"""The end of a traceback that other ranks are told: what failed stands at its end."""


def _shortened(text: str) -> str:
    if len(text) <= _REPORT_CHARACTERS:
        return text
    return "...\n" + text[-_REPORT_CHARACTERS:].partition("\n")[2]


def _end_process(report: str) -> None:
    """End this process at once: its main thread may be inside a call that never returns."""
    print(report, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


class FailureWatcher:
    """Watches for failures of other ranks, from its start to its stop.

    Every rank starts as many watchers as the others, one after the other; a failure is seen by those of the same
    number.

    Args:
        number: How many watchers this rank has started, with this one.
        end: Ends the process, saying why; called in the watcher's thread.
    """

    def __init__(
        self,
        peers: Peers,
        number: int,
        *,
        end: Callable[[str], None] = _end_process,
        poll_seconds: float = POLL_SECONDS,
        grace_seconds: float | None = None,
        agree_seconds: float | None = None,
        told_seconds: float | None = None,
    ) -> None:
        self._peers, self._number, self._rank, self._end = peers, number, peers.rank, end
        self._poll_seconds = poll_seconds
        self._grace_seconds = GRACE_SECONDS if grace_seconds is None else grace_seconds
        self._agree_seconds = AGREE_SECONDS if agree_seconds is None else agree_seconds
        self._told_seconds = TOLD_SECONDS if told_seconds is None else told_seconds
        self._stopped = threading.Event()
        self._has_failed = False
        self._agreed: bool | None = None
        self._process, self._main = os.getpid(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="lightning-mist-failures", daemon=True)
        self._thread.start()
        peers.hear_signals(self._hear_signal)

    # This rank fails ---------------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether this rank has reported a failure of its own."""
        return self._has_failed

    def report(self, error: BaseException, place: str | None = None) -> None:
        """Tell the other ranks that this one fails; only the first report of a rank counts.

        Args:
            place: Where this rank is; ranks that fail at equal places may still talk to each other. ``None`` for a
                place where they may not.
        """
        if self._has_failed or os.getpid() != self._process:
            return
        self._has_failed = True
        text = _shortened("".join(traceback.format_exception(error)))
        self._peers.say("place", self._number, "" if place is None else f"at {place}")
        self._peers.say("failure", self._number, text, wait_seconds=2.0)

    def all_failed_together(self) -> bool:
        """Whether all ranks have failed at the same place, so that they can still do something together.

        The answer of the first time stays. All ranks get the same one, but for one that hears of the last of the others
        in the moment in which that one gives up; it is ended then.
        """
        if self._agreed is None:
            self._agreed = self._agree()
            if not self._agreed:
                self._peers.say("apart", self._number, wait_seconds=2.0)
        return self._agreed

    def _agree(self) -> bool:
        until = time.monotonic() + self._agree_seconds
        while True:
            places = self._peers.said("place", self._number)
            if len(places) == self._peers.world_size:
                return len(set(places.values())) == 1 and "" not in places.values() and not self._is_apart()
            if self._is_apart() or "" in places.values() or time.monotonic() > until:
                return False
            time.sleep(0.05)

    def _is_apart(self) -> bool:
        return bool(self._peers.said("apart", self._number) or self._peers.gone)

    def told_together(self, number: int) -> None:
        """Return once every rank has been told to end; if only some have been, end this process.

        For handlers of signals. Without this the ranks that were told would wait for those that were not.
        """
        name = signal.Signals(number).name
        self._peers.say("told", self._number)
        until = time.monotonic() + self._told_seconds
        while not self._all_told():
            if self._stopped.is_set():
                return
            if time.monotonic() > until:
                told = sorted(self._peers.said("told", self._number))
                stack = "".join(traceback.format_stack(limit=30))
                text = f"{name} ended it, and only ranks {told} were told to end. It was here:\n{stack}"
                self._has_failed = True
                self._peers.say("failure", self._number, _shortened(text), wait_seconds=2.0)
                self._end(f"lightning-mist: rank {self._rank}: {text}")
                return
            time.sleep(0.05)

    def _hear_signal(self, number: int) -> None:
        if number == signal.SIGTERM:
            self._peers.say("told", self._number)

    def _all_told(self) -> bool:
        heard = {*self._peers.said("told", self._number), *self._peers.said("done", self._number)}
        return len(heard) == self._peers.world_size

    # Others fail -------------------------------------------------------------------------------------------------

    def failure(self) -> str | None:
        """What has failed first on another rank, if anything, with that rank's traceback."""
        for rank, text in self._peers.said("failure", self._number).items():
            if rank != self._rank:
                return f"rank {rank}: {text}"
        for rank in self._peers.gone:
            if not self._is_done(rank):
                return f"rank {rank}: its process has ended without a word: killed, or left by os._exit"
        return None

    def cause(self, error: BaseException, wait_seconds: float = 1.0) -> str | None:
        """What failed on another rank before this error did here, if it may have come of that."""
        if self._has_failed or not isinstance(error, RuntimeError):
            return None
        until = time.monotonic() + wait_seconds
        while (found := self.failure()) is None and time.monotonic() < until:
            time.sleep(0.02)
        return found

    def _is_done(self, rank: int) -> bool:
        return rank in self._peers.said("done", self._number)

    def stop(self) -> None:
        """Watch no longer; this rank has ended what the others could wait for, or has failed itself."""
        if self._stopped.is_set() or os.getpid() != self._process:
            return
        self._stopped.set()
        self._peers.hear_signals(None)
        self._peers.say("done", self._number, wait_seconds=2.0)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        since: float | None = None
        while not self._stopped.wait(self._poll_seconds):
            failure = self.failure()
            if failure is None:
                continue
            since = time.monotonic() if since is None else since
            is_writing = self._has_failed and not (self._agreed and self._is_apart())
            limit = PATIENCE_SECONDS if is_writing else self._grace_seconds
            if time.monotonic() - since >= limit:
                self._end(
                    f"lightning-mist: {failure}\nlightning-mist: rank {self._rank} was still waiting "
                    f"{limit:.0f} s later, here, and ends now:\n{self._whereabouts()}"
                )
                return

    def _whereabouts(self) -> str:
        frame: Any = sys._current_frames().get(self._main)
        return "" if frame is None else "".join(traceback.format_stack(frame, limit=12))


class _Started:
    """What this process has started for its default process group."""

    store: Any = None
    peers: Peers | None = None
    count: int = 0


def start_watcher(*, is_one_machine: bool = True, **options: Any) -> FailureWatcher | None:
    """The watcher of this rank, on the default process group's store; ``None`` where there are no other ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # The store of the default group has no other name; torch's own watchdogs use it.
    store = dist.distributed_c10d._get_default_store()
    if _Started.peers is None or _Started.store is not store:
        if _Started.peers is not None:
            _Started.peers.close()
        _Started.peers = Peers(store, dist.get_rank(), dist.get_world_size(), is_one_machine=is_one_machine)
        _Started.store, _Started.count = store, 0
    _Started.count += 1
    return FailureWatcher(_Started.peers, _Started.count, **options)
