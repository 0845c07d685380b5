"""One failing rank ends all ranks, also where the backend would wait for its watchdog.

A rank that raises, or whose process ends, while others wait for it in a collective leaves them waiting: gloo notices
when a connection breaks (not if a loader's worker still holds it), NCCL after its timeout of many minutes. So every
process has a thread that listens to the other ranks. A rank that fails tells them what happened. Once it has left the
fit, those that wait for it are cut off from it: what they wait in raises, the error of the rank that failed is raised
there, and a program may handle it on all ranks and fit again, on process groups made anew. A rank that waits on is
ended. So it goes too where ranks that have not failed wait for each other, or for one that has left.
A process that ends without a word is a failure unless it has said that its part of this fit is done.
"""

import base64
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_mist.errors import PeerError, caught_as
from lightning_mist.runtime.communication.peers import Peers

POLL_SECONDS = 0.5
"""Time between looks at what has been heard."""

GRACE_SECONDS = 10.0
"""How long a rank may wait once it has been cut off from one that has failed or left, or was told to end."""

CUT_SECONDS = 1.0
"""How long a rank waits for one that has failed and left before it is cut off from it: it may be about to fail too."""

STUCK_SECONDS = 4.0
"""Ranks that all wait for so long, while nothing arrives, wait for each other."""

_FRESH = 4
"""After so many looks without a word from it a rank no longer counts as stuck."""

_COLLECTIVES = (
    *("torch/distributed/distributed_c10d.py", "torch/nn/parallel/distributed.py", "torch/autograd/graph.py"),
    *("torch/futures/__init__.py", "runtime/communication/transport.py", "runtime/communication/peers.py"),
)
"""Where a thread is that waits for other ranks; in backward it may."""

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


def _are_at_one(places: dict[int, str]) -> bool:
    return len(set(places.values())) == 1 and "" not in places.values()


