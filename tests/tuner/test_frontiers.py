"""Asking for the frontiers of many slots at once gives what asking for one after another gives."""

import dataclasses

import numpy as np
import pytest

from lightning_mist.hardware import Link, MixedCluster
from lightning_mist.plan import OFFLOADED, SearchSpace
from lightning_mist.tuner import Planner
from lightning_mist.tuner.candidates.choices import SlotChoices
from lightning_mist.tuner.search import Stages
from lightning_mist.tuner.space.applied_space import places_behind
from tests.specs import cluster, profile, spec
from tests.tuner.candidates.test_offload_search import MACHINES, NETWORKS, make
from tests.tuner.searches import frontier


def same(found, wanted):
    assert len(found) == len(wanted)
    for item in dataclasses.fields(SlotChoices):
        assert np.allclose(getattr(found, item.name), getattr(wanted, item.name), rtol=1e-12, atol=0), item.name


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", NETWORKS)
def test_slots_that_are_prepared_together(network, machine):
    together, moved = make(network, machine, limit=600_000), 0
    places = [*places_behind((2, 3, 4)), (0, 2), (0, 3), (0, 4)]
    assert places[:3] == [(1, 2), (1, 3), (1, 4)]
    together.frontiers([(*place, (), None) for place in places], 4)
    evaluated = together.evaluated
    for place in places:
        found = frontier(together, *place, 4)
        same(found, frontier(make(network, machine, limit=600_000), *place, 4))
        moved += int((found.offload_KO.max(axis=1, initial=0) > 0).sum())
    assert moved
    # Nothing was left to evaluate.
    assert together.evaluated == evaluated


def test_only_places_of_interest_are_looked_at_and_others_when_they_are_asked_for():
    maker, fresh = make("alike", "L4", limit=600_000), make("alike", "L4", limit=600_000)
    layers, devices = maker.space.num_layers, maker.space.world_size
    some = np.zeros((devices + 1, layers + 1), dtype=bool)
    others = some.copy()
    some[1, 1], others[2:, 1] = True, True
    # The same slot twice: both are of interest.
    maker.frontiers([(0, 2, (), some), (0, 2, (), others)], 4)
    evaluated = maker.evaluated
    for mask in (some, others):
        maker.frontiers([(0, 2, (), mask)], 4)
    assert maker.evaluated == evaluated
    (found,), wanted = maker.frontiers([(0, 2, (), some | others)], 4), frontier(fresh, 0, 2, 4)
    one_layer, more = (choices.take(choices.layers_K == 1) for choices in (found, wanted))
    same(one_layer, more)
    assert more.offload_KO.any()
    # Of two layers on two devices nobody asked what they could move.
    assert not found.take(found.layers_K == 2).offload_KO.any()
    assert wanted.take(wanted.layers_K == 2).offload_KO.any()
    same(frontier(maker, 0, 2, 4), wanted)


def test_what_is_of_interest_may_grow_and_may_be_nothing():
    maker, fresh = make("unlike", "L4", limit=600_000), make("unlike", "L4", limit=600_000)
    masks = [np.zeros((5, 5), dtype=bool) for _ in range(4)]
    masks[1][1, 2], masks[2][2, 1:3], masks[3][:] = True, True, True
    for mask in masks:
        wishes = [(index, count, (), mask) for index, count in ((1, 3), (0, 3), (2, 3))]
        for (*place, _, _), found in zip(wishes, maker.frontiers(wishes, 4), strict=True):
            wanted = frontier(fresh, *place, 4)
            same(found, wanted.take(mask[wanted.devices_K, wanted.layers_K]))


def test_stages_that_differ_in_their_neighbours_parts_alone():
    copying = {f"{way}_bytes_per_second": 1e9 for way in ("host_to_device", "device_to_host")}
    rates = tuple(dataclasses.replace(profile(flops_per_second=flops), **copying) for flops in (3e10, 1e10, 2e10))
    link = Link(bytes_per_second=3e6, latency_seconds=1e-3)
    machine = MixedCluster(parts=tuple(cluster(2, kind="cuda") for _ in rates), link=link)
    planner = Planner(spec(6), machine, profile=rates)
    space = planner.space(36, SearchSpace(offload=OFFLOADED, offload_ratios=(0.0, 0.5, 1.0), schedules=("1f1b",)))

    def part():
        return Stages(planner.model, space, 700_000).parts[1]

    orders = [(0, 1, 2), (2, 1, 0), (0, 1, 1, 2), (2, 1, 1, 0), (0, 2, 1), (2, 0, 1), (1, 0, 2), (1, 2, 0)]
    wishes = [(order.index(1), len(order), order, None) for order in orders]
    together, seconds = part().frontiers(wishes, 6), []
    for wish, found in zip(wishes, together, strict=True):
        assert found.offload_KO.any()
        same(found, *part().frontiers([wish], 6))
        seconds.append(found.steady_K.min())
    # Seconds are of each one's own neighbours.
    assert len({*np.round(seconds, 9)}) >= 4
