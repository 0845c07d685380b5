"""Values that ranks give each other: buffers, what was updated unit by unit, and for whoever asks all parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from lightning_mist.attributes import replaced
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.mesh import Mesh, make_mesh
from lightning_mist.plan.sharding import BUCKET_BYTES
from lightning_mist.runtime.communication import Transport, Work
from lightning_mist.runtime.parameters.absent_parameters import make_present
from lightning_mist.runtime.parameters.buckets import Bucket, owned_buckets
from lightning_mist.runtime.parameters.even_shards import FlatShard
from lightning_mist.runtime.parameters.masters import MasterWeights
from lightning_mist.runtime.parameters.parameter_parts import speakers_of
from lightning_mist.runtime.parameters.unit_shards import UnitKey
from lightning_mist.schedule.flats import Flat, stage_flats

unversioned = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
"""Inside, writing into these tensors counts for nobody: what autograd saved of a buffer stays valid, as under DDP."""


class BufferSync:
    """The buffers of one rank's module, kept alike over ranks as torch's DDP does: those of rank 0 count.

    They are broadcast before a forward, whatever the step does to them, if the forward before it was one whose
    gradients were to be averaged. That a buffer is a constant cannot be told from outside (writing to its ``.data``
    leaves no trace), so all are sent, as under data parallelism, in one message for each device.
    """

    def __init__(self, module: nn.Module, transport: Transport, *, is_enabled: bool = True) -> None:
        self._module, self._transport, self.is_enabled = module, transport, is_enabled
        self._world = tuple(range(transport.world_size))
        # What DDP calls `require_forward_param_sync` and `require_backward_grad_sync`.
        self._is_due, self._averages = True, True

    @property
    def is_due(self) -> bool:
        """Whether the next forward gives every rank the buffers of rank 0."""
        return self.is_enabled and self._is_due

    @property
    def averages(self) -> bool:
        """Whether gradients of a backward that comes now are to be averaged over ranks."""
        return self._averages

    def accumulating(self) -> AbstractContextManager[None]:
        """Inside, gradients are only added up, as inside DDP's ``no_sync``."""
        return replaced(self, _averages=False)

    def before_forward(self) -> Iterator[Work]:
        """Give every rank the buffers of rank 0, if they are due; every rank calls it before the same forward."""
        if not self.is_due or len(self._world) == 1:
            return
        together: dict[torch.device, list[Tensor]] = {}
        for buffer in self._buffers():
            together.setdefault(buffer.device, []).append(buffer)
        for device, buffers in together.items():
            yield from self._broadcast(buffers, device)

    def after_forward(self) -> None:
        """Note whether the buffers are to be alike again before the next forward."""
        self._is_due = self._averages and torch.is_grad_enabled()

    def _buffers(self) -> list[Tensor]:
        # Asked anew each time: modules may put other tensors in their place.
        ignored = set(getattr(self._module, "_ddp_params_and_buffers_to_ignore", ()))
        named = self._module.named_buffers()
        return [memory_of(buffer.detach()) for name, buffer in named if name not in ignored and not buffer.is_meta]

    def _broadcast(self, buffers: list[Tensor], device: torch.device) -> Iterator[Work]:
        sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
        if self._transport.rank == 0:
            flat = torch.cat([buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in buffers])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        yield self._transport.broadcast(flat, 0, self._world)
        if self._transport.rank == 0:
            return
        with torch.no_grad(), unversioned(tuple(buffers)):
            for buffer, part in zip(buffers, torch.split(flat, sizes), strict=True):
                # A part may begin where its type may not: its copy begins anywhere.
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def memory_of(tensor: Tensor) -> Tensor:
    """A view in which no place of memory comes twice, though in ``tensor`` (one that was expanded) some do."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.select(dim, 0).unsqueeze(dim)
    return tensor


class UnitGather:
    """Gives out what a stage's ranks have updated.

    Args:
        masters: Has what is given out of those that have masters.
        even: What ranks share out evenly, by the unit with which it is updated.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[UnitKey, Sequence[str]],
        transport: Transport,
        masters: MasterWeights | None,
        even: Mapping[UnitKey, Sequence[FlatShard]],
    ) -> None:
        self._mesh, self._transport, self._masters = mesh, transport, masters
        owned = owned_buckets(units, parameters, mesh)
        self._of: dict[UnitKey, list[Bucket]] = {key: [*owned[key], *even.get(key, ())] for key in units}
        self._under_way: dict[UnitKey, list[tuple[Bucket, tuple[Work, Callable[[], None]]]]] = {}

    def begin(self, key: UnitKey) -> None:
        """Start to give out a unit's parameters, which are updated where they are owned."""
        casts = {} if self._masters is None else self._masters.given_out(is_cast=True)
        self._under_way[key] = [(item, item.give_out(casts, self._mesh, self._transport)) for item in self._of[key]]

    def finish(self) -> None:
        """Wait for everything that is under way."""
        for key in list(self._under_way):
            self.end(key)

    def end(self, key: UnitKey) -> None:
        """Wait for a unit's parameters, and take over those of others."""
        for bucket, (work, then) in self._under_way.pop(key, ()):
            work.wait()
            make_present(bucket.parameters)
            with unversioned(bucket.parameters):
                then()


