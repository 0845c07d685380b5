import itertools
import re
from dataclasses import replace

import pytest

from lightning_mist.cost import StageCostModel, predict_with, stage_memory
from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import OffloadRatios
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import SearchSpace, tune
from lightning_mist.units import format_bytes, format_bytes_up, parse_bytes
from tests.specs import cluster, profile, spec
from tests.tuner.instances import random_instance
from tests.tuner.test_tuning import SMALL, every_plan, search


@pytest.mark.sample
@pytest.mark.parametrize("name", SMALL)
def test_the_least_that_any_plan_needs_is_named(name):
    network, devices, rows, limits = SMALL[name]
    model = StageCostModel(network, profile(), cluster(devices))
    least = min(
        max(stage.peak_bytes for stage in predict_with(model, plan).stages)
        for plan in every_plan(network, devices, rows, **limits)
    )
    match = re.escape(f"The least that any plan needs is {format_bytes(least)}, on stage")
    with pytest.raises(InfeasibleError, match=match):
        search(network, devices=devices, rows=rows, memory=least - 1, **limits)
    assert search(network, devices=devices, rows=rows, memory=least, **limits).plan


def test_the_message_says_limit_terms_and_ways_out():
    with pytest.raises(InfeasibleError) as caught:
        search(spec(4, measured=True, exclusions=[("pipeline", "it peeks")]), devices=1, rows=4, memory=100_000)
    text = str(caught.value)
    for part in (
        "no plan fits",
        "memory_limit is 97.7 KiB per device",
        "Largest terms: optimizer ",
        "The search went without several pipeline stages: it peeks",
        "Raise memory_limit to",
        "or use an optimizer that keeps less state",
    ):
        assert part in text


def test_what_the_message_says_would_do_does():
    network, text = spec(4, measured=True, parameter_bytes=10**6), ""
    memory = max(stage.peak_bytes for stage in search(network, devices=1, rows=4).predicted.stages)
    while not text:
        memory = int(0.8 * memory)
        try:
            search(network, devices=1, rows=4, memory=memory)
        except InfeasibleError as error:
            text = str(error)
    asked = re.search(r"(Raise memory_limit to|Use devices with) ([\d.]+ \w+)", text)
    assert search(network, devices=1, rows=4, memory=parse_bytes(asked[2])).plan


def test_limits_that_look_alike_are_told_apart():
    network = spec(4, measured=True, parameter_bytes=10**6)
    plans = list(every_plan(network, 1, 4))
    least = min(max(memory.peak_bytes for memory in stage_memory(network, plan)) for plan in plans)
    with pytest.raises(InfeasibleError) as caught:
        search(network, devices=1, rows=4, memory=least - 1)
    assert f"memory_limit is {format_bytes(least)} per device" in str(caught.value)
    assert "1 B less than that" in str(caught.value)


OFFLOADING = {"offload": OFFLOADED, "offload_ratios": (0.5, 1.0)}
HALVES = [OffloadRatios(**dict(zip(OFFLOADED, item, strict=True))) for item in itertools.product((0, 0.5, 1), repeat=4)]


def offloading_plans(network, rows):
    """Every plan of one device with each of its ways to offload, and the bytes that it takes of device and host."""
    for plan in every_plan(network, 1, rows):
        for offload in HALVES:
            found = replace(plan, stages=tuple(replace(stage, offload=offload) for stage in plan.stages))
            yield found, stage_memory(network, found)[0]


def test_with_offload_the_least_is_that_of_all_plans():
    network = spec(2, measured=True)
    least = min(memory.peak_bytes for _, memory in offloading_plans(network, 2))
    assert least < min(stage_memory(network, plan)[0].peak_bytes for plan in every_plan(network, 1, 2))
    message = f"The least that any plan needs is {format_bytes(least)}, on stage 0 of 1 .* in host memory"
    with pytest.raises(InfeasibleError, match=message):
        search(network, devices=1, rows=2, memory=least - 1, **OFFLOADING)
    assert search(network, devices=1, rows=2, memory=least, **OFFLOADING).plan


