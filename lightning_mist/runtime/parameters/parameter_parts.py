"""What of a parameter a rank has where it has not all of it, and who has the others.

Tensor parallelism gives ranks parts of whole dimensions; pieces of flat buffers that a shard group shares out evenly
hold some of a parameter's elements, in the order of its indices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_mist.plan import ModuleMap, ParameterSplit, Plan
from lightning_mist.plan.mesh import HeldParameter, Mesh
from lightning_mist.schedule.flats import Flat, stage_flats
from lightning_mist.tensor_parallel import shard, unshard


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a parameter."""

    split: ParameterSplit
    degree: int
    index: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The parameter's canonical name."""
        return self.split.name

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self.split.local_shape(self.shape, self.degree)

    def shape_at(self, index: int) -> tuple[int, ...]:
        """Shape of one of the parts: the same for all."""
        return self.local_shape

    def take(self, whole: Tensor) -> Tensor:
        """This part of a whole tensor of the parameter's shape; contiguous, with memory of its own."""
        return shard(whole, self.split, self.index, self.degree)

    def runs(self) -> list[tuple[int, int, int]]:
        """What lies together along the shared dimension: where in the whole, where in the part, and how much."""
        dim, rank = self.split.dim % len(self.shape), len(self.shape)
        numbers = torch.arange(self.shape[dim]).view([-1 if index == dim else 1 for index in range(rank)])
        index = self.take(numbers).flatten()
        starts = [0, *(index.diff().sub(1).nonzero().flatten() + 1).tolist(), len(index)]
        return [(int(index[start]), start, end - start) for start, end in pairwise(starts)]

    def placed(self, local: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Views of this part, each with where it begins in the whole tensor."""
        dim = self.split.dim % len(self.shape)
        zeros = [0] * len(self.shape)
        for whole, start, length in self.runs():
            yield (*zeros[:dim], whole, *zeros[dim + 1 :]), local.narrow(dim, start, length)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all ranks, in their order."""
        return unshard(parts, self.split)


def parts_of(plan: Plan, rank: int, module_map: ModuleMap) -> dict[str, Part]:
    """The parameters of which a rank has a part, by canonical name."""
    group = plan.group_of(plan.stage_of(rank))
    mesh = plan.stages[group].mesh
    shapes = {use.name: use.shape for use in module_map.parameters}
    owners = module_map.owners(plan.bounds)
    return {
        split.name: Part(
            split=split,
            degree=mesh.tensor_parallel_degree,
            index=mesh.devices.index(rank) % mesh.tensor_parallel_degree,
            shape=shapes[split.name],
        )
        for split in module_map.split(mesh.tensor_parallel_degree).parameters
        if group in map(plan.group_of, owners[split.name])
    }


@dataclass(frozen=True, kw_only=True)
class FlatPart:
    """One rank's elements of a parameter; beside tensor parallelism of its tensor-parallel part.

    Attributes:
        shape: Of the whole parameter.
        spans: From and up to which element each rank of the shard group has, by its place.
        inner: The tensor-parallel part; None if there is none.
    """

    name: str
    shape: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    place: int
    inner: Part | None = None

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of what lies in the flat buffer."""
        return self.shape if self.inner is None else self.inner.local_shape

    @property
    def span(self) -> tuple[int, int]:
        """From and up to which element this rank has."""
        return self.spans[self.place]

    @property
    def is_mine(self) -> bool:
        """Whether this rank updates something of it."""
        low, high = self.span
        return low < high

    @property
    def degree(self) -> int:
        """Number of parts, empty ones included."""
        return len(self.spans) * (1 if self.inner is None else self.inner.degree)

    @property
    def index(self) -> int:
        """This part's place among all."""
        return self.place if self.inner is None else self.place * self.inner.degree + self.inner.index

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this part."""
        return self.shape_at(self.index)

    def shape_at(self, index: int) -> tuple[int, ...]:
        """Shape of one of the parts."""
        low, high = self.spans[index if self.inner is None else index // self.inner.degree]
        return (high - low,)

    def take(self, whole: Tensor) -> Tensor:
        """This part of a whole tensor of the parameter's shape; with memory of its own."""
        inner = whole if self.inner is None else self.inner.take(whole)
        return inner.reshape(-1)[slice(*self.span)].clone()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from all parts, in their order."""
        step = 1 if self.inner is None else self.inner.degree
        wholes = [torch.cat(list(parts[index::step])).view(self.inner_shape) for index in range(step)]
        return wholes[0] if self.inner is None else self.inner.join(wholes)

    def placed(self, local: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Views of this part, each with where it begins in the whole tensor."""
        low, high = self.span
        start = 0
        for place, sizes in boxes(self.inner_shape, low, high):
            view = local[start : start + prod(sizes)].view(sizes)
            start += prod(sizes)
            if self.inner is None:
                yield place, view
                continue
            dim = self.inner.split.dim % len(self.shape)
            for whole, first, length in self.inner.runs():
                begin, end = max(first, place[dim]), min(first + length, place[dim] + sizes[dim])
                if begin < end:
                    there = (*place[:dim], whole + begin - first, *place[dim + 1 :])
                    yield there, view.narrow(dim, begin - place[dim], end - begin)


AnyPart: TypeAlias = Part | FlatPart
"""What of a parameter a rank has where it has not all of it."""


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Where blocks of a tensor begin, and their sizes, that hold its elements from ``low`` up to ``high``, in order.

    At most ``2 n - 1`` for ``n`` dimensions: whole rows in the middle, and what is left before and behind them.
    """
    if low >= high:
        return
    if len(shape) == 1:
        yield (low,), (high - low,)
        return
    row = prod(shape[1:])
    first, last = -(-low // row), high // row
    if first > last:
        first = last = low // row  # all of it lies inside of one row
        yield from _rows(shape, first, low - first * row, high - first * row)
        return
    if low < first * row:
        yield from _rows(shape, first - 1, low - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < high:
        yield from _rows(shape, last, 0, high - last * row)


def _rows(shape: Sequence[int], index: int, low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    return (((index, *place), (1, *sizes)) for place, sizes in boxes(shape[1:], low, high))


def pieces_of(mesh: Mesh, module_map: ModuleMap, flats: Sequence[Flat]) -> dict[str, FlatPart]:
    """What of each parameter of some flat buffers a rank has, by canonical name."""
    shapes = {use.name: use.shape for use in module_map.parameters}
    inner = parts_of(mesh.plan, mesh.rank, module_map)
    return {
        name: FlatPart(
            name=name,
            shape=shapes[name],
            spans=tuple(flat.span(index, place) for place in range(flat.degree)),
            place=mesh.shard_index,
            inner=inner.get(name),
        )
        for flat in flats
        for index, name in enumerate(flat.names)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Speakers:
    """Who answers for one parameter.

    Attributes:
        ranks: Global ranks. What they have, in this order, makes the whole; one rank where it is not shared out.
        part: The first rank's part; None if tensor parallelism does not share it out. Of what is shared out evenly too
            several ranks have some.
    """

    ranks: tuple[int, ...]
    part: Part | None


def speakers_of(plan: Plan, parameters: Sequence[HeldParameter], module_map: ModuleMap) -> dict[str, Speakers]:
    """For each parameter the ranks that answer for it: who updates something of it, once."""
    parts: dict[int, dict[str, Part]] = {}
    found, evenly = {}, dict[str, tuple[int, ...]]()
    for item in parameters:
        group, owner = item.stages[0], item.owners[0]
        mesh = plan.stages[group].mesh
        if group not in parts:
            parts[group] = parts_of(plan, mesh.devices[0], module_map)
            evenly |= _having(plan, module_map, group, parts[group])
        part = parts[group].get(item.name)
        first = owner * mesh.tensor_parallel_degree
        count = 1 if part is None else mesh.tensor_parallel_degree
        ranks = evenly[item.name] if item.is_even else mesh.devices[first : first + count]
        found[item.name] = Speakers(ranks=ranks, part=part)
    return found


def _having(plan: Plan, module_map: ModuleMap, group: int, parts: Mapping[str, Part]) -> dict[str, tuple[int, ...]]:
    """Ranks of the first shard group that have something of what is shared out evenly, by name, one for each part."""
    mesh = plan.stages[group].mesh
    width = mesh.tensor_parallel_degree
    found = {}
    for flat in stage_flats(plan, module_map, group):
        for index, name in enumerate(flat.names):
            spans = [flat.span(index, place) for place in range(flat.degree)]
            places = [place for place, (low, high) in enumerate(spans) if low < high]
            count = width if name in parts else 1
            found[name] = tuple(rank for place in places for rank in mesh.devices[place * width :][:count])
    return found
