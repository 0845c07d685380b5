"""Lower bounds of stages are never above the exact value: of every candidate of random questions."""

import itertools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.cost.memory.moments import COUNTED, device_moments
from lightning_mist.cost.time.overlap import copy_rates
from lightning_mist.hardware import Interference
from lightning_mist.hardware.profile import COEFFICIENTS
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import Planner
from lightning_mist.tuner.bounds.range_bounds import POSITIONS, range_bounds, slots_of
from lightning_mist.tuner.bounds.stage_bounds import (
    Setting,
    in_flight,
    knapsack,
    position_bounds,
    stage_bounds,
)
from tests.tiers import examples
from tests.tuner.instances import random_instance
from tests.tuner.whole_space import candidates_of, pipelines, places_of, priced

MOST = 12
"""Candidates of a place that are compared, the memory that each needs being the limit."""

SHARE = st.floats(0, 1, allow_subnormal=False)


def question(seed, **options):
    """A random instance whose channels slow each other down at random."""
    found, rng = random_instance(seed, unlike=0, **options), np.random.default_rng(seed)
    slow = Interference(**{name: float(rng.choice([0.0, rng.random(), 1.0])) for name in COEFFICIENTS}, source="drawn")
    return replace(found, rates=replace(found.rates, interference=slow), known={}), rng


def stages_of(found):
    planner = Planner(found.network, found.machine, profile=found.rates)
    return planner.stages(planner.space(found.rows * found.machine.world_size, found.search)).together


def prepared(found, maker, microbatches, position, kinds, bottleneck=np.inf):
    """The lower bounds of stages at a position with these kinds of state that may be offloaded."""
    setting = Setting(
        kinds=frozenset(kinds),
        rates=copy_rates(found.rates, found.machine) if kinds else None,
        interference=found.rates.interference if found.machine.device.kind == "cuda" else None,
        num_microbatches=microbatches,
        least_ratio=min(maker.space.offload_ratios, default=0.0),
    )
    ranges = range_bounds(maker.model, maker.space, slots_of(maker.space, maker.slot, microbatches), bottleneck)
    return position_bounds(ranges, position, setting, np.inf)


def bounds_in(found, limit, behind, microbatches, bottleneck=np.inf):
    others = in_flight("1f1b", behind, microbatches)
    return stage_bounds(found, limit, others, num_microbatches=microbatches, bottleneck=bottleneck)


def position_of(index, count):
    return "first" if not index else "last" if index == count - 1 else "middle"


def compare(found, rng):
    """Compare candidates of all places of an instance with the lower bounds under their own memory."""
    maker, compared = stages_of(found), 0
    for microbatches, parts, arrangements in pipelines(found):
        for index, kind in places_of(arrangements) if len(parts) > 1 else ():
            prices, rows = (
                priced(found, microbatches, parts, index, kind),
                candidates_of(found, len(parts), index, kind),
            )
            position = position_of(index, len(parts))
            at_position = prepared(found, maker, microbatches, position, maker.space.search.offload)
            for at in rng.permutation(len(rows))[:MOST]:
                limit = float(prices.peak_K[at]) * (1 + 1e-12)
                bounds = bounds_in(at_position, limit, len(parts) - 1 - index, microbatches)
                here = (bounds.layers_K == rows[at][1] - rows[at][0]) & (bounds.devices_K == kind.devices)
                assert bounds.steady_K[here].min(initial=np.inf) <= prices.steady_K[at] * (1 + 1e-9)
                reach = prices.steady_K[at] + prices.boundary_K[at]
                assert (bounds.steady_K + bounds.boundary_K)[here].min(initial=np.inf) <= reach * (1 + 1e-9)
                compared += 1
    return compared


@pytest.mark.parametrize("first_seed", range(0, 60, 15))
def test_no_candidate_takes_less_than_its_lower_bound(first_seed):
    assert sum(compare(*question(seed)) for seed in range(first_seed, first_seed + 15)) > 200


