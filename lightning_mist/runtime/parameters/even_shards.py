"""Pieces of parameters that a shard group shares out evenly, and the gradients of what lies in them.

The parameters of a flat buffer (:mod:`lightning_mist.schedule.flats`) are cut wherever ranks' pieces end. While it
clips or updates, the engine *shows* pieces: each parameter is, and has the gradient of, what of it lies in this rank's
piece, in one dimension and perhaps empty. At all other times parameters are whole, or absent, and a stand-in says that
there is a gradient. No graph may be made while pieces are shown: its nodes would insist on their shapes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_mist.devices import read
from lightning_mist.errors import PlanError
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport, Work
from lightning_mist.runtime.parameters.absent_parameters import AbsentGradient, present_meanwhile, shared_out
from lightning_mist.runtime.parameters.buckets import Begun, Bucket, copy_some, either
from lightning_mist.runtime.parameters.parameter_parts import FlatPart
from lightning_mist.schedule.flats import Flat
from lightning_mist.schedule.stage_program import Key


class FlatShard(Bucket):
    """Parameters in one flat buffer of which every rank of a shard group updates a piece.

    Attributes:
        updated: The piece of what the optimizer updates, where parameters are not that themselves: masters, or values
            under ZeRO-3. None while it is in host memory.
        home: Its place there, if it has one.
        kept: The piece of what is computed with under ZeRO-3; may be ``updated``.
        gradient: The piece of the gradients that the parameters have. In ``fresh`` none of a parameter is zeros.
        mine: Indices of the parameters of which something lies in this rank's piece.
        foreign: Those of which something lies in another's.
    """

    def __init__(self, flat: Flat, parameters: Mapping[str, nn.Parameter], parts: Mapping[str, FlatPart]) -> None:
        super().__init__([(name, parameters[name]) for name in flat.names])
        self.flat, self.parts = flat, [parts[name] for name in flat.names]
        self.numel, self.num_counts = flat.piece * flat.degree, 0
        shapes = [part.inner_shape for part in self.parts]
        # Shape, strides and start of each parameter, and of what of it is this rank's, and what lies between them.
        strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
        self._places = list(zip(shapes, strides, flat.starts, strict=False))
        self._first = self.parts[0].place * flat.piece
        sizes = [high - low for low, high in (part.span for part in self.parts)]
        starts = [min(max(start - self._first, 0), flat.piece) for start in flat.starts]
        self._own_places = [((size,), (1,), start) for size, start in zip(sizes, starts, strict=False)]
        ends = [start + size for start, size in zip(flat.starts, flat.sizes, strict=False)]
        gaps = zip(ends, (*flat.starts[1:-1], self.numel), strict=True)
        self._gaps = [slice(end, then) for end, then in gaps if end < then]
        self.updated: Tensor | None = None
        self.home: Tensor | None = None
        self.kept: Tensor | None = None
        self.gradient: Tensor | None = None
        self.mine = [index for index, part in enumerate(self.parts) if part.is_mine]
        self.foreign = [index for index, part in enumerate(self.parts) if part.span != (0, flat.sizes[index])]
        self._stand_ins: dict[int, AbsentGradient] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        """A view of each parameter's place in a whole buffer."""
        return _views(flat, self._places)

    def own_of(self, flat: Tensor) -> Tensor:
        """This rank's piece of a whole buffer, or of that alone."""
        return flat[self._first :][: self.flat.piece] if len(flat) > self.flat.piece else flat

    def pieces(self, own: Tensor) -> list[Tensor]:
        """A view of what of each parameter lies in this rank's piece."""
        return _views(own, self._own_places)

    def cut(self, index: int, value: Tensor) -> Tensor:
        """What of a parameter's value lies in this rank's piece."""
        return value.reshape(-1)[slice(*self.parts[index].span)]

    def empty_piece(self, like: Tensor) -> Tensor:
        """Memory for a piece, of zeros: what no parameter has stays zero."""
        return torch.zeros(self.flat.piece, dtype=like.dtype, device=like.device)

    def own(self, home: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        """The piece of what the optimizer updates; ``home``: parameters that are in host memory, by canonical name."""
        if (there := self.home if self.updated is None else self.updated) is not None:
            return there
        values = self.computed_with(home)
        self.keep(own := self.empty_piece(values[0]), values)
        return own

    def check(self) -> None:
        """Refuse what somebody put in place of gradients that ranks share out, or of a parameter's memory."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            is_known = parameter.grad is None or type(parameter.grad) is AbsentGradient
            # What is elsewhere has one number for all of its values.
            is_here = self.updated is None and any(parameter.data.stride())
            if not is_known or (is_here and not parameter.data.is_contiguous()):
                raise PlanError(
                    f"{'the strides' if is_known else 'the gradient'} of {name} were replaced while "
                    "ranks share it out: change memory in configure_model, and gradients under zero_stage = 0"
                )

    def show(self) -> list[tuple[nn.Parameter, Tensor, Tensor | None]]:
        """Let parameters be, and have gradients of, what lies in this rank's piece; gives what they were, and had."""
        own = None if self.updated is None else self.pieces(self.updated)
        before = []
        for index in self.mine:
            parameter = self.parameters[index]
            before.append((parameter, value := parameter.data, stand_in := parameter.grad))
            parameter.grad = None
            parameter.data = self.cut(index, value) if own is None else own[index]
            parameter.grad = shared_out(stand_in)
        return before

    def stand_in(self, there: Sequence[bool]) -> None:
        """Let something stand for the gradients that are there."""
        assert self.gradient is not None
        pieces = self.pieces(self.gradient)
        for index in self.mine:
            if there[index]:
                parameter, known = self.parameters[index], self._stand_ins.get(index)
                if known is None or known.dtype is not parameter.dtype:
                    known = self._stand_ins[index] = AbsentGradient.of(parameter)
                known.piece, known.is_asked, known.fate = pieces[index], False, ()
                parameter.grad = known

    def free_gradient(self) -> None:
        """Let go of the piece of the gradients."""
        self.gradient = None
        for known in self._stand_ins.values():
            known.piece = None

    def gather(self, flat: Tensor, mesh: Mesh, transport: Transport) -> Work:
        """Begin to fill a whole buffer from all ranks' pieces in it."""
        return transport.all_gather_into(flat, mesh.shard_peers)

    def give_out(
        self, computed: Mapping[str, Tensor], mesh: Mesh, transport: Transport
    ) -> tuple[Work, Callable[[], None]]:
        """See :meth:`Bucket.give_out`."""
        values = self.computed_with(computed)
        flat = self.buffer(values[0].dtype)
        views = self.views(flat)
        if self.updated is None:
            # What of them is not its own will be overwritten.
            copy_some(views, values, self.mine)
        else:
            self.own_of(flat).copy_(self.updated)
        # What this rank has updated whole it has already, where that is what it computes with.
        then = partial(copy_some, values, views, range(len(views)) if computed else self.foreign)
        return self.gather(flat, mesh, transport), then

    def mark(self, flat: Tensor, had: Sequence[bool]) -> None:
        """Remember which gradients there are, of which ranks tell each other at the end, and let all else be zero."""
        self.present = either(self.present, had)
        for gap in self._gaps:
            flat[gap].zero_()

    def reduce(self, flat: Tensor, mesh: Mesh, transport: Transport) -> Begun:
        """Begin to add up a buffer of gradients over a shard group, each rank its piece."""
        work = transport.reduce_scatter(flat.view(self.flat.degree, -1), mesh.shard_peers)
        return work, work.result


def _views(buffer: Tensor, places: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> list[Tensor]:
    first = buffer.storage_offset()
    return [buffer.as_strided(shape, stride, first + start) for shape, stride, start in places]


class EvenShards:
    """What a rank has of the parameters that its shard group shares out evenly.

    Attributes:
        updated_with: What is updated with a unit: with the first of those that use it.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        flats: Sequence[Flat],
        parts: Mapping[str, FlatPart],
    ) -> None:
        self.parts = parts
        self.shards = tuple(FlatShard(flat, parameters, parts) for flat in flats)
        self.trained = tuple(shard for shard in self.shards if shard.flat.is_trained)
        self._of = {name: (shard, index) for shard in self.shards for index, name in enumerate(shard.names)}
        self.updated_with: dict[Key, list[FlatShard]] = {}
        for shard in self.trained:
            self.updated_with.setdefault(shard.flat.reduced[0], []).append(shard)

    def part_of(self, name: str, home: Mapping[str, Tensor]) -> Tensor:
        """What the optimizer updates of a parameter on this rank; ``home`` as of :meth:`FlatShard.own`."""
        shard, index = self._of[name]
        if (there := shard.home if shard.updated is None else shard.updated) is not None:
            return shard.pieces(there)[index]
        return shard.cut(index, shard.computed_with(home)[index])

    def begin(self, earlier: Collection[nn.Parameter] = ()) -> None:
        """A batch begins; gradients are freed but those that ``earlier`` parameters have of batches before."""
        kept = set(earlier)
        for shard in self.trained:
            shard.forget()
            if kept.isdisjoint(shard.parameters):
                shard.free_gradient()

    def end(self) -> None:
        """Nothing stands for gradients any more."""
        for shard in self.trained:
            for parameter in shard.parameters:
                if type(parameter.grad) is AbsentGradient:
                    parameter.grad = None

    def install(self, factor: Tensor) -> None:
        """Add the batch's gradients, times a factor, to those that parameters have."""
        for shard in self.trained:
            if shard.fresh is None:
                continue
            shard.check()
            if not (factor.device.type == "cpu" and factor == 1.0):
                shard.fresh.mul_(factor)
            had = [shared_out(parameter.grad) for parameter in shard.parameters]
            for new, before in zip(shard.pieces(shard.fresh), had, strict=True):
                if before is not None:
                    new.add_(before)
            shard.gradient, shard.fresh = shard.fresh, None
            there = zip(had, shard.present, strict=True)
            shard.stand_in([before is not None or is_new for before, is_new in there])


@contextmanager
def shown(shards: Sequence[FlatShard]) -> Iterator[None]:
    """Inside, parameters are, and have the gradient of, what of them is this rank's."""
    with present_meanwhile([parameter for shard in shards for parameter in shard.parameters]):
        for shard in shards:
            shard.check()
        before = [item for shard in shards for item in shard.show()]
        try:
            yield
        finally:
            for parameter, value, stand_in in before:
                is_kept = parameter.grad is not None or shared_out(stand_in) is None
                parameter.grad, parameter.data = None, value
                parameter.grad = stand_in if is_kept else None


def tell_presence(shards: Sequence[FlatShard], mesh: Mesh, transport: Transport) -> Iterator[Work]:
    """At the end of a batch: find out which trained parameters had a gradient on any rank."""
    present = [one for shard in shards for one in shard.present]
    if not present:
        return
    flags = torch.tensor(present, dtype=torch.float32).to(shards[0].parameters[0].device)
    yield transport.all_reduce(flags, tuple(sorted(mesh.peers)))
    # Only a rank that lacks a gradient asks whether another had one: asking waits for the device.
    had = iter(present if all(present) else [count > 0 for count in read(flags)])
    for shard in shards:
        shard.present = [next(had) for _ in shard.parts]


def where_pieces_are(mesh: Mesh) -> str:
    """Where values are of which every rank of a group has a piece, for people."""
    return f"shared out over ranks {', '.join(map(str, mesh.shard_peers))}"
