"""Work that is known from sizes alone, against traces of networks of these sizes."""

from dataclasses import replace

import pytest

from lightning_mist.cost.inputs.regions import compile_regions
from lightning_mist.cost.time.region_times import region_seconds
from lightning_mist.estimate.closed_form.layer_bytes import CUDA
from lightning_mist.estimate.closed_form.network_spec import closed_form_spec
from lightning_mist.estimate.closed_form.transformer_form import ClosedForm
from lightning_mist.hardware import catalog_profile, parse_cluster
from lightning_mist.hardware.catalog.devices import find_device
from lightning_mist.model.presets.named_models import PRESETS
from tests.cost.transformers import GPT
from tests.estimate.closed_form.test_network_spec import CASES, GELU, SWIGLU, at, both
from tests.specs import ADAMW


def total(work, kinds, field):
    return sum(at(getattr(item, field)) for item in work if item.kind in kinds)


@pytest.mark.sample
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


@pytest.mark.parametrize("device", ["A100-80", "H100"])
@pytest.mark.parametrize("name", ["gpt3-1.3b", "gpt3-7b", "llama-7b"])
def test_devices_of_the_catalog_train_at_plausible_rates(device, name):
    """Forward and backward of 4 x 2048 tokens compute at a rate between 40 % of the peak and that of large products."""
    shape = PRESETS[name]
    dims = replace(
        GPT,
        hidden=shape.hidden,
        ffn=shape.ffn,
        heads=shape.heads,
        layers=shape.layers,
        vocabulary=shape.vocabulary,
        feed_forward=shape.feed_forward,
        positions=0,
    )
    spec = closed_form_spec(ClosedForm(dims=dims, optimizer=ADAMW, sequence_length=2048, precision="bf16-mixed"))
    costs, profile = compile_regions(spec)(4), catalog_profile(parse_cluster(f"1x8x{device}"))
    seconds = region_seconds(spec, profile, parse_cluster(f"1x8x{device}"), costs, 4)
    flops = costs.forward_flops_R.sum() + costs.backward_flops_R.sum()
    found, peak = find_device(device), dict(find_device(device).peak_flops)["bfloat16"]
    utilisation = flops / (seconds.forward_R.sum() + seconds.backward_R.sum()) / peak
    assert 0.40 < utilisation < found.efficiencies.matmul