class FailureWatcher:
    """Watches for failures of other ranks, from its start to its stop.

    Every rank starts as many watchers as the others, one after the other; a failure is seen by those of the same
    number.

    Args:
        number: How many watchers this rank has started, with this one.
        end: Ends the process, saying why; called in the watcher's thread.

    Attributes:
        has_failed: Whether this rank has reported a failure of its own.
    """

    def __init__(self, peers: Peers, number: int, *, end: Callable[[str], None] = _end_process) -> None:
        self._peers, self._number, self._rank, self._end = peers, number, peers.rank, end
        self._stopped = threading.Event()
        self.has_failed = False
        self._agreed: bool | None = None
        self._cut: str | None = None
        self._used, self._repeats = 0.0, 0
        self._heard: dict[int, tuple[str, float]] = {}
        self._process, self._main = os.getpid(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="lightning-mist-failures", daemon=True)
        self._thread.start()
        peers.hear_signals(self._hear_signal)

    # This rank fails ---------------------------------------------------------------------------------------------

    def report(self, error: BaseException, place: str | None = None) -> None:
        """Tell the other ranks that this one fails; only the first report of a rank counts.

        Args:
            place: Where this rank is; ranks that fail at equal places may still talk to each other. ``None`` for a
                place where they may not.
        """
        if self.has_failed or os.getpid() != self._process:
            return
        self.has_failed = True
        text = _shortened("".join(traceback.format_exception(error)))
        with suppress(Exception):  # not every error can travel
            self._peers.say("error", self._number, base64.b64encode(pickle.dumps(error)).decode())
        self._peers.say("place", self._number, "" if place is None or self._cut else f"at {place}")
        self._say_connections()
        self._peers.say("failure", self._number, text, wait_seconds=2.0)

    @property
    def is_on(self) -> bool:
        """Whether it watches a fit that goes on here."""
        return not self._stopped.is_set() and not self.has_failed and self._cut is None

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
        until = time.monotonic() + AGREE_SECONDS
        while True:
            places = self._peers.said("place", self._number)
            if len(places) == self._peers.world_size:
                return _are_at_one(places) and not self._is_apart()
            if self._is_apart() or "" in places.values() or time.monotonic() > until:
                return False
            time.sleep(0.05)

    def _is_apart(self) -> bool:
        return bool(self._peers.said("apart", self._number) or self._left())

    def told_together(self, number: int) -> None:
        """Return once every rank has been told to end; if only some have been, end this process.

        For handlers of signals. Without this the ranks that were told would wait for those that were not.
        """
        name = signal.Signals(number).name
        self._peers.say("told", self._number)
        until = time.monotonic() + TOLD_SECONDS
        while not self._all_told():
            if self._stopped.is_set():
                return
            if time.monotonic() > until:
                told = sorted(self._peers.said("told", self._number))
                stack = "".join(traceback.format_stack(limit=30))
                text = f"{name} ended it, and only ranks {told} were told to end. It was here:\n{stack}"
                self.has_failed = True
                self._peers.say("failure", self._number, _shortened(text), wait_seconds=2.0)
                self._end(f"lightning-mist: rank {self._rank}: {text}")
                return
            time.sleep(0.05)

    def _hear_signal(self, number: int) -> None:
        if number == signal.SIGTERM:
            self._peers.say("told", self._number)

    def _all_told(self) -> bool:
        return len(self._left().union(self._peers.said("told", self._number))) == self._peers.world_size

    # Others fail -------------------------------------------------------------------------------------------------

    def failure(self) -> str | None:
        """What has failed first on another rank, if anything, with that rank's traceback."""
        for rank, text in self._peers.said("failure", self._number).items():
            if rank != self._rank:
                return f"rank {rank}: {text}"
        for rank in self._peers.gone:
            if rank not in self._peers.said("done", self._number):
                return f"rank {rank}: its process has ended without a word: killed, or left by os._exit"
        return None

    def cause(self, error: BaseException, wait_seconds: float = 1.0) -> Exception | None:
        """What is to be raised in place of an error that came of another rank's failing or leaving."""
        is_broken = isinstance(error, dist.DistError) or "gloo" in str(error)
        if self.has_failed or not is_broken or not isinstance(error, RuntimeError):
            return None
        until = time.monotonic() + wait_seconds
        while (found := self.failure() or self._cut) is None and time.monotonic() < until:
            time.sleep(0.02)
        errors = self._peers.said("error", self._number)
        rank = next((rank for rank in self._peers.said("failure", self._number) if rank != self._rank), None)
        if found is None or rank not in errors:
            return None if found is None else PeerError(found)
        original = None
        with suppress(Exception):  # it is of a class that is not known here
            original = pickle.loads(base64.b64decode(errors[rank]))
        last = found.strip().rpartition("\n")[2].removeprefix(f"rank {rank}: ")
        caused = caught_as(original, PeerError(f"rank {rank} failed, and rank {self._rank} waited for it: {last}"))
        caused.__cause__ = PeerError(found)
        return caused

    def all_end(self) -> bool:
        """Whether all ranks come to the end of training, where this one is; waits for those that are on their way."""
        self._peers.say("ended", self._number)
        # Who waited for this rank until now, such as for a file that it wrote, takes some time to say that it goes on.
        until = time.monotonic() + STUCK_SECONDS
        while missing := self._others() - self._peers.said("ended", self._number).keys():
            stay_away = self._left() | (self._stuck() if time.monotonic() > until else set())
            if self.failure() is not None or missing <= stay_away:
                self._peers.say("ended", self._number, "alone", wait_seconds=2.0)
                return False
            time.sleep(0.02)
        return not any(self._peers.said("ended", self._number).values())

    def _others(self) -> set[int]:
        return set(range(self._peers.world_size)) - {self._rank}

    def _left(self) -> set[int]:
        return {*self._peers.said("done", self._number), *self._peers.gone}

    def _stuck(self) -> set[int]:
        """The ranks that say so again and again: one that is stopped meanwhile takes nothing back."""
        now = time.monotonic()
        for rank, text in self._peers.said("stuck", self._number).items():
            if self._heard.get(rank, ("", now))[0] != text:
                self._heard[rank] = text, now
        return {rank for rank, (text, at) in self._heard.items() if text and now - at < _FRESH * POLL_SECONDS}

    def stop(self) -> None:
        """Watch no longer; this rank has ended what the others could wait for, or has failed itself."""
        if self._stopped.is_set() or os.getpid() != self._process:
            return
        self._stopped.set()
        self._peers.hear_signals(None)
        if self._stuck():
            self._say_connections()
        self._peers.say("done", self._number, wait_seconds=2.0)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        since, moved = None, time.monotonic()
        while not self._stopped.wait(POLL_SECONDS):
            now, is_waiting = time.monotonic(), self._is_waiting()
            moved = now if is_waiting is False else moved
            self._say_stuck(is_waiting is True and now - moved >= STUCK_SECONDS)
            trouble = self._trouble()
            if trouble is None:
                since = None
                continue
            since = now if since is None else since
            known, waited = now - since, now - max(since, moved)
            is_writing = self.has_failed and not (self._agreed and self._is_apart())
            is_lost = waited >= CUT_SECONDS and self._nobody_comes()
            if not self.has_failed and self._cut is None and (is_lost or known >= GRACE_SECONDS):
                self._cut_off(trouble)
                since = now  # from here on it has time to end by itself
                continue
            limit = PATIENCE_SECONDS if is_writing else GRACE_SECONDS
            if max(waited, known - PATIENCE_SECONDS + limit) >= limit:
                self._end(
                    f"lightning-mist: {trouble}\nlightning-mist: rank {self._rank} was still waiting "
                    f"{limit:.0f} s later, here, and ends now:\n{self._whereabouts()}"
                )
                return

    def _trouble(self) -> str | None:
        """Why what this rank may wait for may never come."""
        if (failure := self.failure()) is not None or self._rank not in self._stuck():
            return failure
        if self._rank in self._peers.said("told", self._number) and not self._all_told():
            return f"rank {self._rank} was told to end"
        left = sorted(self._left())
        who = f"ranks {left} have left the fit" if left else "every rank waits for another"
        why = f"{who}, and rank {self._rank} waits: do all have equally many batches, and take the same branches?"
        return why if self._nobody_comes() else None

    def _nobody_comes(self) -> bool:
        failed = self._peers.said("failure", self._number).keys() - {self._rank}
        return bool(failed & self._left()) or self._others() <= self._left() | self._stuck()

    def _cut_off(self, trouble: str) -> None:
        """Let what this rank waits in raise."""
        self._cut = trouble
        self._peers.say("place", self._number, "")
        self._peers.cut(self._number)
        for group in list(dist.distributed_c10d._world.pg_map):
            with suppress(RuntimeError):
                group.abort()  # nothing under gloo, which its connections wake

    def _say_connections(self) -> None:
        self._peers.say("connections", self._number, json.dumps([*self._peers.connections()]))

    def _say_stuck(self, is_stuck: bool) -> None:
        is_stuck = is_stuck and min(self._peers.connections().values(), default=0.0) >= STUCK_SECONDS
        if is_stuck and not self._repeats:
            self._say_connections()
        if is_stuck or self._repeats:
            self._repeats = self._repeats + 1 if is_stuck else 0
            self._peers.say("stuck", self._number, str(self._repeats) if is_stuck else "")

    def _is_waiting(self) -> bool | None:
        """Whether the main thread waits for other ranks; ``None`` where that is not to be seen."""
        is_on_host = not dist.is_initialized() or dist.get_backend() == "gloo"
        if not is_on_host or torch.accelerator.is_available() or not hasattr(time, "pthread_getcpuclockid"):
            return None  # who waits for a device may use a processor
        before, self._used = self._used, time.clock_gettime(time.pthread_getcpuclockid(self._main))
        frame: Any = sys._current_frames().get(self._main)
        return frame is not None and frame.f_code.co_filename.endswith(_COLLECTIVES) and self._used == before

    def _whereabouts(self) -> str:
        frame: Any = sys._current_frames().get(self._main)
        return "" if frame is None else "".join(traceback.format_stack(frame, limit=12))


