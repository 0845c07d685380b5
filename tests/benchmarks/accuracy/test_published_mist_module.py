import pytest
import sympy

from benchmarks.accuracy.published_mist_model import MistDims
from benchmarks.accuracy.published_time import traced
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE
from tests.specs import moved_bytes

# Traces modules of sizes that others published.
pytestmark = pytest.mark.thorough

H, F, T, HEADS, VOCABULARY = 64, 256, 128, 4, 512


def dims(**changes):
    sizes = {"hidden": H, "ffn": F, "layers": 3, "heads": HEADS, "kv_heads": HEADS, "length": T}
    sizes["vocabulary"] = VOCABULARY
    flags = {"is_gated": False, "is_parallel": False, "is_rms": False, "uses_flash": False}
    return MistDims(**{**sizes, **flags, **changes})


def at(expression, rows):
    return int(sympy.sympify(expression).subs({MICROBATCH: rows, SEQUENCE: T}))


@pytest.fixture(scope="module")
def plain():
    return traced(dims(), single_row=False)


def test_products_are_those_of_a_transformer(plain):
    (layer,) = plain.layers
    for rows in (2, 5):
        matrices = 2 * rows * T * (4 * H * H + 2 * H * F)
        scores = 2 * 2 * rows * T * T * H
        assert at(layer.forward_flops, rows) == matrices + scores
        assert at(layer.backward_flops, rows) == 2 * (matrices + scores)
        assert at(plain.tail.forward_flops, rows) == 2 * rows * T * H * VOCABULARY
    assert plain.num_layers == 3
    assert plain.device_kind == "cuda"


def test_flash_attention_makes_scores_again_in_backward():
    spec = traced(dims(uses_flash=True), single_row=False)
    (layer,) = spec.layers
    scores = 2 * 2 * T * T * H
    assert at(layer.forward_flops, 1) == 2 * T * (4 * H * H + 2 * H * F) + scores
    assert at(layer.backward_flops, 1) == 4 * T * (4 * H * H + 2 * H * F) + 5 * scores // 2


def test_gradients_are_gathered_and_added_to_a_flat_parameter(plain):
    # A float16 gradient is written, read and written by the concatenation, and added in three passes.
    (layer,) = plain.layers
    numel = 4 * H * H + 2 * H * F + 4 * H
    of_weights = at(moved_bytes(layer.backward_work), 0)
    assert of_weights >= 2 * (1 + 2 + 3) * numel
    assert of_weights <= 2 * (1 + 2 + 3 + 3) * numel + 16 * 58 * H


def test_a_lone_row_is_not_copied(plain):
    lone = traced(dims(), single_row=True)
    unit = 2 * 2 * T * H
    saved = at(moved_bytes(plain.layers[0].forward_work), 2) - at(moved_bytes(lone.layers[0].forward_work), 2)
    assert saved == 3 * 2 * unit  # three tensors read and written
    assert at(plain.layers[0].backward_flops, 2) == at(lone.layers[0].backward_flops, 2)


@pytest.mark.parametrize(
    ("changes", "matrices"),
    [
        ({"is_gated": True, "is_rms": True, "uses_flash": True}, 4 * H * H + 3 * H * F),
        ({"is_parallel": True, "kv_heads": 1, "uses_flash": True}, 2 * H * H + 2 * H * H // HEADS + 2 * H * F),
    ],
)
def test_other_families(changes, matrices):
    spec = traced(dims(**changes), single_row=True)
    (layer,) = spec.layers
    assert at(layer.forward_flops, 1) == 2 * T * matrices + 4 * T * T * H
