"""How tensors get from rank to rank: a protocol, its implementation over torch.distributed, and how to drive it.

Work that spans ranks is written as a generator that yields each :class:`Work` it must wait for. In a process of its
own :func:`complete` runs it by blocking; tests run the generators of many ranks in one process.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mist.attributes import replaced
from lightning_mist.errors import PlanError, ScheduleError, TraceError
from lightning_mist.plan import LiveTensor, row_slice
from lightning_mist.plan.mesh import MESSAGE_CHANNELS, Mesh, Overlap, Side, overlaps, side_of
from lightning_mist.tensor_parallel.collectives import Reduction


class Work(Protocol):
    """A transfer or collective in progress."""

    def wait(self) -> None:
        """Block until the transfer is complete and its results may be read."""


class Transport(Protocol):
    """What one rank needs to talk to the others. Methods return at once; groups are sorted global ranks.

    Calls on one group must come in the same order on each of its ranks. Point-to-point messages between two ranks
    arrive in the order of their tags' posting.
    """

    rank: int
    world_size: int
    posted: int

    def isend(self, tensor: Tensor, destination: int, tag: int) -> Work:
        """Send a contiguous tensor; it must not change until the work is complete."""

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Receive into a contiguous tensor."""

    def all_reduce(self, tensor: Tensor, group: Sequence[int], reduction: Reduction = "sum") -> Work:
        """Reduce a contiguous tensor over the group, in place."""

    def all_gather(self, tensor: Tensor, group: Sequence[int]) -> "TensorWork":
        """Give every rank of the group the contiguous tensors of all, stacked along a new first dimension."""

    def all_gather_into(self, tensor: Tensor, group: Sequence[int]) -> Work:
        """Give every rank of the group what each has of a contiguous tensor: equal parts, in group order."""

    def reduce_scatter(self, tensor: Tensor, group: Sequence[int]) -> "TensorWork":
        """Give every rank of the group the sum of its entry of the contiguous tensors of all.

        The first dimension has one entry per rank, in group order.
        """

    def reduce(self, tensor: Tensor, destination: int, group: Sequence[int]) -> Work:
        """Sum a contiguous tensor over the group into the destination's tensor; others' contents are undefined."""

    def broadcast(self, tensor: Tensor, source: int, group: Sequence[int]) -> Work:
        """Copy the source's contiguous tensor to every rank of the group."""

    def all_gather_object(self, value: Any, group: Sequence[int]) -> list[Any]:
        """The picklable values of all ranks of the group, in group order; the one method that waits for the others."""

    def close(self) -> None:
        """Let go of what connects the ranks; nothing may be sent any more."""


class TensorWork(Work, Protocol):
    """A collective in progress that gives a new tensor."""

    def result(self) -> Tensor:
        """The new tensor; waits for it."""


def complete(run: Iterator[Work]) -> Any:
    """Run a generator of pending works to its end by blocking on each, and give what it returns."""
    try:
        while True:
            try:
                work = next(run)
            except StopIteration as stop:
                return stop.value
            work.wait()
            # A work may hold the tensor it moved; the next one may be long in coming.
            del work
    finally:
        # Where a wait fails, what it holds in place of parameters goes before anybody looks at them.
        if isinstance(run, Generator):
            run.close()


def check_contiguous(tensor: Tensor, what: str) -> Tensor:
    """The tensor, if it may be handed to a transport.

    Raises:
        ScheduleError: If it is not contiguous; gloo would then give wrong results without a word.
    """
    if not tensor.is_contiguous():
        raise ScheduleError(
            f"{what} of a tensor with shape {tuple(tensor.shape)} and strides {tensor.stride()}: only contiguous "
            "tensors travel; send tensor.contiguous()"
        )
    return tensor


def check_entries(tensor: Tensor, group: Sequence[int]) -> None:
    """Raise a ScheduleError if a tensor to be scattered has not one entry per rank."""
    if tensor.ndim == 0 or tensor.shape[0] != len(group):
        raise ScheduleError(
            f"reduce-scatter of a tensor of shape {tuple(tensor.shape)} over {len(group)} ranks: its first dimension "
            f"must have one entry per rank, {len(group)}"
        )


class _PendingWork:
    """Torch's works, if any, and the tensors that must stay alive until they are complete."""

    __slots__ = ("_tensors", "_works")

    def __init__(self, works: Sequence[Any], *tensors: Tensor) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        # A gloo message must not be waited for twice, and its buffer is free from here on.
        works, self._works = self._works, ()
        for work in works:
            work.wait()
        self._tensors = ()