class _Started:
    """What this process has started for its default process group."""

    store: Any = None
    peers: Peers | None = None
    watcher: FailureWatcher | None = None
    count: int = 0


def _miss(gone: set[int]) -> None:
    if gone:
        raise PeerError(f"the processes of ranks {sorted(gone)} have ended, and this takes all ranks: start again")


def begin_anew(timeout: timedelta | None) -> None:
    """Once all ranks have left the fit before: make process groups anew where it may have broken them."""
    peers, number = _Started.peers, _Started.count
    if peers is None or not dist.is_initialized() or _Started.store is not dist.distributed_c10d._get_default_store():
        return
    if _Started.watcher is not None:
        if _Started.watcher.is_on:
            return  # a fit inside of another
        _Started.watcher.stop()
    if not peers.is_whole:
        return
    while missing := set(range(peers.world_size)) - peers.said("done", number).keys():
        _miss(missing & set(peers.gone))
        time.sleep(0.02)
    places = peers.said("place", number)
    _miss(set(peers.gone) if places else set())
    if not places or (len(places) == peers.world_size and _are_at_one(places)):
        return
    peers.cut(number)  # what is left in them must not wait for the end of the others
    backend, device = dist.get_backend(), getattr(dist.group.WORLD, "bound_device_id", None)
    dist.destroy_process_group()
    store = dist.PrefixStore(f"lightning_mist/again/{number}", _Started.store)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=peers.rank, world_size=peers.world_size, timeout=timeout, device_id=device
    )
    _Started.store = dist.distributed_c10d._get_default_store()


def start_watcher(*, is_one_machine: bool = True) -> FailureWatcher | None:
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
    _Started.watcher = FailureWatcher(_Started.peers, _Started.count)
    return _Started.watcher
