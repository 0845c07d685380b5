"""What a rank of a plan allocates and frees, event by event, over whole optimizer steps.

The list of actions is the one that the runtime executes; at every action the events of the traced network are played
and those of the runtime itself: buffers of transfers and gradients, unsharded parameters, temporaries of the optimizer.

Array axes
    E  events, in order
    K  allocations, by identity
"""

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from lightning_mist.cost.inputs import IntArray
from lightning_mist.cost.memory import TERMS
from lightning_mist.errors import PlanError
from lightning_mist.estimate.allocator import MemoryEvent, free, malloc
from lightning_mist.estimate.replay.rank_state import ReplayedRank, batches_of
from lightning_mist.estimate.replay.step_events import Arrivals, Run
from lightning_mist.model.events import EventTape, Label, Mark, StageTemplate, TapeBlock
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan, ScheduleName, StageMesh, ZeroStage
from lightning_mist.plan.mesh import held_parameters
from lightning_mist.schedule import Schedule, arrived_sends, generate
from lightning_mist.schedule.lowering import add_transfers, add_update
from lightning_mist.schedule.stage_units import defers_update


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """An allocation that is alive at some moment.

    Attributes:
        stage: The stage it belongs to; ``None`` for the whole rank.
    """

    nbytes: int
    label: Label
    stage: int | None
    microbatch: int | None


