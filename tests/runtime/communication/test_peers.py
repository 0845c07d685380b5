import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_mist.runtime.communication import peers as peers_module
from lightning_mist.runtime.communication.peers import Peers


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def connect():
    made = []

    def make(store, count, **options):
        with ThreadPoolExecutor(count) as pool:
            made.extend(pool.map(lambda rank: Peers(store, rank, count, **options), range(count)))
        return made[-count:]

    yield make
    for item in made:
        item.close()


def until(condition):
    while not condition():
        pass


@pytest.mark.parametrize("is_one_machine", [True, False])
def test_what_one_says_all_hear(store, connect, is_one_machine):
    ranks = connect(store, 3, is_one_machine=is_one_machine)
    ranks[1].say("word", 1, "from one")
    for peers in ranks:
        until(lambda peers=peers: peers.said("word", 1) == {1: "from one"})
    assert ranks[0].said("word", 2) == {}


def test_only_what_was_said_last_stays(store, connect):
    first, _ = connect(store, 2)
    first.say("word", 1, "first")
    first.say("word", 1, "second")
    assert first.said("word", 1) == {0: "second"}


def test_what_was_said_last_is_known_before_the_end(store, connect):
    first, second, third = connect(store, 3)
    second.say("word", 1, "last", wait_seconds=30)
    second.close()
    for peers in (first, third):
        until(lambda peers=peers: peers.gone)
        assert peers.gone == (1,)
        assert peers.said("word", 1) == {1: "last"}


def test_who_comes_later_hears_what_was_said_before(store, connect):
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(lambda: connect(store, 1)[0])
        first = coming.result()
        first.say("word", 1, "early", wait_seconds=30)
    second = Peers(store, 1, 2)
    until(lambda: second.said("word", 1) == {0: "early"})
    second.close()


def test_connections_over_one_store_are_apart(store, connect):
    first, _ = connect(store, 2)
    first.say("word", 1, wait_seconds=30)
    _, second = connect(store, 2)
    assert second.said("word", 1) == {}


def test_a_stranger_is_not_let_in(store, connect):
    (first,) = connect(store, 1)
    port = first._server.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall(b'{"rank": 1, "key": "guessed"}\n')
        assert stranger.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\n")
        assert stranger.recv(1) == b""
    assert first.gone == ()


def test_who_never_comes_has_ended_on_the_way(store, connect, monkeypatch):
    monkeypatch.setattr(peers_module, "_ARRIVE_SECONDS", 0.0)
    first = Peers(store, 0, 2)
    until(lambda: first.gone == (1,))
    first.close()


def test_who_cannot_connect_says_so(store, monkeypatch):
    monkeypatch.setattr(peers_module, "_ARRIVE_SECONDS", 0.0)
    store.set("lightning_mist/peers/1", '{"hosts": ["127.0.0.1"], "port": 1, "key": ""}')
    with pytest.warns(UserWarning, match=r"rank 1 cannot connect to rank 0 at 127.0.0.1, port 1"):
        second = Peers(store, 1, 2)
    first = Peers(store, 0, 2)
    until(lambda: first._deadline is None)
    assert first.gone == ()
    first.close()
    second.close()


def test_a_copy_of_the_process_does_not_keep_the_connection(store, connect):
    first, second = connect(store, 2)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # as a loader's worker that lives on
        os._exit(0)
    second.close()
    until(lambda: first.gone == (1,))
    os.close(writing)
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0
