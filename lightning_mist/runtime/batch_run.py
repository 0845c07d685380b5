"""One batch on its way through the actions of one rank: what is received, computed, kept and sent."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_mist.errors import PlanError, TraceError
from lightning_mist.plan import LiveTensor, ModuleMap, OffloadRatios, Plan, ZeroStage, of_whole_batches, replica_ranks
from lightning_mist.plan.calls import describe_value
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Crossing, GraphEnd, Microbatch, Neighbours, Portion, Transport, Work
from lightning_mist.runtime.gradients import GradientReducer, WeightGradients
from lightning_mist.runtime.parameters import CastKeeper, no_kept_casts
from lightning_mist.runtime.process_state import get_random_state, seed_random, set_random_state
from lightning_mist.runtime.stage import InputSpec, RankStages, StageOutput, UnitRunner, make_stages
from lightning_mist.schedule import Action, ActionKind, arrived_sends, check, lower_forwards
from lightning_mist.schedule.action import INPUT_BACKWARDS
from lightning_mist.schedule.stage_units import used_elsewhere
from lightning_mist.tensors import batch_signature, batch_tensors, copy_batch, sequence_length, slice_rows, slice_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What every batch of a rank has in common.

    Attributes:
        live: For each boundary between stages, by the stage before it, the tensors that cross it.
        arrivals: Which sends each computation finds arrived; see
            :func:`~lightning_mist.schedule.lowering.arrived_sends`.
    """

    mesh: Mesh
    stages: RankStages
    live: tuple[tuple[LiveTensor, ...], ...]
    neighbours: Neighbours
    reducer: GradientReducer
    transport: Transport
    device: torch.device
    casts: CastKeeper
    arrivals: Mapping[Action, tuple[Action, ...]]
    runner: UnitRunner


_STATE = LiveTensor(key="random state", shape=(), dtype="uint8", requires_grad=False, batch_dim=None)
"""How a random state crosses a boundary."""

_Key = tuple[int, int]
"""A stage and the index of a microbatch."""


@dataclass(slots=True)
class _Incoming:
    """Live tensors on their way to this stage."""

    specs: tuple[InputSpec, ...]
    crossings: list[Crossing] = field(default_factory=list)
    parts: list[list[list[Tensor]]] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    state: Tensor | None = None

    def take(self) -> tuple[tuple[InputSpec, Crossing, Tensor], ...]:
        """The tensors that have arrived; what they were put together from is no longer kept."""
        parts, self.parts = self.parts, []
        self.works.clear()
        joined = [crossing.join(parts.pop(0)) for crossing in self.crossings]
        return tuple(zip(self.specs, self.crossings, joined, strict=True))


@dataclass(slots=True)
class _Outgoing:
    """What a stage keeps of the tensors it handed on, until their gradients arrive."""

    tensors: tuple[Tensor, ...]
    layout: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...]
    crossings: tuple[Crossing, ...]
    is_connected: tuple[bool, ...]
    end: GraphEnd | None
    gradients: list[list[list[Tensor]]] = field(default_factory=list)
    present: list[Tensor] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    def take(self) -> list[Tensor | None]:
        """Gradients that arrived for tensors that a graph hangs on; one rank alone has that of what has no rows."""
        parts, self.gradients = self.gradients, []
        self.works.clear()
        found: list[Tensor | None] = []
        for number, (crossing, is_connected) in enumerate(zip(self.crossings, self.is_connected, strict=True)):
            part = parts.pop(0)
            if is_connected:
                found.append(crossing.join(part) if part and any(each[number] for each in self.present) else None)
        return found


