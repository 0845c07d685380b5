"""Optimizer state in host memory: fetched unit by unit for the update, and written back behind it.

Between steps ``optimizer.state`` holds the tensors in host memory. For its unit's update a parameter's state lies in a
buffer on the device, and its master with it, if it has one. State that the optimizer makes, in its first step or when
it replaces a tensor, leaves from where it was made. Which actions come when the schedule says; see
:mod:`lightning_mist.schedule.stage_program`.

A deferred step is pending until the next batch's first forward has come through all units. Until a unit is updated its
parameters have the values of the step before: whoever uses one has the whole step taken first.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_mist.errors import PlanError
from lightning_mist.leaves import Path, is_plain, plain_leaves, with_leaves
from lightning_mist.optimizers import is_entrywise, own_attributes, within
from lightning_mist.plan import ModuleMap, ZeroStage
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport
from lightning_mist.runtime.host_memory import (
    ALIGNMENT_BYTES,
    CopyStreams,
    DeviceBuffers,
    HostPool,
    is_host,
    let_go,
    padded_bytes,
)
from lightning_mist.runtime.offload.gradient_offload import OffloadedGradients
from lightning_mist.runtime.offload.unit_steps import UnitSteps, as_now
from lightning_mist.runtime.parameters import (
    EvenShards,
    FlatShard,
    MasterWeights,
    UnitGather,
    UnitKey,
    UnitShards,
    at_work,
    make_absent,
    make_present,
    shared_out,
    shown,
)
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.action import UNIT_NAMES
from lightning_mist.schedule.stage_program import NUM_BUFFERS
from lightning_mist.schedule.stage_units import defers_update, moved_parameters, stage_update, updated_units

_Place = tuple[Any, Path]
"""A parameter and what leads to one of its state's tensors, or to its master; or a flat buffer and its master."""

_MASTER: Path = (object(),)

_Part = tuple[nn.Parameter, int, int]
"""Some of a parameter's elements: from one up to another."""

PART_ELEMENTS = 64
"""Multiples of elements at which parameters are cut: kernels with vector loads give the same bits then."""

_LEAST_ROOM = 2**13
"""Bytes of a buffer that parts can pass through."""


