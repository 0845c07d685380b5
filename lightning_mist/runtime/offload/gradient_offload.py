"""Gradients in host memory: added up there over a batch's microbatches, and on the device for their update only.

A unit's sum lies in a buffer on the device while its backward runs, what the backward made is added, and it is written
back. What is then asked of all gradients, a factor or a clipping, is kept and done when they are fetched for the
update; norms are taken before they leave. Which actions come when the schedule says; see
:mod:`lightning_mist.schedule.stage_program`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.errors import PlanError, ScheduleError
from lightning_mist.plan import ZeroStage
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport
from lightning_mist.runtime.host_memory import CopyStreams, DeviceBuffers, HostPool, let_go
from lightning_mist.runtime.parameters import (
    AbsentGradient,
    Begun,
    Bucket,
    FlatShard,
    UnitKey,
    check_dense,
    either,
    gradient_dtype,
    owned_buckets,
)
from lightning_mist.schedule.stage_program import NUM_BUFFERS
from lightning_mist.schedule.stage_units import ShardUnit


class GradientSum:
    """Gradients of one unit that one rank updates: at ``home`` in host memory, ``flat`` in a device buffer meanwhile.

    Where ranks share them out evenly the sum is of this rank's piece, before ZeRO-2 of all until the last backward.

    Attributes:
        form: Like the flat tensor that holds them, at its end ``num_counts`` numbers: how many ranks had each.
        present: Which of them this rank had; once they are reduced, any rank, in earlier batches too.
        earlier, earlier_present: The same of earlier batches, to which this one's will be added.
        sent: What travels to other ranks: they in the type that is computed in; behind that what has arrived.
        begun: Their way there.
    """

    def __init__(self, bucket: Bucket, *, is_mine: bool) -> None:
        self.bucket, self.is_mine = bucket, is_mine
        self.form = torch.empty(0)
        self.home: Tensor | None = None
        self.earlier: Tensor | None = None
        self.flat: Tensor | None = None
        self.sent: Tensor | None = None
        self.num_counts = 0
        self.present = [False] * len(bucket.names)
        self.earlier_present: list[bool] = []
        self.begun: Begun | None = None

    def lay_out(self, *, is_reduced: bool, adds_whole: bool) -> None:
        """Take the shapes and strides that the parameters have now."""
        self.bucket.keep_layouts()
        like = torch.empty(0, dtype=gradient_dtype(self.bucket.parameters[0]), device="meta")
        self.num_counts = is_reduced * self.bucket.num_counts
        whole = like.new_empty(self.bucket.numel + self.num_counts)
        self.form = whole if adds_whole else self.bucket.own_of(whole)

    def own_views(self, flat: Tensor) -> list[Tensor]:
        """A view of what of each gradient this rank updates."""
        return self.bucket.pieces(self.bucket.own_of(flat))


class OffloadedGradients:
    """The gradients of a rank that are in host memory.

    Args:
        even: What ranks share out evenly, by the unit with which it is updated.
        backwards: How many backwards each of its stages has in a batch.

    Attributes:
        checks: Whether to see which gradients are finite.
    """

    checks = False

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[UnitKey, ShardUnit],
        offloaded: Collection[str],
        backwards: Mapping[int, int],
        *,
        streams: CopyStreams,
        pool: HostPool,
        transport: Transport,
        even: Mapping[UnitKey, Sequence[FlatShard]] = MappingProxyType({}),
    ) -> None:
        self._mesh, self._backwards, self._streams = mesh, backwards, streams
        self._pool, self._transport, self._parameters = pool, transport, parameters
        self._group = tuple(sorted(mesh.shard_peers))
        self._replicates = tuple(sorted(mesh.replicate_peers))
        self._shares = mesh.is_sharded and mesh.plan.stages[mesh.stage].zero_stage >= ZeroStage.GRADIENTS
        # What several chunks of this rank use has several sums, and stays.
        often = Counter(name for unit in units.values() for name in unit.reduced)
        self.names = frozenset(name for name, count in often.items() if count == 1 and name in offloaded)
        names = {key: [name for name in unit.reduced if name in self.names] for key, unit in units.items()}
        self._of: dict[UnitKey, list[GradientSum]] = {}
        for key, owned in owned_buckets(names, parameters, mesh).items():
            buckets = (*(shard for shard in even.get(key, ()) if shard.names[0] in self.names), *owned)
            sums = [GradientSum(bucket, is_mine=bucket.is_mine(mesh)) for bucket in buckets]
            # From ZeRO-2 on others' gradients never stay.
            if kept := [item for item in sums if item.is_mine or not self._shares]:
                self._of[key] = kept
        self._place_of = {item.bucket.names: (key, item) for key, sums in self._of.items() for item in sums}
        self._at = {
            parameter: (key, item, index)
            for key, item in self._place_of.values()
            for index, parameter in enumerate(item.bucket.parameters)
        }
        self._buffer_of = {key: index % NUM_BUFFERS for index, key in enumerate(self._of)}
        self._buffers = DeviceBuffers(streams.ops.device)
        self._left: dict[int, Any] = {}
        self._arriving: dict[UnitKey, Any] = {}
        self._stored: Counter[UnitKey] = Counter()
        self._norms: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}  # not finite if an entry is not
        self._changes: list[Callable[[list[Tensor]], object]] = []

    def keep_layouts(self) -> None:
        """Remember the shapes and strides of the parameters, of which some may lose their memory now."""
        for _, item in self._place_of.values():
            if item.bucket.layouts is item.bucket.parameters:
                item.lay_out(is_reduced=len(self._group) > 1, adds_whole=not self._shares)

    # While a batch runs ----------------------------------------------------------------------------------------------

    def begin(self, earlier: Collection[nn.Parameter] = ()) -> None:
        """A batch begins, whose gradients are added to those that ``earlier`` parameters have of batches before."""
        self._buffers.ensure([[item.form for item in sums] for sums in self._of.values()])
        self._stored.clear()
        self._largest.clear()
        for item in self._mine():
            item.bucket.forget()
            is_kept = not set(earlier).isdisjoint(item.bucket.parameters)
            item.earlier_present = item.present if is_kept else []

    def load(self, key: UnitKey, *, owned: bool = False) -> None:
        """Start to fetch a unit's sums, or of these only what this rank updates."""
        pairs = []
        for flat, item in self._in_buffer(key):
            if item.home is not None and (item.is_mine or not owned):
                own = item.bucket.own_of
                pairs.append((own(flat), own(item.home)) if owned else (flat, item.home))
        if pairs:
            targets, sources = zip(*pairs, strict=True)
            self._arriving[key] = self._streams.load(targets, sources, after=[self._left.get(self._buffer_of[key])])

    def add(self, key: UnitKey) -> None:
        """Add the gradients that a unit's parameters have, and lose, to its sums."""
        self._enter(key)
        for item in self._of.get(key, ()):
            check_dense(item.bucket, len(self._group))
            assert item.flat is not None
            views = item.bucket.views(item.flat)
            for index, (parameter, view) in enumerate(zip(item.bucket.parameters, views, strict=True)):
                gradient, is_first = parameter.grad, self._stored[key] == 0
                if gradient is None:
                    if is_first:
                        view.zero_()
                    continue
                self._streams.uses([gradient], [view])
                view.copy_(gradient) if is_first else view.add_(gradient)
                item.present[index] = True
                parameter.grad = None

    def arrived(self, bucket: Bucket, fresh: Tensor) -> bool:
        """Add what ranks have reduced to this one; False if that is not offloaded."""
        key, item = self._place_of.get(bucket.names, (None, None))
        if key is None or item is None:
            return False
        self._enter(key)
        assert item.flat is not None
        self._streams.uses([fresh], [item.flat])
        item.flat.add_(fresh) if self._stored[key] else item.flat.copy_(fresh)
        item.present = either(item.present, bucket.present)
        return True

    def is_there(self, key: UnitKey) -> bool:
        """Whether a unit's gradients have been added to its sums."""
        return all(item.flat is not None for item in self._of.get(key, ()))

    def reduce(self, key: UnitKey) -> None:
        """Add a unit's gradients to its sums, and start to average these over ranks (before ZeRO-2)."""
        self.add(key)
        for item in self._of.get(key, ()):
            assert item.flat is not None
            item.flat[: item.bucket.numel].mul_(1.0 / self._mesh.plan.num_loaders)
            item.bucket.mark(item.flat, item.present)
            item.sent = item.flat.to(item.bucket.parameters[0].dtype)
            item.begun = item.bucket.reduce(item.sent, self._mesh, self._transport)

    def store(self, key: UnitKey) -> None:
        """Start to write a unit's sums back; they are complete after the last backward of its stage."""
        if key not in self._of:
            return
        if not self._shares and self._of[key][0].sent is None:
            self.add(key)
        self._stored[key] += 1
        is_last = self._stored[key] == self._backwards[key[0]]
        leaving = [item for item in self._of[key] if item.is_mine or not is_last]
        for item in self._of[key]:
            if item.begun is not None:
                item.begun[0].wait()
                item.sent = item.begun[1]()
            elif is_last and not self._shares and self._mesh.plan.num_loaders > 1:
                assert item.flat is not None
                item.flat.mul_(1.0 / self._mesh.plan.num_loaders)
            if is_last and item.is_mine:
                self._complete(item)
            item.begun, item.sent = None, None
        for item in leaving:
            # Not before: a step that was left to this batch has fetched what is at home.
            if item.earlier_present and self._stored[key] == 1:
                item.earlier, item.home = item.home, item.earlier
            if item.home is None:
                # With one backward nothing but the sum over ranks ever leaves.
                (item.home,) = self._pool.take([item.bucket.own_of(item.form) if is_last else item.form])
        moves: list[Any] = [(item.home, item.flat) for item in leaving]
        if is_last:
            moves = [tuple(map(item.bucket.own_of, move)) for item, move in zip(leaving, moves, strict=True)]
        self._left[self._buffer_of[key]] = self._streams.store([home for home, _ in moves], [flat for _, flat in moves])
        for item in self._of[key]:
            item.flat = None

    def _complete(self, item: GradientSum) -> None:
        """Let a sum be over all ranks, and look at it."""
        assert item.flat is not None
        if len(self._replicates) > 1 and self._mesh.is_sharded:
            self._transport.all_reduce(item.flat if item.sent is None else item.sent, self._replicates).wait()
        if item.sent is not None and item.sent is not item.flat:
            item.bucket.own_of(item.flat).copy_(item.sent)
        self._look(item.bucket.names, item.own_views(item.flat))

    def finish(self) -> None:
        """A batch has ended.

        Raises:
            ScheduleError: If a parameter got a gradient after those of its unit had left.
        """
        for parameter, (_, item, index) in self._at.items():
            if parameter.grad is not None:
                raise ScheduleError(
                    f"{item.bucket.names[index]} got a gradient after those of its unit had left for host memory: a "
                    "parameter's gradient must be complete when the backward of the first layer that uses it has run"
                )

    def forget(self) -> None:
        """Leave everything where a batch ended in an error."""
        self._arriving.clear()
        for _, item in self._place_of.values():
            item.flat, item.sent, item.begun = None, None, None

    def end(self) -> None:
        """Leave gradients where they are made from now on."""
        for parameter in self._at:
            if type(parameter.grad) is AbsentGradient:
                parameter.grad = None

    def _in_buffer(self, key: UnitKey) -> list[tuple[Tensor, GradientSum]]:
        if key not in self._of:
            return []
        views = self._buffers.views(self._buffer_of[key], [item.form for item in self._of[key]])
        return list(zip(views, self._of[key], strict=True))

    def _enter(self, key: UnitKey, *, begins: bool = True) -> None:
        """Let a unit's sums be in its buffer; a batch's begin with nothing."""
        if self.is_there(key):
            return
        # A buffer that nothing was fetched into may still be read from.
        self._streams.wait(self._arriving.pop(key, self._left.get(self._buffer_of[key])))
        for flat, item in self._in_buffer(key):
            item.flat = flat
            if begins and self._stored[key] == 0:
                item.present = [False] * len(item.bucket.names)

    def _look(self, names: Sequence[str], views: list[Tensor]) -> None:
        """Take norms, and largest values where that is asked for."""
        device = self._streams.ops.device
        norms = [norm.to(device) for norm in torch._foreach_norm(views)]
        self._norms.update(zip(names, norms, strict=True))
        some = {name: view for name, view in zip(names, views, strict=True) if self.checks and view.numel()}
        largest = torch._foreach_norm(list(some.values()), torch.inf) if some else ()
        self._largest.update((name, norm.to(device)) for name, norm in zip(some, largest, strict=True))

    # Between batches -------------------------------------------------------------------------------------------------

    def install(self, factor: Tensor) -> None:
        """Let parameters say that they have gradients: those of the batch, times a factor, and of earlier ones."""
        for item in self._mine():
            item.present = either(item.present, item.bucket.present)
        if any(item.earlier_present for item in self._mine()):
            self._put_together(factor)
        else:
            self._changes.clear()
            if not (factor.device.type == "cpu" and factor == 1.0):
                self.multiply(factor)
        for item in self._mine():
            there = self._there(item, item.home, item.present)
            for index in item.bucket.mine:
                parameter = item.bucket.parameters[index]
                if parameter.grad is not None and type(parameter.grad) is not AbsentGradient:
                    raise PlanError(
                        f"the gradient of {item.bucket.names[index]} was replaced while its values are in host "
                        "memory: put gradients there under a plan with offload.gradients = 0"
                    )
                parameter.grad = AbsentGradient.of(parameter) if there[index] else None

    def _put_together(self, factor: Tensor) -> None:
        """Add this batch's gradients to those of earlier batches, in host memory."""
        self._streams.settle()
        for item in self._mine():
            if item.home is None:
                continue
            values = item.own_views(item.home)
            torch._foreach_mul_(values, factor.to(item.home.device))
            if item.earlier is not None and item.earlier_present:
                earlier = item.own_views(item.earlier)
                for change in self._changes:
                    change(earlier)
                stands = [self._stands(name) for name in item.bucket.names]
                for view, is_there in zip(earlier, stands, strict=True):
                    if not is_there:
                        view.zero_()  # cleared since the batch began
                torch._foreach_add_(values, earlier)
                before = self._there(item, item.earlier, item.earlier_present)
                before = [had and is_there is not None for had, is_there in zip(before, stands, strict=True)]
                item.present = either(before, self._there(item, item.home, item.present))
                let_go(item.earlier)
            self._look(item.bucket.names, values)
            let_go(item.home)
        self._changes.clear()

    def multiply(self, factor: Tensor) -> None:
        """Multiply all gradients, when they are fetched."""
        if self._norms:
            scaled = torch._foreach_mul(list(self._norms.values()), factor)
            self._norms = dict(zip(self._norms, scaled, strict=True))
        self.change(lambda gradients: torch._foreach_mul_(gradients, factor.to(gradients[0].device)))

    def change(self, change: Callable[[list[Tensor]], object]) -> None:
        """Change all gradients in place, when they are fetched."""
        self._changes.append(change)

    def norms(self) -> Mapping[str, Tensor]:
        """Norms of the gradients by name; 0 of those that are not there, none of those that were cleared."""
        there = {name: is_there for name in self._norms if (is_there := self._stands(name)) is not None}
        return {name: self._norms[name] if it else torch.zeros_like(self._norms[name]) for name, it in there.items()}

    @property
    def found(self) -> Tensor | None:
        """Whether a gradient is not finite, as a number on the device, if that was to be seen."""
        largest = [norm for name, norm in self._largest.items() if self._stands(name)]
        return (~torch.stack(largest).isfinite()).any().float() if largest else None

    def _stands(self, name: str) -> bool | None:
        """Whether a gradient is what was made; False if it was made zeros, and None if it is gone."""
        gradient = self._parameters[name].grad
        return None if gradient is None else not getattr(gradient, "is_zero", False)

    def take(self, key: UnitKey) -> dict[nn.Parameter, Tensor]:
        """Gradients of a unit that were fetched for its update; call :meth:`done` behind that."""
        found: dict[nn.Parameter, Tensor] = {}
        if not any(item.is_mine and item.home is not None for item in self._of.get(key, ())):
            return found
        self._enter(key, begins=False)
        for item in self._of[key]:
            if item.is_mine:
                assert item.flat is not None
                pairs = zip(
                    item.bucket.parameters,
                    item.own_views(item.flat),
                    self._there(item, item.home, item.present),
                    strict=True,
                )
                found |= {parameter: view for parameter, view, is_there in pairs if is_there}
        self._streams.uses(writes=list(found.values()))
        for change in self._changes if found else ():
            change(list(found.values()))
        return found

    def done(self, key: UnitKey) -> None:
        """A unit is updated: its buffer is free."""
        if key in self._of:
            self._left[self._buffer_of[key]] = self._streams.ops.record()
            for item in self._of[key]:
                item.flat = None

    # What several stages hold ----------------------------------------------------------------------------------------

    def lend(self, names: Collection[str]) -> None:
        """Give parameters their gradients on the device, for these to be summed over stages."""
        self._streams.settle()
        for item, index in self._named(names):
            if self._there(item, item.home, item.present)[index]:
                assert item.home is not None
                view = item.own_views(item.home)[index].to(self._streams.ops.device, copy=True)
                if not isinstance(item.bucket, FlatShard):
                    item.bucket.parameters[index].grad = view
                elif type(stand_in := item.bucket.parameters[index].grad) is AbsentGradient:
                    stand_in.piece = view

    def take_back(self, names: Collection[str]) -> None:
        """Take gradients back that were lent."""
        for item, index in self._named(names):
            parameter = item.bucket.parameters[index]
            if parameter.grad is not None and item.is_mine:
                assert item.home is not None
                item.bucket.views(item.home)[index].copy_(parameter.grad)
                item.present[index] = True
                self._look([item.bucket.names[index]], [parameter.grad])
            parameter.grad = None

    def _named(self, names: Collection[str]) -> Iterator[tuple[GradientSum, int]]:
        return ((item, index) for _, item, index in self._at.values() if item.bucket.names[index] in names)

    def _mine(self) -> Iterator[GradientSum]:
        return (item for _, item in self._place_of.values() if item.is_mine)

    def _there(self, item: GradientSum, home: Tensor | None, present: list[bool]) -> list[bool]:
        """Which of the parameters have a gradient at ``home``, on any rank."""
        if home is None or all(present) or not item.num_counts:
            return present
        # Only a rank that lacks a gradient asks whether another had one: asking waits for the device.
        self._streams.settle()
        return either(present, [count != 0 for count in home[-item.num_counts :].tolist()])
