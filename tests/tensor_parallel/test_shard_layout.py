from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.tensor_parallel.shard_layout import (
    Layout,
    fits,
    infer_sizes,
    insert,
    join_parts,
    permute,
    remove,
    slice_shared,
    stack_parts,
    take,
    view,
)


def numbered(sizes):
    return torch.arange(prod(sizes)).reshape(sizes)


@st.composite
def layouts(draw):
    degree = draw(st.sampled_from((2, 4)))
    sizes = draw(st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(sizes) - 1))
    outer = draw(st.sampled_from((1, 2, 3)))
    sizes[dim] = outer * degree * draw(st.sampled_from((1, 2, 3)))
    if draw(st.booleans()):
        pieces = tuple(degree * size for size in draw(st.permutations((1, 2, 4))))[: draw(st.sampled_from((2, 3)))]
        return Layout((*sizes[:dim], sum(pieces), *sizes[dim + 1 :]), dim, pieces), degree
    return Layout(tuple(sizes), dim, outer), degree


@st.composite
def shapes_of(draw, total):
    sizes = []
    while total > 1:
        size = draw(st.sampled_from([k for k in range(1, total + 1) if total % k == 0]))
        sizes.append(size)
        total //= size
        if len(sizes) > 5:
            return (*sizes, total)
    return tuple(sizes)


@given(layouts())
def test_parts_cover_a_tensor_and_join_to_it(case):
    layout, degree = case
    whole = numbered(layout.sizes)
    parts = [take(whole, layout, rank, degree) for rank in range(degree)]
    assert fits(layout, degree)
    assert all(tuple(part.shape) == layout.local_sizes(degree) for part in parts)
    stacked = stack_parts(whole, layout, degree)
    assert stacked.is_contiguous()
    assert torch.equal(stacked, torch.stack(parts))
    assert torch.equal(join_parts(stacked, layout, degree), whole)


@given(layouts(), st.data())
def test_a_view_of_parts_is_the_parts_of_the_view(case, data):
    layout, degree = case
    whole = numbered(layout.sizes)
    sizes = data.draw(shapes_of(whole.numel()))
    found = view(layout, sizes, degree)
    parts = [take(whole, layout, rank, degree) for rank in range(degree)]
    if found is not None:
        assert fits(found, degree)
        for rank, part in enumerate(parts):
            assert torch.equal(part.reshape(found.local_sizes(degree)), take(whole.reshape(sizes), found, rank, degree))
        return
    # no layout of the new shape gives each rank what it has
    seen = whole.reshape(sizes)
    for dim, outer in product(range(len(sizes)), range(1, seen.numel() + 1)):
        other = Layout(sizes, dim, outer)
        if sizes[dim] % outer == 0 and fits(other, degree):
            assert not torch.equal(take(seen, other, 0, degree).flatten(), parts[0].flatten())


def test_sizes_that_are_left_open():
    assert infer_sizes(24, (2, -1, 3)) == (2, 4, 3)
    assert infer_sizes(24, (4, 6)) == (4, 6)
    for sizes in ((5, -1), (-1, -1), (4, 5)):
        with pytest.raises(ValueError, match="invalid for a tensor of 24 elements"):
            infer_sizes(24, sizes)


def test_dimensions_that_move():
    layout = Layout((2, 6, 4), 1, 3)
    assert permute(layout, (2, 0, 1)) == Layout((4, 2, 6), 2, 3)
    assert insert(layout, 1) == Layout((2, 1, 6, 4), 2, 3)
    assert insert(layout, 2, 5) == Layout((2, 6, 5, 4), 1, 3)
    assert remove(layout, frozenset((0, 2))) == Layout((6,), 0, 3)
    assert layout.resized(2, 9) == Layout((2, 6, 9), 1, 3)


def test_slices_of_whole_periods():
    layout = Layout((2, 12), 1, 3)
    assert layout.pieces == (4, 4, 4)
    assert slice_shared(layout, 4, 12) == Layout((2, 8), 1, 2)
    assert slice_shared(layout, 0, 4) == Layout((2, 4), 1, 1)
    assert slice_shared(layout, 2, 6) is None
    assert slice_shared(layout, 4, 4) is None


def test_slices_of_pieces_of_different_sizes():
    layout = Layout((2, 12), 1, (8, 2, 2))
    assert slice_shared(layout, 0, 8) == Layout((2, 8), 1)
    assert slice_shared(layout, 8, 12) == Layout((2, 4), 1, 2)
    assert slice_shared(layout, 0, 10) == Layout((2, 10), 1, (8, 2))
    assert slice_shared(layout, 0, 9) is None
    assert layout.resized(1, 24).outer == (16, 4, 4)
    assert fits(layout, 2)
    assert not fits(layout, 4)


def test_pieces_of_different_sizes_in_another_shape():
    layout = Layout((2, 24), 1, (16, 4, 4))
    heads = view(layout, (2, 6, 4), 1)
    assert heads == Layout((2, 6, 4), 1, (4, 1, 1))
    assert view(heads, (2, 24), 1) == layout
    assert view(Layout((2, 48), 1, (32, 8, 8)), (2, 6, 8), 2) is None


def test_what_broadcasts():
    assert Layout((3, 8, 4), 1).is_like(Layout((8, 1), 0))
    assert not Layout((3, 8, 4), 1).is_like(Layout((3, 8, 4), 1, 2))
    assert not Layout((3, 8, 4), 1).is_like(Layout((3, 8, 4), 2))
    assert (Layout((3, 8), 1).is_last, Layout((3, 8), 0).is_last) == (True, False)
