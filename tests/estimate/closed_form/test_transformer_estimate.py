from dataclasses import replace

import pytest
import torch

from lightning_mist.cost import stage_memory
from lightning_mist.errors import PlanError
from lightning_mist.estimate.closed_form.layer_bytes import CPU, CUDA
from lightning_mist.estimate.closed_form.network_spec import closed_form_spec
from lightning_mist.estimate.closed_form.transformer_estimate import CrossCheck, closed_form_estimate, cross_check
from lightning_mist.estimate.closed_form.transformer_form import ClosedForm
from lightning_mist.model import trace_model
from lightning_mist.plan import StageMesh
from tests.cost.memory.test_memory_model import make_plan
from tests.cost.transformers import step
from tests.estimate.closed_form.test_network_spec import SWIGLU, both
from tests.specs import ADAMW, spec

FORM = ClosedForm(dims=replace(SWIGLU, layers=4), optimizer=ADAMW, sequence_length=64, batch_rows=4)


def test_any_plan_can_be_estimated():
    plan = make_plan([1, 2, 1], degree=2, microbatches=6, zero=3, checkpointed=1)
    found = closed_form_estimate(FORM, plan)
    assert found == stage_memory(closed_form_spec(FORM), plan)
    assert [memory.peak_bytes > 0 for memory in found] == [True] * 3


def test_tensor_parallel_plans():
    alone = make_plan([4])
    mesh = StageMesh(devices=(0, 1), tensor_parallel_degree=2, sequence_parallel=True)
    shared = replace(alone, stages=(replace(alone.stages[0], mesh=mesh),))
    assert closed_form_estimate(FORM, shared)[0].peak_bytes < 0.6 * closed_form_estimate(FORM, alone)[0].peak_bytes
    four = replace(mesh, devices=(0, 1, 2, 3), tensor_parallel_degree=4)
    with pytest.raises(PlanError, match="tensor_parallel_degree = 4: it must divide 4 heads, 2 heads of keys"):
        closed_form_estimate(FORM, replace(alone, stages=(replace(alone.stages[0], mesh=four),)))


def test_plans_for_other_networks():
    with pytest.raises(PlanError, match="the plan has 3 layers, the network 4"):
        closed_form_estimate(FORM, make_plan([3]))


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


def test_only_layers_over_sequences_can_be_compared():
    with pytest.raises(ValueError, match="synthetic has no sequence dimension"):
        cross_check(spec(2), SWIGLU)
    traced, _ = both(SWIGLU, "bf16-true", "cuda")
    with pytest.raises(ValueError, match="has 2 layers, its sizes say 3"):
        cross_check(traced, replace(SWIGLU, layers=3))


def test_networks_without_layers():
    module = torch.nn.Linear(4, 4)
    module.training_step = lambda batch, index: module(batch).sum()
    traced = trace_model(module, torch.zeros(2, 4), call=step(module), optimizer=torch.optim.SGD)
    with pytest.raises(ValueError, match="Linear has no repeated layers"):
        cross_check(traced, SWIGLU)


def test_a_difference_that_does_not_show_is_none():
    check = CrossCheck(
        rows=1, length=1, traced_bytes=100_001, closed_bytes=100_000, operators=CUDA.name, unit_bytes=10_000
    )
    assert check.text.endswith(f"hidden states, as the closed form for {CUDA.name} says")
    assert "0.1% more" in replace(check, traced_bytes=100_060).text
