from math import inf

import numpy as np
import pytest

from lightning_mist.hardware import MixedCluster
from lightning_mist.plan import OffloadRatios
from lightning_mist.tuner.budget import USABLE_MEMORY
from lightning_mist.tuner.families import NO_OFFLOAD, Grid, GridCosts, Limits, Shortage, UniformFamily
from lightning_mist.tuner.space import Shape
from tests.specs import cluster

MOVED = OffloadRatios(optimizer=1.0)


def grid(stages, parts=()):
    return Grid(num_stages=stages, num_microbatches=4, shape=Shape(1, 1, False), parts=parts)


def costs(busy, accumulate, peak):
    """Costs of as many settings as the columns of these have."""
    count = np.array(peak).shape[1]
    numbers = np.arange(count)
    return GridCosts(
        checkpointed_K=numbers,
        zero_K=0 * numbers,
        offload_K=0 * numbers,
        seconds_K=numbers + 1.0,
        busy_SK=np.array(busy, dtype=float),
        accumulate_SK=np.array(accumulate, dtype=float),
        peak_SK=np.array(peak, dtype=float),
        host_SK=np.zeros_like(np.array(peak, dtype=float)),
    )


def test_what_may_be_offloaded_where_all_is_recomputed_is_counted():
    family = UniformFamily(zero_stages=(0,), offloads_if_all_recomputed=(MOVED,))
    assert family.every_offload == (NO_OFFLOAD, MOVED)


def test_limits_are_those_of_a_search():
    device, host = Limits.of(cluster(2, memory=1000, kind="cuda"), 500, 2000).stages(grid(3))
    assert device.tolist() == [500 * USABLE_MEMORY] * 3
    assert host.tolist() == [1000.0] * 3  # Two devices share the memory of their node.


def test_stages_on_unlike_devices_have_the_limits_of_their_part():
    machine = MixedCluster(parts=(cluster(1, memory=1000, kind="cuda"), cluster(1, memory=600, kind="cuda")))
    limits = Limits.of(machine, 800)
    device, _ = limits.stages(grid(3, parts=(1, 0, 0)))
    assert device.tolist() == pytest.approx([600 * USABLE_MEMORY, 800 * USABLE_MEMORY, 800 * USABLE_MEMORY])
    # The only stage has devices of both.
    assert limits.stages(grid(1))[0].tolist() == pytest.approx([600 * USABLE_MEMORY])


def test_a_shortage_without_a_limit_is_all_that_is_needed():
    assert Shortage(needed_bytes=10.0, limit_bytes=4.0).missing == 6.0
    assert Shortage(needed_bytes=3.0, limit_bytes=4.0).missing == -1.0
    assert Shortage(needed_bytes=3.0, limit_bytes=inf).missing == 3.0


def test_the_setting_that_misses_least_is_said_where_it_misses_most():
    found = costs([[1, 1], [1, 1]], [[0, 0], [0, 0]], [[50, 30], [10, 28]])
    limit_S = np.array([20.0, 15.0])
    # The first misses 30 on the first stage, the second 10 there and 13 on the other.
    assert found.least(found.peak_SK, limit_S) == Shortage(needed_bytes=28.0, limit_bytes=15.0)
    nothing = found.take(np.zeros(2, dtype=bool))
    assert nothing.least(nothing.peak_SK, limit_S) is None


def test_settings_are_taken_along_their_own_axis():
    found = costs([[1, 2, 3], [4, 5, 6]], [[0, 0, 0], [0, 0, 0]], [[7, 8, 9], [7, 8, 9]])
    taken = found.take(np.array([True, False, True]))
    assert taken.checkpointed_K.tolist() == [0, 2]
    assert taken.busy_SK.tolist() == [[1, 3], [4, 6]]
    assert taken.seconds_K.tolist() == [1.0, 3.0]


def test_chunks_shorten_the_wait_for_earlier_stages():
    found = costs([[2], [6]], [[0.5], [1.0]], [[1], [1]])
    # The second stage waits for a microbatch of the first one, or for a part of it, and then has four.
    assert found.bound(0, 4, 1) == 2 + 24 - 1.0
    assert found.bound(0, 4, 2) == 1 + 24 - 1.0
    slow_first = costs([[6], [2]], [[0.5], [0.0]], [[1], [1]])
    assert slow_first.bound(0, 4, 1) == 24 - 0.5
