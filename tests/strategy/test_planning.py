from types import SimpleNamespace

import pytest
import torch

from lightning_mist.errors import PlanError
from lightning_mist.plan import Checkpointing, Exclusion, ModuleMap, Plan, StageMesh, StagePlan, ZeroStage
from lightning_mist.strategy import planning
from lightning_mist.strategy.planning import _refuse_sharding, _refuse_unsafe_cuts


def test_sharding_is_refused_where_ranks_must_hold_everything():
    _refuse_sharding(plan(zero=0), "LBFGS")
    _refuse_sharding(plan(zero=1), None)
    with pytest.raises(PlanError, match=r"zero_stage of \[1\], but LBFGS"):
        _refuse_sharding(plan(zero=1), "LBFGS")


def plan(*, devices=(0, 1), microbatches=1, zero=0, checkpointed=0, stages=1, tp=1):
    per_stage = len(devices) // stages
    return Plan(
        global_batch_size=8,
        num_microbatches=microbatches,
        stages=tuple(
            StagePlan(
                layers=(2 * index, 2 * index + 2),
                mesh=StageMesh(
                    devices=devices[index * per_stage : (index + 1) * per_stage],
                    data_parallel_degree=per_stage // tp,
                    tensor_parallel_degree=tp,
                ),
                microbatch_size=8 // (microbatches * per_stage // tp),
                zero_stage=ZeroStage(zero),
                checkpointing=Checkpointing(layers=checkpointed),
            )
            for index in range(stages)
        ),
    )


def pipeline(degrees, microbatches):
    """Stages of one layer with these data-parallel degrees, for batches of 8 rows per rank."""
    world = sum(degrees)
    return Plan(
        global_batch_size=8 * world,
        num_microbatches=microbatches,
        stages=tuple(
            StagePlan(
                layers=(index, index + 1),
                mesh=StageMesh(
                    devices=tuple(range(sum(degrees[:index]), sum(degrees[: index + 1]))), data_parallel_degree=degree
                ),
                microbatch_size=8 * world // (microbatches * degree),
            )
            for index, degree in enumerate(degrees)
        ),
    )


@pytest.mark.parametrize(
    ("degrees", "microbatches", "is_cut"),
    [((1, 1), 2, False), ((1, 1), 4, True), ((2,), 1, False), ((1, 2), 3, True), ((2, 1), 3, True)],
)
@pytest.mark.parametrize("rows", [8, 4, None])
def test_given_plans_may_cut_batches_only_where_that_changes_nothing(monkeypatch, degrees, microbatches, is_cut, rows):
    """Also where only some stages cut them, and on ranks whose own batch has other sizes than the plan's."""
    asked = []
    monkeypatch.setattr(planning, "on_rank_zero", lambda work: (asked.append(work), work()))
    empty = ModuleMap(step="training_step", blocks=(), outputs=(), cuts=(), parameters=())
    excluding = ModuleMap(
        step="training_step",
        blocks=(),
        outputs=(),
        cuts=(),
        parameters=(),
        exclusions=(Exclusion(feature="microbatches", reason="its loss is a sum"),),
    )
    batch = torch.zeros(()) if rows is None else torch.zeros(rows)
    _refuse_unsafe_cuts(
        SimpleNamespace(batch=batch, with_invariance=lambda found: found), empty, pipeline(degrees, microbatches)
    )
    assert bool(asked) == is_cut
    planner = SimpleNamespace(batch=batch, with_invariance=lambda found: excluding)
    if not is_cut:
        _refuse_unsafe_cuts(planner, empty, pipeline(degrees, microbatches))
        return
    with pytest.raises(PlanError, match=r"into up to \d parts, but its loss is a sum. Use a plan"):
        _refuse_unsafe_cuts(planner, empty, pipeline(degrees, microbatches))
