"""What copies add to a batch, by the cost model, is what they add where its lists run on the clock."""

import dataclasses

import pytest

from benchmarks.parity.plans import Group, Layout, make_plan
from benchmarks.planner.copies_clock import run_pipeline
from benchmarks.planner.hidden_copies import KINDS, lists_of, steady_times
from lightning_mist.cost import StageCostModel, predict_with
from lightning_mist.cost.inputs.candidates import slots_of
from lightning_mist.cost.time.overlap import FREE, copy_rates
from lightning_mist.plan import OffloadRatios
from tests.specs import cluster, profile, spec

LAYERS, ROWS = 10, 24
NETWORKS = {
    "alike": spec(LAYERS, measured=True),
    "unlike": spec(LAYERS, kinds=[index % 2 for index in range(LAYERS)], widths=(1000, 1400), measured=True),
    "looked at": spec(LAYERS, exclusions=[("sharded_gradients", "a hook reads gradients")], measured=True),
    "kept whole": spec(LAYERS, exclusions=[("sharded_parameters", "a hook reads parameters")], measured=True),
    "frozen": spec(LAYERS, frozen=[f"blocks.{index}.weight" for index in range(LAYERS)], measured=True),
}
PLACES = {
    "one device": Group(checkpointed=3),
    "ZeRO 0": Group(dp=2),
    "ZeRO 1": Group(dp=2, zero=1, checkpointed=3),
    "ZeRO 2": Group(dp=2, zero=2),
    "ZeRO 3": Group(dp=2, zero=3, checkpointed=3),
}
ALONE, TOGETHER = 0.02, 0.04
"""Differences as parts of a batch, of one kind and of all: units take as long as the longest of what they do, while on
the clock what is left over of one unit helps the next."""


def machine(to_device, to_host):
    rates = {"host_to_device_bytes_per_second": to_device, "device_to_host_bytes_per_second": to_host}
    return dataclasses.replace(profile(link=1e8, latency=1e-5), interference=FREE, **rates)


def batch(model, plan, group, *, moves):
    """Seconds of a batch by the cost model."""
    slot, some = slots_of(plan, model.cluster)[group]
    found = model.seconds(slot, some if moves else dataclasses.replace(some, offload=None))
    return plan.num_microbatches * float(found.steady_K[0]) + float(found.boundary_K[0])


def compare(network, layout, rate, group=0):
    """What copies add by the cost model, and on the clock; how long a batch is there, and fetching gradients once."""
    plan = make_plan(layout, LAYERS, rows=ROWS)
    devices = cluster(plan.world_size, kind="cuda")
    model, free = (StageCostModel(network, machine(*rates), devices) for rates in ((rate, 1.5 * rate), (1e30, 1e30)))
    times, alone = steady_times(model, plan, group), steady_times(free, plan, group)
    on_clock, without = (item.ends[-1] - item.ends[-2] for item in (times, alone))
    trained = sum(item.bytes for item in network.parameters if item.trainable)
    once = trained * plan.stages[group].offload.gradients / copy_rates(model.profile, devices).to_device
    added = batch(model, plan, group, moves=True) - batch(model, plan, group, moves=False)
    return added, on_clock - without, on_clock, once


@pytest.mark.parametrize("rate", [1e7, 3e7, 1e8, 1e9])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids=[*KINDS, "all"])
@pytest.mark.parametrize(
    ("network", "place"),
    [
        (network, place)
        for network in NETWORKS
        for place in PLACES
        # What is looked at is not shared out.
        if PLACES[place].zero <= NETWORKS[network].module_map.largest_zero_stage
    ],
)
def test_copies_add_what_they_add_on_the_clock(network, place, kinds, rate):
    group = dataclasses.replace(PLACES[place], offload=OffloadRatios(**dict.fromkeys(kinds, 1.0)))
    added, wanted, whole, once = compare(NETWORKS[network], Layout(groups=(group,), parts=6), rate)
    tolerance = (ALONE if len(kinds) == 1 else TOGETHER) * whole
    # The cost model fetches gradients for the first microbatch too.
    assert wanted - tolerance <= added <= wanted + tolerance + once


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids=[*KINDS, "all"])
def test_in_a_pipeline_too(kinds, group):
    some = Group(offload=OffloadRatios(**dict.fromkeys(kinds, 1.0)))
    added, wanted, whole, once = compare(NETWORKS["unlike"], Layout(groups=(some,) * 3, parts=6), 3e7, group)
    tolerance = (ALONE if len(kinds) == 1 else TOGETHER) * whole
    assert wanted - tolerance <= added <= wanted + tolerance + once


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("kinds", [("optimizer",), KINDS[:3]], ids=["optimizer", "state"])
@pytest.mark.parametrize("rate", [1e7, 3e7, 1e9])
def test_stages_wait_for_updates_of_those_in_front_as_on_the_clock(kinds, stages, rate):
    some = Group(offload=OffloadRatios(**dict.fromkeys(kinds, 1.0)))
    plan = make_plan(Layout(groups=(some,) * stages, parts=6), LAYERS, rows=ROWS)
    model = StageCostModel(NETWORKS["unlike"], machine(rate, 1.5 * rate), cluster(stages, kind="cuda"))
    *_, before, end = run_pipeline([lists_of(model, plan, group) for group in range(stages)], batches=3)
    found = predict_with(model, plan)
    moving = sum(dict(stage.breakdown)["transfer_seconds"] for stage in found.stages)
    # What the rows of the last units write back is at home soon enough on the clock.
    assert 0.99 * (end - before) <= found.step_seconds <= 1.045 * (end - before) + moving
