"""What a search has proven makes those with less memory shorter, and never changes their plans."""

from dataclasses import replace

import pytest

from lightning_mist.cost import profiles_of
from lightning_mist.errors import InfeasibleError
from lightning_mist.hardware import MixedCluster
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner.search import ProvenBounds
from tests.specs import cluster, profile, spec
from tests.tuner.instances import random_instance
from tests.tuner.searches import stages_of

MORE = 1.3
"""Times as much memory as an instance has, in which mostly something else is fastest."""


def asked_of(instance, planner, memory_limit):
    """The plan of an instance with some memory, how it was found, and how many pipelines were solved."""
    try:
        found = planner.tune(
            global_batch_size=instance.rows * instance.machine.world_size,
            memory_limit=memory_limit,
            search=replace(instance.search, schedules=("1f1b", "zb-h1")),
        )
    except InfeasibleError as error:
        return str(error), None, 0
    return found.plan, found.status, found.stats.solved


@pytest.mark.parametrize("seed", range(16))
def test_a_search_finds_the_same_plan_after_one_with_more_memory(seed):
    instance = random_instance(seed)
    planner, fresh = (Planner(instance.network, instance.machine, profile=instance.rates) for _ in range(2))
    most = min(part.device.memory_bytes for part in instance.machine.parts)
    asked_of(instance, planner, min(most, int(instance.memory_limit * MORE)))
    *after, solved = asked_of(instance, planner, instance.memory_limit)
    *alone, solved_alone = asked_of(instance, fresh, instance.memory_limit)
    assert after == alone
    assert solved <= solved_alone


@pytest.mark.parametrize("seed", range(8))
def test_tables_that_searches_on_unlike_devices_share_hold_with_any_memory(seed):
    instance = random_instance(seed, unlike=1.0)
    planner = Planner(instance.network, instance.machine, profile=instance.rates)
    most = min(part.device.memory_bytes for part in instance.machine.parts)
    limits = [min(most, int(instance.memory_limit * times)) for times in (1, MORE, 1 / MORE)]
    for limit in (*limits, limits[0]):
        fresh = Planner(instance.network, instance.machine, profile=instance.rates)
        assert asked_of(instance, planner, limit)[:2] == asked_of(instance, fresh, limit)[:2]


def test_some_searches_solve_fewer_pipelines_then():
    fewer = 0
    for seed in range(8):
        instance = random_instance(seed, unlike=0.0)
        planner = Planner(instance.network, instance.machine, profile=instance.rates)
        solved = [asked_of(instance, planner, instance.memory_limit)[2] for _ in range(2)]
        fewer += solved[1] < solved[0]
    assert fewer


def test_a_planner_with_other_memory_is_for_the_same_devices():
    planner = Planner(spec(4), cluster(4, kind="cuda"), profile=profile())
    less = planner.with_memory([10**7])
    asked = {"global_batch_size": 16, "search": SearchSpace(schedules=("1f1b",), offload=())}
    assert less.cluster == cluster(4, kind="cuda", memory=10**7)
    assert less.tune(**asked).plan == planner.tune(**asked, memory_limit=10**7).plan


def test_bounds_hold_with_as_much_memory_or_less_of_the_same_space():
    proven, stages = ProvenBounds(), stages_of(memory=10**7)
    proven.add(stages, {"some": 2.0, "other": 1.0})
    proven.add(stages_of(memory=10**6), {"some": 3.0})
    assert proven.of(stages) == {"some": 2.0, "other": 1.0}
    assert proven.of(stages_of(memory=10**6)) == {"some": 3.0, "other": 1.0}
    assert proven.of(stages_of(memory=10**7 + 1)) == {}
    assert proven.of(stages_of(memory=10**7, rows=8)) == {}


def test_a_planner_with_less_memory_in_one_part_keeps_what_is_proven():
    instance = next(item for item in map(random_instance, range(100)) if isinstance(item.machine, MixedCluster))
    planner = Planner(instance.network, instance.machine, profile=instance.rates)
    each = [part.device.memory_bytes for part in instance.machine.parts]
    less = planner.with_memory([each[0], each[1] // 2])
    assert [part.device.memory_bytes for part in less.cluster.parts] == [each[0], each[1] // 2]
    assert profiles_of(less.model) == profiles_of(planner.model)
    asked_of(instance, planner, None)
    fresh = Planner(instance.network, less.cluster, profile=instance.rates)
    after, alone = (asked_of(instance, item, None) for item in (less, fresh))
    assert after[:2] == alone[:2]
    assert after[2] <= alone[2]