class BatchRun:
    """One batch on its way through the actions of one rank.

    Args:
        loss_scale: Factor on every loss before its backward; a tensor of one element stays on its device.
        keeps_graph: Whether backwards will come.
        made: Called whenever the last stage has launched all of what the step returned.
    """

    def __init__(
        self,
        context: RankContext,
        microbatches: Sequence[Microbatch],
        step: Callable[[Microbatch], Any],
        *,
        loss_scale: float | Tensor,
        keeps_graph: bool,
        made: Callable[[], None] | None = None,
    ) -> None:
        self._context, self._neighbours, self._made = context, context.neighbours, made
        self._stages, self._transport = context.stages, context.transport
        self._last = context.mesh.plan.num_stages - 1
        self._tags_per_boundary = max(map(len, context.live), default=0) + 1  # a random state crosses too
        self._microbatches, self._step = microbatches, step
        self._loss_scale, self._keeps_graph = loss_scale, keeps_graph
        # Of which parts of batches there are results, in the order of their index.
        last = next((stage for stage in context.stages if stage.index == self._last), None)
        count, lap = (1, None) if last is None else (last.tail_chunks, last.lap)
        self._chunks = [_chunks_of(microbatch, count, lap) for microbatch in microbatches]
        self.parts = [chunk for chunks in self._chunks for chunk in chunks]
        self._tail_inputs: dict[int, tuple[tuple[Tensor, ...], GraphEnd | None]] = {}
        self.outputs: list[Any] = [None] * len(self.parts)
        self.random_states: list[Tensor | None] = [None] * len(self.parts)
        # Everything on its way is known by stage and microbatch.
        self._incoming: dict[_Key, _Incoming] = {}
        self._received: dict[_Key, tuple[tuple[InputSpec, Crossing, Tensor], ...]] = {}
        self._outgoing: dict[_Key, _Outgoing] = {}
        self._states: dict[_Key, Tensor] = {}
        self._markers: dict[_Key, Tensor | None] = {}
        self._sends: dict[Action, list[Work]] = {}
        self._posts: dict[ActionKind, Callable[[int, Microbatch], None]] = {
            ActionKind.RECV_ACTIVATION: self._receive_activation,
            ActionKind.SEND_ACTIVATION: self._send_activation,
            ActionKind.RECV_GRADIENT: self._receive_gradient,
            ActionKind.SEND_GRADIENT: self._send_gradient,
        }

    def perform(self, action: Action, final: Collection[str] = ()) -> Iterator[Work]:
        """Run one action; the optimizer's step and what follows it are not the batch's.

        Args:
            final: Parameters whose gradients are final when it has accumulated them.
        """
        if action.kind is ActionKind.REDUCE_GRADIENTS:
            yield from self._context.reducer.reduce()
        elif action.kind is ActionKind.REDUCE_TIED:
            yield from self._context.reducer.reduce_tied()
        if action.microbatch is None:
            return
        runner = self._context.runner
        runner.begin(action, marks=self._keeps_graph and action.kind is ActionKind.FORWARD)
        microbatch = self._microbatches[action.microbatch]
        if self._neighbours.rows(microbatch) == 0:
            pass  # a small batch cut into many parts: this rank has no rows of it, and nobody waits for any
        elif action.kind is ActionKind.FORWARD:
            yield from self._forward(action.stage, microbatch)
        elif action.kind in INPUT_BACKWARDS:
            yield from self._backward(action, microbatch, final)
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            self._context.reducer.expect(final)
            self.deferral(action.stage).run(action.microbatch)
        else:
            self._posts[action.kind](action.stage, microbatch)
        runner.finish()

    def finish(self) -> Iterator[Work]:
        """Wait for everything that was sent: buffers must live until their receiver has them."""
        for works in self._sends.values():
            yield from works
        self._sends.clear()

    # Forward ---------------------------------------------------------------------------------------------------------

    def _receive_activation(self, stage: int, microbatch: Microbatch) -> None:
        signature = (batch_signature(microbatch.value), self._keeps_graph)
        with self._stages.at(stage) as part_of_module:
            specs = part_of_module.input_specs(lambda: self._step(_copied(microbatch)), signature)
        incoming = _Incoming(specs=specs)
        for number, (spec, live) in enumerate(zip(specs, self._context.live[stage - 1], strict=True)):
            crossing = self._neighbours.crossing(stage, stage - 1, microbatch, live, spec.length)
            sources = crossing.arriving(self._neighbours.before(stage, microbatch, live.batch_dim))
            like = torch.empty((), dtype=spec.dtype, device=spec.device)
            tag = self._tag(stage - 1, microbatch, number)
            incoming.parts.append(self._receive(crossing, sources, spec.shape, like, tag, incoming.works))
            incoming.crossings.append(crossing)
        if microbatch.random_state is not None:
            crossing = self._neighbours.crossing(stage, stage - 1, microbatch, _STATE)
            ((source,),) = crossing.arriving(self._neighbours.before(stage, microbatch, None))
            incoming.state = torch.empty_like(microbatch.random_state)
            tag = self._tag(stage - 1, microbatch, len(specs))
            incoming.works.append(self._transport.irecv(incoming.state, source.rank, tag))
        self._incoming[stage, microbatch.index] = incoming

    def _receive(
        self,
        crossing: Crossing,
        sources: Sequence[Sequence[Portion]],
        shape: Sequence[int],
        like: Tensor,
        tag: int,
        works: list[Work],
    ) -> list[list[Tensor]]:
        """Post the receives of all portions of a tensor; the buffers, by overlap."""
        buffers = [[like.new_empty(crossing.shape(shape, portion)) for portion in row] for row in sources]
        for row, portions in zip(buffers, sources, strict=True):
            works += [
                self._transport.irecv(part, portion.rank, tag) for part, portion in zip(row, portions, strict=True)
            ]
        return buffers

    def _forward(self, stage: int, microbatch: Microbatch) -> Iterator[Work]:
        index, device, key = microbatch.index, self._context.device, (stage, microbatch.index)
        received: tuple[tuple[InputSpec, Crossing, Tensor], ...] = ()
        state = microbatch.random_state
        if stage > 0:
            incoming = self._incoming.pop(key)
            yield from incoming.works
            received, state = incoming.take(), incoming.state
            yield from self._release(Action(stage, ActionKind.FORWARD, index))
        if self._keeps_graph:
            for spec, _, tensor in received:
                tensor.requires_grad_(spec.requires_grad)
            self._received[key] = received
        if state is not None:
            set_random_state(state, device)
        elif microbatch.seed is not None:
            seed_random(device, microbatch.seed, stage, index)
        runner = self._context.runner
        inputs = tuple(tensor for *_, tensor in received)
        held = *inputs, *batch_tensors(microbatch.value)
        with self._stages.at(stage) as part_of_module, runner.around_step(part_of_module.fake_mode, held):
            runner.start()
            own = microbatch
            if part_of_module.tail is not None:
                own = replace(microbatch, value=copy_batch(microbatch.value))  # a step may pop entries
            output = part_of_module.forward(partial(self._step, own), inputs)
            if stage < self._last:
                part_of_module.check_form(output, (batch_signature(microbatch.value), self._keeps_graph))
        self._context.casts.look(stage, (output.tensors, output.value))
        self._markers[key] = runner.take_marker()
        self._keep_output(stage, microbatch, output, None if state is None else get_random_state(device))

    def _keep_output(self, stage: int, microbatch: Microbatch, output: StageOutput, after: Tensor | None) -> None:
        """Keep what a forward gave, and the state that it left."""
        index, key, tail = microbatch.index, (stage, microbatch.index), self._stages[stage].tail
        if tail is not None:
            kept = [tensor for tensor in output.tensors if self._keeps_graph and tensor.requires_grad]
            tensors = (
                tensor.detach().requires_grad_(any(tensor is item for item in kept)) for tensor in output.tensors
            )
            self._tail_inputs[index] = tuple(tensors), GraphEnd(kept) if kept else None
            for chunk in self._chunks[index]:
                self.random_states[chunk.index] = after
            if not self._keeps_graph:
                with self._stages.at(stage):
                    self._run_tail(stage, microbatch)
        elif stage == self._last:
            self.outputs[index], self.random_states[index] = output.value, after
            if self._made is not None:
                self._made()
        else:
            self._outgoing[key] = self._keep(stage, microbatch, output)
            if after is not None:
                self._states[key] = after

    def _keep(self, stage: int, microbatch: Microbatch, output: StageOutput) -> _Outgoing:
        live_tensors, tensors = self._context.live[stage], output.tensors
        connected = tuple(
            self._keeps_graph and live.requires_grad and tensor.requires_grad
            for live, tensor in zip(live_tensors, tensors, strict=True)
        )
        kept = [tensor for tensor, is_connected in zip(tensors, connected, strict=True) if is_connected]
        return _Outgoing(
            tensors=tensors,
            layout=tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors),
            crossings=tuple(
                self._neighbours.crossing(stage, stage + 1, microbatch, live, length)
                for live, length in zip(live_tensors, output.lengths, strict=True)
            ),
            is_connected=connected,
            end=GraphEnd(kept) if kept else None,
        )

    def _send_activation(self, stage: int, microbatch: Microbatch) -> None:
        key, outgoing = (stage, microbatch.index), self._outgoing[stage, microbatch.index]
        works = []
        for number, (crossing, tensor) in enumerate(zip(outgoing.crossings, outgoing.tensors, strict=True)):
            targets = crossing.leaving(self._neighbours.after(stage, microbatch, crossing.batch_dim))
            works += self._send(crossing, targets, tensor, self._tag(stage, microbatch, number))
        state = self._states.pop(key, None)
        if state is not None:
            crossing, tag = self._neighbours.crossing(stage, stage + 1, microbatch, _STATE), len(outgoing.crossings)
            targets = crossing.leaving(self._neighbours.after(stage, microbatch, None))
            works += self._send(crossing, targets, state, self._tag(stage, microbatch, tag))
        self._sends[Action(stage, ActionKind.SEND_ACTIVATION, microbatch.index)] = works
        # The graph keeps what its backward needs; the tensors themselves may go once they have been sent.
        outgoing.tensors = ()
        if not self._keeps_graph:
            del self._outgoing[key]

    def _send(self, crossing: Crossing, targets: Sequence[Portion], tensor: Tensor, tag: int) -> list[Work]:
        return [self._transport.isend(crossing.cut(tensor, portion), portion.rank, tag) for portion in targets]

    # Backward --------------------------------------------------------------------------------------------------------

    def _receive_gradient(self, stage: int, microbatch: Microbatch) -> None:
        outgoing, ranks = self._outgoing[stage, microbatch.index], set[int]()
        for number, (live, crossing) in enumerate(zip(self._context.live[stage], outgoing.crossings, strict=True)):
            if not live.requires_grad:
                outgoing.gradients.append([])
                continue
            shape, dtype, device = outgoing.layout[number]
            sources = crossing.arriving(self._neighbours.after(stage, microbatch, crossing.batch_dim))
            like, tag = torch.empty((), dtype=dtype, device=device), self._tag(stage, microbatch, number)
            outgoing.gradients.append(self._receive(crossing, sources, shape, like, tag, outgoing.works))
            ranks.update(portion.rank for row in sources for portion in row)
        for rank in sorted(ranks):
            outgoing.present.append(torch.empty(len(outgoing.crossings), dtype=torch.uint8, device="cpu"))
            tag = self._tag(stage, microbatch, len(outgoing.crossings))
            outgoing.works.append(self._transport.irecv(outgoing.present[-1], rank, tag))

    def deferral(self, stage: int) -> WeightGradients:
        """What holds gradients of weights back, of a stage whose backward is split."""
        deferral = self._stages[stage].deferral
        assert deferral is not None
        return deferral

    def _backward(self, action: Action, microbatch: Microbatch, final: Collection[str]) -> Iterator[Work]:
        stage, key = action.stage, (action.stage, microbatch.index)
        is_split = action.kind is ActionKind.BACKWARD_INPUT
        collecting = self.deferral(stage).collecting(microbatch.index) if is_split else nullcontext()
        if stage == self._last:
            with self._stages.at(stage) as part, collecting:
                self._context.runner.start()
                marker = self._markers.pop(key, None)
                if part.tail is None:
                    self._context.reducer.expect(final)
                    self._backward_loss(microbatch, marker)
                    return
                end, gradients = self._run_tail(stage, microbatch)
                # What the layers do not use is final now, and the rest when they have run backward.
                self._context.reducer.complete(part.tail.own.intersection(final))
                self._context.reducer.expect(set(final) - part.tail.own)
                if end is not None:
                    end.backward(gradients, marker)
            return
        outgoing = self._outgoing.pop(key)
        yield from outgoing.works
        yield from self._release(action)
        gradients = outgoing.take()
        if outgoing.end is not None:
            with self._stages.at(stage), collecting:
                self._context.reducer.expect(final)
                self._context.runner.start()
                outgoing.end.backward(gradients, self._markers.pop(key, None))

    def _run_tail(self, stage: int, microbatch: Microbatch) -> tuple[GraphEnd | None, list[Tensor | None]]:
        """Run what is behind the last layer, forward and backward chunk after chunk.

        It draws no random numbers: generators are left as they are.

        Returns:
            Where the graph of what it is given ends, and the gradients for that.
        """
        tensors, end = self._tail_inputs.pop(microbatch.index)
        sums = [torch.zeros_like(tensor) if tensor.requires_grad else None for tensor in tensors]
        state, rows = self._drawn(), microbatch.rows or (0, microbatch.batch_rows or 1)
        tail, lap = self._stages[stage].tail, self._stages[stage].lap
        assert tail is not None
        with tail.attached(), no_kept_casts():
            for chunk in (chunk for chunk in self._chunks[microbatch.index] if chunk.weight):
                inputs = [_leaf(*item, rows, chunk, lap) for item in zip(tail.receives, tensors, sums, strict=True)]
                own = chunk
                if chunk.tokens is not None:
                    own = replace(chunk, value=slice_tokens(microbatch.value, *chunk.tokens[:2]))
                output = tail.forward(partial(self._step, own), [leaf for leaf, _ in inputs])
                del own
                if self._drawn() != state:
                    raise TraceError(
                        "what runs behind the last layer draws random numbers, which it did not when the plan was "
                        "made: chunks draw others than all rows would. Use tail_chunks = 1"
                    )
                self.outputs[chunk.index] = output.value
                del output
                if self._keeps_graph:
                    self._backward_loss(chunk, None)
                for leaf, total in inputs:
                    if total is not None and leaf.grad is not None and leaf.grad is not total:
                        total.add_(leaf.grad)
        if self._made is not None:
            self._made()
        # What no chunk has added to, the loss does not depend on: it has no gradient, rather than one of zeros.
        return end, [total if total._version else None for total in sums if total is not None]

    def _drawn(self) -> bytes:
        """Where torch's generators stand."""
        return get_random_state(self._context.device).numpy().tobytes()

    def _backward_loss(self, part: Microbatch, marker: Tensor | None) -> None:
        loss = _loss_of(self.outputs[part.index])
        if loss is not None and loss.requires_grad:
            # As a product, since a scale on a device is no number for `full_like`.
            weight = torch.full_like(loss, part.weight) * self._loss_scale
            ends = [(loss, weight), *([] if marker is None else [(marker, None)])]
            torch.autograd.backward([end for end, _ in ends], [gradient for _, gradient in ends])
        # The graph that a loss hangs on holds what this stage received and its gradients, of every microbatch so far.
        self.outputs[part.index] = tree_map_only(Tensor, Tensor.detach, self.outputs[part.index])

    def _send_gradient(self, stage: int, microbatch: Microbatch) -> None:
        works, ranks, received = list[Work](), set[int](), self._received.pop((stage, microbatch.index))
        for number, (spec, crossing, tensor) in enumerate(received):
            if not spec.requires_grad:
                continue
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            targets = crossing.leaving(self._neighbours.before(stage, microbatch, crossing.batch_dim))
            works += self._send(crossing, targets, gradient, self._tag(stage - 1, microbatch, number))
            ranks.update(portion.rank for portion in targets)
        # What the loss does not use has no gradient, rather than one of zeros. Hosts tell each other: to read it off
        # a device would wait for all that was launched.
        present = torch.tensor([tensor.grad is not None for *_, tensor in received], dtype=torch.uint8, device="cpu")
        tag = self._tag(stage - 1, microbatch, len(received))
        works += [self._transport.isend(present, rank, tag) for rank in sorted(ranks)]
        self._sends[Action(stage, ActionKind.SEND_GRADIENT, microbatch.index)] = works

    def _release(self, action: Action) -> Iterator[Work]:
        """Wait for the sends that have arrived when the wait of ``action`` is over, which frees their buffers."""
        for send in self._context.arrivals.get(action, ()):
            yield from self._sends.pop(send, [])

    def _tag(self, boundary: int, microbatch: Microbatch, tensor: int) -> int:
        """Tag of a microbatch's ``tensor`` on its way over a boundary, or, behind the last one, of its random state.

        Two ranks may exchange over several boundaries in the same direction, so the boundary is part of the tag.
        """
        return (microbatch.index * self._last + boundary) * self._tags_per_boundary + tensor


