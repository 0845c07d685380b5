import pytest
from sympy import Integer

from lightning_mist.model.presets.named_models import PRESETS
from lightning_mist.model.presets.parametric_specs import (
    FAMILIES,
    PRECISIONS,
    device_class,
    family_of,
    load_forms,
    widths,
)
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE
from tests.model.presets.test_specs import shape_of


def test_families():
    assert {family_of(shape) for shape in PRESETS.values()} == set(FAMILIES)
    assert family_of(PRESETS["gpt3-22b"]) == "gpt3"
    assert family_of(PRESETS["llama-405b"]) == "llama3"


def test_classes_of_devices():
    assert device_class("cpu", None) == "cpu"
    assert device_class("cuda", None) == device_class("cuda", (9, 0)) == "cuda80"
    assert device_class("cuda", (7, 5)) == "cuda70"


def test_rounded_widths():
    found = widths(PRESETS["gpt3-2.7b"], 2048)
    assert (found["h"], found["w"], found["x"], found["y"], found["p"]) == (32 * 80, 80, 32 * 96, 32 * 128, 2048)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_a_file_for_every_family_precision_and_device(family):
    for devices, precisions in PRECISIONS.items():
        for precision in precisions:
            assert load_forms(shape_of(family), precision, devices) is not None
    assert load_forms(shape_of(family), "64-true", "cuda80") is None


def test_products_of_one_size_are_one_entry():
    apart, alike = (load_forms(shape_of("llama", ffn=ffn), "bf16-true", "cuda80") for ffn in (832, 3 * 320))
    counts = []
    for forms, ffn in ((apart, 832), (alike, 3 * 320)):
        layer = forms.parts(shape_of("llama", ffn=ffn), 64).layer
        products = [item for item in layer.forward_work if item.kind == "matmul"]
        assert sum(item.calls for item in products) == 5
        counts.append(len(products))
    # Queries, keys and values together are three times as wide as the hidden states: so is the inner width of one.
    assert counts == [4 - 1, 3 - 1] or counts[0] > counts[1]


def test_half_precision_is_named():
    shape = shape_of("gpt3")
    for precision, dtype in (("16-true", "float16"), ("bf16-true", "bfloat16")):
        events = load_forms(shape, precision, "cuda80").parts(shape, 64).layer.events
        assert {item.dtype for item in events.first.forward} == {dtype, "float32", "uint64"} - (
            {"uint64"} - {item.dtype for item in events.first.forward}
        )


def test_shared_bytes():
    forms = load_forms(shape_of("gpt3"), "bf16-true", "cuda80")
    assert forms.shared(shape_of("gpt3"), 64) == Integer(8) * SEQUENCE
    layer = forms.parts(shape_of("gpt3"), 64, degree=2).layer
    assert layer.forward_flops.coeff(MICROBATCH * SEQUENCE) == 2 * (4 * 320 * 320 + 2 * 320 * 832) // 2
