"""Pieces of flat buffers: equal, aligned, and every element in one of them, whatever the plan and the parameters."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.plan import ModuleMap, ParameterSplit, ParameterUse, TensorSplit, ZeroStage
from lightning_mist.plan.mesh import held_parameters, make_mesh
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.flats import ALIGNMENT, Flat, stage_flats
from lightning_mist.schedule.stage_units import moved_parameters
from tests.plans import plan_of, plans

LAYERS = 4
BLOCKS = tuple(f"b{layer}" for layer in range(LAYERS))
PLACES = st.sets(st.integers(-1, LAYERS), max_size=2)
SHAPES = st.sampled_from([(), (0,), (1,), (2, 3), (64,), (65, 2), (4, 500), (1 << 18, 30)])


def use(index, shape, places, dtype="float32", *, trained=True):
    """A parameter that the head (-1), layers, and the tail (their number) use."""
    owners = (("", min(place, LAYERS - 1)) if place in (-1, LAYERS) else (BLOCKS[place], place) for place in places)
    slots = tuple((owner, "w", (part,)) for owner, part in owners)
    return ParameterUse(name=f"p{index}", slots=slots, shape=shape, dtype=dtype, requires_grad=trained)


def map_of(uses, degree=1):
    """A map whose parameters of two dimensions are shared out in halves of the second, if at all."""
    halves = [
        ParameterSplit(name=item.name, dim=1, factors=((item.shape[1], True),)) for item in uses if item.shape[1:]
    ]
    shared = [item for item in halves if item.factors[0][0] % degree == 0]
    splits = (TensorSplit(degree=degree, parameters=tuple(shared)),) if degree > 1 else ()
    return ModuleMap(step="s", blocks=BLOCKS, cuts=(), parameters=tuple(uses), splits=splits, even_shards=True)


@st.composite
def maps(draw):
    each = st.tuples(SHAPES, PLACES, st.sampled_from(["float32", "bfloat16"]), st.booleans())
    uses = draw(st.lists(each, min_size=1, max_size=12))
    return map_of([use(index, *given[:3], trained=given[3]) for index, given in enumerate(uses)], 2)


@given(plans(num_layers=LAYERS, tensor_degrees=(1, 2)), maps())
def test_every_element_lies_in_one_piece(plan, found):
    held, uses = held_parameters(plan, found), {item.name: item for item in found.parameters}
    for group in range(plan.num_groups):
        flats, stage = stage_flats.__wrapped__(plan, found, group), plan.stages[group]
        shares_all, tensor = stage.zero_stage >= ZeroStage.PARAMETERS, stage.mesh.tensor_parallel_degree
        even = [item.name for item in held if item.is_even and item.stages == (group,)]
        names = Counter(name for flat in flats for name in flat.names)
        assert names == Counter(name for name in even if uses[name].requires_grad or shares_all)
        parts = {split.name for split in found.splits[0].parameters} if tensor > 1 else set()
        for flat in flats:
            assert len({(uses[name].dtype, uses[name].requires_grad) for name in flat.names}) == 1
            assert flat.is_trained == uses[flat.names[0]].requires_grad
            assert flat.degree == stage.mesh.shard_ranks
            assert flat.sizes == tuple(prod(uses[n].shape) // (tensor if n in parts else 1) for n in flat.names)
            assert flat.piece % ALIGNMENT == 0
            assert 0 <= flat.piece * flat.degree - flat.starts[-1] < ALIGNMENT * flat.degree
            for index, (start, size) in enumerate(zip(flat.starts, flat.sizes, strict=False)):
                assert start % ALIGNMENT == 0
                assert start + size <= flat.starts[index + 1]
                end = 0
                for low, high in (flat.span(index, place) for place in range(flat.degree)):
                    assert low % ALIGNMENT == 0 or low == high
                    assert (low, high) == (end, high) or low == high
                    end = max(end, high)
                assert end == size


@given(plans(num_layers=LAYERS), maps())
def test_they_follow_from_plan_and_map_alone(plan, found):
    again = ModuleMap(**{name: getattr(found, name) for name in ModuleMap.__dataclass_fields__})
    for group in range(plan.num_groups):
        assert stage_flats.__wrapped__(plan, again, group) == stage_flats.__wrapped__(plan, found, group)


def flats_of(uses, *, zero, data=2, **options):
    return stage_flats(plan_of(8, 1, {"layers": LAYERS, "data": data, "zero": zero, **options}), map_of(uses), 0)


USES = [
    use(0, (100,), [-1, LAYERS]),
    *(use(1 + k, (64, 2), [k]) for k in range(LAYERS)),
    use(9, (8,), [], trained=False),
]


def test_units_have_flats_of_their_own_and_neighbours_share_them_under_zero_1():
    one, two, three = (flats_of(USES, zero=zero) for zero in (1, 2, 3))
    assert [flat.names for flat in one] == [("p4", "p3", "p2", "p1", "p0")]
    assert [flat.names for flat in two] == [("p0",), ("p1",), ("p2",), ("p3",), ("p4",)]
    assert [flat.names for flat in three] == [*(flat.names for flat in two), ("p9",)]
    # What the head and the tail use is there for both, and complete when the head has run.
    assert three[0].users == ((0, HEAD), (0, TAIL))
    assert three[0].reduced == ((0, HEAD),)
    assert [flat.is_trained for flat in three] == [True] * 5 + [False]


def test_buffers_of_zero_1_are_as_large_as_those_of_ddp():
    uses = [use(k, (3 << 20,), [k % LAYERS]) for k in range(12)]
    assert [len(flat.names) for flat in flats_of(uses, zero=1)] == [1, 3, 3, 3, 2]


def test_chunks_of_a_group_share_a_flat_and_reduce_it_each():
    uses = [use(0, (100,), [0, 2]), use(1, (100,), [0, 1])]
    stages = [{"data": 2, "zero": 2}] * LAYERS
    plan = plan_of(16, 4, *stages, groups=2, schedule="interleaved-1f1b")
    (flat,) = stage_flats(plan, map_of(uses), 0)
    assert (flat.names, flat.reduced) == (("p0",), ((0, 0), (2, 2)))
    # What both groups hold nobody has a piece of.
    assert stage_flats(plan, map_of(uses), 1) == ()


@pytest.mark.parametrize(("stage", "even"), [({"data": 1}, True), ({"zero": 0}, True), ({}, False)])
def test_others_share_out_otherwise(stage, even):
    plan = plan_of(8, 1, {"layers": LAYERS, "data": 2, "zero": 1, **stage})
    assert stage_flats(plan, replace(map_of(USES), even_shards=even), 0) == ()
    assert not any(item.is_even for item in held_parameters(plan, replace(map_of(USES), even_shards=even)))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_moves_lies_in_buffers_of_its_own_unit_by_unit(zero):
    plan = plan_of(8, 1, {"layers": LAYERS, "data": 2, "zero": zero, "offload": {"optimizer": 0.5, "gradients": 1.0}})
    module_map = map_of([use(k, (100,), [k % LAYERS]) for k in range(2 * LAYERS)])
    moved, flats = moved_parameters(plan, module_map, 0), stage_flats(plan, module_map, 0)
    assert moved["O"]
    assert moved["O"] < moved["G"]
    for flat in flats:
        assert len({(name in moved["O"], name in moved["G"]) for name in flat.names}) == 1
        assert len(flat.reduced) == 1
    assert {name for flat in flats for name in flat.names} >= moved["G"]


def test_groups_of_hybrid_sharding_have_pieces_of_their_own_size():
    (flat,) = flats_of(USES, zero=1, data=4, shard=2)
    assert flat.degree == 2
    plan = plan_of(8, 1, {"layers": LAYERS, "data": 4, "zero": 1, "shard": 2})
    for rank in range(4):
        assert {"p0", "p1", "p2", "p3", "p4"} <= {item.name for item in make_mesh(plan, rank, map_of(USES)).owned}


def test_a_piece_may_be_empty_and_a_parameter_too():
    flat = Flat(names=("a", "b"), sizes=(3, 0), degree=4, is_trained=True, users=(), reduced=())
    assert (flat.starts, flat.piece) == ((0, 64, 64), 64)
    assert [flat.span(0, place) for place in range(4)] == [(0, 3), (3, 3), (3, 3), (3, 3)]
    assert {flat.span(1, place) for place in range(4)} == {(0, 0)}
