"""The whole planner against trying everything; ``benchmarks/planner/against_brute_force.py`` does more of the same."""

import re
from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.hardware import USABLE_HOST_MEMORY, MixedCluster
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION
from lightning_mist.units import format_bytes, parse_bytes
from tests.specs import cluster, profile, spec
from tests.tuner.instances import random_instance, size_of, with_chunks
from tests.tuner.verdicts import asked_before, verdict_of
from tests.tuner.whole_space import Instance, by_trying_everything

SEEDS = 40
FEW = 300
"""Plans of which every one can be looked at in a test."""


@pytest.mark.parametrize("first_seed", range(0, SEEDS, 8))
def test_no_plan_of_the_whole_space_is_faster(first_seed):
    for seed in range(first_seed, first_seed + 8):
        instance = random_instance(seed)
        verdict = verdict_of(instance)
        assert verdict.difference <= PRECISION, seed
        assert verdict.bound <= verdict.seconds * (1 + PRECISION), seed
        assert verdict.status == ("optimal" if np.isfinite(verdict.wanted.seconds) else "infeasible"), seed
        if verdict.status == "infeasible":
            explains(instance, verdict)


@pytest.mark.parametrize("first_seed", [0, 43])
def test_no_plan_whose_checkpoints_have_a_share_of_their_own_is_faster(first_seed):
    own = 0
    for seed in range(first_seed, first_seed + 8):
        instance = random_instance(seed, checkpoints=True)
        verdict = verdict_of(instance)
        assert verdict.difference <= PRECISION, seed
        assert verdict.bound <= verdict.seconds * (1 + PRECISION), seed
        assert verdict.status == ("optimal" if np.isfinite(verdict.wanted.seconds) else "infeasible"), seed
        if verdict.status == "optimal":
            own += any(stage.offload.checkpoints is not None for stage in instance.tune().plan.stages)
    # Few instances are so that it pays.
    assert own == (2 if first_seed else 1)


@pytest.mark.parametrize("first_seed", [1, 30])
def test_no_plan_with_chunks_behind_the_last_layer_is_faster(first_seed):
    found = set()
    for seed in range(first_seed, first_seed + 10):
        drawn = random_instance(seed)
        if 0 < drawn.network.num_layers < 5 and size_of(drawn) < 1_000:
            instance = with_chunks(drawn, seed)
            verdict = verdict_of(instance)
            assert verdict.difference <= PRECISION, seed
            assert verdict.bound <= verdict.seconds * (1 + PRECISION), seed
            found |= {instance.tune().plan.stages[-1].tail_chunks} if verdict.status == "optimal" else set()
    assert len(found) > 1


@pytest.mark.parametrize("first_seed", [0, 6])
def test_no_plan_of_fewer_loaders_than_devices_is_faster(first_seed):
    for seed in range(first_seed, first_seed + 6):
        instance = random_instance(seed, fewer_loaders=True)
        verdict = verdict_of(instance)
        assert verdict.difference <= PRECISION, seed
        assert verdict.bound <= verdict.seconds * (1 + PRECISION), seed
        assert verdict.status == ("optimal" if np.isfinite(verdict.wanted.seconds) else "infeasible"), seed


@pytest.mark.parametrize("first_seed", range(0, SEEDS, 8))
def test_no_plan_of_equal_stages_is_faster(first_seed):
    for seed in range(first_seed, first_seed + 8):
        instance = random_instance(seed, equal_stages=True)
        verdict = verdict_of(instance)
        assert verdict.difference <= PRECISION, seed
        assert verdict.status == ("optimal" if np.isfinite(verdict.wanted.seconds) else "infeasible"), seed
        if verdict.status == "infeasible":
            explains(instance, verdict)
        else:
            plan = instance.tune().plan
            assert len({(stage.num_layers, len(stage.devices)) for stage in plan.stages}) == 1


def test_a_planner_that_was_asked_before_answers_the_same():
    for seed in range(SEEDS, SEEDS + 8):
        instance = random_instance(seed)
        assert verdict_of(instance, asked_before(instance)).difference <= PRECISION, seed


@pytest.mark.parametrize(("seed", "binds"), [(404, False), (430, True), (432, True), (561, True)])
def test_no_plan_that_keeps_to_what_hosts_have_is_faster(seed, binds):
    instance = random_instance(seed, offloading=1.0, by_operator=0.0)
    # Hosts that have what was a limit here, beside what processes on a CPU have for themselves.
    parts = [
        replace(part, host_memory_bytes=_host_of(part, instance.host_memory_limit)) for part in instance.machine.parts
    ]
    machine = parts[0] if len(parts) == 1 else replace(instance.machine, parts=tuple(parts))
    verdict = verdict_of(replace(instance, machine=machine, host_memory_limit=None))
    assert verdict.difference <= PRECISION
    unlimited = by_trying_everything(replace(instance, host_memory_limit=None)).seconds
    assert (unlimited < verdict.wanted.seconds) is binds


def _host_of(part, limit):
    own = 0 if part.kind == "cuda" else part.devices_per_node * part.device.memory_bytes
    return round((limit + own) / USABLE_HOST_MEMORY)


def explains(instance, verdict):
    """What cannot be met is named, with the least that it takes."""
    if not verdict.wanted.plans:
        assert "no plan of the search space" in verdict.message
        return
    assert "no plan fits" in verdict.message
    named = re.search(r"The least that any plan(?: without offload)? needs is ([\d.]+ \w+), on stage", verdict.message)
    assert named, verdict.message
    if len(instance.machine.parts) == 1:  # Elsewhere it is the least compared with what each part has.
        # Shown with one decimal; and a plan whose own stages divide more alike than any could exchanges fewer batches.
        assert parse_bytes(named[1]) == pytest.approx(verdict.wanted.peak, rel=0.05)
        assert f"memory_limit is {format_bytes(instance.memory_limit)} per device" in verdict.message


@pytest.mark.parametrize(
    ("limits", "stages"),
    [
        ({"devices_per_stage": (1,)}, 3),
        ({"layer_cuts": (1,)}, 2),
        ({"layer_cuts": ()}, 1),
        ({"num_stages": (2,)}, 2),
        ({"equal_stages": True, "num_stages": (1, 2)}, 1),
    ],
)
def test_limits_hold_on_unlike_devices(limits, stages):
    instance = Instance(
        network=spec(4),
        machine=MixedCluster(parts=(cluster(1), cluster(2))),
        rates=(profile(), profile(flops_per_second=3e10)),
        rows=2,
        memory_limit=10**9,
        search=SearchSpace(schedules=("1f1b",), offload=(), **limits),
    )
    assert verdict_of(instance).difference <= PRECISION
    assert instance.tune().plan.num_stages == stages


def test_instances_are_met_and_not_met():
    feasible = [np.isfinite(by_trying_everything(random_instance(seed)).seconds) for seed in range(16)]
    assert 0 < sum(feasible) < len(feasible)


def test_leaving_out_dominated_stages_changes_nothing():
    compared = 0
    for seed in range(SEEDS):
        instance = random_instance(seed)
        few = by_trying_everything(instance)
        if not 1 < few.plans <= FEW:
            continue
        every = by_trying_everything(instance, reduced=False)
        assert every.seconds == pytest.approx(few.seconds, rel=1e-12), seed
        assert (every.plans, every.peak) == (few.plans, few.peak)
        compared += 1
    assert compared > SEEDS // 8
