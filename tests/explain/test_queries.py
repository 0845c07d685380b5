from dataclasses import replace

import pytest

from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.explain.explanation import Version
from lightning_mist.explain.queries import Asker
from lightning_mist.explain.what_if import Machine
from lightning_mist.hardware import MixedCluster
from lightning_mist.tuner import Planner, SearchSpace
from tests.specs import cluster, profile, spec
from tests.tuner.plans import pipeline

SPACE = SearchSpace(offload=(), schedules=("1f1b",))
HERE = Machine(
    change="", cluster=cluster(2), profiles=(profile(),), memory_limit=10**9, host_memory_limit=None, is_other=False
)


def asker(**changes):
    planner = Planner(spec(6, measured=True), HERE.cluster, profile=HERE.profiles[0])
    values = {"deadline": float("inf"), "is_searching": True, "slowest": 1.0, **changes}
    return Asker(planner=planner, machine=HERE, global_batch_size=16, search=SPACE, **values)


def sharded(level):
    return pipeline({"layers": 6, "data": 2, "zero": level}, rows=8)


@pytest.mark.parametrize(
    ("asked", "level", "wanted", "is_known"),
    [
        ((0, 1, 2), 1, (0, 1), True),
        ((0, 1, 2), 2, (0, 1), False),  # it uses what is left out
        ((0, 1), 1, (0, 1, 2), False),  # the larger space may have a better one
        ((0, 1, 2), None, (0, 1), True),  # nothing fits in the larger space
    ],
)
def test_a_part_of_a_space_is_not_searched_if_its_best_plan_is_known(asked, level, wanted, is_known):
    asking = asker()
    known = Version(plan=None if level is None else sharded(level), reason="" if level else "nothing fits")
    asking.answers.append((replace(SPACE, zero_stages=asked), known))
    found = asking.best("a plan", replace(SPACE, zero_stages=wanted))
    assert (found is known) is is_known


def test_what_is_not_proven_is_searched_again():
    asking = asker()
    asking.answers.append((SPACE, Version(plan=sharded(0), proven=False)))
    found = asking.best("a plan", SPACE)
    assert found.proven
    again = asking.planner.tune(global_batch_size=16, memory_limit=10**9, search=SPACE)
    assert found.plan == again.plan
    assert asking.best("a plan", SPACE) is found


def test_other_spaces_are_searched():
    asking = asker()
    asking.answers.append((SPACE, Version(plan=sharded(0))))
    assert asking.best("a plan", replace(SPACE, num_stages=(2,))).plan.num_stages == 2


def test_nothing_is_asked_without_time_or_when_it_is_up():
    assert asker(is_searching=False).best("a plan", SPACE) is None
    late = asker(deadline=0.0)
    assert late.best("a plan", SPACE) is None
    assert late.unsearched == ["a plan"]


def test_what_does_not_exist_has_a_reason():
    asking = asker()
    asking.machine = replace(HERE, memory_limit=1000)
    found = asking.best("a plan", SPACE)
    assert found.plan is None
    assert found.reason.startswith("no plan fits")


def test_what_cannot_be_asked_is_left_out():
    asking = asker()
    unlike = MixedCluster(parts=(cluster(1), cluster(1, memory=5)))
    other = replace(HERE, change="unlike", cluster=unlike, profiles=(profile(), profile()), is_other=True)
    assert asking.best_on(other) is None
    assert asking.left_out[0].startswith("unlike: synthetic with measured seconds on")
    assert asking.predicted(sharded(0), other).reason.startswith("synthetic with measured seconds on")


def test_a_plan_that_lacks_memory_says_how_much():
    asking, plan = asker(), sharded(0)
    peak = asking.predicted(plan).plan.predicted.stages[0].peak_bytes
    asking.machine = replace(HERE, memory_limit=peak - 7)
    assert asking.predicted(plan).missing_bytes == 7


def test_plans_that_offload_more_than_hosts_have_lack_host_memory():
    asking, plan = asker(), pipeline({"layers": 6, "data": 2, "offload": {"optimizer": 1.0}}, rows=8)
    assert asking.predicted(plan).missing_host_bytes == 0  # nothing is known of the hosts
    held = max(memory.host_bytes for memory in plan_memory(asking.planner.model.memory, plan))
    limited = replace(asking.machine, host_memory_limit=2 * held - 2)
    assert asking.predicted(plan, limited).missing_host_bytes == 1
    known = replace(asking.machine.cluster, host_memory_bytes=1)
    assert asking.predicted(plan, replace(asking.machine, cluster=known)).missing_host_bytes == held
    assert asking.predicted(sharded(0), limited).missing_host_bytes == 0
