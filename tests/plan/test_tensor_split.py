import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import Exclusion, ModuleMap, ParameterSplit, TensorSplit

QKV = ParameterSplit(name="h.0.qkv.weight", dim=0, factors=((3, False), (32, True)))


def test_a_rank_holds_its_part_of_the_dimension():
    assert QKV.size == 96
    assert QKV.local_shape((96, 32), 2) == (48, 32)


@pytest.mark.parametrize("factors", [((3, False),), ((3, True), (4, True))])
def test_exactly_one_factor_is_shared_out(factors):
    with pytest.raises(PlanError, match="exactly one factor"):
        ParameterSplit(name="w", dim=0, factors=factors)


def test_a_map_gives_the_split_of_a_degree_or_says_why_there_is_none():
    split = TensorSplit(degree=2, parameters=(QKV,))
    found = ModuleMap(step="training_step", blocks=(), outputs=(), cuts=(), parameters=(), splits=(split,))
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
    found = ModuleMap(step="training_step", blocks=(), outputs=(), cuts=(), parameters=(), exclusions=(reason,))
    with pytest.raises(PlanError, match=r"no layer has a pair of projections; use tensor_parallel_degree = 1$"):
        found.split(2)
