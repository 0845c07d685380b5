"""The full values of all parameters, from the stages that hold them: for evaluation, checkpoints and teardown."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.runtime.buckets import BUCKET_BYTES, views_like
from lightning_mist.runtime.mesh import make_mesh
from lightning_mist.runtime.transport import Transport, Work

_GATHER_TAG = 1 << 21
"""First tag of gathered parameters; tags of the executor and of batches are smaller."""

_SEGMENTS_IN_FLIGHT = 2
"""Transfers under way at once: one travels while the one before is handed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Consecutive parameters that one rank answers for, and that share a dtype."""

    speaker: int
    names: tuple[str, ...]


class ParameterGatherer:
    """Brings every parameter of the module, in the module's order, to every rank or to one.

    Under ZeRO-1 all ranks of a stage hold its parameters between steps, so one of them speaks for the stage.

    Args:
        plan: The plan.
        rank: This global rank.
        parameters: All parameters of the module by canonical name. Those of other ranks' stages keep their shape and
            dtype although their storage is gone.
        module_map: Where the module can be cut.
        transport: Connects the ranks.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        parameters: Mapping[str, nn.Parameter],
        module_map: ModuleMap,
        transport: Transport,
    ) -> None:
        self._rank, self._transport, self._all = rank, transport, parameters
        self._world = tuple(range(plan.world_size))
        mesh = make_mesh(plan, rank, module_map)
        self._speakers = {item.name: mesh.speaker(item) for item in mesh.parameters}

    def run(self, sink: Callable[[str, Tensor], None], *, destination: int | None = None) -> Iterator[Work]:
        """Hand every parameter to ``sink`` once, by canonical name, in the module's order.

        Args:
            sink: Takes the name and the full value, without history. The value may share memory with the parameter
                itself or with other values: copy what is kept.
            destination: The one rank whose sink is called; every rank's if None.
        """
        outstanding: list[tuple[_Segment, Tensor | None, Work | None]] = []
        for number, segment in enumerate(self._segments()):
            outstanding.append((segment, *self._post(segment, number, destination)))
            if len(outstanding) == _SEGMENTS_IN_FLIGHT:
                yield from self._deliver(*outstanding.pop(0), sink, destination)
        for item in outstanding:
            yield from self._deliver(*item, sink, destination)

    def _segments(self) -> list[_Segment]:
        segments: list[tuple[int, torch.dtype, list[str]]] = []
        size = 0
        for name, speaker in self._speakers.items():
            parameter = self._all[name]
            nbytes = parameter.numel() * parameter.element_size()
            if not segments or segments[-1][:2] != (speaker, parameter.dtype) or size + nbytes > BUCKET_BYTES:
                segments.append((speaker, parameter.dtype, []))
                size = 0
            segments[-1][2].append(name)
            size += nbytes
        return [_Segment(speaker=speaker, names=tuple(names)) for speaker, _, names in segments]

    def _post(self, segment: _Segment, number: int, destination: int | None) -> tuple[Tensor | None, Work | None]:
        is_speaker = self._rank == segment.speaker
        if destination is not None and (self._rank not in {segment.speaker, destination} or is_speaker):
            if not is_speaker or destination == self._rank:
                return None, None
        elif len(self._world) == 1:
            return None, None
        parameters = [self._all[name] for name in segment.names]
        numel = sum(parameter.numel() for parameter in parameters)
        flat = torch.empty(numel, dtype=parameters[0].dtype, device=parameters[0].device)
        if is_speaker:
            torch._foreach_copy_(views_like(flat, parameters), [parameter.detach() for parameter in parameters])
        if destination is None:
            return flat, self._transport.broadcast(flat, segment.speaker, self._world)
        if is_speaker:
            return flat, self._transport.isend(flat, destination, _GATHER_TAG + number)
        return flat, self._transport.irecv(flat, segment.speaker, _GATHER_TAG + number)

    def _deliver(
        self,
        segment: _Segment,
        flat: Tensor | None,
        work: Work | None,
        sink: Callable[[str, Tensor], None],
        destination: int | None,
    ) -> Iterator[Work]:
        if work is not None:
            yield work
        if destination not in (None, self._rank):
            return
        parameters = [self._all[name] for name in segment.names]
        if flat is None or self._rank == segment.speaker:
            values = [parameter.detach() for parameter in parameters]
        else:
            values = views_like(flat, parameters)
        for name, value in zip(segment.names, values, strict=True):
            sink(name, value)
