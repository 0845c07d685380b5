import itertools

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan, StageMesh, StagePlan, replica_ranks, row_slice
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.space import apply, divisors, rank_layout
from tests.specs import spec


def space(layers=4, devices=4, rows=4, *, exclusions=(), **search):
    return apply(SearchSpace(**search), spec(layers, exclusions=exclusions), devices, rows * devices)


def brute_force(layers, devices, rows):
    """Numbers of stages and microbatches for which some plan of data-parallel stages obeys every rule."""
    found = set()
    for num_stages in range(1, min(layers, devices) + 1):
        for degrees in itertools.product(divisors(devices), repeat=num_stages):
            if sum(degrees) != devices:
                continue
            for count in range(1, rows * devices + 1):
                if (rows * devices) % count == 0 and is_allowed(degrees, devices, rows, count):
                    found.add((num_stages, count))
    return found


def is_allowed(degrees, devices, rows, count):
    stages = []
    for index, (degree, ranks) in enumerate(zip(degrees, rank_layout(degrees), strict=True)):
        size, rest = divmod(rows * devices, degree * count)
        if rest:
            return False
        mesh = StageMesh(devices=ranks, data_parallel_degree=degree)
        stages.append(StagePlan(layers=(index, index + 1), mesh=mesh, microbatch_size=size))
    plan = Plan(global_batch_size=rows * devices, num_microbatches=count, stages=tuple(stages))
    try:
        slices = [row_slice(plan, rank, 0) for rank in range(devices)]
    except PlanError:
        return False
    return all(rows % item.parts == 0 for item in slices)


@pytest.mark.parametrize(("layers", "devices", "rows"), [(4, 4, 4), (3, 4, 6), (6, 6, 2), (2, 3, 4), (1, 4, 3)])
def test_pipelines_are_those_that_the_rules_of_plans_allow(layers, devices, rows):
    assert set(space(layers, devices, rows).pipelines()) == brute_force(layers, devices, rows)


def test_whole_batches_only():
    found = space(exclusions=[("microbatches", "a batch norm")])
    # Every microbatch is one rank's batch: as many as there are ranks in a replica.
    assert found.pipelines() == ((1, 1), (2, 2), (4, 4))
    assert found.notes == ("without cutting a batch into microbatches: a batch norm",)


def test_what_a_module_cannot_do_is_ruled_out_with_its_reason():
    found = space(exclusions=[("pipeline", "an .item()"), ("checkpointing", "side effects"), ("pipeline", "a loop")])
    assert {stages for stages, _ in found.pipelines()} == {1}
    assert not found.checkpointing
    assert found.notes == (
        "without several pipeline stages: an .item(); a loop",
        "without activation checkpointing: side effects",
    )


def test_a_module_without_blocks_is_data_parallel():
    found = space(0)
    assert found.pipelines() == ((1, 1), (1, 2), (1, 4))
    assert not found.checkpointing
    assert "no repeated blocks" in found.notes[0]


def test_limits_are_kept():
    found = space(8, 8, 4, max_stages=4, num_stages=(1, 4, 8), num_microbatches=(2, 4, 8), devices_per_stage=(2, 8))
    assert found.pipelines() == ((1, 2), (1, 4), (4, 4), (4, 8))
    assert found.degrees(4) == (2, 8)


def test_the_batch_must_be_a_multiple_of_the_devices():
    with pytest.raises(PlanError, match=r"global_batch_size = 10 on 4 devices.*use 8"):
        apply(SearchSpace(), spec(4), 4, 10)


@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ({"max_stages": 0}, "max_stages=0"),
        ({"num_stages": ()}, "num_stages"),
        ({"num_microbatches": (0,)}, "num_microbatches"),
        ({"zero_stages": (4,)}, "zero_stages"),
        ({"schedule": "zigzag"}, "known schedules are 1f1b, gpipe, interleaved-1f1b, zb-h1"),
        ({"solver_seconds": 0.0}, "solver_seconds"),
    ],
)
def test_wrong_limits_are_refused(argument, match):
    with pytest.raises(ValueError, match=match):
        SearchSpace(**argument)


@pytest.mark.parametrize("degrees", [(4,), (1, 1), (2, 2), (1, 2), (4, 2, 2), (6, 3, 3)])
def test_the_layout_keeps_replicas_together_and_the_last_stage_first(degrees):
    layout = rank_layout(degrees)
    assert sorted(rank for ranks in layout for rank in ranks) == list(range(sum(degrees)))
    assert layout[-1][0] == 0
    stages = tuple(
        StagePlan(
            layers=(index, index + 1),
            mesh=StageMesh(devices=ranks, data_parallel_degree=len(ranks)),
            microbatch_size=12 // len(ranks),
        )
        for index, ranks in enumerate(layout)
    )
    plan = Plan(global_batch_size=12, num_microbatches=1, stages=stages)
    for replica in range(plan.num_replicas):
        ranks = replica_ranks(plan, replica)
        assert ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
        assert [plan.stage_of(rank) for rank in ranks] == sorted((plan.stage_of(r) for r in ranks), reverse=True)


@pytest.mark.parametrize("degrees", [(2, 2), (1, 1, 2), (4,)])
def test_the_least_number_of_replicas_is_no_more_than_that_of_a_plan(degrees):
    found = space(4, 4, 4)
    for num_stages, count in found.pipelines():
        if num_stages == len(degrees) and all(degree in found.degrees(count) for degree in degrees):
            from math import gcd

            assert found.least_replicas(num_stages, count) <= gcd(*degrees)
