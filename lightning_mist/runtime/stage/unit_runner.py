"""What happens between the layers of a stage: running a computation's lines while it computes.

The schedule says what each forward and backward consists of (:mod:`lightning_mist.schedule.stage_program`). In forward
the walk goes on when the step enters a layer. For backward, forward leaves a *marker* at every change of units:
a node of a chain of its own through the graph. Autograd runs the nodes of a graph in the reverse order of their making,
and nodes that accumulate gradients as soon as they can. So when a marker's turn comes, the backward of everything
behind it has run, the gradients there are complete, and nothing before it has begun; whatever the layers hand to each
other, and whether or not it needs a gradient.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.attributes import replaced
from lightning_mist.errors import TraceError
from lightning_mist.plan import ModuleMap, ZeroStage
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport
from lightning_mist.runtime.gradients import UnitGradients
from lightning_mist.runtime.host_memory import CopyStreams, HostPool
from lightning_mist.runtime.offload import OffloadedActivations, OffloadedGradients, OffloadedState
from lightning_mist.runtime.parameters import EvenShards, UnitKey, UnitShards
from lightning_mist.runtime.stage.parameter_guard import ParameterGuard, refused_backward
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.action import COMPUTATIONS, HEAD, INPUT_BACKWARDS, TAIL
from lightning_mist.schedule.stage_program import StageUnits, lines_of
from lightning_mist.schedule.stage_units import expanded_units, moved_parameters, plan_units
from lightning_mist.schedule.unit_checks import check_units


class UnitRunner:
    """Walks the lines of one action after another.

    Args:
        lines_of: Gives what each forward and backward of a list consists of, given the list and, if there may be
            anything of it to do, the update of the batch before.
        actions: The rank's list.
        last_layer: Position of the module's last layer, behind which its tail begins.
    """

    update: OffloadedState | None = None

    def __init__(
        self,
        lines_of: Callable[..., Mapping[Action, Sequence[Action]]],
        actions: Sequence[Action],
        shards: UnitShards | None,
        gradients: UnitGradients | None,
        *,
        device: torch.device,
        last_layer: int,
        guard: ParameterGuard | None = None,
        activations: OffloadedActivations | None = None,
        offloaded_gradients: OffloadedGradients | None = None,
    ) -> None:
        self.lines_of, self._actions, self._lines = lines_of, actions, lines_of(actions)
        self.shards, self.gradients, self._updating = shards, gradients, self._lines
        # Only where there is something to do in a stage's backwards does forward mark where units change.
        self._marked = {action.stage for action in self._lines if action.kind in INPUT_BACKWARDS}
        self._device, self._last_layer = device, last_layer
        self._left: deque[Action] = deque()
        self._units: set[int | None] = set()
        self._unit: int | None = None
        self._marker: Tensor | None = None
        self._guard, self._is_guarded = guard or ParameterGuard({}), False
        self._activations, self.offloaded_gradients = activations, offloaded_gradients

    def take_update(self, update: OffloadedState) -> None:
        """From now on the optimizer's step may be left to the next batch."""
        self.update, self._updating = update, self.lines_of(self._actions, update.rows)

    def running(self, lines: Mapping[Action, Sequence[Action]]) -> AbstractContextManager[None]:
        """Inside, another list is run, by these lines."""
        return replaced(self, _lines=lines)

    def engage(self) -> None:
        """Free the values that other ranks own, if the rank shards them and has not yet."""
        if self.shards is not None and not self.shards.is_engaged:
            if self.gradients is not None:
                self.gradients.keep_layouts()
            self.shards.engage()

    def begin(self, action: Action, *, marks: bool) -> None:
        """Take up an action of the rank's list; ``marks`` tells of a forward whether its backward will come."""
        self._watch(False)
        self._left = deque((self._updating if self._is_updating() else self._lines).get(action, ()))
        self._units, self._unit = {line.unit for line in self._left if line.kind in COMPUTATIONS}, None
        marks = marks and bool(self._left) and action.stage in self._marked
        self._marker = torch.zeros((), device=self._device, requires_grad=True) if marks else None
        self._moves = any(line.kind is ActionKind.STORE_ACTIVATIONS for line in self._left)
        while self._left and self._left[0].kind not in COMPUTATIONS:
            self._perform(self._left.popleft())

    def start(self) -> None:
        """The action's computation begins: with the head, or a backward's first unit. Layers announce themselves."""
        if self._left and (self._left[0].kind is not ActionKind.FORWARD or self._left[0].unit == HEAD):
            self._reach(self._left[0].unit)

    @contextmanager
    def around_step(self, fake_mode: FakeTensorMode | None = None, inputs: Sequence[Tensor] = ()) -> Iterator[None]:
        """Around the user's step: uses of parameters that are freed, in a backward inside it say, are refused.

        Args:
            fake_mode: Of a later stage: before its first layer such uses make fakes.
            inputs: What others hold: the batch, and what a later stage has received, until its gradient leaves.
        """
        with ExitStack() as stack:
            self._watch(fake_mode is None)
            stack.callback(self._watch, False)
            if self.shards is not None and len(self._units) > 1:
                stack.enter_context(replaced(self, _is_guarded=True))
                stack.enter_context(refused_backward())
                stack.enter_context(self._guard.watched(fake_mode))
            if self._activations is not None:
                flats = () if self.shards is None else self.shards.flats
                stack.enter_context(self._activations.hooks((*inputs, *flats)))
            yield

    def before_block(self, position: int) -> None:
        """The step is about to run a layer of the stage."""
        self._watch(True)
        self._guard.leave()
        self._enter(position)

    def after_block(self, position: int) -> None:
        """The step has run a layer of the stage."""
        if self._is_guarded:
            self._guard.enter()
        if position == self._last_layer:
            self._enter(TAIL)

    def take_marker(self) -> Tensor | None:
        """The end of the markers of the forward that ran, from which its backward must start too."""
        marker, self._marker = self._marker, None
        return marker if marker is not None and marker.grad_fn is not None else None

    def finish(self) -> None:
        """The action's computation is over: do what is left of its lines."""
        while self._left:
            action = self._left.popleft()
            if action.kind not in COMPUTATIONS:
                self._perform(action)

    def abandon(self) -> None:
        """Leave everything where a batch ended in an error."""
        self._left.clear()
        self._marker = None
        self.end()
        if self.gradients is not None:
            self.gradients.forget()
        if self.offloaded_gradients is not None:
            self.offloaded_gradients.forget()
        if self.shards is not None:
            self.shards.abandon()

    def end(self) -> None:
        """A batch has ended."""
        self._watch(True)
        if self.update is not None:
            self.update.rest()
        if self._activations is not None:
            self._activations.forget()

    def _watch(self, is_watched: bool) -> None:
        """Whether values of parameters are of interest to who uses them now: what makes fakes is not."""
        if self.update is not None:
            self.update.is_watched = is_watched

    def _enter(self, unit: int) -> None:
        if unit not in self._units:
            return  # it has no parameters, or is a part of a larger unit
        # Modes that watch the user's step for values must not see what is done here.
        with torch._C.DisableTorchFunction():
            if self._marker is not None:
                with torch.enable_grad():
                    self._marker = _Marker.apply(self._marker, self, self._unit)  # type: ignore[no-untyped-call]
            self._reach(unit)

    def _reach(self, unit: int | None) -> None:
        """Do everything that comes before the computation of a unit, and wait for its parameters."""
        self._unit = unit
        if not any(action.kind in COMPUTATIONS and action.unit == unit for action in self._left):
            raise TraceError(
                f"layer {unit} was called after a later one, or twice: under zero_stage 2 and 3, and with offload, "
                "blocks must run in the order of the trace, each once; use zero_stage=1 and no offload"
            )
        while True:
            action = self._left.popleft()
            if action.kind not in COMPUTATIONS:
                self._perform(action)
            elif action.unit == unit:
                break
        if self.update is not None and unit is not None:
            self.update.arrived((action.stage, unit))
        if self.shards is not None and unit is not None:
            self.shards.ready((action.stage, unit))
        if self._activations is not None:
            # What a layer keeps that moves nothing stays, even if one that moves what it keeps has it too.
            self._activations.reach(action, moves=self._moves and unit not in (HEAD, TAIL))

    def _is_updating(self) -> bool:
        return self.update is not None and self.update.is_pending

    def _move_gradients(self, kind: ActionKind, key: UnitKey) -> None:
        assert self.offloaded_gradients is not None
        if kind is ActionKind.LOAD_GRADIENTS:
            self.offloaded_gradients.load(key)
            return
        if self.gradients is not None and not self.offloaded_gradients.is_there(key):
            self.gradients.settle()
        self.offloaded_gradients.store(key)

    def _perform(self, action: Action) -> None:
        assert action.unit is not None
        key = action.stage, action.unit
        if action.kind is ActionKind.REDUCE_GRADIENTS:
            reduces = self.gradients or self.offloaded_gradients
            assert reduces is not None
            reduces.reduce(key)
            return
        if action.kind in (ActionKind.LOAD_GRADIENTS, ActionKind.STORE_GRADIENTS) and not self._is_updating():
            self._move_gradients(action.kind, key)
            return
        if action.microbatch is not None:
            assert self._activations is not None
            self._activations.perform(action)
            return
        if action.kind not in (ActionKind.UNSHARD, ActionKind.RESHARD):
            assert self.update is not None
            self.update.perform(action)
            return
        assert self.shards is not None
        if action.kind is ActionKind.UNSHARD:
            self.shards.unshard(key)
        else:
            self.shards.reshard(key)


