"""One batch on its way through the actions of one rank: what is received, computed, kept and sent."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_mist.errors import TraceError
from lightning_mist.plan import LiveTensor, row_slice
from lightning_mist.runtime.boundary import GraphEnd, join, part_of, part_shape
from lightning_mist.runtime.ghosts import GhostStage, InputSpec
from lightning_mist.runtime.mesh import Mesh, Overlap, overlaps
from lightning_mist.runtime.random import get_random_state, seed_random, set_random_state
from lightning_mist.runtime.reducer import GradientReducer
from lightning_mist.runtime.signature import batch_signature
from lightning_mist.runtime.transport import Transport, Work
from lightning_mist.schedule import Action, ActionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """What a rank computes on in one microbatch.

    Attributes:
        value: The rank's rows of the owner's batch, or the whole batch, untouched.
        weight: Share of these rows in the owner's batch.
        owner: Global rank that loaded the batch.
        index: Index of the microbatch.
        batch_rows: Rows of the owner's whole batch; None if they cannot be counted (then nothing is cut).
        random_state: State of the owner's generators, for whole batches; it travels from stage to stage.
        seed: Otherwise the seed of this part; None leaves the generators alone.
    """

    value: Any
    weight: float
    owner: int
    index: int
    batch_rows: int | None = None
    random_state: Tensor | None = None
    seed: int | None = None


class Neighbours:
    """With whom a rank shares the rows of each microbatch; worked out once per size of batch.

    Args:
        mesh: The rank's place.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._overlaps: dict[tuple[int, int, int, int | None], tuple[Overlap, ...]] = {}
        self._slices = tuple(row_slice(mesh.plan, mesh.rank, index) for index in range(mesh.plan.num_microbatches))

    def rows(self, microbatch: Microbatch) -> int:
        """Rows of this rank's part; 1 for a whole batch that has none to count."""
        if microbatch.batch_rows is None:
            return 1
        first, end = self._slices[microbatch.index].rows(microbatch.batch_rows)
        return end - first

    def before(self, microbatch: Microbatch) -> tuple[Overlap, ...]:
        """Ranks of the stage before that share rows with this one, by ascending row."""
        return self._of(self._mesh.rank, self._mesh.stage - 1, microbatch)

    def after(self, microbatch: Microbatch, batch_dim: int | None) -> tuple[Overlap, ...]:
        """Ranks of the stage after that need (a part of) a tensor from this one.

        A tensor without batch dimension goes whole from the first of each receiver's sources.
        """
        targets = self._of(self._mesh.rank, self._mesh.stage + 1, microbatch)
        if batch_dim is not None:
            return targets
        return tuple(
            target
            for target in targets
            if self._of(target.rank, self._mesh.stage, microbatch)[0].rank == self._mesh.rank
        )

    def _of(self, rank: int, neighbour: int, microbatch: Microbatch) -> tuple[Overlap, ...]:
        key = (rank, neighbour, microbatch.index, microbatch.batch_rows)
        found = self._overlaps.get(key)
        if found is None:
            found = self._overlaps[key] = overlaps(
                self._mesh.plan, rank, neighbour, microbatch.index, microbatch.batch_rows
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What every batch of a rank has in common.

    Attributes:
        mesh: The rank's place in the plan.
        stage: The part of the module it computes.
        live: The tensors that cross into the next stage.
        neighbours: With whom it shares rows.
        reducer: Reduces gradients.
        transport: Connects the ranks.
        device: Where it computes.
    """

    mesh: Mesh
    stage: GhostStage
    live: tuple[LiveTensor, ...]
    neighbours: Neighbours
    reducer: GradientReducer
    transport: Transport
    device: torch.device


@dataclass(slots=True)
class _Incoming:
    """Live tensors on their way to this stage."""

    specs: tuple[InputSpec, ...]
    parts: list[list[Tensor]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    state: Tensor | None = None


@dataclass(slots=True)
class _Outgoing:
    """What a stage keeps of the tensors it handed on, until their gradients arrive."""

    tensors: tuple[Tensor, ...]
    layout: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]
    is_connected: tuple[bool, ...]
    end: GraphEnd | None
    gradients: list[list[Tensor]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


class BatchRun:
    """One batch on its way through the actions of one rank.

    Args:
        place: The rank.
        microbatches: Its microbatches by index.
        step: The user's step on a microbatch.
        loss_scale: Factor on every loss before its backward.
        keeps_graph: Whether backwards will come.

    Attributes:
        outputs: Per microbatch what the step returned, on the last stage.
        random_states: Per microbatch the state of the generators after the last stage's forward, where it travelled.
    """

    def __init__(
        self,
        place: Place,
        microbatches: Sequence[Microbatch],
        step: Callable[[Microbatch], Any],
        *,
        loss_scale: float,
        keeps_graph: bool,
    ) -> None:
        self._place, self._mesh, self._live, self._neighbours = place, place.mesh, place.live, place.neighbours
        self._stage, self._transport = place.stage, place.transport
        self._microbatches, self._step = microbatches, step
        self._loss_scale, self._keeps_graph = loss_scale, keeps_graph
        self.outputs: list[Any] = [None] * len(microbatches)
        self.random_states: list[Tensor | None] = [None] * len(microbatches)
        self._incoming: dict[int, _Incoming] = {}
        self._received: dict[int, tuple[tuple[InputSpec, Tensor], ...]] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._sends: dict[tuple[ActionKind, int], list[Work]] = {}
        self._posts: dict[ActionKind, Callable[[Microbatch], None]] = {
            ActionKind.RECV_ACTIVATION: self._receive_activation,
            ActionKind.SEND_ACTIVATION: self._send_activation,
            ActionKind.RECV_GRADIENT: self._receive_gradient,
            ActionKind.SEND_GRADIENT: self._send_gradient,
        }

    def perform(self, action: Action) -> Iterator[Work]:
        """Run one action; the optimizer's step and what follows it are not the batch's."""
        if action.kind is ActionKind.REDUCE_GRADIENTS:
            yield from self._place.reducer.reduce()
        elif action.kind is ActionKind.REDUCE_TIED:
            yield from self._place.reducer.reduce_tied()
        if action.microbatch is None:
            return
        microbatch = self._microbatches[action.microbatch]
        if self._neighbours.rows(microbatch) == 0:
            # A small batch cut into many parts: this rank has no rows of it, and nobody waits for any.
            return
        if action.kind is ActionKind.FORWARD:
            yield from self._forward(microbatch)
        elif action.kind is ActionKind.BACKWARD:
            yield from self._backward(microbatch)
        else:
            self._posts[action.kind](microbatch)

    def finish(self) -> Iterator[Work]:
        """Wait for everything that was sent: buffers must live until their receiver has them."""
        for works in self._sends.values():
            yield from works
        self._sends.clear()

    # Forward ---------------------------------------------------------------------------------------------------------

    def _receive_activation(self, microbatch: Microbatch) -> None:
        rows, sources = self._neighbours.rows(microbatch), self._neighbours.before(microbatch)
        signature = (batch_signature(microbatch.value), self._keeps_graph)
        specs = self._stage.input_specs(lambda: self._step(_copied(microbatch)), signature)
        incoming = _Incoming(specs=specs)
        for number, spec in enumerate(specs):
            parts = []
            for source in sources if spec.batch_dim is not None else sources[:1]:
                shape = part_shape(spec.shape, spec.batch_dim, rows, source)
                part = torch.empty(shape, dtype=spec.dtype, device=spec.device)
                tag = _tag(microbatch, number, len(specs))
                incoming.works.append(self._transport.irecv(part, source.rank, tag))
                parts.append(part)
            incoming.parts.append(parts)
        if microbatch.random_state is not None:
            incoming.state = torch.empty_like(microbatch.random_state)
            tag = _tag(microbatch, len(specs), len(specs))
            incoming.works.append(self._transport.irecv(incoming.state, sources[0].rank, tag))
        self._incoming[microbatch.index] = incoming

    def _forward(self, microbatch: Microbatch) -> Iterator[Work]:
        index, device = microbatch.index, self._place.device
        received: tuple[tuple[InputSpec, Tensor], ...] = ()
        state = microbatch.random_state
        if self._mesh.stage > 0:
            incoming = self._incoming.pop(index)
            yield from incoming.works
            received = tuple(
                (spec, join(parts, spec.batch_dim)) for spec, parts in zip(incoming.specs, incoming.parts, strict=True)
            )
            state = incoming.state
            yield from self._release(ActionKind.SEND_GRADIENT, index - self._mesh.plan.num_stages)
        if self._keeps_graph:
            for spec, tensor in received:
                tensor.requires_grad_(spec.requires_grad)
            self._received[index] = received
        if state is not None:
            set_random_state(state, device)
        elif microbatch.seed is not None:
            seed_random(device, microbatch.seed, self._mesh.stage, index)
        output = self._stage.forward(lambda: self._step(microbatch), tuple(tensor for _, tensor in received))
        if state is not None:
            self.random_states[index] = get_random_state(device)
        if self._mesh.is_last:
            self.outputs[index] = output.value
        else:
            self._outgoing[index] = self._keep(output.tensors)

    def _keep(self, tensors: tuple[Tensor, ...]) -> _Outgoing:
        connected = tuple(
            self._keeps_graph and live.requires_grad and tensor.requires_grad
            for live, tensor in zip(self._live, tensors, strict=True)
        )
        kept = [tensor for tensor, is_connected in zip(tensors, connected, strict=True) if is_connected]
        return _Outgoing(
            tensors=tensors,
            layout=tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors),
            is_connected=connected,
            end=GraphEnd(kept) if kept else None,
        )

    def _send_activation(self, microbatch: Microbatch) -> None:
        index, count = microbatch.index, len(self._live)
        outgoing, rows = self._outgoing[index], self._neighbours.rows(microbatch)
        works = []
        for number, (live, tensor) in enumerate(zip(self._live, outgoing.tensors, strict=True)):
            for target in self._neighbours.after(microbatch, live.batch_dim):
                part = part_of(tensor, live.batch_dim, rows, target)
                works.append(self._transport.isend(part, target.rank, _tag(microbatch, number, count)))
        state, self.random_states[index] = self.random_states[index], None
        if state is not None:
            (target,) = self._neighbours.after(microbatch, 0)
            works.append(self._transport.isend(state, target.rank, _tag(microbatch, count, count)))
        self._sends[ActionKind.SEND_ACTIVATION, index] = works
        # The graph keeps what its backward needs; the tensors themselves may go once they have been sent.
        outgoing.tensors = ()
        if not self._keeps_graph:
            del self._outgoing[index]

    # Backward --------------------------------------------------------------------------------------------------------

    def _receive_gradient(self, microbatch: Microbatch) -> None:
        outgoing, rows = self._outgoing[microbatch.index], self._neighbours.rows(microbatch)
        for number, (live, (shape, dtype, device)) in enumerate(zip(self._live, outgoing.layout, strict=True)):
            parts = []
            for source in self._neighbours.after(microbatch, live.batch_dim) if live.requires_grad else ():
                part = torch.empty(part_shape(shape, live.batch_dim, rows, source), dtype=dtype, device=device)
                tag = _tag(microbatch, number, len(self._live))
                outgoing.works.append(self._transport.irecv(part, source.rank, tag))
                parts.append(part)
            outgoing.gradients.append(parts)

    def _backward(self, microbatch: Microbatch) -> Iterator[Work]:
        if self._mesh.is_last:
            self._backward_loss(microbatch)
            return
        outgoing = self._outgoing.pop(microbatch.index)
        yield from outgoing.works
        # Who answers with a gradient has the activation.
        yield from self._release(ActionKind.SEND_ACTIVATION, microbatch.index)
        gradients = [
            join(parts, live.batch_dim) if parts else None
            for live, parts, is_connected in zip(self._live, outgoing.gradients, outgoing.is_connected, strict=True)
            if is_connected
        ]
        if outgoing.end is not None:
            outgoing.end.backward(gradients)

    def _backward_loss(self, microbatch: Microbatch) -> None:
        loss = _loss_of(self.outputs[microbatch.index])
        if loss is not None and loss.requires_grad:
            weight = microbatch.weight * self._loss_scale
            loss.backward(gradient=torch.full_like(loss, weight))  # type: ignore[no-untyped-call]
        # The graph that a loss hangs on holds what this stage received and its gradients, of every microbatch so far.
        self.outputs[microbatch.index] = tree_map_only(Tensor, Tensor.detach, self.outputs[microbatch.index])

    def _send_gradient(self, microbatch: Microbatch) -> None:
        rows, sources = self._neighbours.rows(microbatch), self._neighbours.before(microbatch)
        received = self._received.pop(microbatch.index)
        works = []
        for number, (spec, tensor) in enumerate(received):
            if not spec.requires_grad:
                continue
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for source in sources if spec.batch_dim is not None else sources[:1]:
                part = part_of(gradient, spec.batch_dim, rows, source)
                works.append(self._transport.isend(part, source.rank, _tag(microbatch, number, len(received))))
        self._sends[ActionKind.SEND_GRADIENT, microbatch.index] = works

    def _release(self, kind: ActionKind, index: int) -> Iterator[Work]:
        """Wait for sends that are known to have arrived, which frees their buffers.

        Under 1F1B with ``S`` stages the stage before runs the backward of microbatch ``g - S`` before the forward of
        ``g``, so a gradient has arrived when that activation is here. Other schedules keep gradients to the end.
        """
        if kind is ActionKind.SEND_GRADIENT and self._mesh.plan.schedule != "1f1b":
            return
        yield from self._sends.pop((kind, index), [])


def _tag(microbatch: Microbatch, tensor: int, count: int) -> int:
    """Tag of one of ``count`` tensors of a microbatch, or, for ``tensor == count``, of its random state."""
    return microbatch.index * (count + 1) + tensor


def _copied(microbatch: Microbatch) -> Microbatch:
    """A microbatch on which a step may run although it will run again: it may pop entries or write into tensors."""
    return replace(microbatch, value=copy.deepcopy(microbatch.value))


def _loss_of(output: Any) -> Tensor | None:
    """The loss in what a step returned.

    Raises:
        TraceError: If it is of a kind that no trainer takes.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None or isinstance(loss, Tensor):
        return loss
    raise TraceError(
        f"the step returned a {type(loss).__name__} as its loss: a loss is a tensor, a dictionary with a tensor under "
        "'loss', or None"
    )
