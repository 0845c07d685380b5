import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import Exclusion, ModuleMap, ParameterSplit, TensorSplit

QKV = ParameterSplit(name="h.0.qkv.weight", dim=0, factors=((3, False), (32, True)))


def test_a_rank_holds_its_part_of_the_dimension():
    assert QKV.size == 96
    assert QKV.local_shape((96, 32), 2) == (48, 32)


def test_pieces_of_different_sizes_lie_side_by_side():
    packed = ParameterSplit(name="qkv.weight", dim=0, factors=((48, True),), pieces=(32, 8, 8))
    assert packed.ranges(0, 2) == ((0, 16), (32, 4), (40, 4))
    assert packed.ranges(1, 2) == ((16, 16), (36, 4), (44, 4))
    assert packed.local_shape((48, 16), 2) == (24, 16)
    assert QKV.ranges(1, 2) == ((16, 16), (48, 16), (80, 16))
    assert ParameterSplit(name="w", dim=0, factors=((4, True), (3, False))).ranges(1, 2) == ((6, 6),)


@pytest.mark.parametrize(("factors", "pieces"), [(((48, True),), (32, 8)), (((3, False), (16, True)), (32, 16))])
def test_pieces_make_up_the_dimension(factors, pieces):
    with pytest.raises(PlanError, match="that make up its only factor"):
        ParameterSplit(name="w", dim=0, factors=factors, pieces=pieces)


@pytest.mark.parametrize("factors", [((3, False),), ((3, True), (4, True))])
def test_exactly_one_factor_is_shared_out(factors):
    with pytest.raises(PlanError, match="exactly one factor"):
        ParameterSplit(name="w", dim=0, factors=factors)


def test_a_map_gives_the_split_of_a_degree_or_says_why_there_is_none():
    split = TensorSplit(degree=2, parameters=(QKV,))
    found = ModuleMap(step="training_step", blocks=(), cuts=(), parameters=(), splits=(split,))
    assert found.split(2) is split
    assert found.split(2).of("h.0.qkv.weight") is QKV
    assert found.split(2).of("h.0.norm.weight") is None
    assert found.split(1).parameters == ()
    with pytest.raises(
        PlanError,
        match=r"tensor_parallel_degree = 3: it was not shown that 3 devices .*use tensor_parallel_degree = 1 or 2$",
    ):
        found.split(3)


def test_a_module_that_cannot_be_split_says_so():
    reason = Exclusion(feature="tensor", reason="no layer has a pair of projections")
    found = ModuleMap(step="training_step", blocks=(), cuts=(), parameters=(), exclusions=(reason,))
    with pytest.raises(PlanError, match=r"no layer has a pair of projections; use tensor_parallel_degree = 1$"):
        found.split(2)
