"""What must hold of searches that may move state to host memory, and of the limits of every search space."""

import itertools
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from lightning_mist.cost import cost_model, predict_with
from lightning_mist.cost.inputs.candidates import placed_slots_of
from lightning_mist.cost.memory.moments import device_moments
from lightning_mist.errors import InfeasibleError
from lightning_mist.hardware import MixedCluster
from lightning_mist.plan.codec import from_json, to_json
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.space.usable_memory import USABLE_MEMORY
from lightning_mist.units import format_bytes, parse_bytes
from tests.specs import cluster, profile, spec, with_splits
from tests.tuner.test_properties import never_slower
from tests.tuner.whole_space import ALL, Instance, by_trying_everything

SEEDS = range(1, 7)
AMPLE = 10**15
"""Bytes of memory that never bind."""

LINKS = ("host_to_device_bytes_per_second", "device_to_host_bytes_per_second", "host_bytes_per_second_per_node")


@cache
def small(seed, kinds=OFFLOADED, devices=None):
    """Up to three layers on up to two devices, with memory in which mostly something has to move to the host.

    Args:
        seed: Instances of one seed are equal.
        kinds: What may move.
        devices: How many devices there are.
    """
    rng = np.random.default_rng(seed)
    network = spec(
        int(rng.integers(1, 4)),
        widths=(int(4 * 10 ** rng.uniform(2, 4)),),
        parameter_bytes=int(400 * 10 ** rng.uniform(1, 2.5)),
        edge_bytes=int(400 * 10 ** rng.uniform(0, 2.5)),
    )
    network = network.evenly() if seed % 2 else network
    rates = replace(
        profile(flops_per_second=10 ** rng.uniform(9, 10.5), link=10 ** rng.uniform(6, 9)),
        **{name: 10 ** rng.uniform(5, 8) for name in LINKS[:2]},
    )
    machine = cluster(devices or int(rng.integers(1, 3)), kind="cuda")
    if devices is None and rng.random() < 0.2:
        machine, rates = MixedCluster(parts=(cluster(1), cluster(1))), (rates, replace(rates, operator_seconds=2e-6))
    asked = Instance(
        network=with_splits(network, (2, False), (2, True)) if rng.random() < 0.3 else network,
        machine=machine,
        rates=rates,
        rows=int(rng.choice([1, 2])),
        memory_limit=AMPLE,
        search=SearchSpace(schedules=("1f1b",), offload=kinds, offload_ratios=(0.0, 1.0)),
    )
    least, kept = (
        by_trying_everything(replace(asked, known={}, search=replace(asked.search, offload=used))).peak
        for used in (kinds, ())
    )
    share = USABLE_MEMORY if machine.kind == "cuda" else 1.0
    return replace(asked, known={}, memory_limit=int((least + rng.uniform(-0.1, 1.1) * (kept - least)) / share) + 1)


def with_search(instance, **changes):
    """The same question about another space."""
    return replace(instance, search=replace(instance.search, **changes))


def gains(seconds):
    """Whether the last answer is better than the first."""
    return seconds[0] > seconds[-1] * (1 + 1e-6)


def test_more_device_memory_is_never_slower():
    found = []
    for seed in SEEDS:
        instance = small(seed)
        limits = [int(instance.memory_limit * share) for share in (0.8, 1.0, 1.3)]
        found.append(never_slower([replace(instance, memory_limit=limit) for limit in limits], instance.planner()))
    assert sum(map(gains, found)) > len(found) // 2


def test_more_host_memory_is_never_slower():
    found = []
    for seed in SEEDS:
        instance = small(seed)
        limits = (0, 10**4, 10**5, AMPLE)
        questions = [replace(instance, host_memory_limit=limit) for limit in limits]
        found.append(never_slower(questions, instance.planner()))
    assert sum(map(gains, found)) > len(found) // 2
    assert any(seconds[0] > seconds[1] > seconds[-1] or gains(seconds[1:]) for seconds in found)


