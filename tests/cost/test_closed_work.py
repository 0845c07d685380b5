"""Work that is known from sizes alone, against traces of networks of these sizes."""

from dataclasses import replace

import pytest

from lightning_mist.cost.closed_form import CUDA
from lightning_mist.cost.closed_spec import ClosedForm, closed_form_spec
from tests.cost.test_closed_spec import CASES, GELU, SWIGLU, at, both
from tests.specs import ADAMW


def total(work, kinds, field):
    return sum(at(getattr(item, field)) for item in work if item.kind in kinds)


@pytest.mark.parametrize(("dims", "precision", "device"), CASES)
@pytest.mark.parametrize("direction", ["forward_work", "backward_work"])
def test_products_and_attention_are_those_of_a_trace(dims, precision, device, direction):
    traced, closed = both(dims, precision, device)
    for part in (lambda spec: spec.head, lambda spec: spec.layers[0], lambda spec: spec.tail):
        works = [getattr(part(spec), direction) for spec in (traced, closed)]
        for kinds in (("matmul",), ("causal_attention",)):
            expected, found = (total(work, kinds, "flops") for work in works)
            assert found == expected
            assert total(works[1], kinds, "calls") == total(works[0], kinds, "calls")


@pytest.mark.parametrize(("dims", "precision", "device"), CASES)
@pytest.mark.parametrize("direction", ["forward_work", "backward_work"])
def test_bytes_are_near_those_of_a_trace(dims, precision, device, direction):
    traced, closed = both(dims, precision, device)
    for part in (lambda spec: spec.layers[0], lambda spec: spec.tail):
        works = [getattr(part(spec), direction) for spec in (traced, closed)]
        expected, found = (sum(at(item.moved_bytes) for item in work) for work in works)
        assert found == pytest.approx(expected, rel=0.35)


@pytest.mark.parametrize("dims", [SWIGLU, GELU], ids=["swiglu", "gelu"])
def test_tensor_parallel_ranks_share_products(dims):
    spec = closed_form_spec(ClosedForm(dims=dims, optimizer=ADAMW, sequence_length=128, operators=CUDA), (2,))
    for degree in (True, False):
        part = spec.split(2, degree)
        for name in ("forward_flops", "backward_flops"):
            assert at(getattr(part.layers[0], name)) == at(getattr(spec.layers[0], name)) / 2
        assert at(part.layers[0].forward_moved_bytes) < at(spec.layers[0].forward_moved_bytes)
    along, apart = spec.split(2, True).layers[0], spec.split(2).layers[0]
    assert at(along.forward_moved_bytes) < at(apart.forward_moved_bytes)


def test_products_of_one_size_are_one_entry():
    dims = replace(SWIGLU, fused_query_key_value=False, key_value_heads=None)
    (layer,) = closed_form_spec(ClosedForm(dims=dims, optimizer=ADAMW, sequence_length=128)).layers
    counts = sorted(item.calls for item in layer.forward_work if item.kind == "matmul")
    # Queries, keys and values have the size of the output's; gate and up have one.
    assert sum(counts) == 7
    assert 2 in counts
