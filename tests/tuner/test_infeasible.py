import itertools
import re
from dataclasses import replace

import pytest

from lightning_mist.cost import StageCostModel, predict_with
from lightning_mist.errors import InfeasibleError
from lightning_mist.tuner import SearchSpace, tune
from lightning_mist.units import format_bytes
from tests.specs import cluster, profile, spec
from tests.tuner.test_tune import SMALL, every_plan, search


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
        "Raise memory_limit by",
        "or use an optimizer that keeps less state",
    ):
        assert part in text


def test_with_offload_the_least_is_said_to_be_without_it():
    with pytest.raises(InfeasibleError, match="The least that any plan without offload needs is"):
        search(spec(4, measured=True), devices=1, rows=4, memory=100_000, offload=("optimizer",), offload_ratios=(1.0,))


def test_host_memory_that_offload_may_take_is_said_where_it_is_known():
    space = SearchSpace(offload=("optimizer",), offload_ratios=(1.0,))
    known = replace(cluster(1, kind="cuda"), host_memory_bytes=20_480)
    copies = replace(profile(), host_to_device_bytes_per_second=1e9, device_to_host_bytes_per_second=1e9)
    asked = {"profile": copies, "global_batch_size": 4, "memory_limit": 1000, "search": space}
    with pytest.raises(InfeasibleError, match=r"and offload 16\.0 KiB of its host's memory\. Largest"):
        tune(spec(4, measured=True), known, **asked)
    with pytest.raises(InfeasibleError) as caught:
        tune(spec(4, measured=True), cluster(1, kind="cuda"), **asked)
    assert "host" not in str(caught.value)


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
    with pytest.raises(InfeasibleError, match=f"each: {names} leave no number of stages and microbatches"):
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
    stage, stages, first, end, devices = map(
        int, re.search(r"stage (\d+) of (\d+) \(layers (\d+) to (\d+) on (\d+) devices", str(caught.value)).groups()
    )
    assert stage < stages
    assert any(
        plan.num_stages == stages and plan.bounds[stage] == (first, end) and len(plan.stages[stage].devices) == devices
        for plan in itertools.islice(every_plan(network, 2, 2), 10_000)
    )