class OffloadedState:
    """The optimizer state of a rank of which some is in host memory.

    Args:
        units: What it updates of each unit.
        rows: The step, unit by unit (:func:`lightning_mist.schedule.stage_program.update_rows`).
        gather: Gives updated parameters to other ranks unit by unit, where that is to be done.
        masters: What is updated in place of parameters, if there are any.
        even: What ranks share out evenly, by the unit with which it is updated.
        is_dealt: Whether other ranks update other parameters of the same units.
        stale: If the step is deferred: by unit and name, the parameters whose values are old until then.

    Attributes:
        is_watched: Whether who uses a parameter whose values are old is to find new ones.
    """

    is_watched = True

    def __init__(
        self,
        optimizer: Optimizer,
        units: Mapping[UnitKey, Sequence[nn.Parameter]],
        offloaded: Collection[nn.Parameter],
        rows: Sequence[Sequence[Action]],
        *,
        streams: CopyStreams,
        pool: HostPool,
        shards: UnitShards | None = None,
        gradients: OffloadedGradients | None = None,
        gather: UnitGather | None = None,
        masters: MasterWeights | None = None,
        even: Mapping[UnitKey, Sequence[FlatShard]] = MappingProxyType({}),
        is_dealt: bool = False,
        stale: Mapping[UnitKey, Mapping[str, nn.Parameter]] | None = None,
    ) -> None:
        self._gather, self._masters, self._stale, self._todo = gather, masters, stale, set[Action]()
        self._even = even
        self._process = os.getpid()
        self._optimizer, self._units, self.rows = optimizer, units, tuple(rows)
        self.actions = tuple(chain.from_iterable(rows))
        self.offloaded = frozenset(offloaded)
        self._device, self._streams, self._pool = streams.ops.device, streams, pool
        self._buffers, self._shards = DeviceBuffers(self._device), shards
        self._buffer_of = {key: index % NUM_BUFFERS for index, key in enumerate(self._movers())}
        self._home: dict[_Place, Tensor] = {}
        self._staying: set[_Place] = set()
        self._sent: set[nn.Parameter] = set()  # all of whose state has just been brought home
        # The end of the last copy out of each buffer. A unit is always in the same one, and copies out end in the order
        # in which they began: then what it left there before is at home too.
        self._left: dict[int, Any] = {}
        self._arriving: dict[UnitKey, tuple[Any, dict[_Place, Tensor]]] = {}
        self._leaving: list[tuple[Any, list[Tensor]]] = []
        self._is_entrywise = is_entrywise(type(optimizer)) and not is_dealt
        self._in_parts: frozenset[UnitKey] = frozenset()
        self._updated: dict[UnitKey, dict[_Place, Tensor]] = {}  # masters that have just been updated
        self._steps = UnitSteps(optimizer, self.update)
        self._do: dict[ActionKind, Callable[[UnitKey], None]] = {
            ActionKind.LOAD_OPTIMIZER_STATE: self._load,
            ActionKind.UPDATE: self._update,
            ActionKind.STORE_OPTIMIZER_STATE: self._store,
        }
        if shards is not None:
            self._do |= {ActionKind.LOAD_PARAMETERS: shards.fetch, ActionKind.STORE_PARAMETERS: shards.store}
        self._gradients = gradients
        if gradients is not None:
            self._do[ActionKind.LOAD_GRADIENTS] = partial(gradients.load, owned=True)
        if gather is not None:
            self._do[ActionKind.GATHER_PARAMETERS] = gather.begin
        self.send_home(offloaded)

    @property
    def defers(self) -> bool:
        """Whether a step is left to the next batch."""
        return self._stale is not None

    @property
    def is_pending(self) -> bool:
        """Whether a step was asked for of which something is still to be done."""
        return bool(self._todo)

    def update(self) -> None:
        """Update everything, unit by unit; or, of a deferred step, keep what it needs until then."""
        self.flush()
        if self._buffers.ensure(self._rooms()):
            # Their memory was another's until all that was launched so far has run.
            self._left = dict.fromkeys(range(NUM_BUFFERS), self._streams.ops.record())
        self._todo.update(self.actions)
        self._sent.clear()
        if self._stale is None:
            self.flush()
            return
        self._steps.freeze()
        for key, parameters in self._stale.items():
            if self._masters is not None:
                make_present(parameters.values())  # those without a master here too: they are computed with in time
            where = f"those of the step before until {_words(key)} runs"
            make_absent(parameters, lambda _, where=where: where, keeps_gradient=True, arrive=self._arrive)  # type: ignore[misc]

    def _rooms(self) -> list[list[Tensor]]:
        """What must fit a buffer at once: of what belongs to no layer only parts, where that is larger than layers'."""
        units = {key: list(self._homes_of(key, in_parts=False).values()) for key in self._movers()}
        edges = [key for key in units if key[1] in UNIT_NAMES] if self._is_entrywise else []
        room = max((padded_bytes(of_unit) for key, of_unit in units.items() if key not in edges), default=0)
        can = room >= _LEAST_ROOM and all(tensor.is_contiguous() for key in edges for tensor in units[key])
        large = [key for key in edges if can and padded_bytes(units[key]) > room]
        self._in_parts = frozenset(large)
        return [list(self._homes_of(key).values()) for key in units]

    def _at_once(self, key: UnitKey) -> list[nn.Parameter]:
        """The parameters of a unit that are updated whole: of a large one those of one element, or without state."""
        large = key in self._in_parts
        return [p for p in self._units.get(key, ()) if not (large and p.numel() > 1 and self._at_home([p]))]

    def _homes_of(self, key: UnitKey, *, in_parts: bool = True) -> dict[_Place, Tensor]:
        """What a unit's update needs at once of what is in host memory."""
        moved = () if self._masters is None else self._masters.moved
        found = self._at_home(self._at_once(key) if in_parts else self._units[key])
        return found | {(s, _MASTER): s.home for s in self._even.get(key, ()) if s in moved and s.home is not None}

    def flush(self) -> None:
        """Do all that is left of a step, in its order; where updated parameters are given out all ranks do."""
        if not self._todo:
            return
        with at_work():
            for action in self.actions:
                self.perform(action)
            if self._gather is not None:
                self._gather.finish()
        self.rest()
        if self._masters is not None:
            self._masters.updated()
        # From here on anybody may look at state, and write into it.
        self.settle()

    def perform(self, action: Action) -> None:
        """Do one action of the update, if it was asked for and was not done yet."""
        assert action.unit is not None
        if action not in self._todo:
            return
        self._todo.remove(action)
        key = action.stage, action.unit
        # Wherever it happens, the user's precision and inference mode are for the user's step.
        own = torch.inference_mode(mode=False), torch.no_grad(), torch.autocast(self._device.type, enabled=False)
        with own[0], own[1], own[2]:
            if action.kind is ActionKind.STORE_PARAMETERS:
                self.arrived(key)
            self._do[action.kind](key)

    def _arrive(self) -> None:
        """Somebody uses a parameter."""
        if not self.is_watched:
            return
        if os.getpid() != self._process:
            raise PlanError(
                "a parameter is used in a process that was forked while the optimizer's step is left to the next "
                "batch's forward: its value is not here, nor are the streams that bring it; copy it before the fork"
            )
        if self._gather is not None:
            # Giving out takes all ranks: it cannot be done when one of them looks.
            raise PlanError(
                "a parameter is used before the layer that owns it runs, while the optimizer's step is taken layer by "
                "layer in the next batch's forward: with offload and zero_stage 1 or 2 its new value is not here yet; "
                "use zero_stage=0 or 3, or offload nothing but activations"
            )
        # Whatever watches the user's step must not see what is done here.
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self.flush()

    def arrived(self, key: UnitKey) -> None:
        """Wait for what other ranks have updated of a unit."""
        if self._gather is not None:
            self._gather.end(key)

    def rest(self) -> None:
        """Let go of what was needed for a step that is done."""
        if self._todo:
            return
        self._steps.thaw()
        self._free(self._leaving)
        if self._shards is not None:
            self._shards.settle()

    def settle(self) -> None:
        """Wait until all state in host memory has its values: before anybody reads it."""
        self._streams.settle()

    def send_home(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move state to host memory that is on the device, where it did not come from there."""
        for parameter in parameters:
            fresh = self._fresh([parameter])
            homes = dict(zip(fresh, self._homes(fresh), strict=True))
            for place, home in homes.items():
                home.copy_(fresh[place])
                let_go(home)
            self._set(homes)
            self._sent.add(parameter)

    def end(self) -> None:
        """Let the optimizer step as it did before; its state stays where it is.

        A step that is left over is taken, for this rank alone: after an error peers may be gone.
        """
        self._todo -= {action for action in self._todo if action.kind is ActionKind.GATHER_PARAMETERS}
        self.flush()
        self.settle()
        if self._gradients is not None:
            self._gradients.end()
        self._steps.end()

    def _load(self, key: UnitKey) -> None:
        left = self._left.get(self._buffer_of.get(key, 0))  # unless this rank has something of it nothing is fetched
        if key in self._in_parts:
            self._arriving[key] = self._fetch_part(key, 0, self._parts_of(key)[0], left)
        else:
            self._arriving[key] = self._fetch(key, self._homes_of(key), left)

    def _fetch(
        self, key: UnitKey, homes: Mapping[_Place, Tensor], left: Any, half: int | None = None
    ) -> tuple[Any, dict[_Place, Tensor]]:
        if not homes:
            return None, {}
        views = self._buffers.views(self._buffer_of[key], like := list(homes.values()), half)
        return self._streams.load(views, like, after=[left]), dict(zip(homes, views, strict=True))

    def _update(self, key: UnitKey) -> None:
        if self._stale is not None:
            make_present(self._stale[key].values() if self._gather is None else self._units.get(key, ()))
        event, views = self._arriving.pop(key, (None, {}))
        self._streams.wait(event)
        if self._shards is not None:
            self._shards.fetched(key)
        parameters = self._at_once(key)
        gradients = {} if self._gradients is None else self._gradients.take(key)
        gradients = {p: gradient for p, gradient in gradients.items() if self._steps.had_zeros(p) is not None}
        for parameter, gradient in gradients.items():
            if self._steps.had_zeros(parameter):
                gradient.zero_()
        if key in self._in_parts:
            self._update_parts(key, (event, views), gradients)
            event, views = self._fetch(key, self._at_home(parameters), self._left[self._buffer_of[key]])
            self._streams.wait(event)
        self._set(views)
        fetched = {p: value for (p, path), value in views.items() if path is _MASTER}
        flats = self._even.get(key, ())
        in_flats = {parameter for shard in flats for parameter in shard.parameters}
        moved = [shard for shard in flats if shard in fetched]
        with ExitStack() as stack:
            for shard in moved:
                shard.updated = fetched[shard]
                stack.callback(setattr, shard, "updated", None)
            if self._masters is not None:
                whole = [parameter for parameter in parameters if parameter not in in_flats]
                stack.enter_context(self._masters.updating(whole, fetched))
            stack.enter_context(shown(flats))
            read = [gradients.get(p, shared_out(p.grad)) for p in parameters]
            self._streams.uses([item for item in read if item is not None], [*parameters, *views.values()])
            self._steps.of(parameters, {p: gradient for p, gradient in gradients.items() if p in set(parameters)})
            self._updated[key] = {(p, _MASTER): fetched[p] if p in moved else p.data for p in fetched}
            if self._masters is not None:
                self._masters.updated_evenly(flats)
        for parameter in self._steps.cleared.intersection(parameters):
            parameter.grad = None
        if self._gradients is not None:
            self._gradients.done(key)

    def _parts_of(self, key: UnitKey) -> list[_Part]:
        """The parts of a unit's parameters whose state is in host memory, each no larger than half a buffer."""
        parts, whole = list[_Part](), set(self._at_once(key))
        for parameter in (each for each in self._units[key] if each not in whole):
            homes = self._at_home([parameter]).values()
            size = sum(home.element_size() for home in homes)
            most = (self._buffers.half // ALIGNMENT_BYTES - len(homes)) * ALIGNMENT_BYTES // size
            most, count = most // PART_ELEMENTS * PART_ELEMENTS, parameter.numel()
            parts += [(parameter, low, min(low + most, count)) for low in range(0, count, most)]
        return parts

    def _fetch_part(self, key: UnitKey, index: int, part: _Part, left: Any) -> tuple[Any, dict[_Place, Tensor]]:
        parameter, low, high = part
        homes = {place: home.view(-1)[low:high] for place, home in self._at_home([parameter]).items()}
        return self._fetch(key, homes, left, index % 2)

    def _update_parts(
        self, key: UnitKey, arriving: tuple[Any, dict[_Place, Tensor]], gradients: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Update parameters part by part, each fetched beside the update of the one before, the first already."""
        parts, left = self._parts_of(key), [self._left.get(self._buffer_of[key])] * 2
        for index, part in enumerate(parts):
            parameter, low, high = part
            if low == 0:
                before = parameter.grad
                gradient = gradients[parameter] if parameter in gradients else self._steps.gradient_of(parameter)
                made: dict[Any, Any] = {}
            event, views = arriving
            if index + 1 < len(parts):
                arriving = self._fetch_part(key, index + 1, parts[index + 1], left[(index + 1) % 2])
            self._streams.wait(event)
            left[index % 2] = self._update_part(part, views, gradient, made)
            if high == parameter.numel():
                parameter.grad = None if parameter in self._steps.cleared else before
                if made:
                    self._optimizer.state[parameter] = made
        self._left[self._buffer_of[key]] = left[(len(parts) - 1) % 2]

    def _update_part(
        self, part: _Part, views: Mapping[_Place, Tensor], gradient: Tensor | None, made: dict[Any, Any]
    ) -> Any:
        """Update a part as a parameter of one dimension, and start to write it back; the event of the copies' end.

        Counters are those of before the step, so that every part takes the same one; ``made`` gets all of the state.
        """
        parameter, low, high = part
        state, whole, place = self._optimizer.state, parameter.data, (parameter, _MASTER)
        kept = dict(state.pop(parameter, {}))
        make_present([parameter])
        parameter.data = value = views[place] if place in views else whole.view(-1)[low:high]
        parameter.grad, shares = None, {} if gradient is None else {parameter: gradient.reshape(-1)[low:high]}
        state[parameter] = {
            name: views[parameter, (name,)] if (parameter, (name,)) in views else as_now(item)
            for name, item in kept.items()
        }
        self._streams.uses(list(shares.values()), [value, *views.values()])
        try:
            self._steps.of([parameter], shares)
            if self._masters is not None:
                self._masters.updates_part(parameter, low, value)
        finally:
            parameter.data, parameter.grad = whole, None
            found = state.pop(parameter)
            if kept:
                state[parameter] = kept
        leaving = {} if self._masters is None else {place: value}
        made.update(found)
        parts = {name: item for name, item in found.items() if isinstance(item, Tensor) and item.shape == value.shape}
        leaving |= {(parameter, (name,)): item for name, item in parts.items()}
        forms = {key: torch.empty(whole.shape, dtype=item.dtype, device="meta") for key, item in leaving.items()}
        homes = dict(zip(leaving, self._homes(forms), strict=True))
        made.update((path[0], home) for (_, path), home in homes.items() if path is not _MASTER)
        event = self._streams.store([home.view(-1)[low:high] for home in homes.values()], list(leaving.values()))
        gone, self._leaving = self._leaving, [(event, list(leaving.values()))]
        self._free(gone)
        return event

    def _store(self, key: UnitKey) -> None:
        fresh = {**self._updated.pop(key, {}), **self._fresh(self._units.get(key, ()))}
        if not fresh:
            return
        homes = self._homes(fresh)
        event = self._streams.store(homes, list(fresh.values()))
        self._left[self._buffer_of[key]] = event
        self._set(dict(zip(fresh, homes, strict=True)))
        # What was not in the buffer may go when the copy has ended: one unit later.
        gone, self._leaving = self._leaving, [(event, list(fresh.values()))]
        self._free(gone)

    def _free(self, leaving: list[tuple[Any, list[Tensor]]]) -> None:
        for event, tensors in leaving:
            self._streams.wait(event)
            tensors.clear()
        leaving.clear()

    def _movers(self) -> Iterator[UnitKey]:
        """The units of which this rank moves anything, in their order."""
        moved = () if self._masters is None else self._masters.moved
        return (
            key
            for key, parameters in self._units.items()
            if not self.offloaded.isdisjoint(parameters) or any(shard in moved for shard in self._even.get(key, ()))
        )

    def _entries(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[_Place, Tensor]]:
        for parameter in parameters:
            if parameter in self.offloaded:
                for path, value in plain_leaves(self._optimizer.state.get(parameter, {})):
                    # Counters stay with those who read them, and so does what only its own class can make again.
                    if is_plain(value) and value.layout is torch.strided and value.numel() > 1:
                        yield (parameter, path), value

    def _shared(self) -> set[Any]:
        """Storages that are not one tensor's of one parameter: also another's, the optimizer's, or a parameter."""
        optimizer = self._optimizer
        held = within([own_attributes(optimizer), optimizer.param_groups], seen={id(optimizer), id(optimizer.state)})
        shared, once = set(_storages([item for item in held if isinstance(item, Tensor)])), set[Any]()
        for parameter, entry in optimizer.state.items():
            for storage in () if parameter in self._sent else _storages(entry):
                (shared if storage in once else once).add(storage)
        return shared

    def _at_home(self, parameters: Sequence[nn.Parameter]) -> dict[_Place, Tensor]:
        masters = {} if self._masters is None else self._masters.homes(parameters)
        return {
            **{(parameter, _MASTER): value for parameter, value in masters.items()},
            **{place: value for place, value in self._entries(parameters) if is_host(value.untyped_storage())},
        }

    def _fresh(self, parameters: Iterable[nn.Parameter]) -> dict[_Place, Tensor]:
        """Tensors of state that are on the device, in a buffer or where the optimizer has made them, to be moved."""
        here = {
            place: value
            for place, value in self._entries(parameters)
            if value.device == self._device and not is_host(value.untyped_storage()) and place not in self._staying
        }
        if new := here.keys() - self._home.keys():
            shared = self._shared()
            self._staying |= {place for place in new if not shared.isdisjoint(_storages(here[place]))}
        return {place: value for place, value in here.items() if place not in self._staying}

    def _homes(self, fresh: Mapping[_Place, Tensor]) -> list[Tensor]:
        """Where tensors are in host memory; they keep the place that they had."""
        for item, path in fresh:
            if path is _MASTER and self._masters is not None:
                self._home[item, path] = self._masters.home_of(item)
        new = [place for place, value in fresh.items() if not _is_like(self._home.get(place), value)]
        self._home.update(zip(new, self._pool.take([fresh[place] for place in new]), strict=True))
        return [self._home[place] for place in fresh]

    def _set(self, values: Mapping[_Place, Tensor]) -> None:
        new: dict[nn.Parameter, dict[Path, Tensor]] = defaultdict(dict)
        for (parameter, path), value in values.items():
            if path is not _MASTER:
                new[parameter][path] = value
        for parameter, found in new.items():
            self._optimizer.state[parameter] = with_leaves(self._optimizer.state[parameter], found)


def _storages(state: Any) -> list[Any]:
    """Identities of the storages of tensors of state, those in host memory left out."""
    storages = [value.untyped_storage() for _, value in plain_leaves(state) if value.layout is torch.strided]
    return [storage._cdata for storage in storages if not is_host(storage)]


def _words(key: UnitKey) -> str:
    return f"the {UNIT_NAMES[key[1]]}" if key[1] in UNIT_NAMES else f"layer {key[1]}"


def _is_like(home: Tensor | None, value: Tensor) -> bool:
    return home is not None and home.shape == value.shape and home.dtype == value.dtype


def offload_optimizer_state(
    optimizer: Optimizer,
    mesh: Mesh,
    module_map: ModuleMap,
    parameters: Mapping[str, nn.Parameter],
    streams: CopyStreams,
    pool: HostPool,
    shards: UnitShards | None,
    gradients: OffloadedGradients | None,
    transport: Transport,
    masters: MasterWeights | None,
    even: EvenShards,
) -> OffloadedState | None:
    """Let an optimizer step unit by unit where the plan moves what it needs; None if that is nothing."""
    plan, ratios = mesh.plan, mesh.plan.stages[mesh.stage].offload
    if not (ratios.optimizer or ratios.parameters or ratios.gradients):
        return None
    state = moved_parameters(plan, module_map, mesh.stage)["O"]
    units = updated_units(plan, module_map, mesh.stage)
    rows, defers = stage_update(plan, module_map, mesh.stage), defers_update(plan, module_map, mesh.stage)
    is_given_out = any(action.kind is ActionKind.GATHER_PARAMETERS for row in rows for action in row)
    gather = UnitGather(mesh, parameters, units, transport, masters, even.updated_with) if is_given_out else None
    # What another optimizer updates, or nobody, is left alone.
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    owned = {item.name for item in mesh.owned if parameters[item.name] in updated}
    owned -= {name for name, part in even.parts.items() if not part.is_mine}
    return OffloadedState(
        optimizer,
        {key: [parameters[name] for name in of_unit if name in owned] for key, of_unit in units.items()},
        {parameters[name] for name in state if name in owned},
        rows,
        streams=streams,
        pool=pool,
        shards=shards if ratios.parameters else None,
        gradients=gradients,
        gather=gather,
        masters=masters,
        even=even.updated_with,
        is_dealt=mesh.is_sharded and plan.stages[mesh.stage].zero_stage > ZeroStage.NONE,
        stale={key: {name: parameters[name] for name in of_unit} for key, of_unit in units.items()} if defers else None,
    )