class _PendingResult(_PendingWork):
    """Works that fill a new tensor."""

    __slots__ = ("_output",)

    def __init__(self, works: Sequence[Any], output: Any, *tensors: Tensor) -> None:
        super().__init__(works, *tensors)
        self._output = output

    def result(self) -> Any:
        self.wait()
        return self._output


class _PendingSum(_PendingResult):
    """Works that bring rows of which the sum is wanted: in the first of two, whose memory that is alone."""

    __slots__ = ()

    def result(self) -> Any:
        """The sum; asked for once, and the rows are let go of."""
        self.wait()
        (first, second, *others), self._output = self._output, None
        total = first + second if others else first.add_(second)
        for row in others:
            total += row
        return total


def message_options(timeout: timedelta | None) -> Any:
    """NCCL's options of a communicator for messages between stages: few channels, on a stream that goes first."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MESSAGE_CHANNELS
    if timeout is not None:
        options._timeout = timeout
    return options


def _alone() -> AbstractContextManager[None]:
    """Inside, new groups do not touch the default group's communicator.

    Where that is bound to a device, ranks outside of a new group split it (``_new_process_group_helper`` of torch
    2.13), whatever the group's backend, and those inside do so only for NCCL: the next group that splits it would wait
    for ever (github.com/pytorch/pytorch issue 145376).
    """
    return replaced(dist.group.WORLD, bound_device_id=None)


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The names of torch 2.13, where the older ones warn."""


