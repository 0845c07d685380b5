import pytest

from lightning_mist.hardware import parse_cluster
from lightning_mist.tuner import Planner, SearchSpace, tune
from tests.specs import cluster, profile, spec

ALIKE = spec(6, tied=True, measured=True)


def test_asked_again_a_planner_answers_as_a_new_one():
    planner = Planner(ALIKE, cluster(4), profile=profile())
    for limit, rows in ((10**7, 4), (10**6, 4), (10**6, 8), (8 * 10**5, 8)):
        again = planner.tune(global_batch_size=4 * rows, memory_limit=limit, search=SearchSpace())
        fresh = tune(ALIKE, cluster(4), profile=profile(), global_batch_size=4 * rows, memory_limit=limit)
        assert again.plan == fresh.plan
        assert (again.bound, again.status) == (fresh.bound, fresh.status)


def test_host_memory_is_not_negative():
    with pytest.raises(ValueError, match="host_memory_limit=-1: bytes of host memory of a node are not negative"):
        tune(ALIKE, cluster(4), profile=profile(), global_batch_size=16, host_memory_limit=-1)


def test_other_numbers_of_stages_and_microbatches_are_answered_from_what_is_known():
    planner = Planner(ALIKE, cluster(4), profile=profile())
    space = SearchSpace(schedules=("1f1b",))
    asked = {"global_batch_size": 16, "memory_limit": 10**9}
    first = planner.tune(**asked, search=space)
    assert first.stats.candidates > 0
    for limits in (
        {"num_stages": (first.plan.num_stages,)},
        {"num_microbatches": (first.plan.num_microbatches,)},
        {"solver_seconds": 30.0},
        {"schedules": ("1f1b", "zb-h1")},
    ):
        again = planner.tune(**asked, search=SearchSpace(**{"schedules": ("1f1b",), **limits}))
        assert again.stats.candidates == 0


def test_what_may_be_in_host_memory_makes_plans_faster_or_possible():
    planner = Planner(spec(4), parse_cluster("1x4xL4"))
    kinds = ("parameters", "gradients", "optimizer", "activations")
    asked = {"global_batch_size": 16, "memory_limit": 800_000}
    spaces = [SearchSpace(offload=offload, offload_ratios=(0.0, 0.5, 1.0)) for offload in ((), kinds[2:3], kinds)]
    found = [planner.tune(**asked, search=space) for space in spaces]
    bounds = [item.bound for item in found]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < bounds[0]
    assert any(stage.offload.any for stage in found[-1].plan.stages)
    assert {item.status for item in found} <= {"optimal", "explored"}
    least = planner.tune(**asked, host_memory_limit=0, search=spaces[-1])
    assert not any(stage.offload.any for stage in least.plan.stages)
    assert least.bound == bounds[0]
