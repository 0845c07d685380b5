"""Many ranks in one process: a transport whose works complete when every peer has posted its part.

:func:`~tests.turns.drive` runs the ranks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_mist.errors import ScheduleError
from lightning_mist.runtime.communication.transport import TensorWork, Work, check_contiguous, check_entries
from lightning_mist.tensor_parallel.collectives import Reduction
from tests.turns import drive, wait_in_turn

__all__ = ["InMemoryTransport", "InMemoryWorld", "drive"]


@dataclass(eq=False, slots=True)
class _MemoryWork:
    """One rank's part in a message or collective."""

    text: str
    tensor: Tensor | None = None
    value: Any = None
    done: bool = False
    values: list[Any] = field(default_factory=list)

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        wait_in_turn(self)
        if not self.done:
            raise ScheduleError(f"deadlock: {self.text} is waited for, but its peers have not posted their part")

    def result(self) -> list[Any]:
        self.wait()
        return self.values

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False, slots=True)
class _MemoryResult(_MemoryWork):
    """One rank's part in a collective that gives a new tensor."""

    output: Tensor | None = None

    def result(self) -> Tensor:  # type: ignore[override]
        self.wait()
        assert self.output is not None
        return self.output


@dataclass(slots=True)
class _Collective:
    """A collective in which some ranks of the group have arrived."""

    kind: tuple[Any, ...]
    parts: dict[int, _MemoryWork] = field(default_factory=dict)


class InMemoryWorld:
    """Connects the ranks of one process.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.transports = tuple(InMemoryTransport(self, rank) for rank in range(size))
        self._sends: dict[tuple[int, int, int], deque[_MemoryWork]] = defaultdict(deque)
        self._receives: dict[tuple[int, int, int], deque[_MemoryWork]] = defaultdict(deque)
        self._collectives: dict[tuple[tuple[int, ...], int], _Collective] = {}
        self._calls: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)

    @property
    def pending(self) -> tuple[str, ...]:
        """What was posted and has not been matched by its peers."""
        messages = [work for queues in (self._sends, self._receives) for queue in queues.values() for work in queue]
        parts = [work for collective in self._collectives.values() for work in collective.parts.values()]
        return tuple(str(work) for work in (*messages, *parts))

    def message(self, work: _MemoryWork, source: int, destination: int, tag: int, *, is_send: bool) -> _MemoryWork:
        """Post one end of a message; copy if the other end is there."""
        key = (source, destination, tag)
        mine, theirs = (self._sends, self._receives) if is_send else (self._receives, self._sends)
        if not theirs[key]:
            mine[key].append(work)
            return work
        other = theirs[key].popleft()
        send, receive = (work, other) if is_send else (other, work)
        assert send.tensor is not None
        assert receive.tensor is not None
        if send.tensor.numel() != receive.tensor.numel() or send.tensor.dtype != receive.tensor.dtype:
            raise ScheduleError(f"{send} meets {receive}: both ends of a message must agree on elements and dtype")
        with torch.no_grad():
            receive.tensor.copy_(send.tensor.reshape(receive.tensor.shape))
        _finish(send, receive)
        return work

    def collective(
        self,
        work: _MemoryWork,
        rank: int,
        group: tuple[int, ...],
        kind: tuple[Any, ...],
        run: Callable[[Sequence[_MemoryWork]], None],
    ) -> _MemoryWork:
        """Post one rank's part of its next collective on a group; run it if it is the last."""
        if rank not in group or group != tuple(sorted(set(group))):
            raise ScheduleError(f"{work} by rank {rank}: a group is sorted and names each rank once, the caller's too")
        number = self._calls[group, rank]
        self._calls[group, rank] += 1
        entry = self._collectives.setdefault((group, number), _Collective(kind))
        if entry.kind != kind:
            there = next(iter(entry.parts.values()))
            raise ScheduleError(f"{work} meets {there}: ranks of a group must call the same collectives in one order")
        entry.parts[rank] = work
        if len(entry.parts) == len(group):
            del self._collectives[group, number]
            with torch.no_grad():
                run([entry.parts[member] for member in group])
            _finish(*entry.parts.values())
        return work