class Replay:
    """What one rank allocates and frees.

    Attributes:
        begin: Index of the first event of the last step.
        events_E: Events: ``+(i + 1)`` allocates ``i``, ``-(i + 1)`` frees it.
    """

    def __init__(self, rank: int, tape: EventTape, begin: int) -> None:
        self.rank, self.begin = rank, begin
        self.events_E, self.bytes_K = tape.events(), tape.bytes()
        self.marks: tuple[Mark, ...] = tuple(tape.marks)
        self._blocks: tuple[TapeBlock, ...] = tuple(tape.blocks)

    @cached_property
    def _change_E(self) -> IntArray:
        """Bytes by which every event changes what is alive."""
        change_E: IntArray = np.sign(self.events_E) * self.bytes_K[np.abs(self.events_E) - 1]
        return change_E

    @cached_property
    def live_E(self) -> IntArray:
        """Bytes alive after every event."""
        live_E: IntArray = np.cumsum(self._change_E)
        return live_E

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
        """The action during which most bytes are alive, as text."""
        firsts = [mark.event for mark in self.marks]
        index = int(np.searchsorted(firsts, self.peak_event, side="right")) - 1
        return self.marks[index].action if index >= 0 else "set-up"

    def alive_at(self, event: int) -> tuple[Alive, ...]:
        """What is alive after an event, the largest first."""
        count_K = np.zeros(len(self.bytes_K), dtype=np.int64)
        events_E = self.events_E[: event + 1]
        np.add.at(count_K, np.abs(events_E) - 1, np.sign(events_E))
        found = [self._alive(int(identity)) for identity in np.flatnonzero(count_K > 0)]
        return tuple(sorted(found, key=lambda item: -item.nbytes))

    def terms_at_peak(self) -> tuple[tuple[str, int], ...]:
        """Bytes by term at the peak, in the order of :data:`~lightning_mist.cost.memory.memory_model.TERMS`."""
        total = dict.fromkeys(TERMS, 0)
        for item in self.alive_at(self.peak_event):
            total[item.label.term] += item.nbytes
        return tuple(total.items())

    def _alive(self, identity: int) -> Alive:
        block = self._blocks[int(np.searchsorted(self._firsts, identity, side="right")) - 1]
        return Alive(
            nbytes=int(self.bytes_K[identity]),
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
        index_K = np.array([TERMS.index(term) for term in terms], dtype=np.int64)
        term_E = index_K[np.abs(self.events_E) - 1]
        return tuple(
            (name, np.cumsum(np.where(term_E == number, self._change_E, 0))[self.begin :])
            for number, name in enumerate(TERMS)
        )

    def memory_events(self) -> list[MemoryEvent]:
        """The events as a simulation of the allocator takes them, set-up and all steps."""
        sizes = self.bytes_K.tolist()
        return [
            malloc(event - 1, sizes[event - 1]) if event > 0 else free(-event - 1) for event in self.events_E.tolist()
        ]


def replay_rank(
    spec: ModelSpec,
    plan: Plan,
    rank: int,
    *,
    plain: bool | None = None,
    shorten: bool = True,
    known: dict[tuple[object, ...], StageTemplate] | None = None,
) -> Replay:
    """What a rank of a plan allocates and frees over two optimizer steps.

    Args:
        plain: Whether torch's ``DistributedDataParallel`` runs the plan; by default where it does what the plan says.
        shorten: Whether schedules that repeat themselves may be cut short; the peak is the same.
        known: Keeps what stages do, for replays of other ranks of the same plan.

    Raises:
        PlanError: If the network was described without its allocations, or is not known under the plan's splits.
    """
    mesh = plan.stages[plan.stage_of(rank)].mesh
    part = rank_part(spec, mesh)
    view = ReplayedRank(part, spec, plan, rank)
    in_buckets = (plan.is_plain and not spec.master_weights) if plain is None else plain
    lists = _lists(plan, spec, shorten=shorten)
    tape, begin = Run(view, *lists, {} if known is None else known, in_buckets=in_buckets).play()
    return Replay(rank, tape, begin)


def replay_plan(spec: ModelSpec, plan: Plan, *, plain: bool | None = None) -> tuple[Replay, ...]:
    """For every stage of a plan the replay of its most loaded rank; chunks of one group of devices share theirs."""
    groups = [replay_group(spec, plan, group, plain=plain) for group in range(plan.num_groups)]
    return tuple(groups[plan.group_of(stage)] for stage in range(plan.num_stages))


def replay_group(spec: ModelSpec, plan: Plan, group: int, *, plain: bool | None = None) -> Replay:
    """The replay of the most loaded rank of a group of devices; see :func:`replay_plan`."""
    known: dict[tuple[object, ...], StageTemplate] = {}
    mesh = plan.stages[group].mesh
    part = rank_part(spec, mesh)
    classes: dict[tuple[object, ...], int] = {}
    # Of parameters of one size some may be moved and others not, as their layers have them.
    moves = plan.stages[group].offload.updates_by_units
    sizes = {item.name: (item.bytes, re.sub(r"\d+", "*", item.name) if moves else "") for item in part.parameters}
    loads: dict[int, list[tuple[int, str]]] = {}
    for item in held_parameters(plan, spec.module_map) if plan.stages[group].zero_stage else ():
        if group in item.stages and not item.is_even:
            loads.setdefault(item.owner(group), []).append(sizes[item.name])
    # Tensor-parallel ranks hold parts of the same size of everything.
    for index, rank in enumerate(mesh.devices[:: mesh.tensor_parallel_degree]):
        load = tuple(loads.get(index % mesh.shard_ranks, ()))
        classes.setdefault((batches_of(plan, rank), load), rank)
    replays = (replay_rank(spec, plan, rank, plain=plain, known=known) for rank in classes.values())
    return max(replays, key=lambda item: item.peak_bytes)


def rank_part(spec: ModelSpec, mesh: StageMesh) -> ModelSpec:
    """What one rank of a stage does of a network; a :class:`PlanError` if that is not known."""
    shared = spec.on_row_part(mesh.context_parallel_degree)
    if shared is None:
        raise PlanError(
            f"context_parallel_degree = {mesh.context_parallel_degree}: what a device allocates that has a part of "
            f"each row was not traced for {spec.name}; trace it with that degree among the module map's contexts"
        )
    return shared.split(mesh.tensor_parallel_degree, mesh.sequence_parallel)


def _lists(plan: Plan, spec: ModelSpec, *, shorten: bool) -> tuple[Schedule, Arrivals]:
    """The lists that the runtime executes; of microbatches that repeat each other as many as it takes."""
    count = min(plan.num_microbatches, _shown(plan)) if shorten else plan.num_microbatches
    tied = any(len(stages) > 1 for stages in spec.module_map.owners(plan.bounds).values())
    gathers = tuple(
        ZeroStage.NONE < stage.zero_stage < ZeroStage.PARAMETERS
        and stage.mesh.num_peers > 1
        and not defers_update(plan, spec.module_map, group)
        for group, stage in enumerate(plan.stages[: plan.num_groups])
    )
    return _lowered(plan.num_stages, count, plan.schedule, tied=tied and plan.num_groups > 1, gathers=gathers)


@lru_cache(maxsize=2)
def _lowered(
    num_stages: int, num_microbatches: int, name: ScheduleName, *, tied: bool, gathers: tuple[bool, ...]
) -> tuple[Schedule, Arrivals]:
    """Every rank of a plan goes by the same lists: they are made once."""
    computations = generate(num_stages, num_microbatches, name, num_groups=len(gathers))
    schedule = add_update(add_transfers(computations), tied=tied, gathers=gathers)
    return schedule, arrived_sends(schedule)


def _shown(plan: Plan) -> int:
    """Microbatches after which a schedule has nothing new to show."""
    if plan.schedule == "gpipe":
        return plan.num_microbatches
    if plan.schedule == "interleaved-1f1b":
        return 4 * plan.num_groups
    return 2 * plan.num_stages + 1
