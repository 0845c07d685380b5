"""Giving out, unit by unit, what a stage's ranks have updated."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport, Work
from lightning_mist.runtime.parameters.absent_parameters import make_present
from lightning_mist.runtime.parameters.buckets import Bucket, owned_buckets, views_like
from lightning_mist.runtime.parameters.buffers import unversioned
from lightning_mist.runtime.parameters.masters import MasterWeights
from lightning_mist.runtime.parameters.unit_shards import UnitKey


class UnitGather:
    """Gives out what a stage's ranks have updated.

    Args:
        masters: Has what is given out of those that have masters.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[UnitKey, Sequence[str]],
        transport: Transport,
        masters: MasterWeights | None = None,
    ) -> None:
        self._mesh, self._transport, self._masters = mesh, transport, masters
        owners = {item.name: item.owner(mesh.stage) for item in mesh.held}
        self._of = {key: owned_buckets(names, parameters, owners) for key, names in units.items()}
        self._under_way: dict[UnitKey, list[tuple[Bucket, Tensor, Work]]] = {}

    def begin(self, key: UnitKey) -> None:
        """Start to give out a unit's parameters, which are updated where they are owned."""
        group = tuple(sorted(self._mesh.shard_peers))
        for bucket in self._of[key]:
            assert bucket.owner is not None
            values = self._values(bucket)
            flat = bucket.empty(dtype=values[0].dtype)
            if bucket.owner == self._mesh.shard_index:
                torch._foreach_copy_(views_like(flat, values), values)
            work = self._transport.broadcast(flat, self._mesh.shard_peers[bucket.owner], group)
            self._under_way.setdefault(key, []).append((bucket, flat, work))

    def finish(self) -> None:
        """Wait for everything that is under way."""
        for key in list(self._under_way):
            self.end(key)

    def end(self, key: UnitKey) -> None:
        """Wait for a unit's parameters, and take over those of others."""
        for bucket, flat, work in self._under_way.pop(key, ()):
            work.wait()
            make_present(bucket.parameters)
            if bucket.owner != self._mesh.shard_index:
                values = self._values(bucket)
                with unversioned(bucket.parameters):
                    torch._foreach_copy_(values, views_like(flat, values))

    def _values(self, bucket: Bucket) -> list[Tensor]:
        masters = self._masters
        return [
            # Complex parameters have no masters.
            item.detach() if masters is None or not item.is_floating_point() else masters.cast_of(name)
            for name, item in zip(bucket.names, bucket.parameters, strict=True)
        ]
