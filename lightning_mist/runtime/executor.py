"""Running one rank's list of actions.

:meth:`Executor.run` is a generator: it posts transfers and yields each work it must wait for, so that the same code
runs over ``torch.distributed`` and over many ranks in one thread. What travels between stages are the live tensors of
the cut, sliced by rows where the data-parallel degrees differ, and the random state where it follows a batch.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_mist.errors import TraceError
from lightning_mist.plan import LiveTensor, ModuleMap, Plan, row_slice
from lightning_mist.runtime.boundary import GraphEnd, join, part_of, part_shape
from lightning_mist.runtime.ghosts import GhostStage, InputSpec
from lightning_mist.runtime.mesh import Overlap, make_mesh, overlaps
from lightning_mist.runtime.random import get_random_state, seed_random, set_random_state
from lightning_mist.runtime.reducer import GradientReducer
from lightning_mist.runtime.signature import batch_signature
from lightning_mist.runtime.support import check_supported
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


@dataclass(slots=True)
class _Incoming:
    """Live tensors on their way to this stage."""

    specs: tuple[InputSpec, ...]
    parts: list[list[Tensor]]
    works: list[Work]
    state: Tensor | None


@dataclass(slots=True)
class _Outgoing:
    """What a stage keeps of the tensors it handed on, until their gradients arrive."""

    tensors: tuple[Tensor, ...]
    layout: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]
    is_connected: tuple[bool, ...]
    end: GraphEnd | None
    gradients: list[list[Tensor]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


class Executor:
    """Runs the actions of one rank, batch after batch.

    Args:
        plan: The plan.
        rank: This global rank.
        stage: The part of the module that this rank computes.
        module_map: Where the module can be cut.
        transport: Connects the ranks; its groups must include
            :func:`~lightning_mist.runtime.mesh.process_groups` of the plan.
        actions: This rank's lowered list. Without backwards it only evaluates.

    Attributes:
        mesh: This rank's place in the plan.
        reducer: Reduces gradients, gathers parameters.
        outputs: Per microbatch what the step returned, on the last stage; None elsewhere and for parts without rows.
        random_states: Per microbatch the state of the generators after the last stage's forward, where it travelled.

    Raises:
        PlanError: If the runtime cannot run the plan.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stage: GhostStage,
        module_map: ModuleMap,
        transport: Transport,
        actions: Sequence[Action],
    ) -> None:
        check_supported(plan)
        self.plan, self.stage, self.transport = plan, stage, transport
        self.actions = tuple(actions)
        self.mesh = make_mesh(plan, rank, module_map)
        self.reducer = GradientReducer(self.mesh, stage.parameters, transport)
        self.outputs: list[Any] = []
        self.random_states: list[Tensor | None] = []
        self.live: tuple[LiveTensor, ...] = ()
        if not self.mesh.is_last:
            self.live = module_map.cuts[plan.stages[self.mesh.stage].layers[1] - 1]

    def run(
        self, microbatches: Sequence[Microbatch], step: Callable[[Microbatch], Any], *, loss_scale: float = 1.0
    ) -> Iterator[Work]:
        """Run all actions of one batch but the optimizer's step and what follows it.

        The parameters' gradients must be None. At the end ``p.grad`` of the stage's parameters is ``loss_scale`` times
        the mean, over the batches of all ranks, of the gradient of each batch's weighted loss: what data parallelism
        gives. Under ZeRO-1 only the owner of a parameter has it.

        Args:
            microbatches: This rank's microbatches by index.
            step: The user's step on a microbatch: returns a loss, a dictionary with ``"loss"``, or None.
            loss_scale: Factor on every loss before its backward.

        Raises:
            ValueError: If the microbatches are not those of the plan, or a parameter already has a gradient.
        """
        self._check_start(microbatches)
        self.outputs = [None] * len(microbatches)
        self.random_states = [None] * len(microbatches)
        last_backward = max(
            (position for position, action in enumerate(self.actions) if action.kind is ActionKind.BACKWARD), default=-1
        )
        batch = _Batch(self, microbatches, step, loss_scale, keeps_graph=last_backward >= 0)
        try:
            with self.stage.attached():
                for position, action in enumerate(self.actions):
                    if position == last_backward:
                        self.reducer.arm()
                    yield from batch.perform(action)
                yield from batch.finish()
        finally:
            self.reducer.disarm()

    def gather_parameters(self) -> Iterator[Work]:
        """After the optimizer's step: give the stage's ranks the parameters that others of them updated (ZeRO-1)."""
        yield from self.reducer.gather_parameters()

    def _check_start(self, microbatches: Sequence[Microbatch]) -> None:
        indices = [microbatch.index for microbatch in microbatches]
        if indices != list(range(self.plan.num_microbatches)):
            raise ValueError(
                f"microbatches {indices}: the plan has {self.plan.num_microbatches}, given in the order of their index"
            )
        for name, parameter in self.stage.parameters.items():
            if parameter.grad is not None:
                raise ValueError(f"{name} has a gradient: put gradients of earlier batches aside before a batch runs")