@pytest.mark.parametrize("first_seed", range(0, 60, 15))
def test_none_does_whose_checkpoints_have_a_share_of_their_own(first_seed):
    assert sum(compare(*question(seed, checkpoints=True)) for seed in range(first_seed, first_seed + 15)) > 200


def test_state_passes_in_parts_without_zero_only():
    assert compare(*question(213)) > 30


@pytest.mark.parametrize("seed", [133, 234, 846, 923])
def test_parameters_of_the_outermost_units_are_not_counted_as_fetched(seed):
    assert compare(*question(seed)) > 30


@pytest.mark.parametrize("kinds", [(), OFFLOADED])
def test_bounds_rise_as_memory_shrinks_and_what_cannot_fit_is_not_there(kinds):
    found, _ = question(11)
    maker = stages_of(found)
    microbatches = maker.space.microbatch_counts()[-1]
    for position in POSITIONS:
        at_position, every = prepared(found, maker, microbatches, position, kinds), []
        for limit in (1e15, 1e6, 3e5, 1e5, -1e15):
            bounds = bounds_in(at_position, limit, 1, microbatches)
            pairs = zip(bounds.layers_K, bounds.devices_K, strict=True)
            every.append(dict(zip(pairs, bounds.steady_K, strict=True)))
        assert every[0]
        assert not every[-1]
        for more, less in pairwise(every):
            assert all(seconds >= more[pair] for pair, seconds in less.items())


def test_bounds_up_to_a_bottleneck_are_those_of_all_that_are_no_slower():
    found, _ = question(11)
    maker, compared = stages_of(found), 0
    microbatches = maker.space.microbatch_counts()[-1]
    at_position = prepared(found, maker, microbatches, "middle", OFFLOADED)
    for limit, behind in itertools.product((1e15, 1e6, 5e5, 3e5, 1e5), (1, 2)):
        every = bounds_in(at_position, limit, behind, microbatches)
        bottleneck = float(np.median(every.steady_K)) if len(every) else 1.0
        kept = every.take(every.steady_K <= bottleneck)
        fewer = bounds_in(at_position, limit, behind, microbatches, bottleneck)
        np.testing.assert_array_equal(fewer.layers_K, kept.layers_K)
        np.testing.assert_array_equal(fewer.devices_K, kept.devices_K)
        np.testing.assert_allclose(fewer.steady_K, kept.steady_K, rtol=1e-12)
        compared += len(kept)
    assert compared > 5


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_more_microbatches_are_in_flight_than_the_schedule_says_and_hardly_fewer(schedule):
    for microbatches in (1, 2, 3, 5, 9, 40):
        for count in (*range(2, 12), 30):
            for index in range(count):
                found = in_flight(schedule, count - 1 - index, microbatches)
                moments = device_moments(index, count, microbatches, schedule)
                every = [dict(zip(COUNTED, moment.counts, strict=True)) for moment in moments]
                backwards = [counts for counts in every if counts["backward"]]
                others = max((counts["saved"] for counts in backwards), default=0)
                assert found <= others < found * 1.25 + 1
                assert bool(backwards) == (microbatches > 1)
                if index and backwards:
                    # The own one and so many others have been received, too.
                    received = [counts["entering"] for counts in backwards if counts["saved"] >= found]
                    assert max(received) > found or others > found


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=4), SHARE)
def test_the_knapsack_takes_the_cheapest_bytes_first(kinds, share):
    left = wanted = share * sum(free for _, free in kinds)
    seconds = 0.0
    for price, free in sorted(kinds):
        seconds, left = seconds + price * min(free, left), left - min(free, left)
    arrays = [(np.array([[price]]), np.array([free])) for price, free in kinds]
    np.testing.assert_allclose(knapsack(arrays, np.array([wanted])), [[seconds]], rtol=1e-9, atol=1e-9)


def test_where_nothing_is_fast_enough_there_are_no_bounds():
    found, _ = question(11)
    maker = stages_of(found)
    assert not len(bounds_in(prepared(found, maker, 4, "middle", OFFLOADED, 0.0), 1e15, 1, 4))
