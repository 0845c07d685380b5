"""Values of parameters that are there only while they are used: with another rank (ZeRO-3), or in host memory.

Under ZeRO-3 every rank of a shard group has a piece of them, or each is whole with one, and all ranks have all of them
only while they are used. What is offloaded is in its owner's host memory, and on no device but while it is used;
without ZeRO-3 every rank is the owner of all.

The parameters of a unit that have one owner, or are shared out evenly, lie side by side in one flat storage. An owner's
stays. Elsewhere ``UNSHARD`` gives the storage its memory and starts to fill it from the owner, or from pieces beside
it, ``RESHARD`` takes the memory away. The
storage is one and the same object all the time, so that what autograd saved of a parameter (views of it) is right again
when backward has unsharded the unit. A parameter that is sharded is not a number everywhere: whoever computes with it
all the same sees it.

Neither step changes a parameter's version, by which autograd tells values that were overwritten: setting ``.data``
keeps it, and the flat storage is written through a tensor that has a version of its own.

Streams on a device: everything happens on the stream that computes, but for the transfer itself, which its backend runs
on a stream of its own. A transfer begins behind what was to be computed before ``UNSHARD``, so it may write where an
earlier unit's memory was; :meth:`UnitShards.ready` makes the computing stream wait for it. So memory that ``RESHARD``
gives back is used again only behind the computation that read it, and nothing needs to be kept alive by hand.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.plan import ZeroStage
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport, Work
from lightning_mist.runtime.host_memory import CopyStreams, HostPool, let_go
from lightning_mist.runtime.parameters.absent_parameters import is_awaited, make_absent, make_present
from lightning_mist.runtime.parameters.buckets import Bucket
from lightning_mist.runtime.parameters.even_shards import FlatShard, where_pieces_are
from lightning_mist.schedule.stage_units import ShardUnit

UnitKey = tuple[int, int]
"""Stage and unit."""

_ALIGNMENT_BYTES = 16
"""Where a parameter may begin in a flat storage: what kernels with vector loads ask for, and what torch's own flat
parameters keep to (``_get_aligned_numel`` in ``torch/distributed/fsdp/_flat_param.py``)."""


class _Shard:
    """Parameters that the same units use and one rank owns, in one flat storage.

    Attributes:
        first: The first unit that uses them.
        is_trained: Whether they were when training began: what is frozen later may have an update before it.
        even: The bucket where they are shared out evenly.
        has_master: Whether what is computed with is cast, where it is owned, from what the optimizer updates.
        is_resident: Whether the values are here all the time.
        views: The storage's of each parameter, whether it has its memory or not.
        is_attached: Whether the parameters are views of the storage.
        home: The values in host memory, if that is where they are, and they are this rank's.
        arriving: The end of their copy to the device, or of the values' way from another rank.
        leaving: The end of their copy to host memory.
    """

    def __init__(
        self,
        bucket: Bucket,
        first: UnitKey,
        *,
        is_owned: bool,
        is_offloaded: bool,
        has_master: bool,
        where: str,
    ) -> None:
        self.bucket, self.first, self._where = bucket, first, where
        self.even = even = bucket if isinstance(bucket, FlatShard) else None
        self.is_offloaded = is_offloaded and (is_owned or even is not None)
        self.is_trained = bucket.parameters[0].requires_grad
        self.has_master = has_master
        self.is_resident = is_owned and not is_offloaded
        self.users = 0
        self.refuses_use = self.is_attached = False
        self.work: Work | None = None
        self.home: Tensor | None = None
        self.arriving: Any = None
        self.leaving: Any = None
        like = bucket.parameters[0]
        if even is not None and not is_offloaded:
            even.kept = even.empty_piece(like)
        if even is not None and not has_master:
            even.updated = even.kept
        self._storage = torch.empty(0, dtype=like.dtype, device=like.device).untyped_storage()
        # Made once: they stay right whether the storage has its memory or not.
        self.flat = torch.empty(0, dtype=like.dtype, device=like.device)
        self._nbytes = 0
        self.views: list[Tensor] = []
        self._nothing: list[Tensor] = []

    def lay_out(self) -> None:
        """Take the shapes and strides that the parameters have now; those shared out evenly are contiguous."""
        self.bucket.keep_layouts()
        self._nbytes = self.bucket.numel * self.flat.element_size()
        self.allocate()
        nothing = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
        self.flat = nothing.set_(self._storage, 0, (self.bucket.numel,), (1,))
        self.views = self.bucket.views(self.flat)
        fill = math.nan if self.flat.is_floating_point() or self.flat.is_complex() else 0
        one = torch.full((), fill, dtype=self.flat.dtype, device=self.flat.device)
        # A number of its own for each that has no dimensions: others are told from what is here by their strides.
        self._nothing = [one.expand(view.shape) if view.ndim else one.clone() for view in self.views]

    def cast(self, masters: Mapping[str, Tensor]) -> None:
        """Fill the storage from masters, of which some may be elsewhere."""
        here = [index for index, name in enumerate(self.bucket.names) if name in masters]
        if here:
            values = [masters[self.bucket.names[index]] for index in here]
            torch._foreach_copy_([self.views[index] for index in here], values)

    @property
    def own(self) -> Tensor:
        """What of the storage is this rank's."""
        return self.bucket.own_of(self.flat)

    def allocate(self) -> None:
        """Give the storage its memory."""
        self._storage.resize_(self._nbytes)

    def take(self) -> None:
        """Move the parameters' values into the storage."""
        torch._foreach_copy_(self.views, [parameter.data for parameter in self.bucket.parameters])
        self.attach()

    def send_home(self, pool: HostPool) -> None:
        """Move the parameters' values into host memory."""
        if self.home is None or len(self.home) != len(self.own):
            (self.home,) = pool.take([self.own])
        self.bucket.keep(self.home.zero_(), [parameter.data for parameter in self.bucket.parameters])
        let_go(self.home)
        self.free()

    def values(self) -> Mapping[str, Tensor]:
        """Values in host memory by name."""
        if self.home is None or self.even is not None:
            return {}
        return dict(zip(self.bucket.names, self.bucket.views(self.home), strict=True))

    def attach(self) -> None:
        """Let the parameters be views of the storage."""
        self.is_attached = True
        # What is still to be updated stays what its user has to wait for.
        make_present(parameter for parameter in self.bucket.parameters if not is_awaited(parameter))
        for parameter, view in zip(self.bucket.parameters, self.views, strict=True):
            parameter.data = view

    def free(self) -> None:
        """Take the memory away."""
        self.is_attached = False
        for parameter, nothing in zip(self.bucket.parameters, self._nothing, strict=True):
            parameter.data = nothing
        if self.refuses_use:
            named = dict(zip(self.bucket.names, self.bucket.parameters, strict=True))
            make_absent(named, lambda _: self._where, keeps_gradient=self.is_offloaded or self.even is not None)
        self._storage.resize_(0)

    def detach(self, *, is_used: bool) -> None:
        """Give every parameter a memory of its own again, if it has it here."""
        for parameter in self.bucket.parameters if is_used else ():
            parameter.data = parameter.data.clone()
        self._storage.resize_(0)


