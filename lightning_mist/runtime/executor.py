"""Running one rank's list of actions.

:meth:`Executor.run` is a generator: it posts transfers and yields each work it must wait for, so that the same code
runs over ``torch.distributed`` and over many ranks in one thread. What travels between stages are the live tensors of
the cut, sliced by rows where the data-parallel degrees differ, and the random state where it follows a batch.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.devices import ops_of
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.mesh import make_mesh
from lightning_mist.runtime.batch_run import BatchRun, ForwardPass, RankContext, make_forward_pass
from lightning_mist.runtime.communication import Microbatch, Neighbours, Transport, Work
from lightning_mist.runtime.gradients import GradientReducer, WeightGradients
from lightning_mist.runtime.host_memory import CopyStreams, HostPlace, HostPool
from lightning_mist.runtime.offload import OffloadedState
from lightning_mist.runtime.parameters import CastKeeper, EvenShards, MasterWeights, parts_of, pieces_of, shown
from lightning_mist.runtime.recording import ActionRecorder
from lightning_mist.runtime.stage import PipelineStage, RankStages, WrittenWeights, make_unit_runner
from lightning_mist.runtime.support import check_supported
from lightning_mist.schedule import Action, ActionKind, arrived_sends, complete_gradients, lower
from lightning_mist.schedule.action import INPUT_BACKWARDS
from lightning_mist.schedule.flats import stage_flats
from lightning_mist.schedule.stage_units import moved_parameters, updated_units

__all__ = ["Executor", "Microbatch"]


class Executor:
    """Runs the actions of one rank, batch after batch.

    Args:
        stages: The parts of the module that this rank computes, ascending: one, or its chunks; see
            :func:`~lightning_mist.runtime.stage.pipeline_stage.make_stages`.
        transport: Connects the ranks; its groups must include
            :func:`~lightning_mist.plan.mesh.process_groups` of the plan.
        actions: This rank's lowered list. Without backwards it only evaluates.
        masters: Values in 32 bits of all trained parameters of the module by canonical name, if the optimizer is to
            update these; the parameters are in the type that is computed in.

    Attributes:
        shards: Values of parameters that are with their owners only, under ZeRO-3.
        gradients: Gradients that are in host memory.
        even: What the ranks share out evenly, under ZeRO.
        parts: The parts of batches that the step ran on.
        outputs: For each of them what the step returned, on the last stage; None elsewhere and for parts without rows.
        random_states: For each the state of the generators after the last stage's forward, where it travelled.
        state_pool: Host memory, or files, for parameters and optimizer state.
        results_made: Called whenever the last stage has launched all of what the step returned.

    Raises:
        PlanError: If the runtime cannot run the plan.
    """

    results_made: Callable[[], None] | None = None
    _update: OffloadedState | None = None

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Sequence[PipelineStage],
        module_map: ModuleMap,
        transport: Transport,
        actions: Sequence[Action],
        *,
        host: HostPlace | None = None,
        masters: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_supported(plan, module_map)
        self.plan, self.transport = plan, transport
        self.stages = RankStages(stages)
        self.actions = tuple(actions)
        self.mesh = make_mesh(plan, rank, module_map)
        parameter = next(iter(self.parameters.values()), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        self.streams = CopyStreams(ops_of(device))
        place = host or HostPlace()
        self.pool = HostPool(self.streams.ops, place.budget)
        self.state_pool = HostPool(self.streams.ops, place.budget, place.directory) if place.directory else self.pool
        flats = stage_flats(plan, module_map, self.mesh.stage)
        self.even = EvenShards(self.parameters, flats, pieces_of(self.mesh, module_map, flats))
        self._runner = make_unit_runner(
            *(self.mesh, module_map, self.parameters, transport, self.actions, device, self.streams),
            pools=(self.pool, self.state_pool),
            held=(*stages[0].module.parameters(), *stages[0].module.buffers()),
            has_masters=masters is not None,
            even=self.even,
        )
        self.shards = self._runner.shards
        for stage in stages:
            stage.observer = self._runner
            if Action(stage.index, ActionKind.BACKWARD_INPUT, 0) in self.actions:
                stage.deferral = WeightGradients(stage.parameters)
        self.gradients = self._runner.offloaded_gradients
        self.reducer = GradientReducer(
            *(self.mesh, self.parameters, transport, self._runner.gradients, parts_of(plan, rank, module_map)),
            offloaded=() if self.gradients is None else self.gradients.names,
            even=self.even.trained,
        )
        tied = {item.name for item in self.mesh.held if len(item.stages) > 1}
        self._tied = frozenset() if self.gradients is None else self.gradients.names & tied
        self.masters = None
        if masters is not None:
            moved = moved_parameters(plan, module_map, self.mesh.stage)["O"]
            units = updated_units(plan, module_map, self.mesh.stage).values()
            offloaded = [[name for name in names if name in moved] for names in units]
            self.masters = MasterWeights(
                *(self.mesh, self.stages.every, masters, self.shards, self.even.trained),
                offloaded=offloaded,
                pool=self.state_pool,
            )
        self.written = WrittenWeights(self.mesh, self.parameters, module_map)
        self.parts: Sequence[Microbatch] = ()
        self.outputs: list[Any] = []
        self.random_states: list[Tensor | None] = []
        self.recorder = ActionRecorder(device)
        self._context = RankContext(
            mesh=self.mesh,
            stages=self.stages,
            live=tuple(module_map.cuts[stage.layers[1] - 1] for stage in plan.stages[:-1]),
            neighbours=Neighbours(self.mesh),
            reducer=self.reducer,
            transport=transport,
            device=device,
            casts=CastKeeper(may_keep=plan.num_microbatches > 1 and self._runner.gradients is None),
            runner=self._runner,
            arrivals=arrived_sends(lower(plan, tied=False))[self.mesh.stage],
        )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of all stages of this rank by canonical name; one that several use is one entry."""
        return self.stages.parameters

    @property
    def updated(self) -> list[nn.Parameter]:
        """The parameters of which this rank updates something."""
        parts = self.even.parts
        names = [item.name for item in self.mesh.owned if item.name not in parts or parts[item.name].is_mine]
        return [self.parameters[name] for name in names]

    def run(
        self,
        microbatches: Sequence[Microbatch],
        step: Callable[[Microbatch], Any],
        *,
        loss_scale: float | Tensor = 1.0,
        earlier: Collection[nn.Parameter] = (),
        pause: Work | None = None,
    ) -> Iterator[Work]:
        """Run all actions of one batch but the optimizer's step and what follows it.

        The parameters' gradients must be None. At the end ``p.grad`` of the rank's parameters is ``loss_scale`` times
        the mean, over the batches of all ranks, of the gradient of each batch's weighted loss: what data parallelism
        gives. From ZeRO-1 on only the owner of a parameter has it. Under ZeRO-3 values of parameters are with their
        owners only, before and after.

        Args:
            step: The user's step on a microbatch: returns a loss, a dictionary with ``"loss"``, or None.
            loss_scale: Factor on every loss before its backward; a tensor of one element stays on its device.
            earlier: Parameters that have a gradient of earlier batches elsewhere, which is to be kept.
            pause: Yielded once, before the first backward, if given: whoever runs this may do something else meanwhile.

        Raises:
            ValueError: If the microbatches are not those of the plan, or a parameter already has a gradient.
        """
        self._check_start(microbatches)
        final = complete_gradients(self.actions, lambda stage: self.stages[stage].parameters)
        batch = BatchRun(
            self._context, microbatches, step, loss_scale=loss_scale, keeps_graph=bool(final), made=self.results_made
        )
        self.parts, self.outputs, self.random_states = batch.parts, batch.outputs, batch.random_states
        self.engage()
        self.even.begin(earlier)
        if self.gradients is not None:
            self.gradients.checks = isinstance(loss_scale, Tensor)
            self.gradients.begin(earlier)
        try:
            with self._computing():
                self.written.begin()
                with self._context.casts.batch(), self.stages.attached():
                    for position, action in enumerate(self.actions):
                        if pause is not None and action.kind in INPUT_BACKWARDS:
                            yield pause
                            pause = None
                        names = final.get(position, frozenset())
                        yield from self.recorder.around(action, self._perform(batch, action, names))
                    yield from self.recorder.around("sends", batch.finish())
                self.written.check()
        finally:
            self.reducer.disarm()
        if self.gradients is not None:
            self.gradients.finish()

    def forward_pass(self, found: ModuleMap) -> ForwardPass:
        """How to :meth:`evaluate` a step with this map, which nothing hinders."""
        return make_forward_pass(self._context, found)

    def evaluate(
        self, forward: ForwardPass, microbatches: Sequence[Microbatch], step: Callable[[Microbatch], Any]
    ) -> Iterator[Work]:
        """Run the forwards of one step on whole batches, without a graph; :attr:`outputs` are set.

        A rank without a batch takes part all the same: others may wait for its parameters. Its microbatch has no rows.
        """
        batch = BatchRun(forward.context, microbatches, step, loss_scale=1.0, keeps_graph=False)
        self.parts, self.outputs, self.random_states = batch.parts, batch.outputs, batch.random_states
        with self._computing(), self._runner.running(forward.lines), forward.context.stages.attached():
            for action in forward.actions:
                yield from batch.perform(action)
            yield from batch.finish()

    def _perform(self, batch: BatchRun, action: Action, names: frozenset[str]) -> Iterator[Work]:
        """Run one action, after which the gradients of ``names`` are complete."""
        if action.kind is ActionKind.REDUCE_TIED and self._tied:
            assert self.gradients is not None
            self.gradients.lend(self._tied)
            yield from batch.perform(action)
            self.gradients.take_back(self._tied)
            return
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            waiting = batch.deferral(action.stage).names(action.microbatch)  # for this ``W``
            self.reducer.complete(names - waiting)
        yield from batch.perform(action, names)
        self.reducer.complete(names)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Around what is computed of a batch; an error leaves everything where it was."""
        if self.masters is not None:
            self.masters.compute()
        try:
            yield
        except BaseException:
            self._runner.abandon()
            for stage in self.stages:
                if stage.deferral is not None:
                    stage.deferral.forget()
            raise
        finally:
            if self.masters is not None:
                self.masters.rest()
        self._runner.end()

    def refuse_use(self) -> None:
        """Tell whoever uses parameters outside of a batch that their values are away, under ZeRO-3."""
        if self.shards is not None:
            self.shards.refuse_use()
        if self.masters is not None:
            self.masters.refuses_use = True

    def engage(self) -> None:
        """Free the values of parameters that other ranks own (ZeRO-3), or that are in host memory."""
        masters = None if self.masters is None or self.masters.is_engaged else self.masters
        if masters is not None or self.shards is not None:
            self.reducer.keep_layouts()
        if masters is not None:
            masters.engage()
        if self.gradients is not None:
            self.gradients.keep_layouts()
        self._runner.engage()
        if masters is not None:
            masters.rest()

    def give(self, name: str, value: Tensor) -> None:
        """Keep the values of a parameter of this rank's that had none: where it keeps them between batches."""
        if self.masters is not None and name in self.masters.types:
            self.masters.give(name, value)
        elif self.shards is None or not self.shards.give(name, value):
            self.stages.every[name].data = value

    def disengage(self) -> None:
        """All parameters have their full values, and are ordinary ones again."""
        if self.shards is not None:
            self.shards.disengage()
        if self.masters is not None:
            self.masters.disengage()

    @property
    def away(self) -> Mapping[str, nn.Parameter]:
        """Parameters of this rank's stages whose values it has not between batches, by canonical name."""
        shards = {} if self.shards is None else self.shards.away
        if self.masters is None:
            return shards
        return {**{name: p for name, p in shards.items() if name not in self.masters.types}, **self.masters.away}

    def home_values(self) -> dict[str, Tensor]:
        """Values of this rank's parameters, or their masters, that are in host memory, by canonical name."""
        found = self._computed_at_home()
        if self.masters is not None and self.masters.is_engaged:
            found = {name: value for name, value in found.items() if name not in self.masters.types}
            found |= self.masters.home
        if found or any(shard.home is not None for shard in self.even.shards):
            self.streams.settle()
        return found

    def _computed_at_home(self) -> dict[str, Tensor]:
        return {} if self.shards is None or not self.shards.is_engaged else self.shards.home_values()

    def take_update(self, update: OffloadedState) -> None:
        """The optimizer's step is taken unit by unit, in the next batch where the plan says so."""
        self._update = update
        if update.defers:
            self._runner.take_update(update)

    def gather_parameters(self) -> Iterator[Work]:
        """After the optimizer's step: give the stage's ranks what others of them updated (ZeRO-1, ZeRO-2)."""
        if self._update is None or not self._update.defers:
            is_cast = self._update is not None
            masters = None if self.masters is None or not self.masters.is_engaged else self.masters
            casts = {} if masters is None else masters.given_out(is_cast=is_cast)
            if home := self._computed_at_home():
                self.streams.settle()
            yield from self.reducer.gather_parameters({**home, **casts})

    def flush(self) -> None:
        """Take the optimizer's step now if it is left to the next batch: somebody looks. All ranks do."""
        if self._update is not None:
            self._update.flush()

    def shown(self) -> AbstractContextManager[None]:
        """Inside, parameters and gradients are what of them this rank clips and updates, behind all steps."""
        self.flush()
        return shown(self.even.trained)

    def _check_start(self, microbatches: Sequence[Microbatch]) -> None:
        indices = [microbatch.index for microbatch in microbatches]
        if indices != list(range(self.plan.num_microbatches)):
            raise ValueError(
                f"microbatches {indices}: the plan has {self.plan.num_microbatches}, given in the order of their index"
            )
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                raise ValueError(f"{name} has a gradient: put gradients of earlier batches aside before a batch runs")
