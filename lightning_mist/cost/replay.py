"""What a rank of a plan allocates and frees, event by event, over whole optimizer steps.

A replay walks through the very list of actions that the runtime executes and plays, at every action, the events of the
traced network and those of the runtime itself: buffers of transfers, flat buffers of gradients, unsharded parameters,
temporaries of the optimizer. Its timeline, its peak and what is alive there are read off; the events themselves go
into a simulation of the device's allocator.

Array axes
    E  events, in order
    A  allocations, by identity
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_mist.cost.allocator import MemoryEvent, free, malloc
from lightning_mist.cost.compile import IntArray
from lightning_mist.cost.memory import TERMS
from lightning_mist.cost.replay_gradients import Gradients
from lightning_mist.cost.replay_parts import StageShape, StageTemplate, stack
from lightning_mist.cost.replay_rank import RankView, bytes_at
from lightning_mist.cost.replay_tape import Block, Label, Mark, Tape
from lightning_mist.cost.replay_walk import BatchWalk
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan, ZeroStage
from lightning_mist.schedule import Action, ActionKind, Schedule, arrived_sends, generate
from lightning_mist.schedule.action import INPUT_BACKWARDS
from lightning_mist.schedule.lower import add_transfers, add_update
from lightning_mist.schedule.units import expand

STEPS = 2
"""Optimizer steps that are replayed: the first makes the optimizer's state, the second is like all that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """An allocation that is alive at some moment.

    Attributes:
        nbytes: Its size.
        label: What it is and where it comes from.
        stage: The stage it belongs to; ``None`` for the whole rank.
        microbatch: The microbatch; ``None`` if it is of none.
    """

    nbytes: int
    label: Label
    stage: int | None
    microbatch: int | None


class Replay:
    """What one rank allocates and frees.

    Args:
        rank: The global rank.
        tape: What was taken down.
        begin: Index of the first event of the last step, which is the one that is reported.

    Attributes:
        rank: The global rank.
        begin: Index of the first event of the last step.
        events_E: Events: ``+(i + 1)`` allocates ``i``, ``-(i + 1)`` frees it.
        bytes_A: Bytes of every allocation.
        marks: Where actions begin.
    """

    def __init__(self, rank: int, tape: Tape, begin: int) -> None:
        self.rank, self.begin = rank, begin
        self.events_E, self.bytes_A = tape.events(), tape.bytes()
        self.marks: tuple[Mark, ...] = tuple(tape.marks)
        self._blocks: tuple[Block, ...] = tuple(tape.blocks)

    @cached_property
    def live_E(self) -> IntArray:
        """Bytes alive after every event."""
        result_E: IntArray = np.cumsum(np.sign(self.events_E) * self.bytes_A[np.abs(self.events_E) - 1])
        return result_E

    @property
    def peak_event(self) -> int:
        """Index of the first event of the last step after which most bytes are alive."""
        return self.begin + int(np.argmax(self.live_E[self.begin :]))

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive in the last step."""
        return int(self.live_E[self.peak_event])

    @property
    def phase(self) -> str:
        """The action during which that is, as text."""
        return self.action_at(self.peak_event)

    def action_at(self, event: int) -> str:
        """The action that an event belongs to."""
        firsts = [mark.event for mark in self.marks]
        index = int(np.searchsorted(firsts, event, side="right")) - 1
        return self.marks[index].action if index >= 0 else "set-up"

    def alive_at(self, event: int) -> tuple[Alive, ...]:
        """What is alive after an event, the largest first."""
        count_A = np.zeros(len(self.bytes_A), dtype=np.int64)
        events_E = self.events_E[: event + 1]
        np.add.at(count_A, np.abs(events_E) - 1, np.sign(events_E))
        found = [self._alive(int(identity)) for identity in np.flatnonzero(count_A > 0)]
        return tuple(sorted(found, key=lambda item: -item.nbytes))

    def alive_at_peak(self) -> tuple[Alive, ...]:
        """What is alive at the peak, the largest first."""
        return self.alive_at(self.peak_event)

    def terms_at_peak(self) -> tuple[tuple[str, int], ...]:
        """Bytes by term at the peak, in the order of :data:`~lightning_mist.cost.memory.TERMS`."""
        total = dict.fromkeys(TERMS, 0)
        for item in self.alive_at_peak():
            total[item.label.term] += item.nbytes
        return tuple(total.items())

    def _alive(self, identity: int) -> Alive:
        block = self._blocks[int(np.searchsorted(self._firsts, identity, side="right")) - 1]
        return Alive(
            nbytes=int(self.bytes_A[identity]),
            label=block.labels[identity - block.first],
            stage=block.stage if block.stage >= 0 else None,
            microbatch=block.microbatch if block.microbatch >= 0 else None,
        )

    @cached_property
    def _firsts(self) -> IntArray:
        return np.array([block.first for block in self._blocks], dtype=np.int64)

    def live_by_term(self) -> tuple[tuple[str, IntArray], ...]:
        """For each term the bytes alive after every event of the last step."""
        terms = [label.term for block in self._blocks for label in block.labels]
        index_A = np.array([TERMS.index(term) for term in terms], dtype=np.int64)
        term_E = index_A[np.abs(self.events_E) - 1]
        delta_E = np.sign(self.events_E) * self.bytes_A[np.abs(self.events_E) - 1]
        return tuple(
            (name, np.cumsum(np.where(term_E == number, delta_E, 0))[self.begin :]) for number, name in enumerate(TERMS)
        )

    def memory_events(self) -> list[MemoryEvent]:
        """The events as a simulation of the allocator takes them, set-up and all steps."""
        sizes = self.bytes_A.tolist()
        return [
            malloc(event - 1, sizes[event - 1]) if event > 0 else free(-event - 1) for event in self.events_E.tolist()
        ]


