"""Which part of a tensor a rank holds, as data, and what views do to it.

Of a tensor that is shared over ``t`` ranks exactly one dimension is shared out. That dimension is ``outer`` times ``t``
equal chunks, and rank ``r`` holds chunk ``r`` of each time: a fused query-key-value dimension has ``outer`` = 3, a
plain one 1. All that views, cuts and joins do to such a tensor follows from this pair (dimension, outer).

Where what lies side by side has different sizes (queries beside fewer keys and values), ``outer`` is the tuple of these
sizes, each of which is one chunk per rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch
from numpy import broadcast_shapes
from torch import Tensor

Outer = int | tuple[int, ...]
"""How many equal pieces lie side by side, each shared out, or their sizes where they differ."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is shared out over the ranks of a group.

    Attributes:
        sizes: The whole tensor's shape.
        dim: The dimension that is shared out, from 0.
        outer: How many times this dimension repeats one chunk per rank, or the sizes of its pieces where they differ.
    """

    sizes: tuple[int, ...]
    dim: int
    outer: Outer = 1

    @property
    def from_end(self) -> int:
        """The shared dimension counted from the last, which is -1: what broadcasting compares."""
        return self.dim - len(self.sizes)

    @property
    def is_last(self) -> bool:
        """Whether the last dimension is the shared one."""
        return self.dim == len(self.sizes) - 1

    @property
    def pieces(self) -> tuple[int, ...]:
        """Lengths along the shared dimension in each of which every rank has one chunk."""
        if isinstance(self.outer, tuple):
            return self.outer
        return (self.sizes[self.dim] // self.outer,) * self.outer

    def local_sizes(self, degree: int) -> tuple[int, ...]:
        """The shape of one rank's part."""
        sizes, dim = self.sizes, self.dim
        return (*sizes[:dim], sizes[dim] // degree, *sizes[dim + 1 :])

    def resized(self, dim: int, size: int) -> "Layout":
        """The same with another size of a dimension."""
        outer = self.outer
        if isinstance(outer, tuple) and dim == self.dim:
            outer = tuple(piece * size // self.sizes[dim] for piece in outer)
        return Layout((*self.sizes[:dim], size, *self.sizes[dim + 1 :]), self.dim, outer)

    def is_like(self, other: "Layout") -> bool:
        """Whether the parts of two tensors that broadcast meet their counterparts."""
        return (
            self.from_end == other.from_end
            and self.outer == other.outer
            and self.sizes[self.dim] == other.sizes[other.dim]
        )


def fits(layout: Layout, degree: int) -> bool:
    """Whether every rank can hold an equal part."""
    if isinstance(layout.outer, tuple):
        return all(piece % degree == 0 for piece in layout.outer)
    return layout.sizes[layout.dim] % (layout.outer * degree) == 0


def outer_of(pieces: Sequence[int]) -> Outer:
    """What a layout says of pieces that lie side by side: how many there are if they are equal, else their sizes."""
    return len(pieces) if len(set(pieces)) == 1 else tuple(pieces)


def infer_sizes(total: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes with the one that is -1 filled in.

    Raises:
        ValueError: If the sizes do not make up ``total``.
    """
    known = prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known and total % known == 0:
        return tuple(total // known if size == -1 else size for size in sizes)
    if -1 in sizes or known != total:
        raise ValueError(f"shape {list(sizes)} is invalid for a tensor of {total} elements")
    return sizes


def view(layout: Layout, sizes: tuple[int, ...], degree: int) -> Layout | None:
    """The layout of a tensor seen in another shape, None if no dimension of that shape is then evenly shared out.

    In memory order the tensor is ``repeats`` times one chunk per rank. A dimension of the new shape takes these chunks
    if the dimensions before it only count repeats and the ones behind it only cut chunks.
    """
    if isinstance(layout.outer, tuple):
        return _view_pieces(layout, layout.outer, sizes, degree)
    repeats = prod(layout.sizes[: layout.dim]) * layout.outer
    before = 1
    for dim, size in enumerate(sizes):
        if before == 0 or repeats % before:
            return None
        if size > 1 and (before * size) % (repeats * degree) == 0:
            return Layout(sizes, dim, repeats // before)
        before *= size
    return None


def _view_pieces(layout: Layout, pieces: tuple[int, ...], sizes: tuple[int, ...], degree: int) -> Layout | None:
    """The same where pieces have different sizes: a dimension takes them if it begins where they do."""
    start, length = prod(layout.sizes[: layout.dim]), prod(layout.sizes[layout.dim + 1 :])
    for dim, size in enumerate(sizes):
        if size > 1 and prod(sizes[:dim]) == start:
            rest = prod(sizes[dim + 1 :])
            if any(piece * length % (rest * degree) for piece in pieces):
                return None
            return Layout(sizes, dim, tuple(piece * length // rest for piece in pieces))
    return None


def permute(layout: Layout, order: tuple[int, ...]) -> Layout:
    """The layout after the dimensions are put into an order (none of them negative)."""
    return Layout(tuple(layout.sizes[dim] for dim in order), order.index(layout.dim), layout.outer)


def insert(layout: Layout, dim: int, size: int = 1) -> Layout:
    """The layout with a new dimension that is not shared out at position ``dim``."""
    sizes = (*layout.sizes[:dim], size, *layout.sizes[dim:])
    return Layout(sizes, layout.dim + (dim <= layout.dim), layout.outer)


def remove(layout: Layout, dims: frozenset[int]) -> Layout:
    """The layout without some dimensions, of which none is the shared one."""
    sizes = tuple(size for dim, size in enumerate(layout.sizes) if dim not in dims)
    return Layout(sizes, layout.dim - sum(dim < layout.dim for dim in dims), layout.outer)


def slice_shared(layout: Layout, start: int, end: int) -> Layout | None:
    """The layout of ``start`` to ``end`` along the shared dimension, None if that cuts into a piece.

    In a part of one of ``t`` ranks these are ``start / t`` to ``end / t``.
    """
    edges = [0, *accumulate(layout.pieces)]
    if start not in edges or end not in edges or end <= start:
        return None
    sizes = (*layout.sizes[: layout.dim], end - start, *layout.sizes[layout.dim + 1 :])
    return Layout(sizes, layout.dim, outer_of(layout.pieces[edges.index(start) : edges.index(end)]))


def take(tensor: Tensor, layout: Layout, rank: int, degree: int) -> Tensor:
    """One rank's part of a whole tensor; a view where that is possible."""
    dim, whole = layout.dim, layout.sizes[layout.dim]
    if layout.outer == 1:
        return tensor.narrow(dim, rank * whole // degree, whole // degree)
    if isinstance(layout.outer, tuple):
        pieces = torch.split(tensor, list(layout.outer), dim)
        return torch.cat([piece.chunk(degree, dim)[rank] for piece in pieces], dim)
    chunk = whole // (layout.outer * degree)
    cut = torch.unflatten(tensor, dim, (layout.outer, degree, chunk))
    return cut.select(dim + 1, rank).flatten(dim, dim + 1)


def stack_parts(tensor: Tensor, layout: Layout, degree: int) -> Tensor:
    """The parts of all ranks of a whole tensor, one per entry of a new first dimension, contiguous."""
    dim = layout.dim
    if isinstance(layout.outer, tuple):
        return torch.stack([take(tensor, layout, rank, degree) for rank in range(degree)])
    chunk = layout.sizes[dim] // (layout.outer * degree)
    cut = torch.unflatten(tensor, dim, (layout.outer, degree, chunk)).movedim(dim + 1, 0)
    return cut.flatten(dim + 1, dim + 2).contiguous()


def join_parts(parts: Tensor, layout: Layout, degree: int) -> Tensor:
    """The whole tensor from the parts of all ranks, stacked along the first dimension."""
    dim = layout.dim
    if isinstance(layout.outer, tuple):
        pieces = torch.split(parts, [piece // degree for piece in layout.outer], dim + 1)
        return torch.cat([torch.cat(piece.unbind(0), dim) for piece in pieces], dim)
    chunk = layout.sizes[dim] // (layout.outer * degree)
    cut = torch.unflatten(parts, dim + 1, (layout.outer, chunk)).movedim(0, dim + 1)
    return cut.reshape(layout.sizes)


broadcast = lru_cache(maxsize=1024)(broadcast_shapes)
"""The shape of what broadcasts from several shapes; torch's own goes through symbolic ones and takes longer."""


def complete_index(items: Any, num_dims: int) -> tuple[Any, ...] | None:
    """An index with one item per dimension and one ``None`` per new one.

    None if it is not a basic one; next to slices one list of positions is allowed, which stays in its place.
    """
    items = items if isinstance(items, tuple) else (items,)
    lists = sum(_is_list(item) for item in items)
    if not all(item is None or item is Ellipsis or type(item) in (slice, int) or _is_list(item) for item in items):
        return None
    if lists > 1 or (lists and any(type(item) is int for item in items)):
        return None
    used = sum(item is not None and item is not Ellipsis for item in items)
    rest = (slice(None),) * (num_dims - used)
    if not any(item is Ellipsis for item in items):
        return (*items, *rest)
    at = next(index for index, item in enumerate(items) if item is Ellipsis)
    return (*items[:at], *rest, *items[at + 1 :])


def _is_list(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(position) is int for position in item)


def index(layout: Layout, items: tuple[Any, ...], degree: int) -> tuple[tuple[Any, ...], Layout] | None:
    """The index into a part and the layout of what it gives; None if that is not evenly shared out."""
    local, sizes, source, shared, outer = list(items), list[int](), 0, -1, layout.outer
    for place, item in enumerate(items):
        if item is None:
            sizes.append(1)
            continue
        size, is_shared = layout.sizes[source], source == layout.dim
        source += 1
        if isinstance(item, (int, list)):
            if is_shared:
                return None
            sizes += [len(item)] if isinstance(item, list) else []
            continue
        start, end, step = item.indices(size)
        if is_shared:
            shared = len(sizes)
            if (start, end, step) != (0, size, 1):
                cut = slice_shared(layout, start, end) if step == 1 else None
                if cut is None:
                    return None
                outer, local[place] = cut.outer, slice(start // degree, end // degree)
        sizes.append(len(range(start, end, step)))
    return tuple(local), Layout(tuple(sizes), shared, outer)
