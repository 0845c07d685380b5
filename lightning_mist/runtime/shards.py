"""Values of parameters under ZeRO-3: each whole with one data-parallel rank, with others only while they are used.

The parameters of a unit that have one owner lie side by side in one flat storage. The owner's stays. On other ranks
``UNSHARD`` gives the storage its memory and starts to fill it from the owner, ``RESHARD`` takes the memory away. The
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
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.absent import come_back, leave
from lightning_mist.runtime.buckets import Bucket, padded_numel, views_like
from lightning_mist.runtime.transport import Transport, Work
from lightning_mist.schedule.units import ShardUnit

UnitKey = tuple[int, int]
"""Stage and unit."""

_ALIGNMENT_BYTES = 16
"""Where a parameter may begin in a flat storage: what kernels with vector loads ask for, and what torch's own flat
parameters keep to (``_get_aligned_numel`` in ``torch/distributed/fsdp/_flat_param.py``)."""


class _Shard:
    """Parameters that the same units use and one rank owns, in one flat storage."""

    def __init__(self, bucket: Bucket, *, is_owned: bool, rank: int) -> None:
        self.bucket, self.is_owned, self._where = bucket, is_owned, f"on rank {rank} (zero_stage 3)"
        self.users = 0
        self.refuses_use = False
        self.work: Work | None = None
        first = bucket.parameters[0]
        self._storage = torch.empty(0, dtype=first.dtype, device=first.device).untyped_storage()
        # Made once: they stay right whether the storage has its memory or not.
        self.flat = torch.empty(0, dtype=first.dtype, device=first.device)
        self._nbytes = 0
        self._views: list[Tensor] = []
        self._nothing: list[Tensor] = []

    def lay_out(self) -> None:
        """Take the shapes and strides that the parameters have now."""
        self.bucket = self.bucket.with_layouts()
        alignment = max(1, _ALIGNMENT_BYTES // self.flat.element_size())
        size = padded_numel(self.bucket.layouts, alignment)
        self._nbytes = size * self.flat.element_size()
        self.allocate()
        nothing = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
        self.flat = nothing.set_(self._storage, 0, (size,), (1,))
        self._views = views_like(self.flat, self.bucket.layouts, alignment=alignment)
        fill = math.nan if self.flat.is_floating_point() or self.flat.is_complex() else 0
        one = torch.full((), fill, dtype=self.flat.dtype, device=self.flat.device)
        self._nothing = [one.expand(layout.shape) for layout in self.bucket.layouts]

    def allocate(self) -> None:
        """Give the storage its memory."""
        self._storage.resize_(self._nbytes)

    def take(self) -> None:
        """Move the parameters' values into the storage."""
        torch._foreach_copy_(self._views, [parameter.data for parameter in self.bucket.parameters])
        self.attach()

    def attach(self) -> None:
        """Let the parameters be views of the storage."""
        come_back(self.bucket.parameters)
        for parameter, view in zip(self.bucket.parameters, self._views, strict=True):
            parameter.data = view

    def free(self) -> None:
        """Take the memory away."""
        for parameter, nothing in zip(self.bucket.parameters, self._nothing, strict=True):
            parameter.data = nothing
        if self.refuses_use:
            leave(dict(zip(self.bucket.names, self.bucket.parameters, strict=True)), lambda _: self._where)
        self._storage.resize_(0)

    def detach(self) -> None:
        """Give every parameter a memory of its own again."""
        for parameter in self.bucket.parameters:
            parameter.data = parameter.data.clone()
        self._storage.resize_(0)


