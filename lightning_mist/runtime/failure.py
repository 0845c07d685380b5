"""One failing rank ends all ranks, also where the backend would wait for its watchdog.

A rank that raises while others wait for it in a collective leaves them waiting: gloo notices when the connection
breaks, NCCL after its timeout of many minutes. So every process has a thread that looks into the store through which
the processes found each other. A rank that fails writes there what happened; the others have some seconds to end by
themselves (a broken connection gives them a traceback of their own), then their watchers end them.
"""

import os
import sys
import threading
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

POLL_SECONDS = 1.0
"""Time between looks into the store: one request of some bytes per second and rank."""

GRACE_SECONDS = 15.0
"""Time for a rank to end by itself once another one has failed: gloo's broken connections took 7 to 11 seconds to end
all of two and four processes."""

_REPORT_CHARACTERS = 8000
"""The end of a traceback that other ranks are told: what failed stands at its end."""

_STORE_TIMEOUT = timedelta(seconds=30)
"""How long a request to the store may take before the store counts as gone."""


def _end_process(report: str) -> None:
    """End this process at once: its main thread may be inside a call that never returns."""
    print(report, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def second_connection(store: Any) -> Any:
    """The same keys through a connection of its own, where a store cannot do that itself (``Store.clone``, torch 2.8).

    Ranks that share the keys of ``store`` share those of the result. Stores without a server are no connections: they
    are returned as they are.
    """
    stores: Any = dist  # whose stubs do not name what it exports
    inner = store
    while isinstance(inner, stores.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, stores.TCPStore):
        return store
    # What the prefixes are torch does not tell: a name of these keys, from whoever comes first, stands for them.
    name = store.compare_set("lightning_mist/name", "", uuid.uuid4().hex).decode()
    return stores.PrefixStore(name, stores.TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False))


class FailureWatcher:
    """Watches for failures of other ranks, from its start to its stop.

    Every rank starts as many watchers as the others, one after the other; a failure is seen by those of the same
    number.

    Args:
        store: The store that all ranks reach; a connection of its own is made if the store has several.
        rank: This rank.
        end: Ends the process, saying why; called in the watcher's thread.
        poll_seconds: Time between looks.
        grace_seconds: Time for this rank to end by itself.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        *,
        end: Callable[[str], None] = _end_process,
        poll_seconds: float = POLL_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._rank, self._end = rank, end
        self._poll_seconds, self._grace_seconds = poll_seconds, grace_seconds
        # Requests of one connection wait for each other, and the main thread's may be waiting for a peer.
        self._store = store.clone() if hasattr(store, "clone") else second_connection(store)
        self._store.set_timeout(_STORE_TIMEOUT)
        number = self._store.add(f"lightning_mist/watchers/{rank}", 1)
        self._key = f"lightning_mist/failure/{number}"
        self._stopped, self._is_work_done = threading.Event(), False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="lightning-mist-failures", daemon=True)
        self._thread.start()

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails; the first report of all counts."""
        text = "".join(traceback.format_exception(error))[-_REPORT_CHARACTERS:]
        try:
            with self._lock:
                self._store.compare_set(self._key, "", f"rank {self._rank}: {text}")
        except dist.DistError:
            return  # the store has ended with its process, and the others' watchers see that too

    def work_is_done(self) -> None:
        """From now on the store may go with its process, whose rank may have ended well before this one does."""
        self._is_work_done = True

    def stop(self) -> None:
        """Watch no longer; this rank has ended what the others could wait for, or has failed itself."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_seconds):
            failure = self._look()
            if failure is not None:
                if not self._stopped.wait(self._grace_seconds):
                    self._end(
                        f"lightning-mist: {failure}\nlightning-mist: rank {self._rank} was still waiting "
                        f"{self._grace_seconds:.0f} s later and ends now"
                    )
                return

    def _look(self) -> str | None:
        """What has failed, if anything."""
        try:
            with self._lock:
                if not self._store.check([self._key]):
                    return None
                return str(self._store.get(self._key).decode())
        except dist.DistError as error:
            if self._is_work_done:
                return None
            return f"the process that holds the store of all ranks has ended ({error})"


def start_watcher(**options: Any) -> FailureWatcher | None:
    """The watcher of this rank, on the default process group's store; ``None`` where there are no other ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # The store of the default group has no other name; torch's own watchdogs use it.
    store = dist.distributed_c10d._get_default_store()
    return FailureWatcher(store, dist.get_rank(), **options)
