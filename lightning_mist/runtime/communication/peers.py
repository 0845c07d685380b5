"""A connection of every process to the first one, which closes when a process ends, in whatever way it ends.

Killed, left by ``os._exit``, returned from its script without a word: the system closes what a process had open, and
the others hear of it at once, whatever their main threads wait for. Nothing here is a matter of time: a process that
is stopped, swapped out or busy for minutes keeps its connection. The short notes that processes give each other (what
failed, that a fit is over) travel on the same connections, so what a process said last is known before it is gone.

Rank 0 listens and passes on what it hears; its address is found through the store that all ranks reach.
"""

import json
import os
import secrets
import selectors
import signal
import socket
import stat
import struct
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

_CONNECT_SECONDS = 30.0
"""How long a rank tries to reach rank 0 before it does without."""

_ARRIVE_SECONDS = 40.0
"""After this a rank that shared the store's rendezvous and never connected has ended in between."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 5}
"""A machine that goes without closing anything is noticed after 45 seconds of silence."""

_ARRIVED, _UNDER_WAY = 52, 24
"""Where ``tcpi_last_data_recv`` and ``tcpi_unacked`` are in Linux's ``struct tcp_info`` (include/uapi/linux/tcp.h)."""

_every: "weakref.WeakSet[Peers]" = weakref.WeakSet()


