from dataclasses import replace

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import Exclusion, OffloadRatios, Plan, SequenceSplit, StageMesh, StagePlan, ZeroStage
from lightning_mist.plan.module_map import OFFLOADS
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.runtime.support import check_supported, executed_offload, unsupported
from tests.plan.test_mesh import make_map
from tests.plans import plan_of

STAGE = StagePlan(layers=(0, 2), mesh=StageMesh(devices=(0, 1), data_parallel_degree=2), microbatch_size=1)


def _plan(stage):
    rows = stage.microbatch_size * stage.data_parallel_degree
    return Plan(global_batch_size=rows, num_microbatches=1, stages=(stage,))


@pytest.mark.parametrize("zero_stage", ZeroStage)
def test_every_zero_stage_runs(zero_stage):
    check_supported(_plan(replace(STAGE, zero_stage=zero_stage)), make_map(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mesh": StageMesh(devices=(0, 1), tensor_parallel_degree=2)},
            r"stages\[0\]\.tensor_parallel_degree = 2: .*; use tensor_parallel_degree = 1",
        ),
        (
            {"mesh": StageMesh(devices=(0, 1), context_parallel_degree=2)},
            r"stages\[0\]\.context_parallel_degree = 2: .*; use context_parallel_degree = 1",
        ),
        (
            {"mesh": StageMesh(devices=(0, 1, 2, 3), context_parallel_degree=2, tensor_parallel_degree=2)},
            r"tensor_parallel_degree = 2 with context_parallel_degree = 2 .*; use 1 for one of them",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(change, message):
    with pytest.raises(PlanError, match=message):
        check_supported(_plan(replace(STAGE, **change)), make_map(2))


def test_tensor_and_sequence_parallelism_run_where_the_module_can_be_split():
    module_map = make_map(2, degrees=(2,))
    plan = _plan(replace(STAGE, mesh=StageMesh(devices=(0, 1), tensor_parallel_degree=2)))
    check_supported(plan, module_map)
    sequence = _plan(replace(STAGE, mesh=replace(plan.stages[0].mesh, sequence_parallel=True)))
    excluded = replace(module_map, exclusions=(Exclusion(feature="sequence", reason="no sequence"),))
    with pytest.raises(PlanError, match=r"stages\[0\]\.sequence_parallel = True: no sequence; use sequence_parallel=F"):
        check_supported(sequence, excluded)
    entries = tuple(SequenceSplit(position=index, leaf=0, dim=1) for index in range(2))
    split = replace(module_map.splits[0], sequence=entries)
    check_supported(sequence, replace(module_map, splits=(split,)))


def test_chunks_need_two_groups_of_devices():
    plan = plan_of(2, 2, {}, {}, groups=1, schedule="interleaved-1f1b")
    with pytest.raises(PlanError, match=r"'interleaved-1f1b' with 2 stages on one group of devices: .* at least 2"):
        check_supported(plan, make_map(2))


def test_what_is_not_executed_yet_is_named():
    assert unsupported(_plan(STAGE)) == ()
    assert unsupported(_plan(replace(STAGE, mesh=StageMesh(devices=(0, 1), context_parallel_degree=2)))) == ()
    both = replace(STAGE, mesh=StageMesh(devices=(0, 1, 2, 3), context_parallel_degree=2, tensor_parallel_degree=2))
    assert unsupported(_plan(both)) == ("context_parallel_degree with tensor_parallel_degree",)
    moved = replace(STAGE, offload=OffloadRatios(parameters=1.0, gradients=1.0, optimizer=0.5, activations=0.3))
    assert unsupported(_plan(moved)) == ()


def test_state_is_moved_where_layers_are_known():
    plan = _plan(replace(STAGE, offload=OffloadRatios(optimizer=0.5)))
    check_supported(plan, make_map(2))
    excluded = replace(make_map(2), exclusions=(Exclusion(feature="shards", reason="used between layers"),))
    with pytest.raises(PlanError, match=r"offload\.optimizer = 0\.5: used between layers; use offload\.optimizer = 0"):
        check_supported(plan, excluded)


@pytest.mark.parametrize("kind", OFFLOADS)
def test_what_has_to_stay_on_the_device_is_refused(kind):
    excluded = replace(make_map(2), exclusions=(Exclusion(feature=OFFLOADS[kind], reason="a hook reads it"),))
    for name in OFFLOADS:
        plan = _plan(replace(STAGE, offload=OffloadRatios(**{name: 0.5})))
        if OFFLOADS[name] == OFFLOADS[kind]:
            with pytest.raises(PlanError, match=rf"offload\.{name} = 0\.5: a hook reads it; use offload\.{name} = 0"):
                check_supported(plan, excluded)
        else:
            check_supported(plan, excluded)


def test_plans_to_be_executed_offload_where_that_frees_memory():
    assert executed_offload(None, "cuda", has_files=False) == (OFFLOADED, ())
    assert executed_offload(("optimizer",), "cuda", has_files=False) == (("optimizer",), ())
    assert executed_offload(None, "cpu", has_files=False) == ((), ())
    assert executed_offload(None, "cpu", has_files=True) == (("parameters", "optimizer"), ())
    kinds, (note,) = executed_offload(("optimizer", "activations"), "cpu", has_files=True)
    assert kinds == ("optimizer",)
    assert note.startswith("not offloaded: activations; a CPU's own memory is the host's")
    assert executed_offload(("optimizer",), "cpu", has_files=False)[1][0].startswith("not offloaded: optimizer; ")
