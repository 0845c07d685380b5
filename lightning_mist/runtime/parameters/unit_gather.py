"""Giving out, unit by unit, what a stage's ranks have updated."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        self._under_way: dict[UnitKey, list[tuple[Bucket, tuple[Work, Callable[[], None]]]]] = {}

    def begin(self, key: UnitKey) -> None:
        """Start to give out a unit's parameters, which are updated where they are owned."""
        casts = {} if self._masters is None else self._masters.given_out(is_cast=True)
        found = list(zip(self._of[key], give_out(self._of[key], casts, self._mesh, self._transport), strict=True))
        if self._even is not None:
            shards = self._even.updated_with(key)
            buckets = [shard.bucket for shard in shards]
            found += zip(buckets, self._even.give_out(casts, shards), strict=True)
        self._under_way[key] = found

    def finish(self) -> None:
        """Wait for everything that is under way."""
        for key in list(self._under_way):
            self.end(key)

    def end(self, key: UnitKey) -> None:
        """Wait for a unit's parameters, and take over those of others."""
        for bucket, (work, then) in self._under_way.pop(key, ()):
            work.wait()
            make_present(bucket.parameters)
            with unversioned(bucket.parameters):
                then()


def give_out(
    buckets: Iterable[Bucket], computed: Mapping[str, Tensor], mesh: Mesh, transport: Transport
) -> Iterator[tuple[Work, Callable[[], None]]]:
    """Give every rank of a shard group what the owners of whole parameters updated; then there is something to do.

    Args:
        computed: What is computed with by canonical name, where it is another tensor than the parameter.
    """
    for bucket in buckets:
        assert bucket.owner is not None
        pairs = zip(bucket.names, bucket.parameters, strict=True)
        values = [computed[name] if name in computed else parameter.detach() for name, parameter in pairs]
        flat = bucket.empty(dtype=values[0].dtype)
        views, is_mine = views_like(flat, values), bucket.owner == mesh.shard_index
        if is_mine:
            torch._foreach_copy_(views, values)
        work = transport.broadcast(flat, mesh.shard_peers[bucket.owner], tuple(sorted(mesh.shard_peers)))
        yield work, (lambda: None) if is_mine else partial(torch._foreach_copy_, values, views)
