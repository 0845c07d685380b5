import pytest

from lightning_mist.model.split.own_plan import compare_with_own_plan
from lightning_mist.plan.tensor_split import ParameterSplit
from tests import zoo

QUERY = "model.model.layers.1.self_attn.q_proj.weight"
DOWN = "model.model.layers.0.mlp.down_proj.weight"


def split(name, dim):
    return ParameterSplit(name=name, dim=dim, factors=((32, True),))


@pytest.fixture(scope="module")
def llama():
    pytest.importorskip("transformers")
    return zoo.make("llama")[0]


def test_splits_as_in_the_models_own_plan_agree(llama):
    said = compare_with_own_plan(llama, [split(QUERY, 0), split(DOWN, 1), split("other.weight", 0)])
    assert said == "agrees with the model's own plan (_tp_plan) in 2 weights"


def test_what_differs_is_named(llama):
    said = compare_with_own_plan(llama, [split(QUERY, 1), split(DOWN, 1)])
    assert said == f"differs from the model's own plan (_tp_plan) in {QUERY}"
    said = compare_with_own_plan(llama, [split(QUERY, 1), split(DOWN, 0)])
    assert said == f"differs from the model's own plan (_tp_plan) in {QUERY} and 1 other weights, agrees in 0"


def test_a_module_without_a_plan_says_nothing():
    assert compare_with_own_plan(zoo.make("nano")[0], [split("lm_head.weight", 0)]) is None
