"""What is a bound has to be one: every candidate of random questions takes at least as long."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from lightning_mist.cost.memory.phases import stage_phases
from lightning_mist.cost.time.overlap import copy_rates
from lightning_mist.hardware import Interference
from lightning_mist.hardware.profile.interference_model import COEFFICIENTS
from lightning_mist.tuner import Planner
from lightning_mist.tuner.floors import Situation, stage_floors
from lightning_mist.tuner.least_runs import joined_runs, slot_runs, slots_of
from lightning_mist.tuner.placed_runs import Moves, placed_runs, with_copies
from lightning_mist.tuner.search_space import OFFLOADED
from tests.tuner.instances import random_instance
from tests.tuner.whole_space import candidates_of, pipelines, places_of, priced

MOST = 12
"""Candidates of a place that are compared, the memory that each needs being the limit."""


def question(seed):
    """A random instance whose channels slow each other down at random."""
    found, rng = random_instance(seed, unlike=0), np.random.default_rng(seed)
    slow = Interference(**{name: float(rng.choice([0.0, rng.random(), 1.0])) for name in COEFFICIENTS}, source="drawn")
    return replace(found, rates=replace(found.rates, interference=slow), known={}), rng


def floors_of(maker, microbatches, moves, limit, index, count):
    slots = slots_of(maker.space, maker.slot, microbatches)
    of_slots = [slot_runs(maker.model, maker.space, slot, np.inf) for slot in slots]
    runs = joined_runs(maker.model, maker.space.num_layers, of_slots)
    place = "first" if not index else "last" if index == count - 1 else "middle"
    situation = Situation.of(place, stage_phases(index, count, microbatches))
    return stage_floors(placed_at(runs, place, moves), limit, [situation])[0] if len(runs) else None


def placed_at(runs, place, moves):
    """All runs at a place, with what they may move."""
    resident = placed_runs(runs, place, np.inf)
    return resident if moves is None else with_copies(resident, runs, moves)


def compare(found, rng):
    """Compare candidates of all places of an instance with the floors under their own memory."""
    planner = Planner(found.network, found.machine, profile=found.rates)
    space = planner.space(found.rows * found.machine.world_size, found.search)
    maker, compared = planner.stages(space), 0
    rates = copy_rates(found.rates, found.machine) if space.search.offload else None
    for microbatches, parts, arrangements in pipelines(found):
        for index, kind in places_of(arrangements) if len(parts) > 1 else ():
            prices = priced(found, microbatches, parts, index, kind)
            rows = candidates_of(found, len(parts), index, kind)
            for at in rng.permutation(len(rows))[:MOST]:
                kinds = frozenset(space.search.offload)
                moves = Moves(kinds=kinds, rates=rates, num_microbatches=microbatches) if rates else None
                limit = float(prices.peak_K[at]) * (1 + 1e-12)
                floors = floors_of(maker, microbatches, moves, limit, index, len(parts))
                here = (floors.layers_V == rows[at][1] - rows[at][0]) & (floors.devices_V == kind.devices)
                steady, reach = prices.steady_K[at], prices.steady_K[at] + prices.boundary_K[at]
                assert floors.steady_V[here].min(initial=np.inf) <= steady * (1 + 1e-9)
                assert floors.reach_V[here].min(initial=np.inf) <= reach * (1 + 1e-9)
                compared += 1
    return compared


@pytest.mark.parametrize("first_seed", range(0, 60, 15))
def test_no_candidate_takes_less_than_the_floor(first_seed):
    assert sum(compare(*question(seed)) for seed in range(first_seed, first_seed + 15)) > 200


def test_floors_rise_as_memory_shrinks_and_what_cannot_fit_is_not_there():
    found, _ = question(11)
    planner = Planner(found.network, found.machine, profile=found.rates)
    maker = planner.stages(planner.space(found.rows * found.machine.world_size, found.search))
    microbatches = maker.space.microbatch_counts()[-1]
    steady = []
    for limit in (1e15, 1e6, 3e5, 1e5, 1.0):
        floors = floors_of(maker, microbatches, None, limit, 0, 2)
        steady.append(sorted(zip(floors.layers_V, floors.devices_V, floors.steady_V, strict=True)))
    assert steady[0]
    assert not steady[-1]
    assert all(len(less) <= len(more) for more, less in pairwise(steady))


def test_what_stages_find_under_1f1b_is_what_its_schedule_says():
    for microbatches in (1, 2, 3, 5, 9, 40):
        for count in range(2, 12):
            for index in range(count):
                place = "first" if not index else "last" if index == count - 1 else "middle"
                found = Situation.in_1f1b(place, count - 1 - index, microbatches)
                assert found == Situation.of(place, stage_phases(index, count, microbatches))


def test_of_many_in_flight_fewer_numbers_are_told_apart_and_never_more_than_there_are():
    for others in range(70):
        phases = stage_phases(0, others + 1, 100)
        found = Situation.of("first", phases)
        assert found.has_gradients
        assert found.others <= others < found.others * 1.25 + 1
        assert others >= 8 or found.others == others


def test_floors_up_to_a_pace_are_those_of_all_that_are_no_slower():
    found, _ = question(11)
    planner = Planner(found.network, found.machine, profile=found.rates)
    maker = planner.stages(planner.space(found.rows * found.machine.world_size, found.search))
    microbatches = maker.space.microbatch_counts()[-1]
    slots = slots_of(maker.space, maker.slot, microbatches)
    of_slots = [slot_runs(maker.model, maker.space, slot, np.inf) for slot in slots]
    runs = joined_runs(maker.model, maker.space.num_layers, of_slots)
    rates = copy_rates(found.rates, found.machine)
    situations = [Situation.in_1f1b("middle", behind, microbatches) for behind in (1, 2)]
    moves = Moves(kinds=frozenset(OFFLOADED), rates=rates, num_microbatches=microbatches)
    placed, compared = placed_at(runs, "middle", moves), 0
    for limit in (1e15, 1e6, 3e5, 1e5):
        for every in stage_floors(placed, limit, situations):
            pace = float(np.median(every.steady_V)) if len(every) else 1.0
            for wanted, fewer in zip(
                stage_floors(placed, limit, situations), stage_floors(placed, limit, situations, pace), strict=True
            ):
                kept = wanted.within(pace)
                np.testing.assert_array_equal(fewer.layers_V, kept.layers_V)
                np.testing.assert_array_equal(fewer.devices_V, kept.devices_V)
                np.testing.assert_allclose(fewer.steady_V, kept.steady_V, rtol=1e-12)
                compared += len(kept)
    assert compared > 10
