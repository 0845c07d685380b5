"""What must hold of the search whatever the question: of its closed form, which is what it minimises and proves."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel, predict_with
from lightning_mist.errors import InfeasibleError
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION
from lightning_mist.tuner.space.applied_space import divisors
from tests.specs import cluster, profile, spec
from tests.tuner.instances import random_instance
from tests.tuner.whole_space import Instance

SEEDS = range(1000, 1007)
SLACK = 1 + 10 * PRECISION


def least(instance, planner=None):
    """The least step seconds; infinite if nothing fits."""
    try:
        found = instance.tune(planner)
    except InfeasibleError:
        return np.inf
    return found.bound / (1 - found.gap)


def never_slower(instances, planner=None):
    """Whether later questions have answers that are at least as good as those of earlier ones; the answers."""
    seconds = [least(instance, planner) for instance in instances]
    for before, after in itertools.pairwise(seconds):
        assert after <= before * SLACK, seconds
    return seconds


def test_more_memory_is_never_slower():
    found = []
    for seed in SEEDS:
        instance = random_instance(seed)
        limits = [int(instance.memory_limit * share) for share in (0.8, 1.0, 1.25, 4.0)]
        found.append(never_slower([replace(instance, memory_limit=limit) for limit in limits], instance.planner()))
    assert any(seconds[0] > seconds[-1] for seconds in found)


def faster(instance, name):
    """The same question on a machine that is faster in one way, with nothing measured that would stay what it is."""
    many = instance.rates if isinstance(instance.rates, tuple) else (instance.rates,)
    changed = tuple(FASTER[name](rates) for rates in many)
    return replace(instance, rates=changed if len(changed) > 1 else changed[0])


def of_links(rates, **changes):
    return replace(
        rates,
        collectives=tuple(
            replace(item, **{name: factor * getattr(item, name) for name, factor in changes.items()})
            for item in rates.collectives
        ),
    )


def computing(rates):
    compute = tuple(
        replace(item, flops_per_second=tuple(2 * rate for rate in item.flops_per_second)) for item in rates.compute
    )
    return replace(rates, compute=compute)


FASTER = {
    "wider links": lambda rates: of_links(rates, bytes_per_second=4.0),
    "quicker links": lambda rates: of_links(rates, latency_seconds=0.25),
    "more FLOP/s": computing,
    "wider memory": lambda rates: replace(rates, memory_bytes_per_second=2 * rates.memory_bytes_per_second),
    "quicker operators": lambda rates: replace(rates, operator_seconds=0.5 * rates.operator_seconds),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", FASTER)
def test_a_faster_machine_is_never_slower(name):
    found = []
    for seed in SEEDS:
        instance = random_instance(seed)
        instance = replace(instance, network=replace(instance.network, seconds=()))
        found.append(never_slower([instance, faster(instance, name)]))
    assert any(seconds[0] > seconds[1] for seconds in found)


def wider_spaces(instance):
    """Spaces of which each contains the one before."""
    rows = instance.rows * instance.machine.world_size
    least_space = SearchSpace(
        schedules=("1f1b",),
        offload=(),
        zero_stages=(0,),
        checkpointing=False,
        num_stages=(1,),
        num_microbatches=(1,),
        tensor_parallel_degrees=(1,),
    )
    yield least_space
    yield replace(least_space, num_microbatches=divisors(rows)[:3])
    yield (space := replace(least_space, num_microbatches=None))
    yield (space := replace(space, checkpointing=True))
    yield (space := replace(space, zero_stages=(0, 1)))
    yield (space := replace(space, zero_stages=(0, 1, 2, 3)))
    yield (space := replace(space, num_stages=(1, 2)))
    yield (space := replace(space, num_stages=None))
    yield replace(space, tensor_parallel_degrees=None)


def test_a_larger_space_is_never_slower():
    found = []
    for seed in range(1000, 1012):
        instance = random_instance(seed)
        questions = [replace(instance, search=space) for space in wider_spaces(instance)]
        found.append(never_slower(questions, instance.planner()))
    assert any(np.isinf(seconds[0]) and np.isfinite(seconds[-1]) for seconds in found)
    assert any(np.isfinite(seconds[0]) and seconds[-1] < seconds[0] for seconds in found)


@pytest.mark.parametrize("layers", [9, 12])
@pytest.mark.parametrize("memory_limit", [700_000, 900_000, 10**7])
def test_no_answer_is_better_than_its_bound_and_no_bound_of_a_search_cut_short_is_above_the_optimum(
    layers, memory_limit
):
    instance = Instance(
        network=spec(layers, tied=True, measured=True),
        machine=cluster(8),
        rates=profile(),
        rows=8,
        memory_limit=memory_limit,
        search=SearchSpace(schedules=("1f1b",)),
    )
    best = instance.tune()
    hurried = replace(instance, search=replace(instance.search, solver_seconds=1e-9)).tune()
    assert (best.status, hurried.status) == ("optimal", "time limit")
    for found in (best, hurried):
        assert found.bound <= found.closed_form_seconds * SLACK
    assert 0 < hurried.gap < 1
    assert hurried.bound <= best.bound * SLACK
    assert hurried.closed_form_seconds * SLACK >= best.bound


def test_which_of_equal_devices_has_which_part_does_not_matter():
    moved = 0
    for seed in SEEDS:
        instance = random_instance(seed)
        try:
            plan = instance.tune().plan
        except InfeasibleError:
            continue
        if instance.machine.num_nodes > 1:
            continue  # There it matters who is near whom, or what they are.
        count = plan.world_size
        turned = {rank: (rank + 1) % count for rank in range(count)}
        stages = [
            replace(stage, mesh=replace(stage.mesh, devices=tuple(turned[rank] for rank in stage.mesh.devices)))
            for stage in plan.stages
        ]
        model = StageCostModel(instance.network, instance.rates, instance.machine)
        other = predict_with(model, replace(plan, stages=tuple(stages), predicted=None))
        assert other.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-12)
        assert [item.peak_bytes for item in other.stages] == [item.peak_bytes for item in plan.predicted.stages]
        moved += count > 1
    assert moved


@pytest.mark.thorough
def test_in_which_order_parts_are_named_does_not_matter():
    turned = 0
    for seed in range(1000, 1030):
        instance = random_instance(seed)
        if len(instance.machine.parts) == 1:
            continue
        machine = replace(instance.machine, parts=instance.machine.parts[::-1])
        other = replace(instance, machine=machine, rates=instance.rates[::-1])
        assert least(other) == pytest.approx(least(instance), rel=10 * PRECISION)
        turned += np.isfinite(least(instance))
    assert turned
