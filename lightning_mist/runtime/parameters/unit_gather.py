"""Giving out, unit by unit, what a stage's ranks have updated."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport, Work
from lightning_mist.runtime.parameters.absent_parameters import make_present
from lightning_mist.runtime.parameters.buckets import Bucket, owned_buckets, views_like
from lightning_mist.runtime.parameters.buffers import unversioned
from lightning_mist.runtime.parameters.even_shards import EvenShards
from lightning_mist.runtime.parameters.masters import MasterWeights
from lightning_mist.runtime.parameters.unit_shards import UnitKey


class UnitGather:
    """Gives out what a stage's ranks have updated.

    Args:
        masters: Has what is given out of those that have masters.
        even: What ranks share out evenly, if anything.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[UnitKey, Sequence[str]],
        transport: Transport,
        masters: MasterWeights | None = None,
        even: EvenShards | None = None,
    ) -> None:
        self._mesh, self._transport, self._masters, self._even = mesh, transport, masters, even
        owners = {item.name: item.owner(mesh.stage) for item in mesh.held if not item.is_even}
        dealt = {key: [name for name in names if name in owners] for key, names in units.items()}
        self._of = {key: owned_buckets(names, parameters, owners) for key, names in dealt.items()}
        self._under_way: dict[UnitKey, list[tuple[Bucket, Work, Callable[[], None]]]] = {}

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
            self._under_way.setdefault(key, []).append((bucket, work, partial(self._receive, bucket, flat)))
        if self._even is not None:
            casts = {} if self._masters is None else self._masters.given_out(is_cast=True)
            shards = self._even.updated_with(key)
            for shard, (work, then) in zip(shards, self._even.give_out(casts, shards), strict=True):
                self._under_way.setdefault(key, []).append((shard.bucket, work, then))

    def finish(self) -> None:
        """Wait for everything that is under way."""
        for key in list(self._under_way):
            self.end(key)

    def end(self, key: UnitKey) -> None:
        """Wait for a unit's parameters, and take over those of others."""
        for bucket, work, then in self._under_way.pop(key, ()):
            work.wait()
            make_present(bucket.parameters)
            with unversioned(bucket.parameters):
                then()

    def _receive(self, bucket: Bucket, flat: Tensor) -> None:
        if bucket.owner != self._mesh.shard_index:
            values = self._values(bucket)
            torch._foreach_copy_(values, views_like(flat, values))

    def _values(self, bucket: Bucket) -> list[Tensor]:
        masters = self._masters
        return [
            # Complex parameters have no masters.
            item.detach() if masters is None or not item.is_floating_point() else masters.cast_of(name)
            for name, item in zip(bucket.names, bucket.parameters, strict=True)
        ]