def replay_rank(
    spec: ModelSpec,
    plan: Plan,
    rank: int,
    *,
    batches_per_step: int = 1,
    plain: bool | None = None,
    shorten: bool = True,
    known: dict[tuple[object, ...], StageTemplate] | None = None,
) -> Replay:
    """What a rank of a plan allocates and frees over two optimizer steps.

    Args:
        spec: The traced network.
        plan: The plan.
        rank: The global rank.
        batches_per_step: Batches whose gradients are accumulated for each optimizer step.
        plain: Whether torch's ``DistributedDataParallel`` runs the plan; by default where it does what the plan says.
        shorten: Whether schedules that repeat themselves may be cut short; the peak is the same.
        known: Keeps what stages do, for replays of other ranks of the same plan.

    Raises:
        PlanError: If the network was described without its allocations, or is not known under the plan's splits.
    """
    mesh = plan.stages[plan.stage_of(rank)].mesh
    part = spec.split(mesh.tensor_parallel_degree, mesh.sequence_parallel)
    view = RankView(part, spec, plan, rank)
    schedule = _schedule(plan, spec, shorten=shorten)
    in_buckets = is_plain_plan(plan) if plain is None else plain
    return _Run(view, schedule, {} if known is None else known, batches_per_step, in_buckets=in_buckets).run()


def is_plain_plan(plan: Plan) -> bool:
    """Whether a plan is what torch's ``DistributedDataParallel`` does by itself, which then runs it."""
    stage = plan.stages[0]
    return (
        plan.num_stages == 1
        and plan.num_microbatches == 1
        and stage.mesh.tensor_parallel_degree == 1
        and stage.zero_stage == ZeroStage.NONE
        and stage.checkpointing.layers == 0
    )


def replay_plan(
    spec: ModelSpec, plan: Plan, *, batches_per_step: int = 1, plain: bool | None = None
) -> tuple[Replay, ...]:
    """For every stage of a plan the replay of its most loaded rank; chunks of one group of devices share theirs.

    Args:
        spec: The traced network.
        plan: The plan.
        batches_per_step: Batches whose gradients are accumulated for each optimizer step.
        plain: As in :func:`replay_rank`.

    Raises:
        PlanError: As :func:`replay_rank`.
    """
    groups = [
        replay_group(spec, plan, group, batches_per_step=batches_per_step, plain=plain)
        for group in range(plan.num_groups)
    ]
    return tuple(groups[plan.group_of(stage)] for stage in range(plan.num_stages))


