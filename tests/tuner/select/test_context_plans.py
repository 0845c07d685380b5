from dataclasses import replace

import pytest

from lightning_mist.cost import seconds_with
from lightning_mist.errors import InfeasibleError
from lightning_mist.hardware import MixedCluster
from lightning_mist.plan import SearchSpace, TensorSplit
from lightning_mist.plan.grid import plan_of
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.select.equal_stages import fastest_with_context
from lightning_mist.tuner.select.schedule_variants import PlanRoom
from tests.cost.inputs.test_context_parallel import sequences
from tests.specs import cluster, profile

ROWS = 4
SEARCH = SearchSpace(context_parallel_degrees=(2, 4), offload=(), schedules=("1f1b",))


def network(*degrees, length=4096):
    found = sequences(4, length)
    contexts = tuple(TensorSplit(degree=degree, parameters=()) for degree in degrees)
    return replace(found, module_map=replace(found.module_map, contexts=contexts))


def planner(*degrees):
    return Planner(network(*degrees), cluster(4), profile=profile(link=1e9))


def stages(limit=10**12, search=SEARCH, degrees=(2, 4)):
    made = planner(*degrees)
    found = made.stages(made.space(ROWS, search)).together
    found.memory_limit = limit
    return found


def of_grid(limit):
    """The least seconds of all plans that fit and are alike, one by one."""
    found, fits = [], PlanRoom.of(stages(limit)).fits
    for context in (2, 4):
        for count in (1, 2):
            data = 4 // (context * count)
            for parts in (4, 2, 1) if data else ():
                if parts * data % 4 == 0 and ROWS % (parts * data) == 0:
                    plans = [
                        plan_of(
                            4, world_size=4, global_batch_size=ROWS, pipeline_stages=count, zero_stage=zero,
                            context_parallel_degree=context, num_microbatches=parts, checkpointed_layers=recomputed,
                        )
                        for zero in range(4)
                        for recomputed in range(4 // count + 1)
                    ]  # fmt: skip
                    found += [seconds_with(stages().model, plan) for plan in plans if fits(plan)]
    return min(found, default=None)


@pytest.mark.parametrize("limit", [10**12, 5 * 10**7, 3 * 10**7])
def test_it_is_the_fastest_of_equal_stages_that_share_rows(limit):
    plan, least = fastest_with_context(stages(limit)), of_grid(limit)
    if least is None:
        assert plan is None
        return
    assert plan.predicted.step_seconds == pytest.approx(least, rel=1e-9)
    assert {stage.mesh.context_parallel_degree for stage in plan.stages} <= {2, 4}


def test_only_degrees_that_the_module_allows_are_tried():
    plan = fastest_with_context(stages(degrees=(2,)))
    assert {stage.mesh.context_parallel_degree for stage in plan.stages} == {2}
    assert fastest_with_context(stages(degrees=())) is None
    notes = planner(2).tune(global_batch_size=ROWS, search=SEARCH).notes
    assert any("without context_parallel_degree 4: it was not shown" in note for note in notes)


def test_unasked_all_degrees_are_tried_that_are_known():
    search = replace(SEARCH, context_parallel_degrees=None)
    assert fastest_with_context(stages(search=search)) == fastest_with_context(stages())
    made = planner(2, 4)
    assert (
        made.tune(global_batch_size=ROWS, search=search).plan == made.tune(global_batch_size=ROWS, search=SEARCH).plan
    )
    assert not any("context_parallel" in note for note in planner().tune(global_batch_size=ROWS, search=search).notes)


@pytest.mark.parametrize(("known", "asked", "said"), [((2,), None, 1), ((), (2,), 1), ((2,), (), 0), ((), None, 0)])
def test_on_unlike_devices_it_is_said_that_it_is_not_tried(known, asked, said):
    machine = MixedCluster(parts=(cluster(2), cluster(2)))
    made = Planner(network(*known), machine, profile=(profile(link=1e9),) * 2)
    notes = made.tune(global_batch_size=ROWS, search=replace(SEARCH, context_parallel_degrees=asked)).notes
    assert sum("without context parallelism: it is not tried on devices" in note for note in notes) == said


def test_a_search_takes_it_where_it_is_faster_or_alone_fits():
    made, plain = planner(2, 4), replace(SEARCH, context_parallel_degrees=())
    alone = made.tune(global_batch_size=ROWS, search=plain)
    assert not any(stage.mesh.context_parallel_degree > 1 for stage in alone.plan.stages)
    found = made.tune(global_batch_size=ROWS, search=SEARCH)
    context = fastest_with_context(made.stages(made.space(ROWS, SEARCH)))
    assert found.predicted.step_seconds == min(alone.predicted.step_seconds, context.predicted.step_seconds)
    assert any("context parallelism" in item.name for item in found.alternatives)


def test_a_search_takes_it_where_it_alone_fits():
    made, search = planner(2, 4), replace(SEARCH, num_stages=(1,), checkpointing=False, zero_stages=(3,))
    plain = replace(search, context_parallel_degrees=())
    context = fastest_with_context(made.stages(made.space(ROWS, search)))
    limit = int(1.05 * max(stage.peak_bytes for stage in context.predicted.stages) / 0.8)
    with pytest.raises(InfeasibleError):
        made.tune(global_batch_size=ROWS, search=plain, memory_limit=limit)
    scarce = made.tune(global_batch_size=ROWS, search=search, memory_limit=limit)
    assert (scarce.status, scarce.bound) == ("explored", 0.0)
    assert "without context parallelism nothing fits" in scarce.notes
    assert any(stage.mesh.context_parallel_degree > 1 for stage in scarce.plan.stages)


def test_one_device_shares_nothing():
    with pytest.raises(ValueError, match=r"context_parallel_degrees=\(1,\): at least 2 devices share a row"):
        SearchSpace(context_parallel_degrees=(1,))