# The full values of all parameters, from the stages that hold them: for evaluation, checkpoints and teardown.

_GATHER_TAG = 1 << 21
"""First tag of gathered parameters; tags of the executor and of batches are smaller."""

_SEGMENTS_IN_FLIGHT = 2
"""Transfers under way at once: one travels while the one before is handed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Consecutive parameters that the same ranks answer for, and that share a dtype.

    Attributes:
        ranks: The ranks; each has one part of every parameter, or a single one the whole.
        shapes: Shape of what each rank has of them.
        flat: The buffer in which they lie if they are shared out evenly; each rank has a piece of it.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Flat | None = None


@dataclass(slots=True)
class _Transfer:
    """What one speaker has of a segment, on its way; nothing travels to where it is."""

    speaker: int
    flat: Tensor | None
    work: Work | None


class ParameterGatherer:
    """Brings every parameter of the module to every rank or to one.

    Of the copies that several ranks hold, one speaks for all. A parameter that tensor parallelism has shared out is put
    together from its parts, and so are flat buffers from their pieces.

    Args:
        parameters: All parameters of the module by canonical name. Those of other ranks' stages keep their shape and
            dtype although their storage is gone.
        even: What this rank's group shares out evenly.

    Attributes:
        home_values: Gives this rank's values that are in host memory, by canonical name.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        parameters: Mapping[str, nn.Parameter],
        module_map: ModuleMap,
        transport: Transport,
        even: Sequence[FlatShard] = (),
    ) -> None:
        self._rank, self._transport, self._all = rank, transport, parameters
        self.home_values: Callable[[], Mapping[str, Tensor]] = dict
        self._world = tuple(range(plan.world_size))
        held = make_mesh(plan, rank, module_map).parameters
        self.speakers = speakers_of(plan, held, module_map)
        self._even, self._shapes = even, {use.name: use.shape for use in module_map.parameters}
        self._pieces = list[_Segment]()
        for group, stage in enumerate(plan.stages[: plan.num_groups]):
            for flat in stage_flats(plan, module_map, group):
                ranks = stage.devices[: flat.degree * stage.mesh.tensor_parallel_degree]
                self._pieces.append(_Segment(ranks=ranks, names=flat.names, shapes=((flat.piece,),), flat=flat))

    def run(self, sink: Callable[[str, Tensor], None], *, destination: int | None = None) -> Iterator[Work]:
        """Hand every parameter to ``sink`` once, by canonical name, in an order that is the same on all ranks.

        Args:
            sink: Takes the name and the full value, without history. The value may share memory with the parameter
                itself or with other values: copy what is kept.
            destination: The one rank whose sink is called; every rank's if None.
        """
        outstanding: list[tuple[_Segment, list[_Transfer]]] = []
        tag, self._home = _GATHER_TAG, self.home_values()
        for segment in (*self._pieces, *self._segments()):
            transfers = []
            for speaker in segment.ranks:
                transfers.append(self._post(segment, speaker, tag, destination))
                tag += 1
            outstanding.append((segment, transfers))
            if len(outstanding) == _SEGMENTS_IN_FLIGHT:
                yield from self._deliver(*outstanding.pop(0), sink, destination)
        for item in outstanding:
            yield from self._deliver(*item, sink, destination)

    def _segments(self) -> list[_Segment]:
        segments: list[tuple[tuple[int, ...], torch.dtype, list[str]]] = []
        size, of_flats = 0, {name for segment in self._pieces for name in segment.names}
        for name, speakers in self.speakers.items():
            if name in of_flats:
                continue
            dtype = self._all[name].dtype
            nbytes = prod(self._shape(name)) * dtype.itemsize
            if not segments or segments[-1][:2] != (speakers.ranks, dtype) or size + nbytes > BUCKET_BYTES:
                segments.append((speakers.ranks, dtype, []))
                size = 0
            segments[-1][2].append(name)
            size += nbytes
        return [
            _Segment(
                ranks=ranks,
                names=tuple(names),
                shapes=tuple(map(self._shape, names)),
            )
            for ranks, _, names in segments
        ]

    def _shape(self, name: str) -> tuple[int, ...]:
        """Shape of what a rank has of a parameter, or of what it has of that."""
        part = self.speakers[name].part
        return self._shapes[name] if part is None else part.local_shape

    def _post(self, segment: _Segment, speaker: int, tag: int, destination: int | None) -> _Transfer:
        nothing = _Transfer(speaker=speaker, flat=None, work=None)
        is_speaker = self._rank == speaker
        if len(self._world) == 1 or destination == speaker:
            return nothing
        if destination is not None and self._rank not in (speaker, destination):
            return nothing
        like = self._all[segment.names[0]]
        flat = torch.empty(sum(map(prod, segment.shapes)), dtype=like.dtype, device=like.device)
        if is_speaker:
            torch._foreach_copy_(_views(flat, segment.shapes), self._mine(segment))
        if destination is None:
            work = self._transport.broadcast(flat, speaker, self._world)
        elif is_speaker:
            work = self._transport.isend(flat, destination, tag)
        else:
            work = self._transport.irecv(flat, speaker, tag)
        return _Transfer(speaker=speaker, flat=flat, work=work)

    def _deliver(
        self,
        segment: _Segment,
        transfers: list[_Transfer],
        sink: Callable[[str, Tensor], None],
        destination: int | None,
    ) -> Iterator[Work]:
        for transfer in transfers:
            if transfer.work is not None:
                yield transfer.work
        if destination not in (None, self._rank):
            return
        values = [self._values(segment, transfer) for transfer in transfers]
        if (flat := segment.flat) is not None:
            # One whole buffer for each tensor-parallel index.
            pieces = [piece.to(values[0][0].device) for (piece,) in values]
            step = len(pieces) // flat.degree
            wholes = [torch.cat(pieces[index::step]) for index in range(step)]
            places = list(zip(flat.names, flat.starts, flat.sizes, strict=False))
            values = [
                [whole[start : start + size].view(self._shape(name)) for name, start, size in places]
                for whole in wholes
            ]
        for name, *parts in zip(segment.names, *values, strict=True):
            part = self.speakers[name].part
            sink(name, parts[0] if part is None else part.join([value.to(parts[0].device) for value in parts]))

    def _values(self, segment: _Segment, transfer: _Transfer) -> list[Tensor]:
        if transfer.flat is None or self._rank == transfer.speaker:
            return self._mine(segment)
        return _views(transfer.flat, segment.shapes)

    def _mine(self, segment: _Segment) -> list[Tensor]:
        """What this rank has of a segment."""
        if segment.flat is None:
            return [self._value(name) for name in segment.names]
        return [next(shard.own(self._home) for shard in self._even if shard.names == segment.names)]

    def _value(self, name: str) -> Tensor:
        home = self._home.get(name)
        return self._all[name].detach() if home is None else home


def _views(flat: Tensor, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    parts = torch.split(flat, [prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
