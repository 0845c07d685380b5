"""Giving out, unit by unit, what a stage's ranks have updated."""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.communication import Transport, Work
from lightning_mist.runtime.parameters.absent_parameters import make_present
from lightning_mist.runtime.parameters.buckets import Bucket, owned_buckets
from lightning_mist.runtime.parameters.buffers import unversioned
from lightning_mist.runtime.parameters.even_shards import FlatShard
from lightning_mist.runtime.parameters.masters import MasterWeights
from lightning_mist.runtime.parameters.unit_shards import UnitKey


class UnitGather:
    """Gives out what a stage's ranks have updated.

    Args:
        masters: Has what is given out of those that have masters.
        even: What ranks share out evenly, by the unit with which it is updated.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        units: Mapping[UnitKey, Sequence[str]],
        transport: Transport,
        masters: MasterWeights | None,
        even: Mapping[UnitKey, Sequence[FlatShard]],
    ) -> None:
        self._mesh, self._transport, self._masters = mesh, transport, masters
        owners = {item.name: item.owner(mesh.stage) for item in mesh.held if not item.is_even}
        dealt = {key: [name for name in names if name in owners] for key, names in units.items()}
        self._of: dict[UnitKey, list[Bucket]] = {
            key: [*owned_buckets(names, parameters, owners), *even.get(key, ())] for key, names in dealt.items()
        }
        self._under_way: dict[UnitKey, list[tuple[Bucket, tuple[Work, Callable[[], None]]]]] = {}

    def begin(self, key: UnitKey) -> None:
        """Start to give out a unit's parameters, which are updated where they are owned."""
        casts = {} if self._masters is None else self._masters.given_out(is_cast=True)
        self._under_way[key] = [(item, item.give_out(casts, self._mesh, self._transport)) for item in self._of[key]]

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