def make_unit_runner(
    mesh: Mesh,
    module_map: ModuleMap,
    parameters: Mapping[str, nn.Parameter],
    transport: Transport,
    actions: Sequence[Action],
    device: torch.device,
    streams: CopyStreams,
    pools: tuple[HostPool, HostPool],
    held: Sequence[Tensor] = (),
    *,
    even: EvenShards,
    has_masters: bool = False,
) -> UnitRunner:
    """The runner of a rank, for which every action is one line if its stages neither shard nor move anything.

    Args:
        pools: Host memory for activations, and for parameters.
        held: Parameters and buffers of the module, which no layer keeps for itself.
        has_masters: Whether trained parameters are cast from masters.
        even: What ranks share out evenly.
    """
    plan = mesh.plan
    found = plan_units(plan, module_map, mesh.stage)
    units = expanded_units(plan, module_map, found)
    by_key = {(stage, unit.unit): unit for stage, of_stage in found.items() for unit in of_stage}
    offloaded = moved_parameters(plan, module_map, mesh.stage)["P"]
    is_needed = any(item.sharded for item in units.values())
    shards = (
        UnitShards(
            *(mesh, parameters, by_key, transport, offloaded, streams, pools[1]),
            has_masters=has_masters,
            even=even.shards,
        )
        if is_needed
        else None
    )
    offloaded_gradients, offloaded = None, moved_parameters(plan, module_map, mesh.stage)["G"]
    backwards = Counter(a.stage for a in actions if a.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT))
    if offloaded and backwards:
        offloaded_gradients = OffloadedGradients(
            *(mesh, parameters, by_key, offloaded, backwards),
            streams=streams,
            pool=pools[0],
            transport=transport,
            even=even.updated_with,
        )
    reduces = mesh.is_sharded and plan.stages[mesh.stage].zero_stage >= ZeroStage.GRADIENTS
    ratios = {
        (stage, unit): plan.stages[stage].kept_ratio(unit) for stage in units for unit in units[stage].activations
    }
    return UnitRunner(
        partial(_lines_of, units),
        actions,
        shards,
        UnitGradients(mesh, parameters, by_key, transport, offloaded_gradients, even.trained) if reduces else None,
        device=device,
        last_layer=len(module_map.blocks) - 1,
        guard=None if shards is None else ParameterGuard(shards.away),
        activations=OffloadedActivations(ratios, held, streams, pools[0]) if ratios else None,
        offloaded_gradients=offloaded_gradients,
    )


def _lines_of(
    units: Mapping[int, StageUnits], actions: Sequence[Action], update: Sequence[Sequence[Action]] = ()
) -> dict[Action, tuple[Action, ...]]:
    lines = lines_of(actions, units, update)
    check_units(lines, units)
    return {action: part for action, part in zip(actions, lines, strict=True) if part != (action,)}


class _Marker(torch.autograd.Function):
    """The place in a graph where forward left one unit for the next."""

    @staticmethod
    def forward(ctx: Any, marker: Tensor, runner: UnitRunner, left: int | None) -> Tensor:
        ctx.runner, ctx.left = runner, left
        return marker.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.left is not None:
            ctx.runner._reach(ctx.left)
        return gradients[0], None, None