def _innermost(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store


class Peers:
    """This process's connection to all others of a process group, from its making to the end of the process.

    Every rank makes it at the same time, rank 0 first or last alike.

    Args:
        store: The store that all ranks reach; used now and not later.
    """

    on_signal: Callable[[int], None] | None = None

    def __init__(self, store: Any, rank: int, world_size: int, *, is_one_machine: bool = True) -> None:
        self.rank, self.world_size = rank, world_size
        self._notes: dict[tuple[str, int], dict[int, str]] = {}
        self._gone: dict[int, None] = {}
        self._outbox: deque[tuple[bytes, threading.Event]] = deque()
        self._history: dict[tuple[Any, ...], bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._wake_number = self._wake.fileno()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._links: dict[socket.socket, _Link] = {}
        self._ports = {getattr(_innermost(store), "port", None)}  # of what must outlive a failure
        self._server: socket.socket | None = None
        self._is_open = True
        # Fits on the same store follow each other: each process counts for itself, and all count alike.
        prefix = f"lightning_mist/peers/{store.add(f'lightning_mist/peers/count/{rank}', 1)}"
        # Requests of one connection wait for each other, and the main thread's may be waiting for a peer.
        self._store, self._prefix = store.clone(), prefix
        if rank == 0:
            self._listen(store, prefix, is_one_machine)
        else:
            self._connect(store, prefix)
        self._deadline: float | None = time.monotonic() + _ARRIVE_SECONDS if rank == 0 else None
        _every.add(self)
        self._thread = threading.Thread(target=self._serve, name="lightning-mist-peers", daemon=True)
        self._thread.start()

    # What others may ask -----------------------------------------------------------------------------------------

    def say(self, kind: str, number: int, text: str = "", *, wait_seconds: float = 0.0) -> None:
        """Let all ranks know something, in place of what was said of it before; this rank knows it at once.

        It waits at most so long until that has left this process.
        """
        self._notes.setdefault((kind, number), {})[self.rank] = text
        sent = threading.Event()
        self._outbox.append((_line(self.rank, kind, number, text), sent))
        if self._is_open:
            self._nudge()
            if wait_seconds and threading.current_thread() is not self._thread:
                sent.wait(wait_seconds)

    def said(self, kind: str, number: int) -> dict[int, str]:
        """What ranks have said, the first one first."""
        return dict(self._notes.get((kind, number), {}))

    @property
    def gone(self) -> tuple[int, ...]:
        """Ranks whose processes have ended, the first one first."""
        return tuple(self._gone)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have come to be connected, so far as is known."""
        return not any(self._store.check([f"{self._prefix}/apart/{rank}"]) for rank in range(self.world_size))

    def connections(self, cut: Collection[str] = ()) -> dict[str, float]:
        """Seconds since something last arrived (0 if unknown), by both ends of this process's other TCP connections.

        Args:
            cut: Names that another rank gave them: these are shut down, and nobody waits in them any longer.
        """
        found = {}
        numbers: list[str] = []
        with suppress(OSError):  # as many files are open as may be
            numbers = os.listdir("/dev/fd")
        for number in map(int, numbers):
            with suppress(OSError):  # closed by now, or not connected
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    blocks = os.get_blocking(number)
                    with socket.socket(fileno=os.dup(number)) as end:
                        os.set_blocking(number, blocks)  # which a default of timeouts has changed for both
                        own, other = end.getsockname()[:2], end.getpeername()[:2]
                        is_tcp = end.family in (socket.AF_INET, socket.AF_INET6)
                        if is_tcp and self._ports.isdisjoint((own[1], other[1])):
                            found[f"{own} {other}"] = _silence(end)
                            if f"{other} {own}" in cut:
                                end.shutdown(socket.SHUT_RDWR)
        return found

    def cut(self, number: int) -> None:
        """Shut down what connects this process to others by what these said of it."""
        told = self.said("connections", number).items()
        self.connections([name for rank, text in told if rank != self.rank for name in json.loads(text)])

    def close(self) -> None:
        """End the connection, as the end of the process does."""
        self._is_open = False
        self.hear_signals(None)
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._nudge()
            self._thread.join()

    def hear_signals(self, on_signal: Callable[[int], None] | None) -> None:
        """Call something in this connection's thread when a signal comes, or no longer.

        A handler in Python must wait until the main thread leaves what it is in, which may be a collective that waits
        for a peer whose handler waits for this process. Does nothing outside the main thread, or where somebody else
        listens already.
        """
        self.on_signal = on_signal
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._wake_number):
            signal.set_wakeup_fd(before)
        elif on_signal is not None:
            signal.set_wakeup_fd(self._wake_number, warn_on_full_buffer=False)

    def _nudge(self) -> None:
        """Let the thread look at what is to be sent."""
        with suppress(OSError):  # it has not looked at the last ones yet, or the process is ending
            self._wake.send(b"\0")

    def forget(self) -> None:
        """Close this process's ends only: it is a copy of the one that the connection is of."""
        self._is_open = False
        self.hear_signals(None)
        for end in (*self._links, self._server, self._wake, self._woken):
            if end is not None:
                end.close()

    # The making --------------------------------------------------------------------------------------------------

    def _listen(self, store: Any, prefix: str, is_one_machine: bool) -> None:
        if is_one_machine:
            server, hosts = socket.create_server(("127.0.0.1", 0)), ["127.0.0.1"]
        else:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
            hosts = [socket.gethostname(), *_addresses()]
        server.setblocking(False)
        self._server = server
        self._selector.register(server, selectors.EVENT_READ)
        self._ports.add(server.getsockname()[1])
        self._key = secrets.token_hex(16)
        store.set(prefix, json.dumps({"hosts": hosts, "port": server.getsockname()[1], "key": self._key}))

    def _connect(self, store: Any, prefix: str) -> None:
        found = json.loads(store.get(prefix).decode())
        self._ports.add(found["port"])
        hosts = [*found["hosts"]]
        if hosts != ["127.0.0.1"] and os.environ.get("MASTER_ADDR"):
            hosts.insert(0, os.environ["MASTER_ADDR"])  # where rank 0 is reached already
        link = _reach(hosts, found["port"], found["key"], self.rank)
        if link is None:
            self._store.set(f"{prefix}/apart/{self.rank}", "")
            warnings.warn(
                f"rank {self.rank} cannot connect to rank 0 at {' or '.join(hosts)}, port {found['port']}: if a process"
                " ends without a word, others notice only when a collective breaks or its timeout is over",
                stacklevel=2,
            )
            return
        self._add(link)

    def _add(self, link: "_Link") -> None:
        self._links[link.end] = link
        link.end.settimeout(10.0)
        self._selector.register(link.end, selectors.EVENT_READ)

    # The thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while self._is_open:
            for key, _ in self._selector.select(1.0 if self._deadline is not None else None):
                end = key.fileobj
                if end is self._woken:
                    self._drain()
                elif end is self._server:
                    self._accept()
                else:
                    self._read(self._links[end])  # type: ignore[index]
            self._expect_all()
        self.forget()

    def _drain(self) -> None:
        signals = {number for number in self._woken.recv(4096) if number}
        listener = self.on_signal
        if listener is not None:
            for number in sorted(signals):
                listener(number)
        while self._outbox:
            line, sent = self._outbox.popleft()
            self._pass_on(line)
            sent.set()

    def _pass_on(self, line: bytes, but: "_Link | None" = None) -> None:
        if self._server is not None:
            note = json.loads(line)
            self._history[note["rank"], note["kind"], note["number"]] = line
        for link in self._links.values():
            if link is not but and link.rank is not None:
                link.send(line)

    def _accept(self) -> None:
        assert self._server is not None
        try:
            end, _ = self._server.accept()
        except OSError:
            return  # who knocked has gone
        self._add(_Link(end, None))

    def _read(self, link: "_Link") -> None:
        lines = link.lines()
        if lines is None:
            self._drop(link)
            if link.rank is not None:
                self._lost(link.rank)
            return
        for line in lines:
            if link.rank is None:
                self._greet(link, line)
            else:
                self._hear(link, line)

    def _greet(self, link: "_Link", line: bytes) -> None:
        """Take in a rank that shows the key; whoever else knocks is not answered."""
        try:
            note = json.loads(line)
            rank = int(note["rank"]) if secrets.compare_digest(str(note["key"]), self._key) else None
        except (ValueError, KeyError, TypeError):
            rank = None
        if rank is None:
            self._drop(link)
            return
        link.rank = rank
        link.send(b"".join([_line(0, "welcome", 0, self._key), *self._history.values()]))

    def _drop(self, link: "_Link") -> None:
        self._selector.unregister(link.end)
        del self._links[link.end]
        link.end.close()

    def _hear(self, link: "_Link", line: bytes) -> None:
        note = json.loads(line)
        if note["kind"] == "gone":
            self._gone.setdefault(note["rank"])
        else:
            self._notes.setdefault((note["kind"], note["number"]), {})[note["rank"]] = note["text"]
        if self._server is not None:
            self._pass_on(line + b"\n", but=link)

    def _lost(self, rank: int) -> None:
        self._gone.setdefault(rank)
        if self._server is not None:
            self._pass_on(_line(rank, "gone", 0, ""))

    def _expect_all(self) -> None:
        """On rank 0: who was at the rendezvous and does not come has ended on the way."""
        if self._deadline is None or time.monotonic() < self._deadline:
            return
        self._deadline = None
        here = {link.rank for link in self._links.values()} | set(self._gone)
        for rank in range(1, self.world_size):
            if rank not in here and not self._store.check([f"{self._prefix}/apart/{rank}"]):
                self._lost(rank)


class _Link:
    """One connection, and what of a line has arrived on it."""

    def __init__(self, end: socket.socket, rank: int | None) -> None:
        self.end, self.rank, self._rest = end, rank, b""
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not every system has all of them
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, data: bytes) -> None:
        with suppress(OSError):  # it has gone, as the next reading says
            self.end.sendall(data)

    def is_welcome(self, key: str) -> bool:
        """Whether the other end is rank 0; waits for its answer."""
        answer = b""
        try:
            while (byte := self.end.recv(1)) not in (b"", b"\n"):
                answer += byte
            return bool(json.loads(answer)["text"] == key)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def lines(self) -> list[bytes] | None:
        """The whole lines that have arrived; ``None`` once the other end is closed."""
        try:
            data = self.end.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def _silence(end: socket.socket) -> float:
    """Seconds since something last arrived; 0 where the system does not tell, or something is under way."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ARRIVED + 4)
    if struct.unpack_from("I", info, _UNDER_WAY)[0]:
        return 0.0
    return float(struct.unpack_from("I", info, _ARRIVED)[0]) / 1000


def _line(rank: int, kind: str, number: int, text: str) -> bytes:
    return json.dumps({"rank": rank, "kind": kind, "number": number, "text": text}).encode() + b"\n"


def _reach(hosts: Sequence[str], port: int, key: str, rank: int) -> _Link | None:
    """The connection to rank 0 on the first of these hosts that knows the key."""
    every = list(dict.fromkeys(hosts))
    seconds = _CONNECT_SECONDS / len(every)  # an address that swallows what is sent to it leaves time for the next
    for host in every:
        try:
            end = socket.create_connection((host, port), timeout=seconds)
        except OSError:
            continue
        link = _Link(end, 0)
        end.settimeout(seconds)
        link.send(json.dumps({"rank": rank, "key": key}).encode() + b"\n")
        if link.is_welcome(key):
            return link
        end.close()
    return None


def _addresses() -> list[str]:
    """Addresses of this machine, as its name is resolved."""
    try:
        return list(dict.fromkeys(str(item[4][0]) for item in socket.getaddrinfo(socket.gethostname(), None)))
    except OSError:
        return []


def _forget_all() -> None:
    """In a forked copy of this process, such as a loader's worker: the connection must not outlive the process."""
    for peers in list(_every):
        peers.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
