from dataclasses import replace

import pytest
import torch

from lightning_mist import estimate_memory
from lightning_mist.cost import stage_memory
from lightning_mist.errors import PlanError, TraceError
from lightning_mist.estimate import estimate_memory as estimate
from lightning_mist.hardware import parse_cluster
from lightning_mist.model import trace_model
from lightning_mist.model.sources.reference_decoder import LanguageModel, LanguageModelShape, hollow
from lightning_mist.plan import plan_of, save
from tests.cli.networks import make_net, make_own, make_wide
from tests.specs import spec

SPEC = spec(8, parameter_bytes=200_000_000, edge_bytes=400_000_000, widths=(4_000_000,))
SHAPE = LanguageModelShape(
    hidden=64, ffn=128, layers=2, heads=4, vocabulary=96, feed_forward="swiglu", norm="rmsnorm", rotary_fraction=1.0
)
FOUR = parse_cluster("1x4xL4")


def test_every_stage_and_its_terms():
    plan = plan_of(8, world_size=4, global_batch_size=16, pipeline_stages=4)
    estimate = estimate_memory(SPEC, None, plan, FOUR)
    assert [stage.stage for stage in estimate.stages] == [0, 1, 2, 3]
    for stage, memory in zip(estimate.stages, stage_memory(SPEC, plan), strict=True):
        assert sum(stage.term(name) for name, _ in memory.terms) == stage.allocated.p50
        assert sum(value for _, value in stage.terms) == stage.device_total.p50
        assert stage.allocated.p50 <= stage.reserved.p50 <= stage.device_total.p50
    assert estimate.cluster == "4 x L4 with 22.5 GiB each"
    assert estimate.memory_limit == FOUR.device.memory_bytes


def test_on_cpus_there_is_nothing_but_tensors():
    estimate = estimate_memory(SPEC, cluster="2xcpu:64GiB")
    stage = estimate.worst
    assert stage.allocated == stage.reserved == stage.device_total
    assert estimate.plan.stages[0].data_parallel_degree == 2


def test_a_module_is_traced():
    module, batch = make_net()
    plan = plan_of(4, world_size=2, global_batch_size=8, pipeline_stages=2)
    estimate = estimate_memory(module, batch, plan, "1x2xL4", optimizer=torch.optim.SGD)
    traced = trace_model(module, batch, optimizer=torch.optim.SGD, device_kind="cuda")
    assert estimate == estimate_memory(traced, None, plan, "1x2xL4")
    assert (estimate.optimizer, estimate.source, estimate.verdict) == ("SGD", "traced", "fits")
    halved = estimate_memory(module, batch, plan, "1x2xL4", optimizer=torch.optim.SGD, precision="bf16-mixed")
    assert halved.stages[1].allocated != estimate.stages[1].allocated


def test_a_process_that_may_use_too_little_needs_as_much_as_one_that_may_use_more():
    module, batch = make_net()
    large, small = (estimate_memory(module, batch, cluster=f"2xcpu:{size}", advise=False) for size in ("1GiB", "4KiB"))
    assert small.worst.device_total == large.worst.device_total
    assert (large.verdict, small.verdict) == ("fits", "does not fit")


def test_the_optimizer_is_the_module_s_own_unless_one_is_named():
    module, batch = make_own()
    own = estimate_memory(module, batch, cluster="1xcpu:1GiB")
    assert own == estimate_memory(module, batch, cluster="1xcpu:1GiB", optimizer=module.configure_optimizers())
    assert (own.optimizer, own.worst.term("optimizer_bytes")) == ("SGD", 0)
    named = estimate_memory(module, batch, cluster="1xcpu:1GiB", optimizer="Adam")
    assert named == estimate_memory(module, batch, cluster="1xcpu:1GiB", optimizer=torch.optim.Adam)
    assert named.worst.term("optimizer_bytes") > 0
    module.automatic_optimization = False
    assert any("automatic_optimization is off" in note for note in estimate_memory(module, batch).notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module_or_spec": "llama"}, "module_or_spec = 'llama' is of type str: give a module, or what trace_model"),
        ({"plan": 3}, "plan = 3 is of type int: give a Plan, as plan_of makes one, or the path of a plan file"),
        ({"cluster": 8}, "cluster = 8 is of type int: give a Cluster, or text such as '1x8xL4'"),
        ({"optimizer": 3}, "optimizer = 3 is of type int: give an optimizer of the module, a class such as"),
        ({"optimizer": torch.nn.Linear}, "optimizer = <class .*Linear.* is of type type: give an optimizer"),
        ({"allocator": 5}, "allocator = 5 is of type int: give text such as 'expandable_segments:True'"),
    ],
)
def test_arguments_of_other_types_are_refused(changes, message):
    with pytest.raises(TypeError, match=message):
        estimate_memory(**{"module_or_spec": SPEC, **changes})


