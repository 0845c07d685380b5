from itertools import chain
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.plan.tensor_split import ParameterSplit
from lightning_mist.runtime.parameters.flat_parts import FlatPart, boxes
from lightning_mist.runtime.parameters.tensor_parts import Part

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_hold_elements_in_their_order(shape, data):
    low = data.draw(st.integers(0, prod(shape)))
    high = data.draw(st.integers(low, prod(shape)))
    whole = torch.arange(prod(shape)).view(shape)
    found = [
        whole[tuple(slice(start, start + size) for start, size in zip(place, sizes, strict=True))].flatten().tolist()
        for place, sizes in boxes(shape, low, high)
    ]
    assert list(chain.from_iterable(found)) == list(range(low, high))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(found)


def parts_of(shape, cuts, split, degree):
    """The parts of a parameter that lies in a buffer cut at some of its elements, by index."""
    spans = tuple(zip((0, *cuts), (*cuts, prod(split.local_shape(shape, degree) if split else shape)), strict=True))
    inner = [Part(split=split, degree=degree, index=i, shape=shape) for i in range(degree)] if split else [None]
    return [
        FlatPart(name="weight", shape=shape, spans=spans, place=place, inner=part)
        for place in range(len(spans))
        for part in inner
    ]


@pytest.mark.parametrize(
    "split",
    [
        None,
        ParameterSplit(name="weight", dim=0, factors=((4, True),)),
        ParameterSplit(name="weight", dim=1, factors=((3, False), (2, True))),
    ],
)
@given(st.lists(st.integers(0, 12), max_size=3).map(sorted))
def test_parts_join_to_the_whole_and_lie_where_they_say(split, cuts):
    shape, degree = (4, 6), 2
    whole = torch.arange(24.0).view(shape)
    parts = parts_of(shape, cuts, split, degree)
    taken = [part.take(whole) for part in parts]
    assert [part.index for part in parts] == list(range(parts[0].degree))
    assert [tuple(one.shape) for one in taken] == [part.local_shape for part in parts]
    assert torch.equal(parts[0].join(taken), whole)
    filled = torch.full(shape, float("nan"))
    for part, one in zip(parts, taken, strict=True):
        for place, view in part.placed(one):
            at = tuple(slice(start, start + size) for start, size in zip(place, view.shape, strict=True))
            assert filled[at].isnan().all()
            filled[at] = view
    assert torch.equal(filled, whole)
