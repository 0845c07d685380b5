from dataclasses import replace
from itertools import chain
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import PlanError
from lightning_mist.plan import ParameterSplit, TensorSplit
from lightning_mist.plan.mesh import held_parameters
from lightning_mist.runtime.parameters.parameter_parts import (
    FlatPart,
    Part,
    Speakers,
    boxes,
    parts_of,
    speakers_of,
)
from tests.plan.test_mesh import make_map
from tests.plans import plan_of


def split_map(num_layers=2, **options):
    """The map of ``make_map``, with every second row of each layer's weight on one of two ranks."""
    splits = tuple(ParameterSplit(name=f"w{k}", dim=0, factors=((5, False), (2, True))) for k in range(num_layers))
    return replace(make_map(num_layers, **options), splits=(TensorSplit(degree=2, parameters=splits),))


def split_plan(degrees, *, zero=0, num_microbatches=4):
    """Stages of these (data-parallel, tensor-parallel) degrees, ranks in order."""
    rows = 4 * sum(dp * tp for dp, tp in degrees)
    stages = [{"data": dp, "tensor": tp, "zero": zero} for dp, tp in degrees]
    return plan_of(rows * num_microbatches, num_microbatches, *stages)


def test_a_part_is_taken_and_put_together():
    split = ParameterSplit(name="w", dim=0, factors=((5, False), (2, True)))
    whole = torch.arange(20).reshape(10, 2)
    parts = [Part(split=split, degree=2, index=index, shape=(10, 2)) for index in range(2)]
    taken = [part.take(whole) for part in parts]
    assert taken[0][:, 0].tolist() == [0, 4, 8, 12, 16]
    assert [tuple(part.shape) for part in taken] == [parts[0].local_shape] * 2 == [(5, 2)] * 2
    assert all(part.is_contiguous() for part in taken)
    assert torch.equal(parts[1].join(taken), whole)
    taken[0].zero_()
    assert whole[0, 1] == 1


def test_each_rank_has_parts_of_what_its_stage_holds():
    plan, module_map = split_plan([(2, 2), (1, 1)]), split_map()
    found = [parts_of(plan, rank, module_map) for rank in range(5)]
    assert [list(parts) for parts in found] == [["w0"]] * 4 + [[]]
    assert [parts["w0"].index for parts in found[:4]] == [0, 1, 0, 1]
    assert {parts["w0"].shape for parts in found[:4]} == {(10, 1)}
    with pytest.raises(PlanError, match="tensor_parallel_degree = 2"):
        parts_of(plan, 0, make_map(2))


def test_the_owners_of_all_parts_speak_for_a_parameter():
    plan, module_map = split_plan([(2, 2), (1, 1)], zero=1), split_map(tied=(0, 1))
    speakers = speakers_of(plan, held_parameters(plan, module_map), module_map)
    owners = {item.name: item.owners[0] for item in held_parameters(plan, module_map)}
    assert {owners["w0"], owners["tied"]} == {0, 1}
    first = 2 * owners["w0"]
    assert speakers["w0"].ranks == (first, first + 1)
    assert speakers["w0"].part is not None
    assert speakers["tied"] == Speakers(ranks=(2 * owners["tied"],), part=None)
    assert speakers["w1"] == Speakers(ranks=(4,), part=None)
    assert speakers["frozen"] == Speakers(ranks=(0,), part=None)


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


def parts_over(shape, cuts, split, degree):
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
    parts = parts_over(shape, cuts, split, degree)
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
