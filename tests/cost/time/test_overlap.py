import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.cost.time.overlap import (
    COMPUTE,
    TO_HOST,
    beyond_computing,
    concurrent_seconds,
    dual_weights,
    weights_of_passes,
)
from lightning_mist.hardware.profile import seconds_together, speed_table
from lightning_mist.hardware.profile.interference_model import CHANNELS, COEFFICIENTS, Channel, Interference
from tests.tiers import examples

FREE = Interference(**dict.fromkeys(COEFFICIENTS, 0.0), source="test")
TURNS = dataclasses.replace(FREE, **dict.fromkeys(COEFFICIENTS, 1.0))
UNIT = st.floats(0.0, 1.0)
LOADS = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e3)), min_size=4, max_size=4)
MACHINES = st.builds(Interference, **dict.fromkeys(COEFFICIENTS, UNIT), source=st.just("drawn"))


def one(loads: list[float], interference: Interference | None, across_nodes: bool = False) -> float:
    return float(concurrent_seconds(*(np.array([load]) for load in loads), interference, across_nodes)[0])


def coefficient(interference: Interference, pair: tuple[Channel, Channel], across_nodes: bool) -> float:
    name = "_".join(sorted(pair, key=CHANNELS.index))
    return float(getattr(interference, name.replace("network", "across") if across_nodes else name))


def scalar(load: dict[Channel, float], interference: Interference, across_nodes: bool) -> float:
    """The same fluid, one candidate at a time and step by step."""
    left = {name: seconds for name, seconds in load.items() if seconds > 0}
    total = 0.0
    while left:
        slow = {}
        for name in left:
            turns = {k: coefficient(interference, (name, k), across_nodes) for k in left if k != name}
            slow[name] = 1 + scalar(turns, interference, across_nodes)
        first = min(left, key=lambda name: left[name] * slow[name])
        passed = left[first] * slow[first]
        total += passed
        left = {name: left[name] - passed / slow[name] for name in left if name != first}
        left = {name: seconds for name, seconds in left.items() if seconds > 0}
    return total


@given(LOADS, MACHINES, st.booleans())
def test_equals_the_fluid_done_one_step_at_a_time(loads: list[float], machine: Interference, across: bool) -> None:
    assert one(loads, machine, across) == pytest.approx(
        scalar(dict(zip(CHANNELS, loads, strict=True)), machine, across), rel=1e-7, abs=1e-12
    )


@given(LOADS, MACHINES, st.booleans())
def test_between_the_largest_load_and_the_sum(loads: list[float], machine: Interference, across: bool) -> None:
    assert max(loads) <= one(loads, machine, across) <= np.sum(np.array(loads))


@given(LOADS)
def test_limits(loads: list[float]) -> None:
    assert one(loads, FREE) == pytest.approx(max(loads))
    assert one(loads, None) == pytest.approx(sum(loads))
    pair = [*loads[:2], 0.0, 0.0]
    assert one(pair, TURNS) == pytest.approx(sum(pair))


@given(LOADS, MACHINES, st.integers(0, 3), st.floats(0.0, 10.0))
def test_more_work_never_takes_less_time_in_all(
    loads: list[float], machine: Interference, index: int, more: float
) -> None:
    larger = list(loads)
    larger[index] += more
    assert one(larger, machine) >= one(loads, machine) - 1e-9 * (1 + sum(larger))


@given(LOADS, MACHINES, st.floats(0.1, 10.0))
def test_scales_with_the_loads(loads: list[float], machine: Interference, factor: float) -> None:
    assert one([factor * load for load in loads], machine) == pytest.approx(factor * one(loads, machine), rel=1e-9)


def test_a_known_case() -> None:
    machine = dataclasses.replace(FREE, compute_network=0.5)
    # Both at 2/3: the network's 2 s take 3, in which 2 of the computation's 4 s are done; 2 s remain alone.
    assert one([4.0, 2.0, 0.0, 0.0], machine) == pytest.approx(5.0)