def test_host_memory_is_named_where_it_binds():
    """A plan fits into the device if it may move enough; with less host memory than that none does."""
    network = spec(2, measured=True)
    plans = [memory for _, memory in offloading_plans(network, 2)]
    plain = min(memory.peak_bytes for memory in plans if not memory.host_bytes)
    limit = (plain + min(memory.peak_bytes for memory in plans)) // 2
    host = min(memory.host_bytes for memory in plans if memory.peak_bytes <= limit)

    def tuned(host_limit):
        return tune(
            network,
            cluster(1),
            profile=profile(),
            global_batch_size=2,
            memory_limit=limit,
            host_memory_limit=host_limit,
            search=SearchSpace(schedules=("1f1b",), **OFFLOADING),
        )

    message = re.escape(f"Host memory is what binds: with {format_bytes_up(host)} of it per node a plan fits")
    with pytest.raises(InfeasibleError, match=message):
        tuned(host - 1)
    assert tuned(host).plan
    with pytest.raises(InfeasibleError, match=r"Raise memory_limit to|Use devices with") as caught:
        search(network, devices=1, rows=2, memory=1000, **OFFLOADING)
    assert "Host memory" not in str(caught.value)


@pytest.mark.parametrize("seed", [94, 98, 99, 104, 105, 113, 119])
def test_with_the_memory_that_it_tells_to_give_a_plan_fits(seed):
    asked = random_instance(seed)
    asked = replace(asked, memory_limit=asked.memory_limit // 2)
    with pytest.raises(InfeasibleError, match="Raise memory_limit to") as caught:
        asked.tune()
    told = re.search(r"Raise memory_limit to ([\d.]+ \w+)", str(caught.value))
    assert replace(asked, memory_limit=parse_bytes(told[1])).tune().plan


def test_that_offload_was_left_out_is_said_of_devices_that_have_a_host():
    network, machine = spec(2, measured=True), cluster(1, kind="cuda")
    for search_space, said in ((SearchSpace(offload=()), "any plan without offload needs"), (None, "any plan needs")):
        rates = replace(profile(), host_to_device_bytes_per_second=1e9, device_to_host_bytes_per_second=1e9)
        chosen = search_space or SearchSpace(offload=OFFLOADED)
        with pytest.raises(InfeasibleError, match=said):
            tune(network, machine, profile=rates, global_batch_size=2, memory_limit=1000, search=chosen)


def test_host_memory_that_offload_may_take_is_said_where_it_is_known():
    space = SearchSpace(offload=("optimizer",), offload_ratios=(1.0,))
    known = replace(cluster(1, kind="cuda"), host_memory_bytes=20_480)
    copies = replace(profile(), host_to_device_bytes_per_second=1e9, device_to_host_bytes_per_second=1e9)
    asked = {"profile": copies, "global_batch_size": 4, "memory_limit": 1000, "search": space}
    with pytest.raises(InfeasibleError, match=r"and offload 16\.0 KiB of its host's memory\. Largest"):
        tune(spec(4, measured=True), known, **asked)
    with pytest.raises(InfeasibleError) as caught:
        tune(spec(4, measured=True), cluster(1, kind="cuda"), **asked)
    assert "of its host's memory" not in str(caught.value)


def test_what_binds_changes_the_way_out():
    wide = spec(4, widths=(1_000_000,), parameter_bytes=400, edge_bytes=400, measured=True)
    with pytest.raises(InfeasibleError, match=r"Largest terms: working .*smaller batches or shorter samples"):
        search(wide, devices=1, rows=1, memory=1000)


@pytest.mark.parametrize(
    "limits",
    [
        {"num_stages": (5,)},
        {"num_microbatches": (7,)},
        {"devices_per_stage": (3,)},
        {"num_stages": (2,)},
        {"data_parallel_degrees": (3,), "microbatch_sizes": (7,)},
    ],
)
def test_an_empty_search_space_is_told_from_a_lack_of_memory(limits):
    exclusions = [("pipeline", "x")] if limits == {"num_stages": (2,)} else []
    network = spec(4, measured=True, exclusions=exclusions)
    names = re.escape(", ".join(f"{name}={value}" for name, value in reversed(limits.items())))
    with pytest.raises(InfeasibleError, match=f"16 rows: {names} leave no degrees, number of stages and microbatches"):
        tune(
            network,
            cluster(4),
            profile=profile(),
            global_batch_size=16,
            memory_limit=10**12,
            search=SearchSpace(**limits),
        )


def test_every_number_in_the_message_is_of_one_plan():
    network = spec(4, tied=True, measured=True)
    with pytest.raises(InfeasibleError) as caught:
        search(network, devices=2, rows=2, memory=1)
    stage, stages, first, last, devices = map(
        int, re.search(r"stage (\d+) of (\d+) \(layers (\d+) to (\d+) on (\d+) device", str(caught.value)).groups()
    )
    assert stage < stages
    assert any(
        plan.num_stages == stages
        and plan.bounds[stage] == (first, last + 1)
        and len(plan.stages[stage].devices) == devices
        for plan in itertools.islice(every_plan(network, 2, 2), 10_000)
    )
