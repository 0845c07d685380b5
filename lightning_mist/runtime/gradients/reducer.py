"""Gradients of a stage over its data-parallel ranks, and over the stages that share a parameter.

Under hybrid sharding they are summed within each shard group first, to the owner there, and then over the owners of all
groups.

Every rank contributes a fixed set of parameters, whatever got a gradient: a missing one counts as zeros. At the end of
each buffer travels one number per parameter that says how many ranks had a gradient, so that a parameter that nobody
touched ends without one, as in a single process. A bucket leaves as soon as its gradients are complete, in a fixed
order of buckets; which action completes which gradients the executor says.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.errors import PlanError, ScheduleError
from lightning_mist.plan import ZeroStage
from lightning_mist.plan.mesh import HeldParameter, Mesh, needs_spreading, sums_wholes, tied_groups
from lightning_mist.runtime.communication import TensorWork, Transport, Work
from lightning_mist.runtime.offload import OffloadedGradients
from lightning_mist.runtime.parameters import (
    Begun,
    Bucket,
    FlatShard,
    Part,
    UnitKey,
    gradient_dtype,
    make_buckets,
    owned_buckets,
    tell_presence,
)
from lightning_mist.schedule.stage_units import ShardUnit

# Gradients under ZeRO-2 and ZeRO-3: reduced to their owners unit by unit, after every backward of a microbatch.
#
# Behind the backward of a unit its gradients leave for their owners while the next unit computes; when that one's are
# ready the first have arrived, so that at most the gradients of one unit are under way. Owners add up what arrives;
# other ranks keep no gradient. Every rank contributes a fixed set of parameters in a fixed order, whatever got a
# gradient: a missing one counts as zeros, and one number per parameter says how many ranks had one.
#
# Under hybrid sharding each shard group does this for itself. Once a batch, at its end, the owners of all groups sum
# what they have added up.


class UnitGradients:
    """Sums of the gradients of a rank's units."""

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[UnitKey, ShardUnit],
        transport: Transport,
        offloaded: OffloadedGradients | None = None,
        even: Sequence[FlatShard] = (),
    ) -> None:
        self._mesh, self._transport, self._offloaded = mesh, transport, offloaded
        self._even = even
        names = frozenset[str]() if offloaded is None else offloaded.names
        self._replicates = tuple(sorted(mesh.replicate_peers))
        owned = owned_buckets({key: unit.reduced for key, unit in units.items()}, parameters, mesh, apart=names)
        self._owned = list(chain.from_iterable(owned.values()))
        self._of: dict[UnitKey, list[Bucket]] = {
            key: [*(shard for shard in even if key in shard.flat.reduced), *owned[key]] for key in units
        }
        self._under_way: list[tuple[Bucket, Begun]] = []

    def keep_layouts(self) -> None:
        """Remember the shapes and strides of the parameters, which are about to lose their memory."""
        for item in self._owned:
            item.keep_layouts()

    def reduce(self, key: UnitKey) -> None:
        """Start to reduce a unit's gradients, which the parameters lose, once those before have arrived."""
        self.settle()
        self._under_way += [(item, item.begin(self._mesh, self._transport)) for item in self._of[key]]

    @contextmanager
    def as_they_come(self) -> Iterator[None]:
        """Around a backward of which nothing is known before: a unit is reduced when all its gradients have come.

        Units leave in the reverse of their order, the same on every rank. Those of which a parameter gets no gradient
        leave when the backward is over, and so do all behind them.
        """
        left, missing = list(reversed(self._of)), dict[UnitKey, set[nn.Parameter]]()

        def came(parameter: nn.Parameter) -> None:
            for waiting in missing.values():
                waiting.discard(parameter)
            while left and not missing[left[0]]:
                self.reduce(left.pop(0))

        with ExitStack() as stack:
            for key, items in self._of.items():
                missing[key] = {p for item in items for p in item.parameters if p.requires_grad}
                for parameter in missing[key]:
                    hook = parameter.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            yield
        for key in left:
            self.reduce(key)

    def finish(self) -> Iterator[Work]:
        """Give every owner its gradients: the mean over all ranks' batches.

        A parameter that had no gradient in any microbatch of any rank has none.

        Raises:
            ScheduleError: If a parameter got a gradient after those of its unit were reduced for the last time.
        """
        yield from (work for _, (work, _) in self._under_way)
        self.settle()
        for items in self._of.values():
            for item in items:
                for name, parameter in zip(item.names, item.parameters, strict=True):
                    if parameter.grad is not None:
                        raise ScheduleError(
                            f"{name} got a gradient after the last reduction of its unit: a parameter's gradient must "
                            "be complete when the backward of the first layer that uses it has run"
                        )
        if len(self._replicates) > 1:
            flats = [item.fresh for item in (*self._owned, *self._even)]
            yield from [self._transport.all_reduce(flat, self._replicates) for flat in flats if flat is not None]
        for owned in reversed(self._owned):  # as backward has reached them
            owned.install()

    def forget(self) -> None:
        """Drop everything, also what is under way."""
        self._under_way.clear()
        for item in self._owned:
            item.forget()

    def settle(self) -> None:
        """Wait for what is under way, and add it up where it is owned."""
        for item, (work, result) in self._under_way:
            work.wait()
            if (received := result()) is None:
                continue
            if self._offloaded is None or not self._offloaded.arrived(item, received):
                item.add(received)
        self._under_way.clear()


