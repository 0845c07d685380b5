from dataclasses import replace

import pytest

from lightning_mist.cost import predict, predict_with, stage_memory
from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.explain.explanation import Finding, TechniqueValue, Version, kind_of
from lightning_mist.explain.plan_explanation import Asker, explain_plan, main_reasons
from lightning_mist.explain.what_if import Machine
from lightning_mist.hardware import MixedCluster
from lightning_mist.plan.changes import TECHNIQUES
from lightning_mist.tuner import Planner, SearchSpace
from tests.explain.test_explain_text import STEP, explanation, plan, version
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


def test_the_best_of_a_space_is_what_a_search_of_it_finds():
    asking = asker()
    found = asking.best("a plan", SPACE)
    assert found.proven
    again = asking.planner.tune(global_batch_size=16, memory_limit=10**9, search=SPACE)
    assert found.plan == again.plan
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


NETWORK = spec(6, measured=True, widths=(4000,))
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
    expected = predict(NETWORK, planner.model.profile, planner.cluster, bare)
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
        planner.model.profile,
        collectives=tuple(replace(cost, bytes_per_second=2e8) for cost in planner.model.profile.collectives),
    )
    other = Planner(NETWORK, planner.cluster, profile=faster)
    assert item.same_plan.plan.predicted == predict_with(other.model, replace(result.plan, predicted=None))
    again = other.tune(global_batch_size=16, memory_limit=TIGHT, search=SPACE)
    assert item.best.seconds == again.predicted.step_seconds


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


def technique(name, switched_off):
    return TechniqueValue(name=name, meaning="m", use="u", switched_off=switched_off)


def lacking(size):
    return Version(plan=plan(STEP), missing_bytes=size)


def limit(kind, text, **values):
    return Finding(stage=0, limit=kind, binds=True, values=tuple(values.items()), text=text)


def made(techniques=(), findings=()):
    return replace(explanation(), techniques=tuple(techniques), findings=tuple(findings))


PACE = limit("pace", "Stage 0 takes 1 s (forward 0.5 s): it sets the pace; the next takes less. And so on")


def test_techniques_that_buy_most_come_first_and_then_what_binds():
    techniques = [
        technique("idle", version(STEP)),
        technique("fast", version(1.2 * STEP)),
        technique("small", lacking(2**20)),
        technique("large", lacking(2**30)),
    ]
    assert main_reasons(made(techniques, [PACE])) == (
        "large: without, 1.0 GiB of memory more per device would be needed than there is",
        "small: without, 1.0 MiB of memory more per device would be needed than there is",
        "Stage 0 takes 1 s: it sets the pace",
    )
    assert main_reasons(made(techniques[:2], [PACE])) == (
        "fast: without, a step takes 600 ms (+20.0%)",
        "Stage 0 takes 1 s: it sets the pace",
    )
    assert len(main_reasons(made(techniques))) == 3


def test_memory_is_told_before_the_pace_if_the_step_gains_by_it():
    felt = limit("memory", "Stage 0 is full", gain_seconds=STEP / 4, step_gain_seconds=STEP / 4)
    hardly = limit("memory", "Stage 0 is full", gain_seconds=STEP / 4, step_gain_seconds=0.0)
    free = replace(felt, binds=False)
    assert main_reasons(made(findings=[PACE, felt])) == ("Stage 0 is full", "Stage 0 takes 1 s: it sets the pace")
    assert main_reasons(made(findings=[PACE, hardly, free])) == ("Stage 0 takes 1 s: it sets the pace",)


def test_stages_that_say_the_same_say_it_once():
    assert main_reasons(made(findings=[PACE, PACE])) == ("Stage 0 takes 1 s: it sets the pace",)
