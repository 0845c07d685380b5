"""Flat buffers of parameters that a stage's ranks share out evenly: one piece a rank, wherever parameters begin or end.

What one unit uses lies in one buffer for each type of elements, so that one collective gathers it and one reduces it;
what of it moves to host memory lies in a buffer of its own, so that every rank moves an equal piece. Under ZeRO-1,
which reduces and gathers once a batch, neighbours share buffers of the size of DDP's buckets if nothing moves. All of
it follows from a plan and the module's map, equal on all ranks.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod

from lightning_mist.plan import ModuleMap, Plan, ZeroStage
from lightning_mist.plan.mesh import held_parameters, itemsize
from lightning_mist.plan.sharding import deal_buckets
from lightning_mist.schedule.stage_program import Key
from lightning_mist.schedule.stage_units import moved_parameters, shard_units

ALIGNMENT = 64
"""Elements at whose multiples parameters begin and pieces are cut: kernels with vector loads round alike then."""


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Parameters in one buffer, of which every rank of a shard group has an equal piece.

    Attributes:
        names: Canonical names; with ``sizes`` the elements of each, of this tensor-parallel rank's part.
        is_trained: Whether they are, all or none.
        users: Stages and units that use them, in the order of forward.
        reduced: Those behind whose backward their gradients are complete, one for each chunk that uses them.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    degree: int
    is_trained: bool
    users: tuple[Key, ...]
    reduced: tuple[Key, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins, and behind them where the last one's place ends."""
        return tuple(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes), initial=0))

    @cached_property
    def piece(self) -> int:
        """Elements of each rank's piece."""
        return -(-self.starts[-1] // (self.degree * ALIGNMENT)) * ALIGNMENT

    def span(self, index: int, place: int) -> tuple[int, int]:
        """From and up to which of its elements one parameter lies in a rank's piece; perhaps none of them."""
        size, shift = self.sizes[index], place * self.piece - self.starts[index]
        low = min(max(shift, 0), size)
        return low, min(max(shift + self.piece, low), size)


@lru_cache(maxsize=8)
def stage_flats(plan: Plan, module_map: ModuleMap, group: int) -> tuple[Flat, ...]:
    """The flat buffers of what the ranks of a group of devices share out evenly; none where they do not."""
    stage = plan.stages[group]
    held = {item.name: item for item in held_parameters(plan, module_map) if item.is_even and group in item.stages}
    shares_all = stage.zero_stage >= ZeroStage.PARAMETERS
    degree = stage.mesh.tensor_parallel_degree
    parts = {split.name: split for split in module_map.split(degree).parameters}
    users: dict[str, list[Key]] = {name: [] for name in held}
    reduced: dict[str, list[Key]] = {name: [] for name in held}
    for chunk in plan.chunks(group):
        for unit in shard_units(module_map, plan.bounds, chunk):
            for found, of_unit in ((users, unit.names), (reduced, unit.reduced)):
                for name in held.keys() & set(of_unit):
                    found[name].append((chunk, unit.unit))
    moved = moved_parameters(plan, module_map, group)
    joins_units = stage.zero_stage == ZeroStage.OPTIMIZER and not stage.offload.updates_by_units
    sizes, keys = dict[str, int](), dict[str, Hashable]()
    for use in module_map.parameters:
        if use.name in held and (use.requires_grad or shares_all):
            shape = parts[use.name].local_shape(use.shape, degree) if use.name in parts else use.shape
            sizes[use.name] = prod(shape)
            kinds = tuple(use.name in names for names in moved.values())
            units = (tuple(users[use.name]) if shares_all else (), tuple(reduced[use.name]))
            keys[use.name] = (use.requires_grad, use.dtype, *(() if joins_units else (*units, *kinds)))
    # Backward reaches the last parameters first, so their gradients are complete first.
    names = list(reversed(sizes) if joins_units else sizes)
    types = {use.name: use.dtype for use in module_map.parameters}
    if joins_units:
        dealt = deal_buckets([sizes[name] * itemsize(types[name]) for name in names], [keys[name] for name in names])
        flats = [[names[index] for index in bucket] for bucket in dealt]
    else:
        together: dict[Hashable, list[str]] = {}
        for name in names:
            together.setdefault(keys[name], []).append(name)
        flats = list(together.values())
    return tuple(
        Flat(
            names=tuple(in_flat),
            sizes=tuple(sizes[name] for name in in_flat),
            degree=stage.mesh.shard_ranks,
            is_trained=held[in_flat[0]].requires_grad,
            users=tuple(users[in_flat[0]]),
            reduced=tuple(reduced[in_flat[0]]),
        )
        for in_flat in flats
    )
