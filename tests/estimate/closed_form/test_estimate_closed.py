from dataclasses import replace

import pytest
import torch

from lightning_mist.errors import PlanError
from lightning_mist.estimate.closed_form.layer_bytes import CPU, CUDA
from lightning_mist.estimate.closed_form.transformer_estimate import (
    closed_spec,
    module_dims,
    operators_of,
    shape_dims,
    with_second_opinion,
)
from lightning_mist.model import trace_model
from lightning_mist.model.sources.reference_decoder import LanguageModel, LanguageModelShape, hollow
from tests import zoo
from tests.cost.transformers import step, tokens
from tests.specs import ADAMW

SHAPE = LanguageModelShape(
    hidden=64, ffn=128, layers=2, heads=4, vocabulary=96, feed_forward="swiglu", norm="rmsnorm", rotary_fraction=1.0
)
LENGTH = 16


def spec_of(dims, degrees=()):
    return closed_spec(
        dims,
        optimizer=ADAMW,
        precision="32-true",
        rows=2,
        sequence_length=LENGTH,
        degrees=degrees,
        device_kind="cuda",
        name="small",
    )


def test_sizes_are_read_from_configurations():
    assert module_dims(torch.nn.Linear(2, 2), LENGTH) is None
    parallel = replace(SHAPE, parallel=True)
    assert module_dims(hollow(lambda: LanguageModel(parallel, LENGTH)), LENGTH) is None
    dims = module_dims(zoo.make("llama")[0], 12)
    assert (dims.layers, dims.hidden, dims.feed_forward) == (4, 32, "swiglu")


def test_sizes_of_models_known_by_name():
    module = LanguageModel(SHAPE, LENGTH)
    dims = module_dims(module, LENGTH)
    assert dims == shape_dims(SHAPE, LENGTH)
    assert dims.parameters == sum(parameter.numel() for parameter in module.parameters())
    with pytest.raises(ValueError, match="share a norm: no closed form is about that"):
        shape_dims(replace(SHAPE, parallel=True), LENGTH)


def test_kinds_of_devices_have_their_operators():
    assert (operators_of("cuda"), operators_of("cpu")) == (CUDA, CPU)


def test_a_network_of_which_only_sizes_are_known():
    dims = shape_dims(SHAPE, LENGTH)
    found = spec_of(dims, degrees=(1, 2))
    assert (found.name, found.num_layers, found.device_kind, found.batch_rows) == ("small", 2, "cuda", 2)
    assert {split.degree for split in found.splits} == {2}
    assert 4 * dims.parameters == sum(parameter.bytes for parameter in found.parameters)
    with pytest.raises(PlanError, match="tensor_parallel_degree = 3: it must divide 4 heads"):
        spec_of(dims, degrees=(3,))


@pytest.mark.thorough
def test_a_traced_transformer_gets_a_second_opinion():
    module = LanguageModel(SHAPE, LENGTH)
    traced = trace_model(module, tokens(2, LENGTH), call=step(module))
    noted = with_second_opinion(traced, module, "cpu")
    assert noted.notes[:-1] == traced.notes
    assert noted.notes[-1].startswith("second opinion: ")
    # A module that does not say its sizes, or says those of another number of layers, gets none.
    assert with_second_opinion(traced, torch.nn.Linear(2, 2), "cpu") is traced
    other = hollow(lambda: LanguageModel(replace(SHAPE, layers=3), LENGTH))
    assert with_second_opinion(traced, other, "cpu") is traced