class _Batch:
    """One batch on its way through the actions of one rank."""

    def __init__(
        self,
        executor: Executor,
        microbatches: Sequence[Microbatch],
        step: Callable[[Microbatch], Any],
        loss_scale: float,
        *,
        keeps_graph: bool,
    ) -> None:
        self.ex, self.plan, self.mesh, self.live = executor, executor.plan, executor.mesh, executor.live
        self.transport, self.stage = executor.transport, executor.stage
        self.microbatches, self.step, self.loss_scale, self.keeps_graph = microbatches, step, loss_scale, keeps_graph
        self.incoming: dict[int, _Incoming] = {}
        self.received: dict[int, tuple[tuple[InputSpec, Tensor], ...]] = {}
        self.outgoing: dict[int, _Outgoing] = {}
        self.sends: dict[tuple[ActionKind, int], list[Work]] = {}
        self.handlers: dict[ActionKind, Callable[[int], Iterator[Work]]] = {
            ActionKind.RECV_ACTIVATION: self._receive_activation,
            ActionKind.FORWARD: self._forward,
            ActionKind.SEND_ACTIVATION: self._send_activation,
            ActionKind.RECV_GRADIENT: self._receive_gradient,
            ActionKind.BACKWARD: self._backward,
            ActionKind.SEND_GRADIENT: self._send_gradient,
        }

    def perform(self, action: Action) -> Iterator[Work]:
        """Run one action."""
        if action.kind is ActionKind.REDUCE_GRADIENTS:
            yield from self.ex.reducer.reduce()
        elif action.kind is ActionKind.REDUCE_TIED:
            yield from self.ex.reducer.reduce_tied()
        elif action.microbatch is not None and self._rows(action.microbatch):
            yield from self.handlers[action.kind](action.microbatch)

    def finish(self) -> Iterator[Work]:
        """Wait for everything that was sent: buffers must live until their receiver has them."""
        for works in self.sends.values():
            yield from works
        self.sends.clear()

    def _rows(self, index: int) -> int:
        """Rows of this rank's part; 1 for a whole batch that has none to count."""
        batch_rows = self.microbatches[index].batch_rows
        if batch_rows is None:
            return 1
        first, end = row_slice(self.plan, self.mesh.rank, index).rows(batch_rows)
        return end - first

    def _overlaps(self, index: int, neighbour: int) -> tuple[Overlap, ...]:
        return overlaps(self.plan, self.mesh.rank, neighbour, index, self.microbatches[index].batch_rows)

    def _tag(self, index: int, tensor: int, count: int) -> int:
        # One more tag per microbatch than tensors: the last is the random state's.
        return index * (count + 1) + tensor

    def _call(self, index: int) -> Callable[[], Any]:
        microbatch = self.microbatches[index]
        return lambda: self.step(microbatch)

    def _receive_activation(self, index: int) -> Iterator[Work]:
        microbatch, rows = self.microbatches[index], self._rows(index)
        signature = (batch_signature(microbatch.value), torch.is_grad_enabled(), self.keeps_graph)
        specs = self.stage.input_specs(lambda: self.step(_copied(microbatch)), signature)
        sources = self._overlaps(index, self.mesh.stage - 1)
        incoming = _Incoming(specs=specs, parts=[], works=[], state=None)
        for number, spec in enumerate(specs):
            parts = []
            for overlap in sources if spec.batch_dim is not None else sources[:1]:
                shape = part_shape(spec.shape, spec.batch_dim, rows, overlap)
                part = torch.empty(shape, dtype=spec.dtype, device=spec.device)
                incoming.works.append(self.transport.irecv(part, overlap.rank, self._tag(index, number, len(specs))))
                parts.append(part)
            incoming.parts.append(parts)
        if microbatch.random_state is not None:
            incoming.state = torch.empty_like(microbatch.random_state)
            incoming.works.append(
                self.transport.irecv(incoming.state, sources[0].rank, self._tag(index, len(specs), len(specs)))
            )
        self.incoming[index] = incoming
        return
        yield  # A generator, although it waits for nothing.

    def _forward(self, index: int) -> Iterator[Work]:
        microbatch = self.microbatches[index]
        received: tuple[tuple[InputSpec, Tensor], ...] = ()
        state = microbatch.random_state
        if self.mesh.stage > 0:
            incoming = self.incoming.pop(index)
            yield from incoming.works
            received = tuple(
                (spec, join(parts, spec.batch_dim)) for spec, parts in zip(incoming.specs, incoming.parts, strict=True)
            )
            state = incoming.state
            yield from self._release(ActionKind.SEND_GRADIENT, index - self.plan.num_stages)
        if self.keeps_graph:
            for spec, tensor in received:
                tensor.requires_grad_(spec.requires_grad)
        device = self._device
        if state is not None:
            set_random_state(state, device)
        elif microbatch.seed is not None:
            seed_random(device, microbatch.seed, self.mesh.stage, index)
        output = self.stage.forward(self._call(index), tuple(tensor for _, tensor in received))
        if state is not None:
            self.ex.random_states[index] = get_random_state(device)
        if self.keeps_graph:
            self.received[index] = received
        if self.mesh.is_last:
            self.ex.outputs[index] = output.value
        else:
            self.outgoing[index] = self._outgoing(output.tensors)

    def _outgoing(self, tensors: tuple[Tensor, ...]) -> _Outgoing:
        connected = tuple(
            self.keeps_graph and live.requires_grad and tensor.requires_grad
            for live, tensor in zip(self.live, tensors, strict=True)
        )
        kept = [tensor for tensor, is_connected in zip(tensors, connected, strict=True) if is_connected]
        return _Outgoing(
            tensors=tensors,
            layout=tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors),
            is_connected=connected,
            end=GraphEnd(kept) if kept else None,
        )

    def _receivers(self, index: int, batch_dim: int | None) -> tuple[Overlap, ...]:
        """Who gets (a part of) an output: a tensor without batch dimension comes from each receiver's first source."""
        targets = self._overlaps(index, self.mesh.stage + 1)
        if batch_dim is not None:
            return targets
        batch_rows = self.microbatches[index].batch_rows
        first_sources = {
            target.rank: overlaps(self.plan, target.rank, self.mesh.stage, index, batch_rows)[0].rank
            for target in targets
        }
        return tuple(target for target in targets if first_sources[target.rank] == self.mesh.rank)

    def _send_activation(self, index: int) -> Iterator[Work]:
        outgoing, rows, count = self.outgoing[index], self._rows(index), len(self.live)
        works = []
        for number, (live, tensor) in enumerate(zip(self.live, outgoing.tensors, strict=True)):
            for target in self._receivers(index, live.batch_dim):
                part = part_of(tensor, live.batch_dim, rows, target)
                works.append(self.transport.isend(part, target.rank, self._tag(index, number, count)))
        state = self.ex.random_states[index]
        if state is not None:
            target = self._overlaps(index, self.mesh.stage + 1)[0]
            works.append(self.transport.isend(state, target.rank, self._tag(index, count, count)))
            self.ex.random_states[index] = None
        self.sends[ActionKind.SEND_ACTIVATION, index] = works
        # The graph keeps what its backward needs; the tensors themselves may go once they have been sent.
        outgoing.tensors = ()
        if not self.keeps_graph:
            del self.outgoing[index]
        return
        yield

    def _receive_gradient(self, index: int) -> Iterator[Work]:
        outgoing, rows, count = self.outgoing[index], self._rows(index), len(self.live)
        for number, (live, (shape, dtype, device)) in enumerate(zip(self.live, outgoing.layout, strict=True)):
            parts = []
            for source in self._receivers(index, live.batch_dim) if live.requires_grad else ():
                part = torch.empty(part_shape(shape, live.batch_dim, rows, source), dtype=dtype, device=device)
                outgoing.works.append(self.transport.irecv(part, source.rank, self._tag(index, number, count)))
                parts.append(part)
            outgoing.gradients.append(parts)
        return
        yield

    def _backward(self, index: int) -> Iterator[Work]:
        if self.mesh.is_last:
            self._backward_loss(index)
        else:
            outgoing = self.outgoing.pop(index)
            yield from outgoing.works
            # Who answers with a gradient has the activation.
            yield from self._release(ActionKind.SEND_ACTIVATION, index)
            gradients = [
                join(parts, live.batch_dim) if parts else None
                for live, parts, is_connected in zip(self.live, outgoing.gradients, outgoing.is_connected, strict=True)
                if is_connected
            ]
            if outgoing.end is not None:
                outgoing.end.backward(gradients)

    def _backward_loss(self, index: int) -> None:
        loss = _loss_of(self.ex.outputs[index])
        if loss is not None and loss.requires_grad:
            weight = self.microbatches[index].weight * self.loss_scale
            loss.backward(gradient=torch.full_like(loss, weight))  # type: ignore[no-untyped-call]

    def _send_gradient(self, index: int) -> Iterator[Work]:
        rows, received = self._rows(index), self.received.pop(index)
        sources = self._overlaps(index, self.mesh.stage - 1)
        works = []
        for number, (spec, tensor) in enumerate(received):
            if not spec.requires_grad:
                continue
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for source in sources if spec.batch_dim is not None else sources[:1]:
                part = part_of(gradient, spec.batch_dim, rows, source)
                works.append(self.transport.isend(part, source.rank, self._tag(index, number, len(received))))
        self.sends[ActionKind.SEND_GRADIENT, index] = works
        return
        yield

    def _release(self, kind: ActionKind, index: int) -> Iterator[Work]:
        """Wait for sends that are known to have arrived, which frees their buffers.

        Under 1F1B with ``S`` stages the stage before runs the backward of microbatch ``g - S`` before the forward of
        ``g``, so a gradient has arrived when that activation is here. Other schedules keep gradients to the end.
        """
        if kind is ActionKind.SEND_GRADIENT and self.plan.schedule != "1f1b":
            return
        yield from self.sends.pop((kind, index), [])

    @property
    def _device(self) -> torch.device:
        parameter = next(iter(self.stage.parameters.values()), None)
        return torch.device("cpu") if parameter is None else parameter.device


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