class UnitShards:
    """The parameters of a rank whose values are not here all the time.

    Args:
        offloaded: The parameters whose values are in their owner's host memory, by canonical name.
        has_masters: Whether trained parameters are cast from masters when a batch begins.
        even: What ranks share out evenly.

    Attributes:
        masters: What this rank's own are cast from, by canonical name; see
            :class:`~lightning_mist.runtime.parameters.masters.MasterWeights`.
        is_engaged: Whether values are away; before :meth:`engage` every rank has all.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[UnitKey, ShardUnit],
        transport: Transport,
        offloaded: Collection[str] = (),
        streams: CopyStreams | None = None,
        pool: HostPool | None = None,
        *,
        has_masters: bool = False,
        even: Sequence[FlatShard] = (),
    ) -> None:
        self._mesh, self._transport, self._streams, self._pool = mesh, transport, streams, pool
        self._is_shared = mesh.is_sharded and mesh.plan.stages[mesh.stage].zero_stage >= ZeroStage.PARAMETERS
        users: dict[str, list[UnitKey]] = {}
        for key, unit in units.items():
            for name in unit.names:
                users.setdefault(name, []).append(key)
        together: dict[tuple[Any, ...], list[tuple[str, nn.Parameter]]] = {}
        for item in mesh.held:
            p, is_offloaded = parameters[item.name], item.name in offloaded
            owner = item.owner(mesh.stage) if self._is_shared else mesh.shard_index
            if not item.is_even if self._is_shared else is_offloaded:
                is_updated = p.requires_grad or not (is_offloaded or has_masters)
                key_of = (tuple(users[item.name]), owner, is_offloaded, is_updated, p.dtype, p.device)
                together.setdefault(key_of, []).append((item.name, p))
        self.masters: Mapping[str, Tensor] = {}
        self._shards: list[_Shard] = []
        self._of: dict[UnitKey, list[_Shard]] = {key: [] for key in units}
        buckets: list[tuple[Bucket, Sequence[UnitKey], str]] = []
        for (keys, owner, *_), items in together.items():
            alignment = max(1, _ALIGNMENT_BYTES // items[0][1].element_size())
            where = f"on rank {mesh.shard_peers[owner]} (zero_stage 3)"
            if owner == mesh.shard_index:
                where = "in host memory (offload.parameters)"
            buckets.append((Bucket(items, owner, alignment=alignment), keys, where))
        if self._is_shared:
            buckets += [(shard, shard.flat.users, f"{where_pieces_are(mesh)} (zero_stage 3)") for shard in even]
        for bucket, keys, where in buckets:
            shard = _Shard(
                bucket,
                keys[0],
                is_owned=bucket.owner == mesh.shard_index,
                is_offloaded=bucket.names[0] in offloaded,
                has_master=has_masters and bucket.parameters[0].requires_grad,
                where=where,
            )
            self._shards.append(shard)
            for key in keys:
                self._of[key].append(shard)
        self._cast_at = {
            name: (shard, index)
            for shard in self._shards
            if shard.has_master
            for index, name in enumerate(shard.bucket.names)
        }
        others = [shard.bucket for shard in self._shards if not shard.is_resident]
        self.away = {n: p for bucket in others for n, p in zip(bucket.names, bucket.parameters, strict=True)}
        self.is_engaged = False
        self._abandoned: list[tuple[_Shard, Work]] = []
        self._leaving: list[_Shard] = []

    @property
    def cast_names(self) -> Collection[str]:
        """Parameters that have masters and whose casts are here, on whichever rank."""
        return self._cast_at.keys()

    def cast_of(self, name: str) -> Tensor:
        """What is computed with of a parameter that has a master, while its storage has memory."""
        shard, index = self._cast_at[name]
        return shard.views[index]

    @property
    def flats(self) -> list[Tensor]:
        """The flat tensors of all parameters, whether they have their memory or not."""
        return [shard.flat for shard in self._shards]

    def refuse_use(self) -> None:
        """From now on whoever uses a parameter that is away is told so.

        See :mod:`~lightning_mist.runtime.parameters.absent_parameters`.
        """
        for shard in self._shards:
            shard.refuses_use = True

    def engage(self) -> None:
        """Free the values that other ranks own, which must be equal on all ranks, and move home what is offloaded.

        Nothing if they are away already.
        """
        if self.is_engaged:
            return
        self.is_engaged = True
        with torch.no_grad():
            for shard in self._shards:
                shard.lay_out()
                if shard.is_resident:
                    shard.take()
                elif shard.is_offloaded:
                    assert self._pool is not None
                    shard.send_home(self._pool)
                    if shard.even is not None and not shard.has_master:
                        shard.even.home = shard.home
                else:
                    if shard.even is not None and shard.even.kept is not None:
                        shard.even.keep(shard.even.kept, [parameter.data for parameter in shard.bucket.parameters])
                    shard.free()

    def give(self, name: str, value: Tensor) -> bool:
        """Copy values to where this rank keeps those of a parameter between batches; whether that is here."""
        for shard in self._shards:
            if name in shard.bucket.names:
                own = shard.flat if shard.even is None else shard.even.kept
                if shard.home is not None:
                    own = shard.home
                assert own is not None
                shard.bucket.put(own, shard.bucket.names.index(name), value)
                let_go(own)
                return True
        return False

    def compute(self) -> None:
        """A batch begins: parameters that are here as masters are cast, others' are away."""
        for shard in self._shards:
            if shard.has_master and shard.is_resident:
                shard.cast(self.masters)
                shard.attach()
            elif shard.has_master:
                if shard.even is not None and shard.even.kept is not None and shard.even.updated is not None:
                    shard.even.kept.copy_(shard.even.updated)
                shard.free()

    def disengage(self) -> None:
        """Let go of the owned parameters, which become ordinary ones; those that are away must be given values."""
        if not self.is_engaged:
            return
        self.is_engaged = False
        with torch.no_grad():
            for shard in self._shards:
                if shard.is_resident:
                    shard.detach(is_used=not shard.has_master)

    def home_values(self) -> dict[str, Tensor]:
        """Values of this rank's own in host memory by canonical name; others may still be on their way there."""
        return {name: value for shard in self._shards for name, value in shard.values().items()}

    def unshard(self, key: UnitKey) -> None:
        """Start to fetch the parameters of a unit; :meth:`ready` waits for them."""
        for shard in self._of[key]:
            shard.users += 1
            if shard.users == 1:
                if not shard.is_attached:
                    self._fetch(shard)
                if self._is_shared:
                    # Others get what has arrived.
                    self._arrived(shard)
                    if shard.even is not None and shard.even.kept is not None:
                        shard.own.copy_(shard.even.kept)
                    shard.work = shard.bucket.gather(shard.flat, self._mesh, self._transport)

    def ready(self, key: UnitKey) -> None:
        """Wait until the parameters of an unsharded unit, if it has any, have their values."""
        for shard in self._of.get(key, ()):
            self._settle(shard)
            if not shard.is_resident:
                shard.attach()

    def reshard(self, key: UnitKey) -> None:
        """Free the parameters of a unit that no other unsharded unit uses."""
        for shard in self._of[key]:
            shard.users -= 1
            if shard.users == 0:
                self._settle(shard)
                if shard.leaving is not None:
                    self._at_home(shard)
                    self._leaving.remove(shard)
                if not shard.is_resident:
                    shard.free()

    def fetch(self, key: UnitKey) -> None:
        """Start to fetch this rank's own parameters of a unit from host memory, for their update."""
        for shard in self._updated(key):
            if shard.even is None:
                self._fetch(shard)
                continue
            assert shard.home is not None
            piece = shard.even.kept = torch.empty_like(shard.home, device=shard.flat.device)
            if not shard.has_master:
                shard.even.updated = piece
            self._load(shard, piece)

    def fetched(self, key: UnitKey) -> None:
        """Wait for a unit's own parameters that :meth:`fetch` began to copy."""
        for shard in self._updated(key):
            self._settle(shard)
            if shard.even is None:
                shard.attach()

    def store(self, key: UnitKey) -> None:
        """Start to write what was updated back to host memory; what was written back before is freed."""
        self.settle()
        assert self._streams is not None
        for shard in self._updated(key):
            values = shard.flat if shard.even is None else shard.even.kept
            assert shard.home is not None
            assert values is not None
            shard.leaving = self._streams.store([shard.home], [values])
            self._leaving.append(shard)

    def settle(self) -> None:
        """Free what is written back, when it is."""
        for shard in self._leaving:
            self._at_home(shard)
            if shard.users == 0:
                shard.free()
        self._leaving.clear()

    def _at_home(self, shard: _Shard) -> None:
        assert self._streams is not None
        self._streams.wait(shard.leaving)
        shard.leaving = None
        if shard.even is not None:
            shard.even.kept = None
            if not shard.has_master:
                shard.even.updated = None

    def _updated(self, key: UnitKey) -> list[_Shard]:
        """What is updated with a unit: of parameters that several units use, the first of these."""
        shards = [shard for shard in self._of.get(key, ()) if shard.is_offloaded and shard.first == key]
        return [shard for shard in shards if shard.is_trained]

    def _fetch(self, shard: _Shard) -> None:
        if not shard.is_resident:
            shard.allocate()
        if shard.is_offloaded and (shard.even is None or shard.even.kept is None):
            self._load(shard, shard.own)

    def _load(self, shard: _Shard, target: Tensor) -> None:
        assert self._streams is not None
        assert shard.home is not None
        # Its memory was another's until all that was launched so far has run.
        shard.arriving = self._streams.load([target], [shard.home], after=[self._streams.ops.record()])

    def _arrived(self, shard: _Shard) -> None:
        if shard.arriving is not None:
            assert self._streams is not None
            self._streams.wait(shard.arriving)
            shard.arriving = None

    def abandon(self) -> None:
        """Shard everything where a batch ended in an error; what is under way is not waited for, peers may be gone."""
        for shard in self._shards:
            if shard.work is not None:
                # Its memory must stay: the transfer may still write there.
                self._abandoned.append((shard, shard.work))
            elif shard.users and not shard.is_resident:
                self._arrived(shard)
                if shard.leaving is not None:
                    self._at_home(shard)  # a copy to host memory reads what is freed, and needs no peer
                shard.free()
            shard.users, shard.work = 0, None

    def _settle(self, shard: _Shard) -> None:
        self._arrived(shard)
        if shard.work is not None:
            work, shard.work = shard.work, None
            work.wait()
