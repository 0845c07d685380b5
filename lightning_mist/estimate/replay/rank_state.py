"""What one rank of a plan holds, and with whom it shares rows: everything that its replay needs to know beforehand."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_mist.cost.memory import ALIGNMENT_BYTES, LEAST_BYTES
from lightning_mist.model.spec import ModelSpec, bytes_at
from lightning_mist.plan import Plan, ZeroStage, loader_of, row_slice
from lightning_mist.plan.mesh import (
    HeldParameter,
    Mesh,
    itemsize,
    make_mesh,
    needs_spreading,
    overlaps,
    side_of,
    tied_groups,
)
from lightning_mist.plan.sharding import deal_buckets
from lightning_mist.plan.tensor_split import stripes_of
from lightning_mist.schedule.flats import Flat, stage_flats
from lightning_mist.schedule.stage_program import StageUnits
from lightning_mist.schedule.stage_units import (
    ShardUnit,
    expanded_units,
    moved_parameters,
    plan_units,
    updated_units,
)

UnitKey = tuple[int, int]
"""Stage and unit."""


def padded(nbytes: int) -> int:
    """Bytes that a tensor takes in a buffer of what passes between device and host memory."""
    return -(-nbytes // LEAST_BYTES) * LEAST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter that a rank computes with.

    Attributes:
        bytes: Bytes of this rank's copy or part.
        owner: The data-parallel index that updates it.
    """

    item: HeldParameter
    bytes: int
    whole_bytes: int
    itemsize: int
    dtype: str
    owner: int

    @property
    def name(self) -> str:
        """Its canonical name."""
        return self.item.name

    @property
    def is_trained(self) -> bool:
        """Whether it gets a gradient."""
        return self.item.requires_grad


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """Parameters that travel in one flat buffer.

    Attributes:
        owner: The place in a shard group that they belong to; ``None`` if to all.
        leaves: Whether what they hold is in host memory while nobody uses it.
        piece: Bytes of each rank's even piece, where ranks have these; then the buffer has so many of them.
    """

    names: tuple[str, ...]
    bytes: int
    itemsize: int
    owner: int | None
    leaves: bool = False
    piece: int = 0

    @property
    def with_counts(self) -> int:
        """Bytes with one number per parameter at the end, as gradients travel to owners."""
        return self.bytes + len(self.names) * self.itemsize * (not self.piece)