def test_groups_between_nodes_have_coefficients_of_their_own() -> None:
    machine = dataclasses.replace(FREE, across_to_host=1.0)
    loads = [0.0, 1.0, 0.0, 1.0]
    assert one(loads, machine, across_nodes=False) == pytest.approx(1.0)
    assert one(loads, machine, across_nodes=True) == pytest.approx(2.0)


def test_all_candidates_at_once() -> None:
    random = np.random.default_rng(0)
    loads_CK = random.exponential(size=(4, 500)) * (random.random((4, 500)) < 0.7)
    machine = Interference(**dict(zip(COEFFICIENTS, random.random(9).tolist(), strict=True)), source="test")
    together_K = concurrent_seconds(*loads_CK, machine, True)
    assert together_K.tolist() == [one(list(loads_CK[:, k]), machine, True) for k in range(500)]
    broadcast_KK = concurrent_seconds(loads_CK[0][:, None], loads_CK[1], np.array(0.0), np.array(0.0), machine, True)
    assert broadcast_KK.shape == (500, 500)
    assert broadcast_KK[3, 7] == one([loads_CK[0, 3], loads_CK[1, 7], 0.0, 0.0], machine, True)


@pytest.mark.parametrize("load", [-1.0, np.nan, np.inf])
def test_wrong_loads(load: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        one([load, 0.0, 0.0, 0.0], FREE)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("coefficient", [0.0, 0.3, 1.0])
def test_two_channels_take_what_the_larger_load_does_and_the_smaller_one_s_turns(coefficient, across):
    name = "compute_across" if across else "compute_network"
    machine = dataclasses.replace(FREE, **{name: coefficient})
    loads_CK = np.random.default_rng(0).uniform(0, 2, (2, 50)) * (np.arange(50) % np.array([[4], [5]]) > 0)
    none_K = np.zeros(50)
    for one_kind in (machine, None):
        both_K = concurrent_seconds(*loads_CK, none_K, none_K, one_kind, across)
        beyond_K = beyond_computing(*loads_CK, one_kind, across)
        np.testing.assert_allclose(beyond_K, both_K - loads_CK[0], atol=1e-14)


@settings(max_examples=examples(60))
@given(MACHINES, st.booleans(), st.lists(st.floats(0, 10, allow_subnormal=False), min_size=8, max_size=8))
def test_loads_take_at_least_what_their_weights_say_together_or_one_after_the_other(machine, across, numbers):
    first, then = np.array(numbers).reshape(2, len(CHANNELS), 1)
    table, weights = speed_table(machine, across), dual_weights(machine, across)
    whole = seconds_together(first + then, table)
    parts = seconds_together(first, table) + seconds_together(then, table)
    assert (weights @ (first + then) <= np.minimum(whole, parts) * (1 + 1e-9) + 1e-12).all()
    np.testing.assert_allclose(np.diag(weights), 1.0)


@settings(max_examples=examples(60))
@given(MACHINES, st.booleans(), st.lists(st.floats(0, 10, allow_subnormal=False), min_size=8, max_size=8))
def test_a_forward_and_a_backward_take_at_least_what_a_pair_of_weights_says(machine, across, numbers):
    forward, backward = np.array(numbers).reshape(2, len(CHANNELS), 1)
    first, then = (float(concurrent_seconds(*loads, machine, across)[0]) for loads in (forward, backward))
    alone = float(concurrent_seconds(backward[COMPUTE], np.zeros(1), np.zeros(1), np.zeros(1), machine, across)[0])
    weights, is_told = weights_of_passes(machine, across), 0
    for own, other in zip(*weights, strict=True):
        least = float(own @ forward[:, 0] + other @ backward[:, 0]) + (0.0 if other.any() else alone)
        assert least <= (first + then) * (1 + 1e-9) + 1e-12
        is_told += not other.any()
    assert is_told == 2


@pytest.mark.parametrize("machine", [None, TURNS])
def test_what_takes_turns_adds_up(machine):
    weights = dual_weights(machine, False)
    np.testing.assert_allclose(weights[[COMPUTE, TO_HOST]], 1.0)