class InMemoryTransport:
    """The transport of one rank of an :class:`InMemoryWorld`."""

    def __init__(self, world: InMemoryWorld, rank: int) -> None:
        self.rank, self.world_size, self._world = rank, world.size, world

    def isend(self, tensor: Tensor, destination: int, tag: int) -> Work:
        """Send a contiguous tensor; it must not change until the work is complete."""
        work = _MemoryWork(f"rank {self.rank}: {_describe('send', tensor)} to rank {destination}, tag {tag}", tensor)
        return self._world.message(work, self.rank, destination, tag, is_send=True)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Receive into a contiguous tensor."""
        work = _MemoryWork(f"rank {self.rank}: {_describe('receive', tensor)} from rank {source}, tag {tag}", tensor)
        return self._world.message(work, source, self.rank, tag, is_send=False)

    def all_reduce(self, tensor: Tensor, group: Sequence[int], reduction: Reduction = "sum") -> Work:
        """Reduce a contiguous tensor over the group, in place, in the order of ranks."""

        def run(parts: Sequence[_MemoryWork]) -> None:
            total = _sum(parts) if reduction == "sum" else _largest(parts)
            for part in parts:
                _tensor(part).copy_(total)

        return self._collective("all-reduce", tensor, group, (reduction,), run)

    def all_gather(self, tensor: Tensor, group: Sequence[int]) -> TensorWork:
        """Give every rank of the group the contiguous tensors of all, stacked in group order."""

        def run(parts: Sequence[_MemoryWork]) -> None:
            for part in parts:
                assert isinstance(part, _MemoryResult)
                part.output = torch.stack([_tensor(other).reshape(_tensor(part).shape) for other in parts])

        return self._with_result("all-gather", tensor, group, run)

    def all_gather_into(self, tensor: Tensor, group: Sequence[int]) -> Work:
        """Give every rank of the group what each has of a contiguous tensor."""

        def run(parts: Sequence[_MemoryWork]) -> None:
            rows = [_tensor(part).view(len(parts), -1)[index].clone() for index, part in enumerate(parts)]
            for part in parts:
                _tensor(part).view(-1).copy_(torch.cat(rows))

        return self._collective("all-gather", tensor, group, ("in place",), run)

    def reduce_scatter(self, tensor: Tensor, group: Sequence[int]) -> TensorWork:
        """Give every rank of the group the sum of its entry of the contiguous tensors of all."""
        check_entries(tensor, group)

        def run(parts: Sequence[_MemoryWork]) -> None:
            for part, entry in zip(parts, _sum(parts), strict=True):
                assert isinstance(part, _MemoryResult)
                part.output = entry.clone()

        return self._with_result("reduce-scatter", tensor, group, run)

    def reduce(self, tensor: Tensor, destination: int, group: Sequence[int]) -> Work:
        """Sum a contiguous tensor over the group into the destination's tensor; others' are overwritten."""

        def run(parts: Sequence[_MemoryWork]) -> None:
            total = _sum(parts)
            for member, part in zip(group, parts, strict=True):
                # What the protocol leaves undefined must not look like a result.
                _tensor(part).copy_(total) if member == destination else _tensor(part).fill_(_GARBAGE)

        return self._collective("reduce", tensor, group, (destination,), run)

    def broadcast(self, tensor: Tensor, source: int, group: Sequence[int]) -> Work:
        """Copy the source's contiguous tensor to every rank of the group."""

        def run(parts: Sequence[_MemoryWork]) -> None:
            origin = _tensor(parts[tuple(group).index(source)])
            for part in parts:
                if _tensor(part) is not origin:  # the source's is read only
                    _tensor(part).copy_(origin)

        return self._collective("broadcast", tensor, group, (source,), run)

    def all_gather_object(self, value: Any, group: Sequence[int]) -> list[Any]:
        """The values of all ranks of the group, in group order."""

        def run(parts: Sequence[_MemoryWork]) -> None:
            values = [part.value for part in parts]
            for part in parts:
                part.values = list(values)

        work = _MemoryWork(f"rank {self.rank}: gather of objects over {list(group)}", value=value)
        return self._world.collective(work, self.rank, tuple(group), ("objects",), run).result()

    def close(self) -> None:
        """Nothing is held."""

    def _collective(
        self,
        name: str,
        tensor: Tensor,
        group: Sequence[int],
        arguments: tuple[int | str, ...],
        run: Callable[[Sequence[_MemoryWork]], None],
    ) -> Work:
        text = f"rank {self.rank}: {_describe(name, tensor)} over {list(group)}"
        kind = (name, *arguments, tensor.numel(), tensor.dtype)
        return self._world.collective(_MemoryWork(text, tensor), self.rank, tuple(group), kind, run)

    def _with_result(
        self, name: str, tensor: Tensor, group: Sequence[int], run: Callable[[Sequence[_MemoryWork]], None]
    ) -> TensorWork:
        work = _MemoryResult(f"rank {self.rank}: {_describe(name, tensor)} over {list(group)}", tensor)
        self._world.collective(work, self.rank, tuple(group), (name, tensor.numel(), tensor.dtype), run)
        return work


_GARBAGE = 77
"""Fills what a reduction leaves undefined; any value that no test expects does."""


def _finish(*works: _MemoryWork) -> None:
    for work in works:
        work.done, work.tensor = True, None


def _tensor(work: _MemoryWork) -> Tensor:
    assert work.tensor is not None
    return work.tensor


def _sum(parts: Sequence[_MemoryWork]) -> Tensor:
    total = _tensor(parts[0]).clone()
    for part in parts[1:]:
        total += _tensor(part).reshape(total.shape)
    return total


def _largest(parts: Sequence[_MemoryWork]) -> Tensor:
    return torch.stack([_tensor(part).reshape(_tensor(parts[0]).shape) for part in parts]).amax(0)


def _describe(name: str, tensor: Tensor) -> str:
    check_contiguous(tensor, name)
    return f"{name} of {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