def _chunks_of(microbatch: Microbatch, count: int, lap: int | None) -> tuple[Microbatch, ...]:
    """A microbatch in chunks of as many rows, or tokens, or one more; only those that have rows have values."""
    if count == 1:
        return (microbatch,)
    length = None if lap is None else sequence_length(microbatch.value) or lap
    first, end = microbatch.rows or (0, microbatch.batch_rows or 0)
    if microbatch.weight and (microbatch.batch_rows is None or (lap is not None and length == lap)):
        lacking, what = ("second", "tokens") if microbatch.batch_rows else ("first", "rows")
        raise PlanError(
            f"tail_chunks = {count}: the tensors of a batch do not share a {lacking} dimension of several {what} to "
            "cut; use tail_chunks = 1"
        )
    begin, every = (first, end - first) if length is None else (0, length - (lap or 0))
    cuts = [begin + every * number // count for number in range(count + 1)]
    found = []
    for number, (low, high) in enumerate(pairwise(cuts)):
        weight = microbatch.weight * (high - low) / max(every, 1)
        chunk = replace(microbatch, value=None, weight=weight, index=microbatch.index * count + number)
        if length is None:
            value = slice_rows(microbatch.value, low - first, high - first) if high > low else None
            found.append(replace(chunk, value=value, rows=(low, high)))
        else:
            found.append(replace(chunk, tokens=(low, high + (lap or 0), length)))
    return tuple(found)


def _leaf(
    live: LiveTensor,
    tensor: Tensor,
    total: Tensor | None,
    every: tuple[int, int],
    chunk: Microbatch,
    lap: int | None,
) -> tuple[Tensor, Tensor | None]:
    """The rows or tokens of a chunk, and where their gradient is added up, which that of rows is at once."""
    place = None
    if chunk.tokens is not None:
        first, end, length = chunk.tokens
        short = length - tensor.shape[1] if tensor.dim() > 1 else -1
        if not 0 <= short <= (lap or 0):
            raise TraceError(
                f"the {describe_value(live.key)} has the shape {tuple(tensor.shape)} behind the last layer, for "
                f"{length} tokens: it had one place for each when the plan was made. Use tail_chunks = 1"
            )
        place = 1, first, end - first - short
    elif live.batch_dim is not None and chunk.rows is not None:
        each = tensor.shape[live.batch_dim] // (every[1] - every[0])
        place = live.batch_dim, (chunk.rows[0] - every[0]) * each, (chunk.rows[1] - chunk.rows[0]) * each
    if place is not None:
        tensor, total = tensor.narrow(*place), total if total is None else total.narrow(*place)
    leaf = tensor.detach()
    if chunk.tokens is not None:
        # The next chunk may have some of these tokens too, and must not see what is written into them.
        return leaf.clone(memory_format=torch.contiguous_format).requires_grad_(total is not None), total
    leaf.requires_grad_(total is not None).grad = total
    return leaf, total


def _copied(microbatch: Microbatch) -> Microbatch:
    """A microbatch on which a step may run although it will run again: it may pop entries or write into tensors."""
    return replace(microbatch, value=copy_batch(microbatch.value, with_tensors=True))


def _loss_of(output: Any) -> Tensor | None:
    """The loss in what a step returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None or isinstance(loss, Tensor):
        return loss
    raise TraceError(
        f"the step returned a {type(loss).__name__} as its loss: a loss is a tensor, a dictionary with a tensor under "
        "'loss', or None"
    )


# Running a step that is only evaluated by the forwards of a plan: on whole batches, without a graph.


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """What a rank does for every batch of one evaluated step.

    Attributes:
        plan: The plan of whole batches; see :func:`~lightning_mist.plan.rows.of_whole_batches`.
        lines: What its actions consist of, where a stage shards or moves anything.
    """

    plan: Plan
    actions: tuple[Action, ...]
    context: RankContext
    lines: Mapping[Action, Sequence[Action]]


def is_whole(plan: Plan, *, has_masters: bool) -> bool:
    """Whether every rank has all parameters all the time, and room for a whole row."""
    return plan.num_stages == 1 and not any(
        stage.mesh.num_row_peers > 1
        or stage.offload.parameters > 0.0
        or (has_masters and stage.offload.optimizer > 0.0)
        or (
            stage.mesh.num_peers > 1
            and stage.zero_stage >= (ZeroStage.OPTIMIZER if has_masters else ZeroStage.PARAMETERS)
        )
        for stage in plan.stages
    )


def without_training(plan: Plan) -> Plan:
    """The plan of whole batches, which there must be, of ranks that hold nothing but parameters and activations."""
    whole = of_whole_batches(plan)
    assert whole is not None
    stages = (replace(stage, offload=OffloadRatios(parameters=stage.offload.parameters)) for stage in whole.stages)
    return replace(whole, stages=tuple(stages))


def hindrance(plan: Plan, module_map: ModuleMap, found: ModuleMap) -> str | None:
    """Why a step cannot be evaluated by the forwards of a plan, if so.

    Args:
        module_map: Of the step that the plan trains.
        found: Of the step to evaluate.
    """
    if (whole := of_whole_batches(plan)) is None:
        return "the plan's stages cut batches differently, and evaluation takes them whole"
    moves = any(stage.zero_stage >= ZeroStage.PARAMETERS or stage.offload.parameters > 0.0 for stage in plan.stages)
    elsewhere = used_elsewhere(module_map, plan.bounds, found) if plan.num_stages > 1 or moves else None
    # These hold for all that lets a rank run the step for others: what it leaves behind, it would leave there.
    reasons = found.excludes("pipeline") if len(replica_ranks(whole, 0)) > 1 else ()
    return elsewhere or next(iter(reasons), None)


def evaluated_map(module_map: ModuleMap, found: ModuleMap) -> ModuleMap:
    """The map by which a step is evaluated: its own cuts, and of parameters that it does not use what training does."""
    trained = {use.name: use for use in module_map.parameters}
    uses = tuple(use if use.regions else trained[use.name] for use in found.parameters)
    return replace(
        found,
        parameters=uses,
        splits=module_map.splits,
        unsplit=module_map.unsplit,
        contexts=module_map.contexts,
        uncontexts=module_map.uncontexts,
    )


def make_forward_pass(context: RankContext, found: ModuleMap) -> ForwardPass:
    """The forward pass of a rank for a step with this map, which nothing hinders."""
    mesh = context.mesh
    plan = of_whole_batches(mesh.plan)
    assert plan is not None
    schedule = lower_forwards(plan)
    check(schedule, plan.num_microbatches, is_trained=False)
    module = next(iter(context.stages)).module
    stages = make_stages(module, found, plan, mesh.rank, context.transport)
    for stage in stages:
        stage.observer = context.runner
    mine = replace(mesh, plan=plan)
    return ForwardPass(
        plan=plan,
        actions=schedule[mesh.stage],
        context=replace(
            context,
            mesh=mine,
            stages=RankStages(stages),
            live=tuple(found.cuts[stage.layers[1] - 1] for stage in plan.stages[:-1]),
            neighbours=Neighbours(mine),
            casts=CastKeeper(may_keep=False),
            arrivals=arrived_sends(schedule)[mesh.stage],
        ),
        lines=context.runner.lines_of(schedule[mesh.stage]),
    )
