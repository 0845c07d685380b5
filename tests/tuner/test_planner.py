from dataclasses import replace

import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.errors import InfeasibleError, PlanError
from lightning_mist.hardware import parse_cluster
from lightning_mist.model.spec.polynomial import MICROBATCH
from lightning_mist.tuner import Planner, SearchSpace, tune, unshared
from lightning_mist.tuner.infeasible import UndecidedError
from lightning_mist.tuner.options import OPTIONS
from tests.plans import plan_of
from tests.specs import cluster, profile, spec

ALIKE = spec(6, tied=True, measured=True)


def test_asked_again_a_planner_answers_as_a_new_one():
    planner, asked = Planner(ALIKE, cluster(4), profile=profile()), list[tuple[int, int]]()
    for limit, rows in ((10**7, 4), (10**6, 4), (10**6, 8), (8 * 10**5, 8), (10**6, 4)):
        again = planner.tune(global_batch_size=4 * rows, memory_limit=limit, search=SearchSpace())
        fresh = tune(ALIKE, cluster(4), profile=profile(), global_batch_size=4 * rows, memory_limit=limit)
        assert replace(again, stats=fresh.stats) == fresh
        assert 0 < again.stats.candidates <= fresh.stats.candidates
        # What is proven of as much memory or more need not be looked at again.
        if not any(other == rows and most >= limit for most, other in asked):
            assert again.stats.candidates == fresh.stats.candidates
        asked.append((limit, rows))


def test_networks_of_more_layers_than_tables_can_have_are_refused():
    with pytest.raises(PlanError, match=r"10,000 layers: plans are searched for at most 2,000; put several in one"):
        Planner(replace(spec(4), kinds=spec(4).kinds[:1] * 10_000), cluster(2), profile=profile())


def test_zero_stages_that_a_plan_has_nothing_for_are_named():
    uneven = plan_of(8, 1, {"data": 2, "zero": 3}, {}, {"context": 2, "zero": 3}, {})
    (said,) = unshared(uneven, SearchSpace(zero_stages=(2, 3)))
    assert said.startswith("zero_stages = (2, 3): ZeRO shares nothing out on these stages of the plan: 1, 3. ")
    assert unshared(uneven, SearchSpace()) == ()
    assert unshared(plan_of(8, 1, {"data": 2, "zero": 3}), SearchSpace(zero_stages=(3,))) == ()
    only = SearchSpace(zero_stages=(3,), num_stages=(4,))
    assert unshared(found := tune(ALIKE, cluster(4), profile=profile(), global_batch_size=16, search=only).plan, only)
    assert found.num_stages == 4


def test_host_memory_is_not_negative():
    with pytest.raises(ValueError, match="host_memory_limit=-1: bytes of host memory of a node are not negative"):
        tune(ALIKE, cluster(4), profile=profile(), global_batch_size=16, host_memory_limit=-1)


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


def test_what_hosts_have_limits_what_is_offloaded():
    machine, kinds = parse_cluster("1x4xL4"), ("parameters", "gradients", "optimizer", "activations")
    space = SearchSpace(offload=kinds, offload_ratios=(0.0, 0.5, 1.0))
    asked = {"global_batch_size": 16, "memory_limit": 800_000, "search": space}
    roomy = Planner(spec(4), machine).tune(**asked)
    told = "host_memory_limit is 307.2 GiB per node, 80% of the catalog's 384.0 GiB of a node of 4 L4: "
    assert any(note.startswith(told) for note in roomy.notes)
    held = _host_bytes(machine, roomy.plan)
    assert held > 0
    small = replace(machine, host_memory_bytes=4 * held)
    found = Planner(spec(4), small).tune(**asked)
    assert _host_bytes(machine, found.plan) <= 0.8 * held
    limited = Planner(spec(4), machine).tune(**asked, host_memory_limit=int(0.8 * 4 * held))
    assert (found.plan, found.bound) == (limited.plan, limited.bound)
    assert found.bound > roomy.bound
    assert any(note.startswith("host_memory_limit is") for note in found.notes)
    nothing = Planner(spec(4), machine).tune(global_batch_size=16, search=SearchSpace(offload=()))
    for notes in (limited.notes, nothing.notes):
        assert not any("host_memory_limit" in note for note in notes)


def _host_bytes(machine, plan):
    return max(memory.host_bytes for memory in plan_memory(StageCostModel(spec(4), None, machine).memory, plan))


BATCHES = replace(spec(4, measured=True), batch_bytes=1_000_000 * MICROBATCH)
"""Rows of a megabyte each, so that it matters how many ranks' batches a rank has."""


def test_what_fits_only_in_several_copies_is_found():
    planner, asked = Planner(BATCHES, cluster(4), profile=profile()), {"schedules": ("1f1b",), "num_stages": (2,)}
    pinned = SearchSpace(**asked, data_parallel_degrees=(2,))
    roomy = planner.tune(global_batch_size=32, memory_limit=10**10, search=pinned)
    limit = max(stage.peak_bytes for stage in roomy.predicted.stages)
    found = planner.tune(global_batch_size=32, memory_limit=limit, search=SearchSpace(**asked))
    assert found.plan.num_replicas == 2
    assert max(stage.peak_bytes for stage in found.predicted.stages) <= limit
    assert found.bound == pytest.approx(planner.tune(global_batch_size=32, memory_limit=limit, search=pinned).bound)
    assert any("several" in note for note in found.notes)
    assert not found.certified
    # Where a slower plan fits without, it is not taken for the best.
    asked["num_stages"] = (1, 2, 3)
    found = planner.tune(global_batch_size=32, memory_limit=limit, search=SearchSpace(**asked))
    best = planner.tune(global_batch_size=32, memory_limit=limit, search=replace(pinned, num_stages=(1, 2, 3)))
    assert found.bound <= best.bound * (1 + 1e-9)
    with pytest.raises(InfeasibleError, match=r"no plan fits.*Raise memory_limit to \d"):
        planner.tune(global_batch_size=32, memory_limit=limit // 4, search=SearchSpace(**asked))


@pytest.mark.parametrize("place", ["1x4xL4", "1x2xL4+1x2xT4"])
def test_a_search_cut_short_does_not_say_that_nothing_fits(monkeypatch, place):
    monkeypatch.setattr(OPTIONS, "first_seconds", 0.0)
    planner = Planner(spec(4), parse_cluster(place))
    asked = {"global_batch_size": 16, "memory_limit": 1000}
    with pytest.raises(UndecidedError, match="no plan was found in solver_seconds=1e-09, and not everything"):
        planner.tune(**asked, search=SearchSpace(solver_seconds=1e-9))
    with pytest.raises(InfeasibleError, match="no plan fits"):
        planner.tune(**asked)


@pytest.mark.parametrize(
    ("measured", "note"),
    [
        (True, "seconds of layers are measured, blocks 0-3 compiled"),
        (False, "blocks 0-3 compiled: their kernels are priced as --stack says, which is eagerly unless asked for"),
    ],
)
def test_a_plan_says_which_blocks_are_compiled(measured, note):
    network = replace(spec(4, measured=measured), compiled="blocks 0-3 compiled")
    assert note in tune(network, cluster(2), profile=profile(), global_batch_size=4).notes