class ReplayedRank:
    """One rank of a plan.

    Attributes:
        spec: The network, or the rank's part of it.
        held: The parameters that it computes with, in the module's order.
    """

    def __init__(self, spec: ModelSpec, whole: ModelSpec, plan: Plan, rank: int) -> None:
        self.spec, self.plan, self.rank = spec, plan, rank
        self.mesh: Mesh = make_mesh(plan, rank, whole.module_map)
        self.chunks = plan.chunks(plan.group_of(self.mesh.stage))
        self.batch_rows = max(1, plan.global_batch_size // plan.num_loaders)
        self.module_map = whole.module_map
        part = {item.name: item.bytes for item in spec.parameters}
        wholes = {item.name: item.bytes for item in whole.parameters}
        dtypes = {use.name: use.dtype for use in self.module_map.parameters}
        self.held = tuple(
            Held(
                item=item,
                bytes=part[item.name],
                whole_bytes=wholes[item.name],
                itemsize=itemsize(dtypes[item.name]),
                dtype=dtypes[item.name],
                owner=item.owner(self.mesh.stage),
            )
            for item in self.mesh.held
        )
        self.by_name = {item.name: item for item in self.held}
        self._crossing: dict[tuple[int, int, int], tuple[CrossingTensor, ...]] = {}

    @property
    def zero_stage(self) -> ZeroStage:
        """What its stage shards; nothing where there is nobody to share with."""
        return self.plan.stages[self.mesh.stage].zero_stage if len(self.mesh.peers) > 1 else ZeroStage.NONE

    @property
    def shares(self) -> bool:
        """Whether there are other data-parallel ranks."""
        return len(self.mesh.peers) > 1

    @cached_property
    def owned(self) -> frozenset[str]:
        """The parameters that its optimizer updates, trained or not."""
        return frozenset(item.name for item in self.mesh.owned)

    @cached_property
    def even(self) -> dict[Flat, FlatBuffer]:
        """Flat buffers of which every rank of the shard group has an even piece."""
        flats = stage_flats(self.plan, self.module_map, self.mesh.stage)
        sizes = [(flat, flat.piece * (size := self.by_name[flat.names[0]].itemsize), size) for flat in flats]
        return {
            flat: FlatBuffer(flat.names, flat.degree * piece, size, None, piece=piece) for flat, piece, size in sizes
        }

    @cached_property
    def parts(self) -> dict[str, int]:
        """Bytes of what its optimizer updates of each trained parameter of its, if anything."""
        found = {item.name: item.bytes for item in self.held if item.is_trained and item.name in self.owned}
        for flat, buffer in self.even.items():
            for index, name in enumerate(flat.names if flat.is_trained else ()):
                low, high = flat.span(index, self.mesh.shard_index)
                found[name] = (high - low) * buffer.itemsize
        return {name: size for name, size in found.items() if size}

    @cached_property
    def _evens(self) -> frozenset[str]:
        return frozenset(name for flat in self.even for name in flat.names)

    @cached_property
    def regions_of(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """By parameter and stage of this rank: the regions there that use it, ascending."""
        found: dict[str, dict[int, tuple[int, ...]]] = {}
        for use in self.module_map.parameters:
            regions: set[int] = set()
            for module, _, parts in use.slots:
                regions |= {self._region(module, part) for part in parts}
            found[use.name] = {
                stage: tuple(sorted(region for region in regions if region in self._regions(stage)))
                for stage in self.chunks
            }
        return found

    def _region(self, module: str, part: int) -> int:
        blocks = self.module_map.blocks
        if not blocks:
            return 0
        beyond = part == len(blocks) - 1 and not f"{module}.".startswith(f"{blocks[part]}.")
        return part + 2 if beyond else part + 1

    def _regions(self, stage: int) -> frozenset[int]:
        first, end = self.plan.stages[stage].layers
        low = first + 1 if first else 0
        return frozenset(range(low, end + 1 + (end == self.spec.num_layers)))

    @cached_property
    def batches(self) -> int:
        """Batches that it has: its own and those that it computes on."""
        return batches_of(self.plan, self.rank)

    @cached_property
    def buckets(self) -> tuple[FlatBuffer, ...]:
        """Flat buffers in which parameters travel that ZeRO-1 and ZeRO-2 give back."""
        return self.dealt(frozenset())

    def dealt(self, left: frozenset[str]) -> tuple[FlatBuffer, ...]:
        """Those in which gradients travel, but for those that are in host memory."""
        away = left | self._evens
        trained = [item for item in reversed(self.held) if item.is_trained and item.name not in away]
        keys = [(item.owner if self.mesh.is_sharded else None, item.dtype) for item in trained]
        dealt = deal_buckets([item.bytes for item in trained], keys)
        rest = (self._flat([trained[i] for i in indices], keys[indices[0]][0]) for indices in dealt)
        even = (flat for of, flat in self.even.items() if of.is_trained and left.isdisjoint(flat.names))
        # What several stages hold is, with the first of them, complete behind the rest.
        return (*even, *rest)

    def _flat(self, items: Sequence[Held], owner: int | None) -> FlatBuffer:
        names, size = tuple(item.name for item in items), sum(item.bytes for item in items)
        return FlatBuffer(names, size, items[0].itemsize, owner=owner)

    @cached_property
    def units(self) -> dict[int, tuple[ShardUnit, ...]]:
        """Units of its stages, from ZeRO-2 on or where activations are moved."""
        return plan_units(self.plan, self.module_map, self.mesh.stage)

    @cached_property
    def expanded(self) -> dict[int, StageUnits]:
        """The same as the lines between them need them."""
        return expanded_units(self.plan, self.module_map, self.units)

    @cached_property
    def updated(self) -> dict[UnitKey, tuple[Held, ...]]:
        """What the ranks of its stage update with each unit."""
        found = updated_units(self.plan, self.module_map, self.mesh.stage)
        return {key: tuple(self.by_name[name] for name in names) for key, names in found.items()}

    @cached_property
    def moved(self) -> dict[str, frozenset[str]]:
        """By kind of state the parameters of which it is in host memory."""
        found = moved_parameters(self.plan, self.module_map, self.mesh.stage)
        # What several chunks of this rank use has several sums, and stays.
        often = Counter(name for units in self.units.values() for unit in units for name in unit.reduced)
        return {
            "parameters": found["P"],
            "gradients": frozenset(name for name in found["G"] if often[name] == 1),
            "optimizer": found["O"],
        }

    @property
    def reduces_units(self) -> bool:
        """Whether gradients are reduced unit by unit."""
        return self.zero_stage >= ZeroStage.GRADIENTS

    @cached_property
    def unit_gradients(self) -> dict[UnitKey, tuple[FlatBuffer, ...]]:
        """Flat buffers in which the gradients of every unit travel."""
        found = {}
        for stage, units in self.units.items():
            for unit in units:
                key = stage, unit.unit
                found[key] = self.flats_of([self.by_name[name] for name in unit.reduced], self.moved["gradients"])
        return found

    def flats_of(self, items: Sequence[Held], left: frozenset[str] = frozenset()) -> tuple[FlatBuffer, ...]:
        """Flat buffers in which trained parameters of a unit, or their gradients, travel."""
        together, names = dict[tuple[int, bool, str], list[Held]](), {item.name for item in items}
        for item in (item for item in items if item.name not in self._evens):
            together.setdefault((item.owner, item.name in left, item.dtype), []).append(item)
        even = (flat for of, flat in self.even.items() if of.is_trained and flat.names[0] in names)
        dealt = (replace(self._flat(found, key[0]), leaves=key[1]) for key, found in together.items())
        return (*(replace(flat, leaves=flat.names[0] in left) for flat in even), *dealt)

    @cached_property
    def shards(self) -> tuple[tuple[FlatBuffer, tuple[UnitKey, ...]], ...]:
        """Flat storages of parameters that are there while they are used, each with the units that use it."""
        users: dict[str, list[UnitKey]] = {}
        for stage, units in self.units.items():
            for unit in units:
                for name in unit.names:
                    users.setdefault(name, []).append((stage, unit.unit))
        together: dict[tuple[tuple[UnitKey, ...], int, bool, bool, str], list[Held]] = {}
        is_shared, away = self.zero_stage >= ZeroStage.PARAMETERS, self.moved["parameters"]
        for item in (item for item in self.held if not (is_shared and item.name in self._evens)):
            leaves, owner = item.name in away, item.owner if is_shared else self.mesh.shard_index
            key = tuple(users.get(item.name, ())), owner, leaves, item.is_trained or not leaves, item.dtype
            if is_shared or leaves:
                together.setdefault(key, []).append(item)
        of_even = self.even.items() if is_shared else ()
        result = [(replace(flat, leaves=flat.names[0] in away), even.users) for even, flat in of_even]
        for (keys, owner, leaves, *_), items in together.items():
            size = sum(-(-item.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for item in items)
            result.append((replace(self._flat(items, owner), bytes=size, leaves=leaves), keys))
        return tuple(result)

    @cached_property
    def shards_of(self) -> dict[UnitKey, tuple[FlatBuffer, ...]]:
        """Those that each unit uses."""
        found: dict[UnitKey, list[FlatBuffer]] = {}
        for flat, keys in self.shards:
            for key in keys:
                found.setdefault(key, []).append(flat)
        return {key: tuple(flats) for key, flats in found.items()}

    @property
    def several(self) -> Iterator[Held]:
        """The trained parameters that several stages use."""
        return (item for item in self.held if item.is_trained and len(item.item.stages) > 1)

    @cached_property
    def tied(self) -> tuple[Held, ...]:
        """The trained parameters that other groups of devices hold too and whose gradients this rank helps to sum."""
        groups = ((item, tied_groups(self.plan, item.item)) for item in self.several)
        return tuple(item for item, ranks in groups if any(self.rank in group for group in ranks))

    @cached_property
    def spread(self) -> tuple[Held, ...]:
        """The tied parameters whose summed gradient is handed to others of the stage that update them, or by these."""
        mine = (item for item in self.several if item.name in self.owned)
        return tuple(item for item in mine if needs_spreading(self.plan, item.item, self.mesh.stage))

    def crossing(self, stage: int, other: int, microbatch: int) -> tuple["CrossingTensor", ...]:
        """How this rank exchanges the tensors that cross the boundary between a stage of its and a neighbour."""
        key = stage, other, microbatch
        if key not in self._crossing:
            self._crossing[key] = self._find_crossing(*key)
        return self._crossing[key]

    def _find_crossing(self, stage: int, other: int, microbatch: int) -> tuple["CrossingTensor", ...]:
        cut = self.plan.stages[max(stage, other)].layers[0]
        specs = self.spec.boundaries[cut - 1]
        live = self.module_map.cuts[cut - 1]
        rows = self.plan.stages[stage].microbatch_size
        shared = overlaps(self.plan, self.rank, other, microbatch, self.batch_rows)
        found = []
        for tensor, known in zip(specs, live, strict=True):
            mine, theirs = side_of(self.plan, stage, known), side_of(self.plan, other, known)
            length = known.shape[known.sequence_dim] if known.sequence_dim is not None else 1
            parts = mine.sources(self.mesh.row_index, theirs, length)
            low, high = mine.held(self.mesh.row_index, length)
            rows_shares = [(o.end - o.first) / rows for o in shared] if known.batch_dim is not None else [1.0]
            shares = tuple(r * (end - start) / (high - low) for r in rows_shares for _, start, end in parts)
            copied = known.batch_dim not in (None, 0) and len(rows_shares) > 1
            found.append(
                CrossingTensor(
                    bytes=bytes_at(tensor.bytes, rows, self.spec.sequence_length or 1),
                    shares=shares,
                    requires_grad=known.requires_grad,
                    is_copied=copied or (len(parts) > 1 and known.sequence_dim != 0),
                    dtype=known.dtype,
                    times_laid=self._times_laid(known.sequence_dim is not None and mine.is_parted(length), length),
                )
            )
        return tuple(found)

    def _times_laid(self, is_parted: bool, length: int) -> int:
        degree = self.plan.stages[self.mesh.stage].mesh.context_parallel_degree
        return degree if is_parted and degree > 1 and stripes_of(length, degree) > 1 else 0


def batches_of(plan: Plan, rank: int) -> int:
    """Batches that a rank has: its own and those that it computes on."""
    computed_on = {row_slice(plan, rank, index).owner for index in range(plan.num_microbatches)}
    return len({loader_of(plan, each) for each in (rank, *computed_on)})


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingTensor:
    """A tensor that crosses a boundary, seen from one rank.

    Attributes:
        shares: Share of that in each message.
        is_copied: Whether a message is a copy of a part rather than a view into the tensor.
        times_laid: How many times as large the whole is from which what arrives as one run of tokens is laid out in
            stripes, as context-parallel ranks compute on it; 0 if it stays as it is.
    """

    bytes: int
    shares: tuple[float, ...]
    requires_grad: bool
    is_copied: bool
    dtype: str
    times_laid: int = 0

    @property
    def portions(self) -> tuple[int, ...]:
        """Bytes of each message."""
        return tuple(round(share * self.bytes) for share in self.shares)
