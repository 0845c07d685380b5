"""Presets by their sizes, against traces of networks of other sizes than those that the forms were found from."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from sympy import Integer

from lightning_mist.model import device_operators, trace_model
from lightning_mist.model.presets.named_models import PRESETS, LanguageModelShape
from lightning_mist.model.presets.specs import (
    FAMILIES,
    KNOWN_OPTIMIZERS,
    PRECISIONS,
    device_class,
    family_of,
    load_forms,
    preset_map,
    preset_spec,
    widths,
)
from lightning_mist.model.sources.text_sources import open_model
from lightning_mist.model.spec import Polynomial
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE
from lightning_mist.model.trace.optimizer import describe_optimizer
from tests.specs import ADAMW, moved_bytes

ROWS, LENGTH = 4, 96


def shape_of(family, **changes):
    choices = dict(FAMILIES[family])
    sizes = {"hidden": 320, "ffn": 832, "layers": 2, "heads": 8, "vocabulary": 1000, **changes}
    if choices.pop("grouped"):
        sizes = {"key_value_heads": 8, **sizes, "hidden": 2 * sizes["hidden"], "heads": 2 * sizes["heads"]}
    return LanguageModelShape(**sizes, **choices)


def traced(monkeypatch, shape, precision, degrees, capability):
    monkeypatch.setitem(PRESETS, "small", shape)
    source = open_model("small", batch_rows=ROWS, sequence_length=LENGTH, precision=precision)
    dtype = "float32" if "mixed" in precision or "32" in precision else {"16": "float16"}.get(precision[:2], "bfloat16")
    known = preset_map(shape, rows=ROWS, length=LENGTH, degrees=degrees, dtype=dtype)
    spec = trace_model(
        source.module,
        source.batch,
        call=source.call,
        module_map=known,
        optimizer=torch.optim.AdamW,
        precision=precision,
        device_kind=device_operators("cuda", capability=capability),
    )
    return replace(spec, name="small", module_map=known)


def differences(one, other, path=""):
    """Where two specifications differ, but in lines of code, which files of forms leave out."""
    if isinstance(one, Polynomial):
        return [] if one.expression == other.expression else [path]
    if is_dataclass(one) and type(one) is type(other):
        return [
            each
            for field in fields(one)
            if field.name != "line"
            for each in differences(getattr(one, field.name), getattr(other, field.name), f"{path}.{field.name}")
        ]
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for index, pair in pairs for each in differences(*pair, f"{path}[{index}]")]
    return [] if one == other else [f"{path}: {one} against {other}"]


CASES = [
    ("gpt3", "bf16-mixed", (8, 9)),
    ("llama", "16-mixed", (8, 0)),
    ("falcon", "bf16-true", (9, 0)),
    ("llama3", "32-true", (8, 0)),
    ("gpt3", "16-mixed", (7, 0)),
    ("falcon", "16-mixed", (7, 5)),
    ("llama", "16-true", (7, 5)),
    ("llama3", "16-true", (7, 0)),
    ("gpt3", "32-true", (7, 5)),
]


@pytest.mark.thorough
@pytest.mark.sample
@pytest.mark.parametrize(("family", "precision", "capability"), CASES)
def test_it_is_what_a_trace_says(monkeypatch, family, precision, capability):
    shape = shape_of(family)
    expected = traced(monkeypatch, shape, precision, (4,), capability).evenly()
    found = preset_spec(
        shape,
        name="small",
        precision=precision,
        rows=ROWS,
        length=LENGTH,
        degrees=(4,),
        optimizer=expected.optimizer,
        capability=capability,
    )
    assert found is not None
    assert found.head.events is not None
    assert differences(expected, found) == []


@pytest.mark.thorough
def test_one_head_of_keys_and_values_on_each_rank_is_near(monkeypatch):
    shape = shape_of("llama3")
    expected = traced(monkeypatch, shape, "bf16-true", (8,), (8, 0)).split(8)
    found = of(shape, degrees=(8,), rows=ROWS, length=LENGTH).split(8)
    for one, other in zip((expected.head, *expected.layers), (found.head, *found.layers), strict=True):
        for direction in ("forward_work", "backward_work"):
            bytes_of = [
                float(moved_bytes(getattr(part, direction)).subs({MICROBATCH: 8, SEQUENCE: 2048}))
                for part in (one, other)
            ]
            assert bytes_of[1] == pytest.approx(bytes_of[0], rel=0.02)


def test_adam_w_is_known_as_it_is_measured():
    assert KNOWN_OPTIMIZERS["AdamW"] == describe_optimizer(torch.optim.AdamW, device_kind="cuda")


def of(shape, precision="bf16-true", **changes):
    how = {"name": "x", "rows": 1, "length": 64, "degrees": (2, 3), "optimizer": ADAMW, **changes}
    return preset_spec(shape, precision=precision, **how)


def test_degrees_that_do_not_divide_are_left_out():
    spec = of(shape_of("gpt3"))
    assert {item.degree for item in spec.splits} == {2}
    assert spec.module_map.unsplit == ((3, "3 does not divide 8 heads, the inner width 832 or the vocabulary of 1000"),)
    assert spec.module_map.split(2).degree == 2


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"tied": True}, {}),
        ({"rotary_fraction": 0.5}, {}),
        ({"heads": 32}, {}),
        ({"heads": 1}, {}),
        ({}, {"precision": "64-true"}),
        ({}, {"device_kind": "cpu"}),
        ({}, {"capability": (7, 0)}),
        ({"heads": 2}, {"precision": "16-true", "capability": (7, 0)}),
    ],
    ids=str,
)
def test_what_was_never_traced_is_not_known(changes, how):
    assert of(shape_of("gpt3")) is not None
    assert of(replace(shape_of("gpt3"), **changes), **how) is None


@pytest.mark.parametrize(
    ("precision", "capability"), [("bf16-true", (8, 0)), ("16-mixed", (7, 0)), ("16-true", (7, 5)), ("32-true", (7, 0))]
)
def test_every_preset_is_known(precision, capability):
    how = {"precision": precision, "capability": capability, "degrees": ()}
    assert [name for name, shape in PRESETS.items() if of(replace(shape, layers=2), **how) is None] == []


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
        _, layer, _ = forms.parts(shape_of("llama", ffn=ffn), 64)
        products = [item for item in layer.forward_work if item.kind == "matmul"]
        assert sum(item.calls for item in products) == 5
        counts.append(len(products))
    # Queries, keys and values together are three times as wide as the hidden states: so is the inner width of one.
    assert counts == [4 - 1, 3 - 1] or counts[0] > counts[1]


def test_half_precision_is_named():
    shape = shape_of("gpt3")
    for precision, dtype in (("16-true", "float16"), ("bf16-true", "bfloat16")):
        _, layer, _ = load_forms(shape, precision, "cuda80").parts(shape, 64)
        events = layer.events
        assert {item.dtype for item in events.first.forward} == {dtype, "float32", "uint64"} - (
            {"uint64"} - {item.dtype for item in events.first.forward}
        )


def test_shared_bytes():
    forms = load_forms(shape_of("gpt3"), "bf16-true", "cuda80")
    assert forms.shared(shape_of("gpt3"), 64) == Integer(8) * SEQUENCE
    _, layer, _ = forms.parts(shape_of("gpt3"), 64, degree=2)
    assert layer.forward_flops.coeff(MICROBATCH * SEQUENCE) == 2 * (4 * 320 * 320 + 2 * 320 * 832) // 2
