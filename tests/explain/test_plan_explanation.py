from dataclasses import replace

import pytest

from lightning_mist.cost import predict, predict_with, stage_memory
from lightning_mist.explain.explanation import closed_form_of, kind_of
from lightning_mist.explain.plan_explanation import _remember, explain_plan
from lightning_mist.explain.queries import Asker
from lightning_mist.hardware import MixedCluster
from lightning_mist.plan.changes import TECHNIQUES
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.select.selection import Alternative
from tests.specs import cluster, profile, spec
from tests.tuner.plans import pipeline

NETWORK = spec(6, measured=True, widths=(4000,))
SPACE = SearchSpace(offload=(), schedules=("1f1b",))
TIGHT = 1_200_000
"""Bytes with which the network needs both a pipeline and recomputation."""


def explained(network=NETWORK, *, devices=2, rows=8, memory=TIGHT, search=SPACE, seconds=60.0, machine=None):
    planner = Planner(network, cluster(devices), profile=machine or profile())
    asked = {"global_batch_size": rows * devices, "memory_limit": memory, "search": search}
    result = planner.tune(**asked)
    return planner, result, explain_plan(planner, result, **asked, seconds=seconds)


def test_every_technique_that_the_plan_uses_is_explained_and_no_other():
    _, result, found = explained()
    used = [technique.name for technique in TECHNIQUES if technique.use(result.plan)]
    assert [item.name for item in found.techniques] == used
    assert "activation checkpointing" in used
    _, roomy, free = explained(memory=10**9)
    assert not any(stage.checkpointing.layers for stage in roomy.plan.stages)
    assert "activation checkpointing" not in [item.name for item in free.techniques]


def test_the_plan_without_a_technique_is_predicted_as_by_hand():
    planner, result, found = explained()
    by_name = {item.name: item for item in found.techniques}
    item = by_name["activation checkpointing"]
    bare = replace(
        result.plan,
        predicted=None,
        stages=tuple(
            replace(stage, checkpointing=replace(stage.checkpointing, layers=0)) for stage in result.plan.stages
        ),
    )
    expected = predict(NETWORK, planner.profile, planner.cluster, bare)
    assert item.switched_off.plan.predicted == expected
    assert item.switched_off.missing_bytes == max(stage.peak_bytes for stage in expected.stages) - TIGHT > 0


def test_the_best_plan_without_a_technique_is_that_of_a_search_without_it():
    planner, result, found = explained()
    item = next(item for item in found.techniques if item.name == "activation checkpointing")
    again = planner.tune(global_batch_size=16, memory_limit=TIGHT, search=replace(SPACE, checkpointing=False))
    assert item.best_without.seconds == again.predicted.step_seconds > result.predicted.step_seconds
    assert item.best_without.fits


def test_a_technique_without_which_nothing_fits_is_so_explained():
    _, _, found = explained(memory=950_000)
    item = next(item for item in found.techniques if item.name == "activation checkpointing")
    assert item.best_without.plan is None
    assert item.best_without.reason.startswith("no plan fits. The least that any plan needs is")


def test_other_plans_are_of_other_kinds_fit_and_come_fastest_first():
    _, result, found = explained()
    kinds = [kind_of(result.plan), *(kind_of(item.plan) for item in found.others)]
    assert len(set(kinds)) == len(kinds) > 1
    seconds = [item.plan.predicted.step_seconds for item in found.others]
    assert seconds == sorted(seconds)
    assert all(stage.peak_bytes <= TIGHT for item in found.others for stage in item.plan.predicted.stages)
    assert all(item.differences for item in found.others)


def test_more_memory_buys_what_a_search_with_it_finds():
    planner, result, found = explained()
    item = found.what_ifs[0]
    assert item.change == "1.0 GiB more memory per device"
    again = planner.tune(global_batch_size=16, memory_limit=TIGHT + 2**30, search=SPACE)
    assert item.best.seconds == again.predicted.step_seconds < result.predicted.step_seconds
    assert item.same_plan.seconds == result.predicted.step_seconds


def test_a_faster_link_is_predicted_for_the_same_plan_and_searched_for():
    planner, result, found = explained()
    item = next(item for item in found.what_ifs if "between the devices of a node" in item.change)
    faster = replace(
        planner.profile,
        collectives=tuple(replace(cost, bytes_per_second=2e8) for cost in planner.profile.collectives),
    )
    other = Planner(NETWORK, planner.cluster, profile=faster)
    assert item.same_plan.plan.predicted == predict_with(other.model, replace(result.plan, predicted=None))
    again = other.tune(global_batch_size=16, memory_limit=TIGHT, search=SPACE)
    assert item.best.seconds == again.predicted.step_seconds