def replay_group(
    spec: ModelSpec, plan: Plan, group: int, *, batches_per_step: int = 1, plain: bool | None = None
) -> Replay:
    """The replay of the most loaded rank of a group of devices; see :func:`replay_plan`."""
    known: dict[tuple[object, ...], StageTemplate] = {}
    mesh = plan.stages[group].mesh
    part = spec.split(mesh.tensor_parallel_degree, mesh.sequence_parallel)
    classes: dict[tuple[object, ...], int] = {}
    # Tensor-parallel ranks hold parts of the same size of everything.
    for rank in mesh.devices[:: mesh.tensor_parallel_degree]:
        view = RankView(part, spec, plan, rank)
        load = tuple(item.bytes for item in view.held if item.name in view.owned)
        classes.setdefault((view.batches, load if view.zero_stage else ()), rank)
    replays = (
        replay_rank(spec, plan, rank, batches_per_step=batches_per_step, plain=plain, known=known)
        for rank in classes.values()
    )
    return max(replays, key=lambda item: item.peak_bytes)


def _schedule(plan: Plan, spec: ModelSpec, *, shorten: bool) -> Schedule:
    """The lists that the runtime executes; of microbatches that repeat each other as many as it takes."""
    count = plan.num_microbatches
    if shorten:
        count = min(count, _shown(plan))
    computations = generate(plan.num_stages, count, plan.schedule, num_groups=plan.num_groups)
    tied = any(len(stages) > 1 for stages in spec.module_map.owners(plan.bounds).values())
    gathers = [
        ZeroStage.NONE < stage.zero_stage < ZeroStage.PARAMETERS and stage.data_parallel_degree > 1
        for stage in plan.stages[: plan.num_groups]
    ]
    return add_update(add_transfers(computations), tied=tied and plan.num_groups > 1, gathers=gathers)


def _shown(plan: Plan) -> int:
    """Microbatches after which a schedule has nothing new to show."""
    if plan.schedule == "gpipe":
        return plan.num_microbatches
    if plan.schedule == "interleaved-1f1b":
        return 4 * plan.num_groups
    return 2 * plan.num_stages + 1


