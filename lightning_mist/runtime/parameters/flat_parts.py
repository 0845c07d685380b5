"""What of a parameter lies in one rank's piece of a flat buffer: some of its elements, in the order of its indices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_mist.plan import ModuleMap
from lightning_mist.plan.mesh import Mesh
from lightning_mist.runtime.parameters.tensor_parts import Part, parts_of
from lightning_mist.schedule.flats import Flat


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
