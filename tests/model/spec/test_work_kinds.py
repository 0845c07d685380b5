import re
from pathlib import Path
from typing import get_args

from lightning_mist.model.presets.specs import FAMILIES
from lightning_mist.model.spec import model_spec
from lightning_mist.model.spec.model_spec import OperatorKind
from tests.model.presets.test_specs import of, shape_of


def test_each_kind_is_explained():
    lines = Path(model_spec.__file__).read_text(encoding="utf-8").splitlines()
    explained = {name for line in lines if line.startswith("* ") for name in re.findall("``(.*?)``", line)}
    assert explained == {*get_args(OperatorKind)}


def test_networks_that_are_known_do_work_of_these_kinds_only():
    wholes = [of(shape_of(family)) for family in FAMILIES]
    parts = [part for whole in wholes for part in (whole, *whole.splits)]
    layers = [layer for part in parts for layer in (part.head, *part.layers, part.tail)]
    used = {item.kind for layer in layers for item in (*layer.forward_work, *layer.backward_work)}
    assert used <= {*get_args(OperatorKind)}
    assert {"matmul", "causal_attention", "elementwise", "index", "reduction"} <= used