class _Run:
    """Two optimizer steps of one rank."""

    def __init__(
        self,
        view: RankView,
        schedule: Schedule,
        known: dict[tuple[object, ...], StageTemplate],
        batches: int,
        *,
        in_buckets: bool,
    ) -> None:
        self._view, self._batches, self._tape, self._in_buckets = view, batches, Tape(), in_buckets
        self._actions = schedule[view.mesh.stage]
        self._arrivals = arrived_sends(schedule)[view.mesh.stage]
        self._lines = dict(zip(self._actions, expand(self._actions, view.lines), strict=True))
        self._gradients = Gradients(self._tape, view, in_buckets=in_buckets)
        self._templates = {stage: self._template(stage, known) for stage in view.chunks}
        self._final = self._final_gradients()
        self._has_state = False

    def _template(self, stage: int, known: dict[tuple[object, ...], StageTemplate]) -> StageTemplate:
        plan, view = self._view.plan.stages[stage], self._view
        tied = frozenset(name for name, regions in view.regions_of.items() if len(regions[stage]) > 1)
        shape = StageShape(
            first=plan.layers[0], end=plan.layers[1], checkpointed=plan.checkpointing.layers, rows=plan.microbatch_size
        )
        key = (shape, plan.mesh.tensor_parallel_degree, plan.mesh.sequence_parallel)
        if key not in known:
            known[key] = stack(view.spec, shape, tied=tied)
        return known[key]

    def run(self) -> Replay:
        """Play everything."""
        self._set_up()
        begin = 0
        kept: list[int] = []
        for _ in range(STEPS):
            begin = self._tape.length
            self._tape.mark("start of step")
            for identity in kept:
                self._tape.free(identity)
            self._gradients.forget()
            kept = self._step()
        return Replay(self._view.rank, self._tape, begin)

    def _set_up(self) -> None:
        view, tape = self._view, self._tape
        tape.mark("set-up")
        if view.zero_stage >= ZeroStage.PARAMETERS:
            for flat, _ in view.shards:
                if flat.owner == view.mesh.data_index:
                    tape.malloc(flat.bytes, Label("parameter_bytes", "parameters of a unit"))
        else:
            for item in view.held:
                tape.malloc(item.bytes, Label("parameter_bytes", item.name, dtype=item.dtype))
        if self._in_buckets:
            for bucket in view.buckets:
                tape.malloc(bucket.bytes, Label("gradient_bytes", "bucket of DistributedDataParallel"))
        tape.malloc(view.spec.buffer_bytes, Label("buffer_bytes", "buffers"))
        size = bytes_at(view.spec.batch_bytes, view.batch_rows, view.spec.sequence_length or 1)
        for index in range(view.batches):
            tape.malloc(size, Label("batch_bytes", "its own batch" if index == 0 else "a batch that it computes on"))

    def _step(self) -> list[int]:
        """One optimizer step; what stays of it until the next one begins."""
        kept: list[int] = []
        for batch in range(self._batches):
            for identity in kept:
                self._tape.free(identity)
            aside = self._gradients.put_aside() if batch else []
            kept = self._batch()
            self._gradients.add(aside)
        for action in self._actions:
            if action.kind is ActionKind.OPTIMIZER_STEP:
                self._mark(action)
                self._update()
            elif action.kind is ActionKind.GATHER_PARAMETERS:
                self._mark(action)
                self._gradients.gather()
        return kept

    def _mark(self, action: Action) -> None:
        self._tape.mark(str(action), action.stage)

    def _batch(self) -> list[int]:
        walk = BatchWalk(self._tape, self._view, self._templates, self._arrivals, self._gradients)
        for position, action in enumerate(self._actions):
            if action.kind in (ActionKind.OPTIMIZER_STEP, ActionKind.GATHER_PARAMETERS):
                continue
            self._mark(action)
            names = self._final.get(position, frozenset())
            self._gradients.expect(names)
            if action.kind is ActionKind.BACKWARD_WEIGHT and action.microbatch is not None:
                self._gradients.complete(names - walk.deferred((action.stage, action.microbatch)))
            if action.kind is ActionKind.REDUCE_GRADIENTS:
                self._gradients.reduce()
            elif action.kind is ActionKind.REDUCE_TIED:
                self._gradients.reduce_tied()
            else:
                walk.perform(action, self._lines[action])
            self._gradients.complete(names)
        walk.finish()
        return walk.kept

    def _final_gradients(self) -> dict[int, frozenset[str]]:
        """For each position of the list the parameters whose gradients are complete when its action has run."""
        last: dict[str, int] = {}
        for position, action in enumerate(self._actions):
            if action.kind in INPUT_BACKWARDS or action.kind is ActionKind.BACKWARD_WEIGHT:
                last.update(dict.fromkeys(self._gradients.names[action.stage], position))
        return {
            position: frozenset(name for name, at in last.items() if at == position)
            for position in sorted(set(last.values()))
        }

    def _update(self) -> None:
        """The optimizer's step: its state when it steps for the first time, and its temporaries."""
        view, tape, optimizer = self._view, self._tape, self._view.spec.optimizer
        mine = [item for item in view.held if item.is_trained and item.name in view.owned]
        if not self._has_state:
            self._has_state = True
            for item in mine:
                for size in _pieces(optimizer.state_bytes_per_parameter_byte, item.bytes):
                    tape.malloc(size, Label("optimizer_bytes", f"{optimizer.name} state of {item.name}"))
        label = Label("working_bytes", f"temporaries of {optimizer.name}", operator=f"{optimizer.name}.step")
        share = optimizer.step_peak_bytes_per_parameter_byte
        together = [tape.malloc(round(share * item.bytes), label) for item in mine if share > 0]
        for item in mine:
            if optimizer.step_peak_bytes_per_largest > 0:
                tape.free(tape.malloc(round(optimizer.step_peak_bytes_per_largest * item.bytes), label))
        for identity in together:
            tape.free(identity)


def _pieces(factor: float, size: int) -> list[int]:
    """Bytes of state of one parameter: as many tensors of its size as there are, and the rest."""
    whole = int(factor)
    rest = round((factor - whole) * size)
    return [size] * whole + [rest] * (rest > 0)
