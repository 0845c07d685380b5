from dataclasses import replace

import pytest
import torch

from lightning_mist.cost import stage_memory
from lightning_mist.errors import PlanError
from lightning_mist.estimate.closed_form.layer_bytes import CPU, CUDA
from lightning_mist.estimate.closed_form.network_spec import closed_form_spec
from lightning_mist.estimate.closed_form.transformer_estimate import (
    CrossCheck,
    closed_spec,
    cross_check,
    with_second_opinion,
)
from lightning_mist.estimate.closed_form.transformer_form import ClosedForm
from lightning_mist.model import trace_model
from lightning_mist.plan import StageMesh
from tests.cost.memory.test_memory_model import make_plan
from tests.cost.transformers import step
from tests.estimate.closed_form.test_network_spec import SWIGLU, both
from tests.specs import ADAMW

FORM = ClosedForm(dims=replace(SWIGLU, layers=4), optimizer=ADAMW, sequence_length=64, batch_rows=4)


def test_tensor_parallel_plans_need_less():
    alone = make_plan([4])
    mesh = StageMesh(devices=(0, 1), tensor_parallel_degree=2, sequence_parallel=True)
    shared = replace(alone, stages=(replace(alone.stages[0], mesh=mesh),))
    network = closed_form_spec(FORM, [2])
    whole, part = (stage_memory(network, plan)[0].peak_bytes for plan in (alone, shared))
    assert part < 0.6 * whole


def test_degrees_that_do_not_divide_the_sizes_are_refused():
    with pytest.raises(PlanError, match="tensor_parallel_degree = 4: it must divide 4 heads, 2 heads of keys"):
        closed_spec(
            SWIGLU,
            optimizer=ADAMW,
            precision="bf16-true",
            rows=4,
            sequence_length=64,
            degrees=[4],
            device_kind="cuda",
            name="network",
        )


@pytest.mark.thorough
@pytest.mark.sample
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_trace_and_form_agree(precision):
    traced, _ = both(SWIGLU, precision, "cuda")
    check = cross_check(traced, SWIGLU, CUDA)
    assert check.ratio == 1.0
    assert check.text.endswith(f"hidden states, as the closed form for {check.operators} says")


def test_a_difference_is_said_in_hidden_states():
    traced, _ = both(SWIGLU, "bf16-true", "cuda")
    check = cross_check(traced, SWIGLU, CPU)
    # Norms that are not fused keep six hidden states more each.
    assert check.closed_bytes - check.traced_bytes == pytest.approx(12 * check.unit_bytes / 2, rel=0.01)
    assert "the trace" in check.text
    assert "less: the module computes by other operators than it assumes" in check.text


def test_only_layers_over_sequences_get_a_second_opinion():
    module = torch.nn.Linear(4, 4)
    module.training_step = lambda batch, index: module(batch).sum()
    traced = trace_model(module, torch.zeros(2, 4), call=step(module), optimizer=torch.optim.SGD)
    assert with_second_opinion(traced, module, "cuda") == traced


def test_a_difference_that_does_not_show_is_none():
    check = CrossCheck(traced_bytes=100_001, closed_bytes=100_000, operators=CUDA.name, unit_bytes=10_000)
    assert check.text.endswith(f"hidden states, as the closed form for {CUDA.name} says")
    assert "0.1% more" in replace(check, traced_bytes=100_060).text