def test_a_name_that_is_no_optimizer_is_refused():
    with pytest.raises(ValueError, match="optimizer 'Adamm' is not a class"):
        estimate_memory(*make_net(), optimizer="Adamm")


def test_layers_are_split_for_the_degrees_of_the_plan():
    module, batch = make_wide()
    plan = plan_of(4, world_size=2, global_batch_size=8, tensor_parallel_degree=2)
    estimate = estimate_memory(module, batch, plan, "1x2xL4")
    whole = estimate_memory(module, batch, plan_of(4, world_size=1, global_batch_size=4), "1xL4")
    assert estimate.worst.term("parameter_bytes") < 0.6 * whole.worst.term("parameter_bytes")


def test_plans_come_from_files_too(tmp_path):
    plan = plan_of(8, world_size=4, global_batch_size=16)
    save(plan, tmp_path / "plan.json")
    assert estimate_memory(SPEC, None, tmp_path / "plan.json", FOUR).plan == plan


def test_plans_that_are_not_executed_are_noted():
    plan = plan_of(8, world_size=4, global_batch_size=2, pipeline_stages=4, num_microbatches=2)
    plan = replace(plan, data_parallel_size=None)
    assert any("such a plan is not executed" in note for note in estimate_memory(SPEC, None, plan, FOUR).notes)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("22 bananas", "memory_limit: '22 bananas' is not a size"),
        (0, "memory_limit = 0: it must be more than nothing and at most the 22.5 GiB of one L4"),
        (-5, "memory_limit: a size of -5 bytes"),
        ("40GiB", "memory_limit = 40GiB: it must be .* at most the 22.5 GiB of one L4"),
    ],
)
def test_nonsense_budgets_are_refused(limit, message):
    with pytest.raises(ValueError, match=message):
        estimate_memory(SPEC, None, None, "1xL4", memory_limit=limit)


def test_plans_for_something_else_are_refused():
    plan = plan_of(6, world_size=4, global_batch_size=16)
    with pytest.raises(PlanError, match="the plan has 6 layers, synthetic has 8"):
        estimate_memory(SPEC, None, plan, FOUR)
    with pytest.raises(PlanError, match="the plan has 2 devices, the cluster 4"):
        estimate_memory(SPEC, None, plan_of(8, world_size=2, global_batch_size=16), FOUR)
    plan = plan_of(8, world_size=4, global_batch_size=16, tensor_parallel_degree=4)
    with pytest.raises(PlanError, match="tensor_parallel_degree = 4: what that costs is not known"):
        estimate_memory(replace(SPEC, splits=()), None, plan, FOUR)


def test_modules_without_a_step_or_of_another_type_are_refused():
    with pytest.raises(ValueError, match="Linear has no training_step: give call="):
        estimate_memory(torch.nn.Linear(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"precision 'bf16-true' with parameters of torch.float32: .*module.to\("):
        estimate_memory(make_net()[0], torch.ones(2, 2), precision="bf16-true")
    with pytest.raises(ValueError, match="precision 'half': known precisions are"):
        estimate_memory(make_net()[0], torch.ones(2, 2), precision="half")


@pytest.mark.thorough
def test_what_cannot_be_traced_has_a_closed_form_where_it_says_its_sizes(monkeypatch):
    module = hollow(lambda: LanguageModel(SHAPE, 16))
    tokens = torch.zeros(4, 16, dtype=torch.long)
    traced = estimate_memory(module, (tokens, tokens.clone()))
    assert any("second opinion: each layer keeps" in note for note in traced.notes)

    def fails(*args, **kwargs):
        raise TraceError("aten.nonzero has no fake kernel")

    monkeypatch.setattr(estimate, "trace_model", fails)
    closed = estimate_memory(module, (tokens, tokens.clone()))
    assert closed.source == "closed form (aten.nonzero has no fake kernel)"
    assert closed.worst.term("parameter_bytes") == traced.worst.term("parameter_bytes")
    assert closed.worst.allocated.p50 == pytest.approx(traced.worst.allocated.p50, rel=0.1)
    wider = [found.worst.device_total.p95 / found.worst.device_total.p50 for found in (traced, closed)]
    assert wider[0] < wider[1]
    with pytest.raises(TraceError, match=r"aten.nonzero"):
        estimate_memory(*make_net())
