import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_mist.errors import PeerError
from lightning_mist.runtime.communication import failure
from lightning_mist.runtime.communication.failure import FailureWatcher, start_watcher
from lightning_mist.runtime.communication.peers import Peers

WAITS_FOREVER = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from lightning_mist.runtime.communication import failure
failure.POLL_SECONDS, failure.GRACE_SECONDS = 0.05, 3.0
rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
watcher = failure.start_watcher()
dist.barrier()
if rank == 0:
    watcher.report(RuntimeError("broken"))
    watcher.stop()
    print("reported", flush=True)
    sys.stdin.read()
else:
    try:
        dist.recv(torch.empty(1), 0)
    except RuntimeError as error:
        caught = watcher.cause(error)
        assert isinstance(caught, RuntimeError)
        print("caught", caught, flush=True)
    torch.futures.Future().wait()
"""


class Ended:
    """Stands in for the end of the process."""

    def __init__(self):
        self.said, self._event = [], threading.Event()

    def __call__(self, text):
        self.said.append(text)
        self._event.set()

    def happens(self, seconds):
        return self._event.wait(seconds)

    def wait(self):
        assert self._event.wait(30)
        return self.said[0]


class World:
    """Ranks of this process, each with a connection and as many watchers as are asked for."""

    def __init__(self, count, monkeypatch):
        store, self._monkeypatch = dist.HashStore(), monkeypatch
        with ThreadPoolExecutor(count) as pool:
            self.peers = list(pool.map(lambda rank: Peers(store, rank, count), range(count)))
        self.ends = [Ended() for _ in range(count)]
        self._watchers, self._number = [], 0

    def watch(self, **options):
        self._number += 1
        options = {"poll_seconds": 0.01, "grace_seconds": 0.01, "agree_seconds": 0.5, "told_seconds": 0.1, **options}
        for name, seconds in options.items():
            self._monkeypatch.setattr(failure, name.upper(), seconds)
        found = [FailureWatcher(peers, self._number, end=end) for peers, end in zip(self.peers, self.ends, strict=True)]
        self._watchers += found
        return found

    def close(self):
        for watcher in self._watchers:
            watcher.stop()
        for peers in self.peers:
            peers.close()


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(failure, "_COLLECTIVES", ("",))  # these tests wait elsewhere
    made = []

    def make(count):
        made.append(World(count, monkeypatch))
        return made[0]

    yield make
    for item in made:
        item.close()


def test_a_failure_ends_the_others(world):
    ranks = world(3)
    first, second, third = ranks.watch()
    second.report(ValueError("seven"))
    second.stop()
    for end in (ranks.ends[0], ranks.ends[2]):
        assert "rank 1: ValueError: seven" in end.wait()
    third.report(RuntimeError("something that follows from it"))
    first.stop()
    third.stop()
    assert ranks.ends[1].said == []


def test_who_ends_by_itself_is_not_ended(world):
    ranks = world(2)
    first, second = ranks.watch(grace_seconds=60)
    first.report(ValueError())
    second.stop()
    first.stop()
    assert [end.said for end in ranks.ends] == [[], []]


def test_failures_of_an_earlier_run_are_over(world):
    ranks = world(2)
    for watcher in ranks.watch(grace_seconds=60):
        watcher.report(ValueError("the first time"))
        watcher.stop()
    first, second = ranks.watch()
    assert second.failure() is None
    first.report(ValueError("the second time"))
    assert "the second time" in ranks.ends[1].wait()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_process_that_ends_without_a_word_is_a_failure(world, gone):
    ranks = world(3)
    ranks.watch()
    ranks.peers[gone].close()
    for rank in {0, 1, 2} - {gone}:
        assert f"rank {gone}: its process has ended without a word" in ranks.ends[rank].wait()


def test_who_was_done_may_go(world):
    ranks = world(3)
    first, second, third = ranks.watch()
    second.stop()
    ranks.peers[1].close()
    third.stop()
    ranks.peers[2].close()
    while set(ranks.peers[0].gone) != {1, 2}:
        pass
    assert first.failure() is None
    first.stop()
    assert ranks.ends[0].said == []


def test_who_was_done_with_the_fit_before_is_missed_in_this_one(world):
    ranks = world(2)
    for watcher in ranks.watch():
        watcher.stop()
    ranks.peers[1].close()
    FailureWatcher(ranks.peers[0], 2, end=ranks.ends[0])
    assert "rank 1: its process has ended" in ranks.ends[0].wait()


def test_all_that_fail_at_one_place_can_still_work_together(world):
    first, second = world(2).watch(grace_seconds=60)
    first.report(ValueError(), "7")
    second.report(ValueError(), "7")
    assert first.all_failed_together()
    assert second.all_failed_together()


@pytest.mark.parametrize(("mine", "theirs"), [("7", "8"), ("7", None), (None, None)])
def test_at_different_places_or_in_the_middle_they_cannot(world, mine, theirs):
    first, second = world(2).watch(grace_seconds=60)
    first.report(ValueError(), mine)
    second.report(ValueError(), theirs)
    assert not first.all_failed_together()
    assert not second.all_failed_together()


def test_who_fails_alone_cannot(world):
    ranks = world(2)
    first, second = ranks.watch(grace_seconds=60)
    first.report(ValueError(), "7")
    assert not first.all_failed_together()
    second.report(ValueError(), "7")
    assert not second.all_failed_together()


def test_an_error_that_follows_from_another_ranks_says_so(world):
    first, second = world(2).watch(grace_seconds=60)
    first.report(ValueError("seven"))
    caused = second.cause(RuntimeError("gloo: Connection closed by peer"), 30)
    assert isinstance(caused, ValueError)
    assert isinstance(caused, PeerError)
    assert str(caused) == "rank 0 failed, and rank 1 waited for it: ValueError: seven"
    assert "rank 0: ValueError: seven" in str(caused.__cause__)
    assert second.cause(RuntimeError("an error of its own"), 30) is None
    assert first.cause(RuntimeError("gloo"), 0) is None


def test_errors_that_cannot_travel_are_told_all_the_same(world):
    class Local(Exception):
        pass

    first, second = world(2).watch(grace_seconds=60)
    first.report(Local("seven"))
    caused = second.cause(RuntimeError("gloo"), 30)
    assert type(caused) is PeerError
    assert "seven" in str(caused)


def test_interrupts_are_not_raised_on_other_ranks(world):
    first, second = world(2).watch(grace_seconds=60)
    first.report(KeyboardInterrupt())
    assert type(second.cause(RuntimeError("gloo"), 30)) is PeerError


def test_all_ranks_come_to_the_end_or_are_not_waited_for(world):
    first, second = world(2).watch(grace_seconds=60)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda watcher: watcher.all_end(), (first, second))) == [True, True]
    ranks = world(2)
    first, second = ranks.watch(grace_seconds=60)
    second.stop()
    assert not first.all_end()


def test_who_computes_is_not_ended(world, monkeypatch):
    monkeypatch.setattr(failure, "_COLLECTIVES", ("collectives.py",))
    ranks = world(2)
    first, _ = ranks.watch()
    first.report(ValueError("seven"))
    first.stop()
    assert not ranks.ends[1].happens(1.0)


def test_a_signal_to_all_ranks_is_waited_for(world):
    ranks = world(2)
    watchers = ranks.watch(told_seconds=60)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda watcher: watcher.told_together(signal.SIGTERM), watchers))
    assert [end.said for end in ranks.ends] == [[], []]


def test_a_signal_to_one_rank_ends_all(world):
    ranks = world(2)
    _, second = ranks.watch()
    second.told_together(signal.SIGTERM)
    assert "SIGTERM ended it, and only ranks [1] were told to end" in ranks.ends[1].wait()
    assert "rank 1: SIGTERM ended it" in ranks.ends[0].wait()


def test_a_signal_to_one_rank_whose_others_are_done_is_not_waited_for(world):
    ranks = world(2)
    first, second = ranks.watch(told_seconds=60)
    first.stop()
    second.told_together(signal.SIGTERM)
    assert ranks.ends[1].said == []


def test_a_signal_is_told_while_its_handler_waits(world):
    """The main thread may be in a collective when it comes, and its handler in Python runs after that."""
    first, second = world(2).watch(told_seconds=60)
    handled = []
    before = signal.signal(signal.SIGTERM, lambda *_: handled.append(1))
    try:
        second.stop()
        first._peers.hear_signals(first._hear_signal)
        os.kill(os.getpid(), signal.SIGTERM)
        while 0 not in first._peers.said("told", 1):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled


@pytest.mark.usefixtures("single_rank")
def test_one_rank_alone_is_not_watched():
    assert start_watcher() is None


def test_a_rank_in_a_collective_that_never_ends_is_interrupted_and_one_that_waits_on_is_ended():
    """Its peer lives on, so nothing else breaks the connection."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", WAITS_FOREVER, str(rank), str(server.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for rank in range(2)
    )
    try:
        output, said = second.communicate(timeout=60)
        assert "caught rank 0 failed, and rank 1 waited for it: RuntimeError: broken" in output
        assert first.poll() is None
        assert second.returncode == 1
        assert "rank 0: RuntimeError: broken" in said
        assert "rank 1 was still waiting" in said
        assert "in wait" in said
    finally:
        first.kill()
        second.kill()
        first.communicate()
        second.communicate()
