import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_mist.runtime.failure import FailureWatcher, second_connection, start_watcher

WAITS_FOREVER = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from lightning_mist.runtime.failure import start_watcher
rank, file = int(sys.argv[1]), sys.argv[2]
store = dist.TCPStore("127.0.0.1", int(sys.argv[3]), 2, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
watcher = start_watcher(poll_seconds=0.05, grace_seconds=0.2)
dist.barrier()
if rank == 0:
    watcher.report(RuntimeError("broken"))
    watcher.stop()
    print("reported", flush=True)
    sys.stdin.read()
else:
    dist.recv(torch.empty(1), 0)
"""


class Ended:
    """Stands in for the end of the process."""

    def __init__(self):
        self.said, self._event = [], threading.Event()

    def __call__(self, text):
        self.said.append(text)
        self._event.set()

    def wait(self):
        assert self._event.wait(30)
        return self.said[0]


def watchers(store, count, ends, **options):
    return [
        FailureWatcher(store, rank, end=ends[rank], poll_seconds=0.01, **{"grace_seconds": 0.01, **options})
        for rank in range(count)
    ]


@pytest.fixture
def store():
    return dist.HashStore()


def test_a_failure_ends_the_others(store):
    ends = [Ended() for _ in range(3)]
    first, second, third = watchers(store, 3, ends)
    second.report(ValueError("seven"))
    second.stop()
    for end in (ends[0], ends[2]):
        assert "rank 1: ValueError: seven" in end.wait()
    third.report(RuntimeError("something that follows from it"))
    first.stop()
    third.stop()
    assert ends[1].said == []


def test_who_ends_by_itself_is_not_ended(store):
    ends = [Ended(), Ended()]
    first, second = watchers(store, 2, ends, grace_seconds=60)
    first.report(ValueError())
    second.stop()
    first.stop()
    assert not second._thread.is_alive()
    assert [end.said for end in ends] == [[], []]


def test_failures_of_an_earlier_run_are_over(store):
    ends = [Ended(), Ended()]
    for watcher in watchers(store, 2, ends, grace_seconds=60):
        watcher.report(ValueError("the first time"))
        watcher.stop()
    first, second = watchers(store, 2, ends)
    assert second._look() is None
    first.report(ValueError("the second time"))
    assert "the second time" in ends[1].wait()
    first.stop()
    second.stop()


def test_a_store_that_has_ended_is_a_failure():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    end = Ended()
    watcher = FailureWatcher(client, 1, end=end, poll_seconds=0.01, grace_seconds=0.01)
    del server
    assert "the process that holds the store of all ranks has ended" in end.wait()
    watcher.report(ValueError("too late to be heard"))
    watcher.stop()


def test_a_second_connection_has_the_same_keys():
    """What a store without ``clone`` is given."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    first, second, other = (
        second_connection(dist.PrefixStore("outer", dist.PrefixStore(prefix, store)))
        for prefix, store in (("run 1", server), ("run 1", client), ("run 2", client))
    )
    first.set("key", "value")
    assert second.check(["key"])
    assert not other.check(["key"])
    inner = second.underlying_store
    assert isinstance(inner, dist.TCPStore)
    assert inner is not client


def test_a_store_without_a_server_is_its_own_connection(store):
    assert second_connection(store) is store


@pytest.mark.usefixtures("single_rank")
def test_one_rank_alone_is_not_watched():
    assert start_watcher() is None


def test_a_rank_in_a_collective_that_never_ends_is_ended():
    """Its peer lives on, so nothing breaks the connection: as NCCL would leave it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", WAITS_FOREVER, str(rank), "", str(server.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    )
    try:
        _, said = second.communicate(timeout=60)
        assert first.poll() is None
        assert second.returncode == 1
        assert "rank 0: RuntimeError: broken" in said
        assert "rank 1 was still waiting" in said
    finally:
        first.kill()
        second.kill()
        first.communicate()
        second.communicate()


def test_a_store_may_end_once_the_work_is_done():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    end = Ended()
    watcher = FailureWatcher(client, 1, end=end, poll_seconds=60, grace_seconds=0.01)
    watcher.work_is_done()
    del server
    assert watcher._look() is None
    watcher.stop()
    assert end.said == []