class UnitShards:
    """The parameters of a rank whose stages run under ZeRO-3.

    Args:
        mesh: The rank's place.
        parameters: Its stages' parameters by canonical name.
        units: The units of its stages, by stage and unit.
        transport: Connects the ranks.

    Attributes:
        is_engaged: Whether values of other owners are away; before :meth:`engage` every rank has all.
        away: The parameters that another rank owns, by canonical name.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[UnitKey, ShardUnit],
        transport: Transport,
    ) -> None:
        self._mesh, self._transport = mesh, transport
        self._group = tuple(sorted(mesh.peers))
        users: dict[str, list[UnitKey]] = {}
        for key, unit in units.items():
            for name in unit.names:
                users.setdefault(name, []).append(key)
        together: dict[tuple[Any, ...], list[tuple[str, nn.Parameter]]] = {}
        for item in mesh.held:
            p, owner = parameters[item.name], item.owner(mesh.stage)
            together.setdefault((tuple(users[item.name]), owner, p.dtype, p.device), []).append((item.name, p))
        self._shards: list[_Shard] = []
        self._of: dict[UnitKey, list[_Shard]] = {key: [] for key in units}
        for (keys, owner, *_), items in together.items():
            rank = mesh.rank if owner is None else mesh.peers[owner]
            shard = _Shard(Bucket.of(items, owner), is_owned=owner == mesh.data_index, rank=rank)
            self._shards.append(shard)
            for key in keys:
                self._of[key].append(shard)
        others = [shard.bucket for shard in self._shards if not shard.is_owned]
        self.away = {n: p for bucket in others for n, p in zip(bucket.names, bucket.parameters, strict=True)}
        self.is_engaged = False
        self._abandoned: list[tuple[_Shard, Work]] = []

    @property
    def flats(self) -> list[Tensor]:
        """The flat tensors of all parameters, whether they have their memory or not."""
        return [shard.flat for shard in self._shards]

    def refuse_use(self) -> None:
        """From now on whoever uses a parameter that is away is told so; see :mod:`~lightning_mist.runtime.absent`."""
        for shard in self._shards:
            shard.refuses_use = True

    def engage(self) -> None:
        """Free the values that other ranks own; they must be equal on all ranks. Nothing if they are away already."""
        if self.is_engaged:
            return
        self.is_engaged = True
        with torch.no_grad():
            for shard in self._shards:
                shard.lay_out()
                if shard.is_owned:
                    shard.take()
                else:
                    shard.free()

    def disengage(self) -> None:
        """Let go of the owned parameters, which become ordinary ones; those of other owners must be given values."""
        if not self.is_engaged:
            return
        self.is_engaged = False
        with torch.no_grad():
            for shard in self._shards:
                if shard.is_owned:
                    shard.detach()

    def unshard(self, key: UnitKey) -> None:
        """Start to fetch the parameters of a unit; :meth:`ready` waits for them."""
        for shard in self._of[key]:
            shard.users += 1
            if shard.users == 1:
                if not shard.is_owned:
                    shard.allocate()
                assert shard.bucket.owner is not None
                shard.work = self._transport.broadcast(shard.flat, self._mesh.peers[shard.bucket.owner], self._group)

    def ready(self, key: UnitKey) -> None:
        """Wait until the parameters of an unsharded unit have their values."""
        for shard in self._of[key]:
            self._settle(shard)

    def reshard(self, key: UnitKey) -> None:
        """Free the parameters of a unit that no other unsharded unit uses."""
        for shard in self._of[key]:
            shard.users -= 1
            if shard.users == 0:
                self._settle(shard)
                if not shard.is_owned:
                    shard.free()

    def abandon(self) -> None:
        """Shard everything where a batch ended in an error; what is under way is not waited for, peers may be gone."""
        for shard in self._shards:
            if shard.work is not None:
                # Its memory must stay: the transfer may still write there.
                self._abandoned.append((shard, shard.work))
            elif shard.users and not shard.is_owned:
                shard.free()
            shard.users, shard.work = 0, None

    def _settle(self, shard: _Shard) -> None:
        if shard.work is None:
            return
        work, shard.work = shard.work, None
        work.wait()
        if not shard.is_owned:
            shard.attach()
