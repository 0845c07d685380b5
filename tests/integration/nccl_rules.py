"""What ranks post, replayed under the rules of NCCL, without a device.

A run over an :class:`InMemoryWorld` is recorded and then replayed as NCCL would run it. Every rank has a host, which
runs ahead, one stream that it computes on, and a stream for every communicator that it is in:

* the kernels of a communicator run one after the other, in the order of their posting; each begins when the computing
  stream has come to where it was posted, and ends together with those of its peers (a small message may be buffered:
  then its sender's ends by itself);
* waiting for a kernel stops the computing stream, not the host; waiting for what travels through host memory, or for
  objects, stops the host (gloo);
* the first message of a pair over a communicator stops the host until the other end is posted, while the two connect
  (github.com/NVIDIA/nccl issues 783 and 1346), unless they have exchanged one before;
* of communicators that are made at first use, the first call stops the host until all members have come to it
  (github.com/pytorch/pytorch issues 108378 and 113281).
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Layout = Callable[[int, int], Hashable]
"""The communicator on which a message from one rank to another travels."""


def by_pair(source: int, destination: int) -> Hashable:
    """One for either direction of each pair."""
    return source, destination


def by_direction(source: int, destination: int) -> Hashable:
    """Two of the whole world, one for either direction of rank numbers."""
    return "ascending" if source < destination else "descending"


@dataclass(eq=False, slots=True)
class Call:
    """One rank's part in a message or collective.

    Attributes:
        rank: Whose.
        members: The ranks that take part; of a message source and destination.
        is_message: Whether it is point to point.
        is_source: Whether this part sends.
        on_host: Whether it travels through host memory.
        blocks: Whether the host waits for it where it is posted (objects).
        what: Equal on all members.
        at: Where in the rank's record it was posted.
        others: All members' parts.
        is_done: Whether its kernel has ended.
    """

    rank: int
    members: tuple[int, ...]
    is_message: bool
    is_source: bool
    on_host: bool
    blocks: bool
    what: str
    at: int = 0
    others: "list[Call]" = field(default_factory=list)
    is_done: bool = False

    def __str__(self) -> str:
        return f"{self.what} among {list(self.members)}"


class _Watched:
    """A work that notes when it is waited for."""

    def __init__(self, inner: Any, note: Callable[[], None]) -> None:
        self._inner, self._note = inner, note

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def wait(self) -> None:
        self._note()
        self._inner.wait()

    def result(self) -> Any:
        self._note()
        return self._inner.result()

    def __str__(self) -> str:
        return str(self._inner)


class Recording:
    """A transport that records what one rank posts and waits for.

    Args:
        inner: The transport that does it.

    Attributes:
        record: What the host did, in order: posted calls, and ``("wait", call)``.
        on_host: Whether collectives of now are of tensors that would be in host memory on any device.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.rank, self.world_size = inner, inner.rank, inner.world_size
        self.record: list[Call | tuple[str, Call]] = []
        self.on_host = False

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name in ("isend", "irecv"):
            return lambda tensor, peer, tag: self._message(value, tensor, peer, tag, is_source=name == "isend")
        if not callable(value) or name == "close":
            return value

        def collective(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or next(arg for arg in reversed(args) if isinstance(arg, (tuple, list)))
            work = value(*args, **kwargs)
            if len(group) == 1:
                return work
            is_object = name == "all_gather_object"
            return self._post(
                work, tuple(group), name, is_message=False, on_host=is_object or self.on_host, blocks=is_object
            )

        return collective

    def _message(self, call: Any, tensor: Any, peer: int, tag: int, *, is_source: bool) -> Any:
        members = (self.rank, peer) if is_source else (peer, self.rank)
        # States of random generators are in host memory on any device; nothing else that stages send is of bytes.
        on_host = tensor.element_size() == 1 and not tensor.dtype.is_floating_point
        what = f"message {tag}"
        return self._post(call(tensor, peer, tag), members, what, is_message=True, on_host=on_host, is_source=is_source)

    def _post(self, work: Any, members: tuple[int, ...], what: str, **kind: Any) -> Any:
        call = Call(self.rank, members, what=what, **{"blocks": False, "is_source": False, **kind}, at=len(self.record))
        self.record.append(call)
        return _Watched(work, lambda: self.waited(call)) if not call.blocks else work

    def waited(self, call: Call) -> None:
        """Note that the rank waits for a call."""
        self.record.append(("wait", call))

    def watch(self, run: Iterator[Any]) -> Iterator[Any]:
        """A rank's generator; what it yields it waits for."""
        for work in run:
            if isinstance(work, _Watched):
                work._note()
            yield work


@dataclass(slots=True)
class _World:
    """Where all ranks are in the replay."""

    records: Sequence[Sequence[Call | tuple[str, Call]]]
    queues: dict[tuple[int, Hashable], list[Call]]
    names: dict[int, Hashable]
    hosts: list[int]
    streams: list[int]

    def is_posted(self, call: Call) -> bool:
        return self.hosts[call.rank] > call.at

    def is_reached(self, call: Call) -> bool:
        """Whether the host has come to it, if not past it."""
        return self.hosts[call.rank] >= call.at

    def may_run(self, call: Call) -> bool:
        queue = self.queues[call.rank, self.names[id(call)]]
        return self.is_posted(call) and self.streams[call.rank] >= call.at and queue[0] is call


def replay(
    recordings: Sequence[Recording],
    layout: Layout = by_pair,
    *,
    is_connected: bool = True,
    is_eager: bool = True,
    is_buffered: bool = False,
) -> list[str]:
    """Run what was recorded by NCCL's rules.

    Args:
        recordings: Of all ranks.
        layout: Which messages share a communicator.
        is_connected: Whether pairs that send each other messages have exchanged one before.
        is_eager: Whether communicators of groups are made before they are used.
        is_buffered: Whether messages are small enough not to wait for their receiver.

    Returns:
        Where hosts and streams are stuck, if they are; and calls that meet others than their own.
    """
    records = [recording.record for recording in recordings]
    wrong = _match(records, layout)
    if wrong:
        return wrong
    names = {id(call): _name(call, layout) for record in records for call in record if isinstance(call, Call)}
    queues: dict[tuple[int, Hashable], list[Call]] = defaultdict(list)
    for record in records:
        for call in record:
            if isinstance(call, Call) and not call.on_host:
                call.is_done = False
                queues[call.rank, names[id(call)]].append(call)
    world = _World(records, queues, names, [0] * len(records), [0] * len(records))
    known: set[Hashable] = set()
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in range(len(records)):
            has_moved |= _advance(world, rank, known, is_connected, is_eager)
        has_moved |= _run_kernels(world, is_buffered=is_buffered)
    return _stuck(world)


def _name(call: Call, layout: Layout) -> Hashable:
    return ("messages", layout(*call.members)) if call.is_message else ("group", call.members)


def _match(records: Sequence[Sequence[Call | tuple[str, Call]]], layout: Layout) -> list[str]:
    """Tell each call who its peers are: by order, as NCCL does; through host memory by tag."""
    numbers: dict[Hashable, int] = defaultdict(int)
    found: dict[Hashable, list[Call]] = defaultdict(list)
    for record in records:
        for call in record:
            if not isinstance(call, Call):
                continue
            key = (call.members, call.is_message, call.on_host, call.what if call.on_host else None)
            number = numbers[key, call.rank]
            numbers[key, call.rank] += 1
            found[key, number].append(call)
    wrong = []
    for calls in found.values():
        for call in calls:
            call.others = calls
        if len(calls) != len(calls[0].members) or len({call.what for call in calls}) > 1:
            wrong.append(" meets ".join(f"rank {call.rank}: {call}" for call in calls))
    return wrong


def _advance(world: _World, rank: int, known: set[Hashable], is_connected: bool, is_eager: bool) -> bool:
    """Let a rank's host, and then its computing stream, go on as far as they can."""
    record, start = world.records[rank], (world.hosts[rank], world.streams[rank])
    while world.hosts[rank] < len(record) and _host_may_go_on(
        world, record[world.hosts[rank]], known, is_connected, is_eager
    ):
        world.hosts[rank] += 1
    while world.streams[rank] < world.hosts[rank]:
        item = record[world.streams[rank]]
        if isinstance(item, tuple) and not item[1].on_host and not item[1].is_done:
            break
        world.streams[rank] += 1
    return start != (world.hosts[rank], world.streams[rank])


def _host_may_go_on(
    world: _World, item: Call | tuple[str, Call], known: set[Hashable], is_connected: bool, is_eager: bool
) -> bool:
    if isinstance(item, tuple):
        call = item[1]
        return not call.on_host or all(map(world.is_posted, call.others))
    if item.on_host:
        return not item.blocks or all(map(world.is_reached, item.others))
    if item.is_message:
        name: Hashable = (world.names[id(item)], item.members)
        is_known = is_connected or name in known
    else:
        name = world.names[id(item)]
        is_known = is_eager or name in known
    if not is_known and not all(map(world.is_reached, item.others)):
        return False
    known.add(name)
    return True


def _run_kernels(world: _World, *, is_buffered: bool) -> bool:
    """Run every kernel that can end now; whether there was one."""
    has_run = False
    for queue in world.queues.values():
        while queue and world.may_run(queue[0]):
            call = queue[0]
            alone = is_buffered and call.is_message and call.is_source
            sent = is_buffered and call.is_message and all(each.is_done or each is call for each in call.others)
            if not (alone or sent or all(each.is_done or world.may_run(each) for each in call.others)):
                break
            for each in (call,) if alone or sent else call.others:
                each.is_done = True
                world.queues[each.rank, world.names[id(each)]].remove(each)
            has_run = True
    return has_run


def _stuck(world: _World) -> list[str]:
    found = []
    for rank, record in enumerate(world.records):
        for what, at in (("host", world.hosts[rank]), ("stream", world.streams[rank])):
            if at < len(record):
                item = record[at]
                waits = f"waits for {item[1]}" if isinstance(item, tuple) else f"posts {item}"
                found.append(f"rank {rank}: its {what} {waits}")
                break
    return found