class GradientReducer:
    """Turns the sums of weighted gradients on each rank into the mean over all ranks' batches.

    Args:
        units: Reduces gradients unit by unit while backwards run (ZeRO-2, ZeRO-3); what it does is not done here.
        parts: Of which of the parameters this rank has a part.
        offloaded: Names of the parameters whose gradients are in host memory, and are not reduced here.
        even: What ranks share out evenly of what is trained.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        transport: Transport,
        units: UnitGradients | None = None,
        parts: Mapping[str, Part] = MappingProxyType({}),
        offloaded: Collection[str] = (),
        even: Sequence[FlatShard] = (),
    ) -> None:
        self._even = even
        self._mesh, self._parameters, self._transport, self._units = mesh, parameters, transport, units
        self._parts = parts
        self._group = tuple(sorted(mesh.shard_peers))
        self._replicates = tuple(sorted(mesh.replicate_peers))
        # Beside reductions by units buckets would leave at another moment on every rank.
        self._leaves_early = len(self._group) > 1 and units is None and not offloaded
        # Backward reaches the last parameters first, so their buckets fill first.
        trained = [item for item in reversed(mesh.held) if item.requires_grad]
        dealt = [item for item in trained if not item.is_even]
        self.buckets = _buckets_of(mesh, parameters, dealt)
        staying = [item for item in dealt if item.name not in offloaded]
        self._owned = self.buckets if len(staying) == len(dealt) else _buckets_of(mesh, parameters, staying)
        places = {item.name: place for place, item in enumerate(trained)}
        evenly = [shard for shard in even if shard.names[0] not in offloaded]
        self._reduced: list[Bucket] = [*self._owned, *evenly]
        self._reduced.sort(key=lambda item: max(places[name] for name in item.names))
        self._trained = {item.name for item in trained}
        self._tied = [item for item in mesh.held if item.requires_grad and len(item.stages) > 1]
        self._launched: list[Begun] = []
        self._ready: set[nn.Parameter] = set()
        self._hooks: list[Any] = []

    def expect(self, names: Collection[str]) -> None:
        """From now on a gradient of these parameters is final when it is accumulated.

        Call before the action in which they are accumulated last.
        """
        if self._leaves_early:
            self._hooks += [
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                for name in names
                if (parameter := self._parameters[name]).requires_grad and name in self._trained
            ]

    def complete(self, names: Collection[str]) -> None:
        """These parameters get no more gradients in this batch, whether they got any or not."""
        if self._leaves_early and names:
            self._ready.update(self._parameters[name] for name in names)
            self._launch_ready()

    def disarm(self) -> None:
        """Forget a reduction that has begun, if any."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._ready.clear()
        self._launched.clear()
        for item in self._owned:
            item.forget()

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Around a backward of which nothing is known before: gradients leave as they come, for :meth:`reduce`."""
        names = frozenset(self._parameters)
        try:
            self.expect(names)
            with nullcontext() if self._units is None else self._units.as_they_come():
                yield
            self.complete(names)
        except BaseException:
            self.disarm()
            if self._units is not None:
                self._units.forget()
            raise

    def reduce(self) -> Iterator[Work]:
        """Sum the gradients over the stage's data-parallel ranks and divide by the number of all ranks.

        Afterwards ``p.grad`` holds the mean on every rank, from ZeRO-1 on only on the owner of ``p`` (None elsewhere).

        Raises:
            PlanError: If a parameter has a gradient that was not trained when the plan was made.
        """
        self._check_known()
        scale = 1.0 / self._mesh.plan.num_loaders
        if len(self._group) == 1:
            if scale != 1.0:
                _scale([p.grad for p in self._parameters.values() if p.grad is not None], scale)
            self.disarm()
            return
        if self._units is not None:
            yield from self._units.finish()
            yield from tell_presence(self._even, self._mesh, self._transport)
            return
        for item in self._reduced[len(self._launched) :]:
            self._launch(item)
        for item, (work, result) in zip(self._reduced, self._launched, strict=True):
            yield work
            _refuse_late(item)
            if (received := result()) is None:
                continue
            if len(self._replicates) > 1:
                yield self._transport.all_reduce(received, self._replicates)
            item.add(received)
        for owned in self._owned:
            owned.install()
        yield from tell_presence(self._even, self._mesh, self._transport)
        self.disarm()

    def reduce_tied(self) -> Iterator[Work]:
        """Sum the gradients of the copies that several stages hold, so that each copy has the same, full gradient.

        Runs after :meth:`reduce`. Under ZeRO-1 only the owner of a copy in its stage has it. Where the copies differ in
        how tensor parallelism shares them out, every stage puts its whole gradient together, and takes its parts from
        the sum.
        """
        mesh = self._mesh
        groups = [(item, group) for item in self._tied for group in tied_groups(mesh.plan, item) if mesh.rank in group]
        flats: dict[str, Tensor] = {}
        yield from self._contribute([item for item, _ in groups], flats)
        pending = []
        for item, group in groups:
            flat = flats.pop(item.name)
            pending.append((item, flat, self._transport.all_reduce(flat, group)))
        for item, flat, work in pending:
            yield work
            part = self._parts.get(item.name) if sums_wholes(mesh.plan, item) else None
            _install_one(self._parameters[item.name], flat, part)
        spread = []
        for item in self._tied:
            if needs_spreading(mesh.plan, item, mesh.stage):
                source, group = mesh.peers[item.owner(mesh.stage)], self._replicates if mesh.is_sharded else self._group
                if source in group:
                    flat = _with_presence(self._parameters[item.name])
                    spread.append((item, flat, self._transport.broadcast(flat, source, group)))
        for item, flat, work in spread:
            yield work
            _install_one(self._parameters[item.name], flat)

    def _contribute(self, items: Sequence[HeldParameter], flats: dict[str, Tensor]) -> Iterator[Work]:
        """Fill ``flats`` with what this rank adds to the sum of each tied gradient."""
        gathers: list[tuple[str, Part, TensorWork]] = []
        tensor_group = tuple(sorted(self._mesh.tensor_peers))
        for item in items:
            flat = flats[item.name] = _with_presence(self._parameters[item.name])
            part = self._parts.get(item.name)
            if part is not None and sums_wholes(self._mesh.plan, item):
                gathers.append((item.name, part, self._transport.all_gather(flat, tensor_group)))
        for name, part, work in gathers:
            yield work
            rows = work.result()[[tensor_group.index(rank) for rank in self._mesh.tensor_peers]]
            whole = part.join([row[:-1].view(part.local_shape) for row in rows])
            flats[name] = torch.cat([whole.reshape(-1), rows[0, -1:]])
        for item in items:
            if sums_wholes(self._mesh.plan, item) and self._mesh.tensor_index > 0:
                # All tensor-parallel ranks of a stage have the same whole gradient by now: it must count once.
                flats[item.name].zero_()

    def keep_layouts(self) -> None:
        """Remember the shapes and strides of the parameters, of which some may lose their memory now."""
        for bucket in {*self.buckets, *self._owned}:
            if bucket.layouts is bucket.parameters:
                bucket.keep_layouts()

    def gather_parameters(self, home: Mapping[str, Tensor] = MappingProxyType({})) -> Iterator[Work]:
        """Give every data-parallel rank the parameters that their owners updated (ZeRO-1, ZeRO-2).

        Nothing without sharding; nothing under ZeRO-3, where every unit is given out when it is used.
        """
        zero_stage = self._mesh.plan.stages[self._mesh.stage].zero_stage
        if not self._mesh.is_sharded or zero_stage >= ZeroStage.PARAMETERS:
            return
        pending: list[tuple[Work, Callable[[], None]]] = []
        for bucket in (*self._even, *self.buckets):
            pending.append(bucket.give_out(home, self._mesh, self._transport))
            if len(pending) == _BUCKETS_IN_FLIGHT:
                yield from _waited(pending.pop(0))
        for item in pending:
            yield from _waited(item)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self._ready.add(parameter)
        self._launch_ready()

    def _launch_ready(self) -> None:
        # Buckets leave in one order on every rank, whatever the order in which they fill.
        while len(self._launched) < len(self._reduced):
            item = self._reduced[len(self._launched)]
            # The last to come is the last of its bucket, mostly.
            if not all(parameter in self._ready for parameter in reversed(item.parameters)):
                return
            self._launch(item)

    def _launch(self, item: Bucket) -> None:
        self._launched.append(item.begin(self._mesh, self._transport))

    def _check_known(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and name not in self._trained:
                raise PlanError(
                    f"{name} has a gradient, but did not require one when the plan was made: the set of trained "
                    "parameters must stay as it was; plan again after unfreezing"
                )


def _refuse_late(bucket: Bucket) -> None:
    late = [name for name, p in zip(bucket.names, bucket.parameters, strict=True) if p.grad is not None]
    if late:
        raise ScheduleError(
            f"{late[0]} got a gradient after its bucket was reduced: a parameter is accumulated once per backward; "
            "do not call backward inside backward (reentrant checkpointing of a shared module does)"
        )


def _waited(begun: tuple[Work, Callable[[], None]]) -> Iterator[Work]:
    work, then = begun
    yield work
    then()


_BUCKETS_IN_FLIGHT = 2
"""Buffers under way at once: one travels while the one before is copied out; more only cost memory."""


def _scale(gradients: list[Tensor], scale: float) -> None:
    dense = [gradient for gradient in gradients if gradient.layout is torch.strided]
    if dense:
        torch._foreach_mul_(dense, scale)
    for gradient in gradients:
        if gradient.layout is not torch.strided:
            gradient.mul_(scale)


def _buckets_of(
    mesh: Mesh, parameters: Mapping[str, nn.Parameter], items: Sequence[HeldParameter]
) -> tuple[Bucket, ...]:
    owners = [item.owner(mesh.stage) if mesh.is_sharded else None for item in items]
    return make_buckets([(item.name, parameters[item.name], own) for item, own in zip(items, owners, strict=True)])


def _with_presence(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient, flat, and one number that says whether it has one."""
    flat = torch.empty(parameter.numel() + 1, dtype=gradient_dtype(parameter), device=parameter.device)
    view = flat[:-1].view(parameter.shape)
    if parameter.grad is None:
        view.zero_()
    else:
        view.copy_(parameter.grad)
    flat[-1] = float(parameter.grad is not None)
    return flat


def _install_one(parameter: nn.Parameter, flat: Tensor, part: Part | None = None) -> None:
    if parameter.grad is None and flat[-1] == 0:
        return
    parameter.grad = flat[:-1].view(parameter.shape) if part is None else part.take(flat[:-1].view(part.shape))
