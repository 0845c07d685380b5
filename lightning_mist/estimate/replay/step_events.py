"""Optimizer steps of one rank: what is there from the start, batches, the optimizer's update."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from lightning_mist.estimate.replay.batch_events import BatchWalk
from lightning_mist.estimate.replay.gradient_events import Gradients
from lightning_mist.estimate.replay.rank_state import Held, ReplayedRank, padded
from lightning_mist.model.events import EventTape, Label, StageShape, StageTemplate, stack
from lightning_mist.model.spec import bytes_at
from lightning_mist.plan import ZeroStage
from lightning_mist.schedule import Action, ActionKind, Schedule, complete_gradients
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.stage_program import NUM_BUFFERS, lines_of
from lightning_mist.schedule.stage_units import defers_update, stage_update

STEPS = 2
"""Optimizer steps that are replayed: the first makes the optimizer's state, the second is like all that follow."""

Arrivals: TypeAlias = tuple[Mapping[Action, tuple[Action, ...]], ...]
"""For every group of devices which of its sends each of its computations finds arrived."""


class Run:
    """Two optimizer steps of one rank."""

    def __init__(
        self,
        view: ReplayedRank,
        schedule: Schedule,
        arrivals: Arrivals,
        known: dict[tuple[object, ...], StageTemplate],
        *,
        in_buckets: bool,
    ) -> None:
        self._view, self._tape, self._in_buckets = view, EventTape(), in_buckets
        self._actions = schedule[view.mesh.stage]
        self._arrivals = arrivals[view.mesh.stage]
        self._rows = stage_update(view.plan, view.module_map, view.mesh.stage)
        self._defers = defers_update(view.plan, view.module_map, view.mesh.stage)
        # By whether the update of the batch before is still to be done.
        lines = [lines_of(self._actions, view.expanded, update) for update in ((), self._rows)[: 1 + self._defers]]
        self._lines = [dict(zip(self._actions, found, strict=True)) for found in lines]
        self._gradients = Gradients(self._tape, view, in_buckets=in_buckets)
        self._templates = {stage: self._template(stage, known) for stage in view.chunks}
        self._final = complete_gradients(self._actions, self._gradients.names.__getitem__)
        self._has_state = self._is_pending = False

    def _template(self, stage: int, known: dict[tuple[object, ...], StageTemplate]) -> StageTemplate:
        plan, view = self._view.plan.stages[stage], self._view
        tied = frozenset(name for name, regions in view.regions_of.items() if len(regions[stage]) > 1)
        shape = StageShape(
            first=plan.layers[0], end=plan.layers[1], checkpointed=plan.checkpointing.layers, rows=plan.microbatch_size
        )
        degrees = plan.mesh.tensor_parallel_degree, plan.mesh.context_parallel_degree, plan.mesh.sequence_parallel
        key = (shape, *degrees, plan.method)
        if key not in known:
            known[key] = stack(view.spec.computing(plan.method), shape, tied=tied, casts=view.spec.master_weights)
        return known[key]

    def play(self) -> tuple[EventTape, int]:
        """Play everything: the tape, and the index of the first event of the last step."""
        self._set_up()
        begin = 0
        kept: list[int] = []
        for _ in range(STEPS):
            begin = self._tape.length
            self._tape.mark("start of step")
            for identity in kept:
                self._tape.free(identity)
            if not self._is_pending:
                self._gradients.forget()
            kept = self._step()
        return self._tape, begin

    def _set_up(self) -> None:
        view, tape = self._view, self._tape
        tape.mark("set-up")
        for flat, _ in view.shards:
            if not flat.leaves and (flat.piece or flat.owner == view.mesh.shard_index):
                tape.malloc(flat.piece or flat.bytes, Label("parameter_bytes", "parameters of a unit"))
        in_units = {name for flat, _ in view.shards for name in flat.names}
        for item in (item for item in view.held if item.name not in in_units):
            tape.malloc(item.bytes, Label("parameter_bytes", item.name, dtype=item.dtype))
        if self._in_buckets:
            for bucket in view.buckets:
                tape.malloc(bucket.bytes, Label("gradient_bytes", "bucket of DistributedDataParallel"))
        tape.malloc(view.spec.buffer_bytes, Label("buffer_bytes", "buffers"))
        units = view.updated.values() if view.moved["optimizer"] else ()
        moved = [[item for item in self._updated_here(of) if item.name in view.moved["optimizer"]] for of in units]
        rooms = [sum(padded(size) for item in items for size in self._state(item)) for items in moved]
        if view.spec.optimizer.is_entrywise and view.zero_stage == ZeroStage.NONE:
            # What belongs to no layer passes in parts.
            of_layers = [room for (_, unit), room in zip(view.updated, rooms, strict=False) if unit not in (HEAD, TAIL)]
            rooms = of_layers if any(of_layers) else rooms
        for what, room in (("optimizer state", max(rooms, default=0)), ("gradients", self._gradients.room)):
            for _ in range(NUM_BUFFERS * (room > 0)):
                tape.malloc(room, Label("offload_bytes", f"buffer of {what}"))
        size = bytes_at(view.spec.batch_bytes, view.batch_rows, view.spec.sequence_length or 1)
        for index in range(view.batches):
            tape.malloc(size, Label("batch_bytes", "its own batch" if index == 0 else "a batch that it computes on"))

    def _updated_here(self, items: Sequence[Held]) -> list[Held]:
        """What this rank updates, with the bytes of its part."""
        parts = self._view.parts
        return [replace(item, bytes=parts[item.name]) for item in items if item.name in parts]

    def _state(self, item: Held) -> list[int]:
        """Bytes of state of one parameter: as many tensors of its size as there are, and the rest."""
        factor = self._view.spec.optimizer.state_bytes_per_parameter_byte
        rest = round((factor - int(factor)) * item.bytes)
        return [item.bytes] * int(factor) + [rest] * (rest > 0)

    def _step(self) -> list[int]:
        """One optimizer step; what stays of it until the next one begins."""
        kept = self._batch()
        for action in self._actions:
            if action.kind is ActionKind.OPTIMIZER_STEP:
                self._tape.mark(str(action))
                self._begin_update()
            elif action.kind is ActionKind.GATHER_PARAMETERS:
                self._tape.mark(str(action))
                self._gradients.gather()
        return kept

    def _batch(self) -> list[int]:
        walk = BatchWalk(self._tape, self._view, self._templates, self._arrivals, self._gradients, self._line)
        lines, self._is_pending = self._lines[self._is_pending], False
        for position, action in enumerate(self._actions):
            if action.kind in (ActionKind.OPTIMIZER_STEP, ActionKind.GATHER_PARAMETERS):
                continue
            self._tape.mark(str(action))
            names = self._final.get(position, frozenset())
            self._gradients.expect(names)
            if action.kind is ActionKind.BACKWARD_WEIGHT and action.microbatch is not None:
                self._gradients.complete(names - walk.deferred((action.stage, action.microbatch)))
            if action.kind is ActionKind.REDUCE_GRADIENTS:
                self._gradients.reduce()
            elif action.kind is ActionKind.REDUCE_TIED:
                self._gradients.reduce_tied()
            else:
                walk.perform(action, lines[action])
            self._gradients.complete(names)
        walk.finish()
        self._gradients.rest()
        return walk.kept

    def _line(self, line: Action) -> None:
        """What happens between the units of a computation, or in the optimizer's step by units."""
        assert line.unit is not None
        if line.kind is not ActionKind.UPDATE:
            self._gradients.line(line)
            return
        items = self._view.updated[line.stage, line.unit]
        self._update(self._updated_here(items))
        for item in items if self._defers else ():
            self._gradients.drop(item.name)

    def _begin_update(self) -> None:
        """A step is asked for. The first makes state: what leaves of it is of two units at once, as in the buffers."""
        view, tape, mine = self._view, self._tape, self._updated_here(self._view.held)
        if not self._has_state:
            self._has_state = True
            for item in mine:
                for size in self._state(item) if item.name not in view.moved["optimizer"] else ():
                    tape.malloc(size, Label("optimizer_bytes", f"{view.spec.optimizer.name} state of {item.name}"))
        self._is_pending = self._defers
        if not self._rows:
            self._update(mine)
        elif not self._is_pending:
            for line in chain.from_iterable(self._rows):
                self._line(line)
            self._gradients.rest()

    def _update(self, mine: Sequence[Held]) -> None:
        """The temporaries of an update of some parameters."""
        tape, share = self._tape, self._view.spec.optimizer.step_peak_bytes_per_parameter_byte
        together = [tape.malloc(round(share * item.bytes), self._temporary) for item in mine if share > 0]
        left: list[int] = []
        for item in mine:
            left = self._update_one(item.bytes, left)
        for identity in (*left, *together):
            tape.free(identity)

    @property
    def _temporary(self) -> Label:
        name = self._view.spec.optimizer.name
        return Label("working_bytes", f"temporaries of {name}", operator=f"{name}.step")

    def _update_one(self, nbytes: int, left: list[int]) -> list[int]:
        """One parameter in a loop over them: what it leaves for the time of the next, given what was left to it."""
        optimizer, tape = self._view.spec.optimizer, self._tape
        stays = optimizer.step_left_bytes_per_parameter_byte
        passes = max(0.0, optimizer.step_peak_bytes_per_largest - 2 * stays)
        passing = [tape.malloc(round(passes * nbytes), self._temporary)] if passes > 0 else []
        staying = [tape.malloc(round(stays * nbytes), self._temporary)] if stays > 0 else []
        for identity in (*left, *passing):
            tape.free(identity)
        return staying