class DistributedTransport:
    """A transport over ``torch.distributed``, on process groups of its own.

    Every rank must construct it with the same arguments, after the default process group exists; the default group
    itself is only used to make the others. CPU tensors use gloo, those on a device the device's backend (NCCL).

    NCCL ignores tags, and runs the messages of one communicator one after the other. So each pair that sends messages
    in a schedule has a communicator of its own for either direction: a queue with one sender and one receiver, which
    schedules post at both ends in the same order. It is connected here, since the first message of a pair would block
    the host until the other end is posted (github.com/NVIDIA/nccl issue 783). Other messages travel on the world's.

    Args:
        groups: Sorted global ranks of every group that collectives will run on; repetitions are made once.
        pairs: Pairs of ranks of which the first sends to the second, sorted.
        talking: Those groups that exchange objects and host tensors; all if None.
        timeout: How long gloo waits for a peer; torch's default if None.

    Attributes:
        posted: Number of messages and collectives that this rank has taken part in.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, ...]],
        device: torch.device,
        *,
        pairs: Sequence[tuple[int, int]] = (),
        talking: Sequence[tuple[int, ...]] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        self._timeout, self.posted = timeout, 0
        self._is_host = device.type == "cpu"
        world = tuple(range(self.world_size))
        wanted = [group for group in dict.fromkeys((world, *groups)) if len(group) > 1]
        backend = dist.get_default_backend_for_device(device)
        self._groups = {group: self._made(group, backend) for group in wanted}
        # Objects are gathered by blocking calls; a group apart keeps them out of the order of other collectives.
        told = wanted if talking is None else [group for group in dict.fromkeys((world, *talking)) if len(group) > 1]
        self._object_groups = {group: self._made(group, "gloo") for group in told}
        self._channels = {
            # Each has options of its own: making a group writes to them.
            pair: self._made(pair, backend, None if self._is_host else message_options(timeout))
            for pair in pairs
        }
        self._connect(pairs)

    def _made(self, ranks: tuple[int, ...], backend: str, options: Any = None) -> Any:
        # Only NCCL's groups are split off the default one, and only where that is NCCL's.
        with nullcontext() if backend == dist.get_backend() == "nccl" else _alone():
            return dist.new_group(list(ranks), backend=backend, timeout=self._timeout, pg_options=options)

    def _connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Send one element from each pair to each, in an order that is the same on all ranks: none waits for ever."""
        for source, destination in pairs:
            if self.rank in (source, destination):
                element = torch.zeros(1, device=self.device)
                is_source = self.rank == source
                (self.isend(element, destination, 0) if is_source else self.irecv(element, source, 0)).wait()
        self.posted = 0

    def close(self) -> None:
        """Destroy the groups of this transport that this rank is in."""
        for group in (*self._groups.values(), *self._object_groups.values(), *self._channels.values()):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._groups, self._object_groups, self._channels = {}, {}, {}

    def isend(self, tensor: Tensor, destination: int, tag: int) -> Work:
        check_contiguous(tensor, "send")
        channel = self._channel(self.rank, destination, tensor)
        return _PendingWork((dist.isend(tensor, destination, group=channel, tag=tag),), tensor)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        check_contiguous(tensor, "receive")
        channel = self._channel(source, self.rank, tensor)
        return _PendingWork((dist.irecv(tensor, source, group=channel, tag=tag),), tensor)

    def _channel(self, source: int, destination: int, tensor: Tensor) -> Any:
        """What a message travels on."""
        is_away = tensor.device.type == "cpu" and not self._is_host
        channel = self._channels.get((source, destination))
        if channel is None or is_away:
            return self._group_of(tensor, tuple(range(self.world_size)))
        self.posted += 1
        return channel

    def all_reduce(self, tensor: Tensor, group: Sequence[int], reduction: Reduction = "sum") -> Work:
        operation = dist.ReduceOp.SUM if reduction == "sum" else dist.ReduceOp.MAX
        return self._in_place("all-reduce", dist.all_reduce, tensor, operation, group)

    def reduce(self, tensor: Tensor, destination: int, group: Sequence[int]) -> Work:
        return self._in_place("reduce", dist.reduce, tensor, destination, group)

    def broadcast(self, tensor: Tensor, source: int, group: Sequence[int]) -> Work:
        return self._in_place("broadcast", dist.broadcast, tensor, source, group)

    def _in_place(self, what: str, run: Any, tensor: Tensor, how: Any, group: Sequence[int]) -> Work:
        """A collective of torch's that leaves its result in the tensor, where that of one rank alone is already."""
        check_contiguous(tensor, what)
        if len(group) == 1:
            return _PendingWork(())
        return _PendingWork((run(tensor, how, group=self._group_of(tensor, group), async_op=True),), tensor)

    def all_gather(self, tensor: Tensor, group: Sequence[int]) -> TensorWork:
        check_contiguous(tensor, "all-gather")
        if len(group) == 1:
            return _PendingResult((), tensor.detach().clone().unsqueeze(0))
        output = torch.empty((len(group), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        # The flat form is the one that every backend takes.
        work = _ALL_GATHER(output.view(-1), tensor.view(-1), group=self._group_of(tensor, group), async_op=True)
        return _PendingResult((work,), output, tensor)

    def all_gather_into(self, tensor: Tensor, group: Sequence[int]) -> Work:
        check_contiguous(tensor, "all-gather")
        rows, handle = tensor.view(len(group), -1), self._group_of(tensor, group)
        if tensor.is_cpu:
            # Gloo's own gathers into memory of its own first, and copies that.
            pairs = zip(rows, group, strict=True)
            return _PendingWork([dist.broadcast(row, rank, group=handle, async_op=True) for row, rank in pairs], tensor)
        own = rows[list(group).index(self.rank)]
        return _PendingWork((_ALL_GATHER(tensor.view(-1), own, group=handle, async_op=True),), tensor)

    def reduce_scatter(self, tensor: Tensor, group: Sequence[int]) -> TensorWork:
        check_contiguous(tensor, "reduce-scatter")
        check_entries(tensor, group)
        if len(group) == 1:
            return _PendingResult((), tensor.detach()[0].clone())
        handle = self._group_of(tensor, group)
        if self._is_host:
            # Gloo's own costs as much as an all-reduce; sums in the order of ranks are the same however many there are.
            if len(group) == 2:
                # What is its own a rank need not send to itself.
                own = list(group).index(self.rank)
                row = torch.empty_like(tensor[own])
                sizes = [row.numel() * (rank != own) for rank in range(2)]
                sent = tensor[1 - own].view(-1)
                work = dist.all_to_all_single(row.view(-1), sent, sizes, sizes, group=handle, async_op=True)
                return _PendingSum((work,), (row, tensor[own]), tensor)
            rows = torch.empty_like(tensor)
            work = dist.all_to_all_single(rows.view(-1), tensor.view(-1), group=handle, async_op=True)
            return _PendingSum((work,), rows.unbind(), tensor)
        output = torch.empty(tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
        work = _REDUCE_SCATTER(output.view(-1), tensor.view(-1), group=handle, async_op=True)
        return _PendingResult((work,), output, tensor)

    def all_gather_object(self, value: Any, group: Sequence[int]) -> list[Any]:
        found = [value] * len(group)
        if len(group) > 1:
            dist.all_gather_object(found, value, group=self._group(group, self._object_groups))
        return found

    def _group_of(self, tensor: Tensor, ranks: Sequence[int]) -> Any:
        """The group for a tensor: on a device's run host tensors travel as objects do."""
        is_away = tensor.device.type == "cpu" and not self._is_host
        return self._group(ranks, self._object_groups if is_away else self._groups)

    def _group(self, ranks: Sequence[int], groups: dict[tuple[int, ...], Any]) -> Any:
        self.posted += 1
        try:
            return groups[tuple(ranks)]
        except KeyError:
            known = ", ".join(str(list(group)) for group in groups)
            raise PlanError(
                f"no process group of ranks {list(ranks)}: groups are made once, for {known}; add it to groups"
            ) from None


# Microbatches and live tensors at a boundary between stages: who sends what to whom, and the end of a stage's graph.
#
# Two stages exchange rows by the overlap of their ranks' slices, and along the sequence by the overlap of the parts
# that their tensor-parallel ranks hold. Gradients go the same way back, by the same rule with the sides exchanged: a
# rank that holds a part, or the whole, gets the gradient of just that.


def span(size: int, rows: int, overlap: Overlap) -> tuple[int, int]:
    """Start and length, along a dimension of ``size`` entries for ``rows`` rows, of the rows of an overlap.

    A dimension may hold several entries per row (heads folded into the batch, for example).

    Raises:
        TraceError: If the entries cannot be told apart by row.
    """
    if (overlap.first, overlap.end) == (0, rows):
        return 0, size
    if size % rows:
        raise TraceError(
            f"a tensor that crosses a boundary has {size} entries along its batch dimension for {rows} rows: to be "
            "cut, it needs a multiple of the rows; use the same data_parallel_degree on both sides"
        )
    factor = size // rows
    return overlap.first * factor, (overlap.end - overlap.first) * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """What of a tensor is exchanged with one rank; along the sequence counted from the start of this rank's part."""

    rank: int
    overlap: Overlap
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """How one tensor of one microbatch crosses a boundary, seen from one rank.

    Attributes:
        rows: Rows of this rank's part of the microbatch.
        sequence_dim: The dimension that either side may hold in parts, or None.
        length: Size of the whole tensor along it; 1 if there is none.
    """

    batch_dim: int | None
    rows: int
    mine: Side
    theirs: Side
    index: int
    sequence_dim: int | None = None
    length: int = 1

    def arriving(self, overlaps: Sequence[Overlap]) -> tuple[tuple[Portion, ...], ...]:
        """What comes from the other side, for each overlap in the order of the sequence."""
        begin, _ = self.mine.held(self.index, self.length)
        sources = self.mine.sources(self.index, self.theirs, self.length)
        return tuple(
            tuple(
                Portion(rank=overlap.ranks[other], overlap=overlap, start=start - begin, size=end - start)
                for other, start, end in sources
            )
            for overlap in overlaps
        )

    def leaving(self, overlaps: Sequence[Overlap]) -> tuple[Portion, ...]:
        """What goes to the other side."""
        begin, _ = self.mine.held(self.index, self.length)
        return tuple(
            Portion(rank=overlap.ranks[other], overlap=overlap, start=start - begin, size=end - start)
            for overlap in overlaps
            for other in range(self.theirs.degree)
            for source, start, end in self.theirs.sources(other, self.mine, self.length)
            if source == self.index
        )

    def shape(self, shape: Sequence[int], portion: Portion) -> tuple[int, ...]:
        """Shape of a portion of a tensor that this rank holds in this shape."""
        sizes = list(shape)
        if self.batch_dim is not None:
            sizes[self.batch_dim] = span(sizes[self.batch_dim], self.rows, portion.overlap)[1]
        if self.sequence_dim is not None:
            sizes[self.sequence_dim] = portion.size
        return tuple(sizes)

    def cut(self, tensor: Tensor, portion: Portion) -> Tensor:
        """A portion of what this rank holds: contiguous, without history, sharing memory where it can."""
        tensor = tensor.detach()
        if self.batch_dim is not None:
            start, size = span(tensor.shape[self.batch_dim], self.rows, portion.overlap)
            tensor = tensor.narrow(self.batch_dim, start, size)
        if self.sequence_dim is not None:
            tensor = tensor.narrow(self.sequence_dim, portion.start, portion.size)
        return tensor.contiguous()

    def join(self, portions: Sequence[Sequence[Tensor]]) -> Tensor:
        """What this rank holds from all that :meth:`arriving` announced.

        Portions of a tensor without batch dimension from several overlaps are summed.
        """
        parts = [_cat(row, self.sequence_dim) for row in portions]
        if self.batch_dim is None and len(parts) > 1:
            return torch.stack(parts).sum(0)
        return _cat(parts, self.batch_dim)


def _cat(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    assert dim is not None
    return torch.cat(tuple(parts), dim=dim)


class GraphEnd:
    """Where a stage's graph ends: gradients that arrive later go in here, the tensors themselves need not live.

    Keeping the tensors that were sent would keep their memory until backward. The graph of each hangs on an empty
    scalar instead, whose backward hands out the gradient that :meth:`backward` is given.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # A node holds its list and not the object itself, which would be a cycle around the whole graph.
        self._gradients: list[list[Tensor | None]] = [[] for _ in tensors]
        self._anchors: list[Tensor] = [
            _Anchor.apply(*each)  # type: ignore[no-untyped-call]
            for each in zip(self._gradients, tensors, strict=True)
        ]

    def backward(self, gradients: list[Tensor | None], marker: Tensor | None = None) -> None:
        """Run the graph's backward with one gradient per tensor; what only hangs on tensors without one gets none.

        Args:
            gradients: The gradients. The list is emptied, so that backward can free each of them when it has used it.
            marker: Another end of the same graph, whose gradient does not matter.
        """
        ends = [] if marker is None else [marker]
        for held, anchor in zip(self._gradients, self._anchors, strict=True):
            held.append(gradients.pop(0))
            ends += [] if held[0] is None else [anchor]
        if ends:
            torch.autograd.backward(ends)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], tensor: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensor.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, Tensor | None]:
        return None, ctx.gradients.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """What a rank computes on in one microbatch.

    Attributes:
        value: The rank's rows of the owner's batch, or the whole batch, untouched.
        weight: Share of these rows in the owner's batch.
        owner: Global rank that loaded the batch.
        batch_rows: Rows of the owner's whole batch; None if they cannot be counted (then nothing is cut).
        rows: Where its rows begin and end in the owner's batch; None for a whole one.
        tokens: Of a chunk of tokens: where these begin and end among how many; None for all of them.
        random_state: State of the owner's generators, for whole batches; it travels from stage to stage.
        seed: Otherwise the seed of this part; None leaves the generators alone.
    """

    value: Any
    weight: float
    owner: int
    index: int
    batch_rows: int | None = None
    rows: tuple[int, int] | None = None
    tokens: tuple[int, int, int] | None = None
    random_state: Tensor | None = None
    seed: int | None = None


class Neighbours:
    """With whom a rank shares the rows of each microbatch; worked out once per size of batch."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._overlaps = cache(partial(overlaps, mesh.plan))
        self._slices = tuple(row_slice(mesh.plan, mesh.rank, index) for index in range(mesh.plan.num_microbatches))

    def rows(self, microbatch: Microbatch) -> int:
        """Rows of this rank's part; 1 for a whole batch that has none to count."""
        if microbatch.batch_rows is None:
            return 1
        first, end = self._slices[microbatch.index].rows(microbatch.batch_rows)
        return end - first

    def before(self, stage: int, microbatch: Microbatch, batch_dim: int | None = 0) -> tuple[Overlap, ...]:
        """Ranks of the stage before ``stage``, one of this rank's, with which it exchanges a tensor, by ascending row.

        A tensor without batch dimension comes whole from the first of them.
        """
        sources = self._of(self._mesh.rank, stage - 1, microbatch)
        return sources if batch_dim is not None else sources[:1]

    def after(self, stage: int, microbatch: Microbatch, batch_dim: int | None = 0) -> tuple[Overlap, ...]:
        """Ranks of the stage after ``stage``, one of this rank's, with which it exchanges a tensor, by ascending row.

        A tensor without batch dimension goes whole from the first of each receiver's sources.
        """
        targets = self._of(self._mesh.rank, stage + 1, microbatch)
        if batch_dim is not None:
            return targets
        rank = self._mesh.rank
        return tuple(target for target in targets if rank in self._of(target.ranks[0], stage, microbatch)[0].ranks)

    def crossing(self, stage: int, other: int, microbatch: Microbatch, live: LiveTensor, length: int = 1) -> Crossing:
        """How a tensor crosses the boundary between ``stage``, one of this rank's, and the stage before or after."""
        return Crossing(
            batch_dim=live.batch_dim,
            rows=self.rows(microbatch),
            mine=side_of(self._mesh.plan, stage, live),
            theirs=side_of(self._mesh.plan, other, live),
            index=self._mesh.row_index,
            sequence_dim=live.sequence_dim,
            length=length,
        )

    def _of(self, rank: int, neighbour: int, microbatch: Microbatch) -> tuple[Overlap, ...]:
        return self._overlaps(rank, neighbour, microbatch.index, microbatch.batch_rows)
