from types import SimpleNamespace

import pytest
import torch

from lightning_mist.errors import PlanError
from lightning_mist.plan import Exclusion, ModuleMap, Plan, StageMesh, StagePlan
from lightning_mist.strategy import planning
from lightning_mist.strategy.planning import _refuse_unsafe_cuts


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
    monkeypatch.setattr(planning, "on_rank_zero", lambda work: work())
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
    proves = SimpleNamespace(batch=batch, with_invariance=lambda found: (asked.append(found), found)[1])
    _refuse_unsafe_cuts(proves, empty, pipeline(degrees, microbatches))
    assert bool(asked) == is_cut
    planner = SimpleNamespace(batch=batch, with_invariance=lambda found: excluding)
    if not is_cut:
        _refuse_unsafe_cuts(planner, empty, pipeline(degrees, microbatches))
        return
    with pytest.raises(PlanError, match=r"into up to \d parts, but its loss is a sum. Use a plan"):
        _refuse_unsafe_cuts(planner, empty, pipeline(degrees, microbatches))