@pytest.mark.thorough
def test_a_finer_grid_of_shares_is_never_slower():
    grids, found = ((0.0,), (0.0, 1.0), (0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)), []
    for seed in SEEDS:
        instance = small(seed, ("optimizer", "activations"))
        found.append(never_slower([with_search(instance, offload_ratios=item) for item in grids], instance.planner()))
    for index in range(len(grids) - 1):
        assert any(gains(seconds[index : index + 2]) for seconds in found), grids[index]


def test_more_kinds_of_offload_are_never_slower():
    found = []
    for seed in SEEDS:
        order = OFFLOADED[seed % 4 :] + OFFLOADED[: seed % 4]
        questions = [with_search(small(seed), offload=order[:count]) for count in range(5)]
        questions.append(with_search(small(seed), offload=(*order, "checkpoints")))
        found.append(never_slower(questions, questions[0].planner()))
    for index in range(4):
        assert any(gains(seconds[index : index + 2]) for seconds in found), index


@pytest.mark.thorough
def test_wider_links_to_the_host_are_never_slower():
    found = {name: [] for name in LINKS}
    for seed, name in itertools.product(SEEDS, LINKS):
        instance = small(seed)
        many = instance.rates if isinstance(instance.rates, tuple) else (instance.rates,)
        rates = [tuple(replace(item, **{name: width}) for item in many) for width in (1e5, 1e8)]
        questions = [replace(instance, rates=item if len(item) > 1 else item[0]) for item in rates]
        found[name].append(never_slower(questions))
    for name, seconds in found.items():
        assert any(map(gains, seconds)), name


LIMITS = {
    "max_stages": ((1,), None),
    "num_stages": (((1,),), None),
    "num_microbatches": (((1,), (1, 2)), None),
    "microbatch_sizes": (((2,),), None),
    "layer_cuts": (((1,),), None),
    "devices_per_stage": (((1,),), None),
    "zero_stages": (((0,), (0, 1)), (0, 1, 2, 3)),
    "data_parallel_degrees": (((1,),), None),
    "tensor_parallel_degrees": (((1,),), None),
    "sequence_parallel": ((True,), None),
    "checkpointing": ((False,), True),
    "checkpointed_shares": (((0.0,), (0.0, 1.0)), None),
    "schedules": ((("gpipe",),), ("gpipe", "1f1b")),
}
"""Limits of a space: narrow ones, of which each contains the one before, and the widest."""


def tight_without_zero(instance):
    """The same with two data-parallel ranks, and a little less memory than these need without ZeRO."""
    asked = with_search(instance, num_stages=(1,), data_parallel_degrees=(2,), zero_stages=(0,))
    least = by_trying_everything(replace(asked, known={})).peak
    return replace(asked, memory_limit=int(0.98 * least / USABLE_MEMORY))


def in_pairs(instance):
    """The same with layers shared by both devices, which exchange more often under sequence parallelism."""
    network = with_splits(replace(instance.network, splits=()), (2, False), (2, True))
    asked = replace(instance, network=network, memory_limit=AMPLE, known={})
    return with_search(asked, num_stages=(1,), tensor_parallel_degrees=(2,), offload=())


@pytest.mark.thorough
def test_lifting_any_limit_is_never_slower():
    found = {name: [] for name in LIMITS}
    for seed in SEEDS:
        instance = small(seed, ("optimizer", "activations"), 2)
        planner = instance.planner()
        for name, (narrow, wide) in LIMITS.items():
            if name == "layer_cuts" and instance.network.num_layers < 2:
                continue
            asked = tight_without_zero(instance) if name == "zero_stages" else instance
            if name == "data_parallel_degrees":  # Several stages may do without.
                asked = replace(with_search(instance, num_stages=(1,)), memory_limit=AMPLE)
            if name == "sequence_parallel":
                asked = in_pairs(instance)
            questions = [with_search(asked, **{name: value}) for value in (*narrow, wide)]
            found[name].append(never_slower(questions, planner if asked.network is instance.network else None))
    for name, seconds in found.items():
        assert any(map(gains, seconds)), name