def test_a_plan_of_one_stage_is_proven_best_only_where_the_search_proves_it():
    planner, result, _ = explained(seconds=0)
    alone = planner.tune(global_batch_size=16, search=replace(SPACE, num_stages=(1,))).plan
    result = replace(result, alternatives=(Alternative(name="1 stage", plan=alone),))
    assert (result.plan.num_stages, result.status) == (2, "optimal")

    def known(search=SPACE, **changes):
        asker = Asker(
            planner=planner,
            machine=None,
            global_batch_size=16,
            search=search,
            deadline=0.0,
            is_searching=True,
            slowest=0.0,
        )
        _remember(asker, replace(result, **changes))
        return [version.plan for _, version in asker.answers]

    seconds = closed_form_of(alone)
    assert known(bound=seconds / 1.2) == [alone]
    assert known(bound=seconds / 1.3) == []
    assert known(bound=seconds / 1.2, status="time limit") == []
    assert known(bound=seconds / 1.2, search=replace(SPACE, offload=("optimizer",))) == []


def test_without_time_only_what_needs_no_search_is_said():
    _, result, found = explained(seconds=0)
    assert found.findings
    assert [item.name for item in found.techniques] == [item.name for item in TECHNIQUES if item.use(result.plan)]
    assert all(item.best_without is None for item in found.techniques)
    assert not found.what_ifs
    assert not found.left_out
    assert not found.unsearched


def test_what_there_was_no_time_for_is_listed():
    _, result, found = explained(seconds=1e-9)
    assert all(item.best_without is None for item in found.techniques)
    for item in found.techniques:
        assert f"the best plan without {item.name}" in found.unsearched
    assert "1.0 GiB more memory per device" in found.unsearched
    assert all(item.best is None for item in found.what_ifs)
    assert [kind_of(item.plan) for item in found.others] != [kind_of(result.plan)]


def test_a_measured_machine_says_why_it_does_not_grow():
    assert "more devices: how a larger machine communicates was not measured" in explained()[2].left_out


def test_a_technique_that_is_insisted_on_has_no_best_plan_without_it():
    _, _, found = explained(search=replace(SPACE, num_stages=(2,)))
    pipeline = next(item for item in found.techniques if item.name == "pipeline stages")
    assert pipeline.best_without is None
    assert pipeline.switched_off.plan.num_stages == 1


def test_host_memory_counts_too():
    planner, result, _ = explained(seconds=0)
    stages = [{"layers": 3, "offload": {"activations": 0.5}}] * 2
    plan = pipeline(*stages, microbatches=8, rows=8)
    plan = replace(plan, predicted=predict_with(planner.model, plan))
    limit = 1_000
    asked = {"global_batch_size": 16, "host_memory_limit": 2 * limit, "search": SPACE}
    found = explain_plan(planner, replace(result, plan=plan), **asked, seconds=0)
    off = next(item.switched_off for item in found.techniques if item.name == "pipeline stages")
    need = stage_memory(NETWORK, off.plan)[0].host_bytes
    assert off.missing_host_bytes == need - limit > 0
    assert not off.fits
    assert [item.value("host_limit_bytes") for item in found.findings if item.limit == "host memory"] == [limit] * 2


def test_settled_cuts_are_kept_to():
    _, result, found = explained(search=replace(SPACE, layer_cuts=(2,)))
    assert result.plan.bounds == ((0, 2), (2, 6))
    by_name = {item.name: item for item in found.techniques}
    assert by_name["uneven stages"].switched_off.plan.bounds == ((0, 3), (3, 6))
    assert by_name["uneven stages"].best_without is None
    assert {item.plan.bounds for item in found.others} <= {result.plan.bounds}


def test_less_than_no_time_is_refused():
    with pytest.raises(ValueError, match="seconds=-1: explaining takes some time"):
        explained(seconds=-1)


def test_stages_on_unlike_devices_each_have_their_own_limit():
    network, fast = spec(4, widths=(4000,)), profile(flops_per_second=4e10, bytes_per_second=4e9)
    place = MixedCluster(parts=(cluster(1, memory=10**6, kind="cuda"), cluster(1, memory=2 * 10**6, kind="cuda")))
    planner = Planner(network, place, profile=(profile(), fast))
    asked = {"global_batch_size": 16, "search": SPACE}
    result = planner.tune(**asked)
    found = explain_plan(planner, result, **asked, seconds=60)
    parts = [place.part_of(stage.devices[0]) for stage in result.plan.stages]
    assert sorted(parts) == [0, 1]
    assert found.limits == tuple(0.8 * (1 + part) * 10**6 for part in parts)
    more, faster = found.what_ifs[0], found.what_ifs[1]
    assert more.change == "1.0 GiB more memory per device"
    grown = replace(place, parts=tuple(cluster(1, memory=n * 10**6 + 2**30, kind="cuda") for n in (1, 2)))
    again = Planner(network, grown, profile=(profile(), fast)).tune(**asked)
    assert more.best.seconds == again.predicted.step_seconds
    assert faster.best is not None