def test_more_schedules_are_never_slower():
    found = []
    for seed in SEEDS:
        instance = replace(small(seed, ("optimizer",), 2), memory_limit=AMPLE, rows=2, network=spec(2 + seed % 3))
        planner, seconds = instance.planner(), []
        for schedules in (("1f1b",), ("1f1b", "zb-h1"), ("1f1b", "interleaved-1f1b", "zb-h1")):
            asked = with_search(instance, schedules=schedules, num_stages=(2,), tensor_parallel_degrees=(1,))
            seconds.append(asked.tune(planner).predicted.step_seconds)
        assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(seconds)), (seed, seconds)
        found.append(seconds)
    assert any(map(gains, found)), found


def host_bytes_of(instance, plan):
    """Bytes of host memory that each device of each stage of a plan takes, by the cost model."""
    model, found = cost_model(instance.network, instance.rates, instance.machine), []
    for slot, candidates in placed_slots_of(plan, instance.machine):
        moments = device_moments(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)
        needs = model.memory(slot).needs(slot, candidates)
        found.append(float(needs.host_bytes(moments)[0]))
    return found


def test_plans_are_written_and_read_alike_and_stay_within_all_limits():
    moved = 0
    for seed in range(1, 20):
        instance = replace(small(seed), host_memory_limit=10**5 if seed % 2 else AMPLE)
        try:
            plan = instance.tune().plan
        except InfeasibleError:
            continue
        assert from_json(to_json(plan)) == plan
        model = cost_model(instance.network, instance.rates, instance.machine)
        assert predict_with(model, plan) == plan.predicted, seed
        for stage, predicted, host in zip(
            plan.stages, plan.predicted.stages, host_bytes_of(instance, plan), strict=True
        ):
            parts = {instance.machine.part_of(device) for device in stage.devices}
            part = parts.pop() if len(parts) == 1 else ALL
            assert predicted.peak_bytes <= instance.limit(part) * (1 + 1e-9), seed
            assert host <= instance.host_limit(part) * (1 + 1e-9), seed
            used = {name for name in OFFLOADED if getattr(stage.offload, name)}
            assert all(getattr(stage.offload, name) in instance.search.offload_ratios for name in OFFLOADED)
            assert bool(used) == (host > 0), seed
            moved += bool(used)
    assert moved > 10


def test_what_cannot_be_met_is_said_with_what_binds():
    for seed in SEEDS:
        instance = replace(small(seed), host_memory_limit=AMPLE)
        few = replace(instance, memory_limit=2 * instance.memory_limit // 3, known={})
        kept = by_trying_everything(with_search(few, offload=())).peak
        moved = by_trying_everything(replace(few, known={})).peak
        if moved <= min(map(few.limit, range(len(few.machine.parts)))):
            continue
        with pytest.raises(InfeasibleError, match="no plan fits") as caught:
            few.tune()
        said = re.search(
            r"The least that any plan( without offload)? needs is ([\d.]+ \w+), on stage", str(caught.value)
        )
        assert said, caught.value
        if len(few.machine.parts) == 1:
            assert parse_bytes(said[2]) == pytest.approx(kept if said[1] else moved, rel=0.05)
            assert f"memory_limit is {format_bytes(few.memory_limit)} per device" in str(caught.value)


def test_host_memory_that_is_too_little_is_named():
    refused = 0
    for seed in SEEDS:
        instance = small(seed)
        try:
            replace(instance, host_memory_limit=AMPLE).tune()
        except InfeasibleError:
            continue
        without = with_search(instance, offload=())
        if by_trying_everything(replace(without, known={})).seconds < np.inf:
            continue
        refused += 1
        with pytest.raises(InfeasibleError, match=r"no plan fits.*host"):
            replace(instance, host_memory_limit=0).tune()
    assert refused > 1
