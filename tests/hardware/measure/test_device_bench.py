from typing import Any

import numpy as np
import pytest
import torch

from lightning_mist.hardware.catalog.interference_kinds import interference_of_kind
from lightning_mist.hardware.groups import RankGroup
from lightning_mist.hardware.measure.device_bench import (
    LOAD_SECONDS,
    MAX_UNITS,
    Counts,
    DeviceBench,
    concurrent_times,
    fit_interference,
    kind_of,
    measure_on_device,
    network_groups,
    of_vector,
    vector_of,
)
from lightning_mist.hardware.measure.operators import Session
from lightning_mist.hardware.profile.hardware_profile import CollectiveCost
from lightning_mist.hardware.profile.interference_model import COEFFICIENTS, Interference, seconds_together, speed_table

HANDLE: Any = object()


def group(*ranks: int, nodes: int = 1) -> RankGroup:
    return RankGroup(ranks=ranks, num_nodes=nodes, handle=HANDLE)


def test_a_cpu_has_no_such_channels() -> None:
    def never() -> None:
        raise AssertionError("nothing is measured")

    session = Session(device=torch.device("cpu"), world=None)
    found = measure_on_device(session, (), copies=(0.0, 0.0), collectives=(), budget_seconds=1.0, report=never)
    assert found is None


def test_the_largest_group_of_either_kind_that_a_rank_is_in() -> None:
    groups = (group(0, 1), group(2, 3), group(0, 2, nodes=2), group(1, 3, nodes=2), group(0, 1, 2, 3, nodes=2))
    for rank, pair in ((0, 0), (1, 0), (2, 1), (3, 1)):
        assert network_groups(groups, rank) == (groups[pair], groups[4])
    assert network_groups((group(0, 1, nodes=2),), 1) == (None, group(0, 1, nodes=2))
    assert network_groups((), 0) == (None, None)


@pytest.mark.gpu
def test_device() -> None:
    session = Session(device=torch.device("cuda", 0), world=None)
    bench = DeviceBench(session, None, None)
    bench.seconds((1, 0, 0, 0), False)  # a first product makes the library's handle
    alone = bench.seconds((20, 0, 0, 0), False)
    assert alone > 0
    assert bench.seconds((40, 0, 0, 0), False) > alone
    with pytest.raises(ValueError, match="no group inside the node"):
        bench.seconds((0, 1, 0, 0), False)
    found = measure_on_device(session, (), copies=(2e10, 2e10), collectives=(), budget_seconds=2.0, report=lambda: None)
    assert found is not None
    assert all(0 <= getattr(found, name) <= 1 for name in COEFFICIENTS)
    # The copies are direct and the processor of a device does not make them: computation has little to do with them.
    assert found.compute_to_device < 0.7
    assert found.compute_to_host < 0.7


PRIOR = interference_of_kind(staged=False, shared=False)


class ModelledBench:
    """A machine that does what the model says, with units of some lengths."""

    def __init__(self, truth: Interference, units: tuple[float, float, float, float], noise: float = 0.0) -> None:
        self.truth = truth
        self.units = np.array(units)
        self.noise = noise
        self.random = np.random.default_rng(0)
        self.calls: list[tuple[Counts, bool]] = []
        self.spent = 0.0

    def seconds(self, counts: Counts, across_nodes: bool) -> float:
        self.calls.append((counts, across_nodes))
        units = self.units * np.array([1.0, 3.0 if across_nodes else 1.0, 1.0, 1.0])
        took = float(seconds_together(units * np.array(counts), speed_table(self.truth, across_nodes)))
        took *= 1 + self.noise * self.random.standard_normal()
        self.spent += took
        return took


def measured(
    bench: ModelledBench, networks: tuple[bool, ...], prior: Interference = PRIOR, budget: float = 1e3
) -> Interference:
    return fit_interference(concurrent_times(bench.seconds, networks, budget), prior, "here")


def test_a_machine_is_found() -> None:
    truth = of_vector(np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]), PRIOR)
    found = measured(ModelledBench(truth, (2e-4, 9e-4, 6e-4, 5e-4)), (False, True))
    # The prior holds on as if times were a few percent off: these are exact.
    assert vector_of(found) == pytest.approx(vector_of(truth), abs=0.06)
    assert (found.source, found.spread < 0.02) == ("here", True)


def test_noise_averages_out() -> None:
    truth = of_vector(np.linspace(0.2, 0.8, 9), PRIOR)
    found = measured(ModelledBench(truth, (2e-4, 9e-4, 6e-4, 5e-4), noise=0.03), (False, True))
    assert vector_of(found) == pytest.approx(vector_of(truth), abs=0.15)
    assert 0.0 < found.spread < 0.05


@pytest.mark.parametrize("networks", [(), (False,), (True,)])
def test_what_a_machine_does_not_have_keeps_its_kinds_coefficients(networks: tuple[bool, ...]) -> None:
    truth = of_vector(np.full(9, 0.8), PRIOR)
    bench = ModelledBench(truth, (1e-3, 1e-3, 1e-3, 1e-3))
    found = measured(bench, networks)
    for name in COEFFICIENTS:
        across, inside = "across" in name, "network" in name
        known = (across and True in networks) or (inside and False in networks) or not (across or inside)
        before, after = abs(getattr(PRIOR, name) - 0.8), abs(getattr(found, name) - 0.8)
        assert after < 0.3 * before + 0.02 if known else after == pytest.approx(before, abs=0.01)
    if not networks:
        assert all(counts[1] == 0 for counts, _ in bench.calls)


def test_loads_are_as_long_as_meant_and_even() -> None:
    bench = ModelledBench(PRIOR, (2e-4, 9e-4, 6e-4, 5e-4))
    times = concurrent_times(bench.seconds, (False,), 1e3)
    even = times.loads[:, :11]
    assert ((even == 0) | (np.abs(even / LOAD_SECONDS - 1) < 0.1)).all()
    assert len(times.seconds) == 11 + 6 * 2 + 4 * 3 + 4
    assert (times.loads > 0).sum(axis=0)[:11].tolist() == [2] * 6 + [3] * 4 + [4]
    assert len({tuple(column) for column in np.round(times.loads, 6).T.tolist()}) == len(times.seconds)


def test_units_that_take_no_time_are_bounded() -> None:
    times = concurrent_times(ModelledBench(PRIOR, (1e-12, 1e-3, 1e-3, 1e-3)).seconds, (False,), 1e3)
    assert times.loads[0].max() <= 2 * MAX_UNITS * 1e-12 * 1.01


def test_the_budget_ends_it_after_the_pairs() -> None:
    truth = of_vector(np.full(9, 0.5), PRIOR)
    short = ModelledBench(truth, (1e-3, 1e-3, 1e-3, 1e-3))
    found = measured(short, (False,), budget=1e-3)
    before, after = (np.abs(vector_of(one)[:6] - 0.5) for one in (PRIOR, found))
    assert (after < 0.5 * before).all()
    long = ModelledBench(truth, (1e-3, 1e-3, 1e-3, 1e-3))
    measured(long, (False,), budget=1e3)
    assert short.spent < 0.5 * long.spent


def collective(operation: str, size: int, nodes: int, rate: float) -> CollectiveCost:
    return CollectiveCost(
        operation=operation, group_size=size, num_nodes=nodes, latency_seconds=0.0, bytes_per_second=rate, spread=0.0
    )


def test_kind_is_told_by_rates_alone() -> None:
    slow, fast = collective("all_gather", 8, 1, 5e9), collective("all_gather", 8, 1, 200e9)
    across = collective("all_gather", 16, 2, 400e9)
    reduced = collective("all_reduce", 8, 1, 200e9)
    assert kind_of(6e9, 6e9, [slow, across, reduced]) == interference_of_kind(staged=False, shared=True)
    assert kind_of(6e9, 6e9, [slow, fast]) == interference_of_kind(staged=False, shared=False)
    assert kind_of(3e9, 3e9, [slow]) == interference_of_kind(staged=True, shared=True)
    assert kind_of(50e9, 50e9, []) == interference_of_kind(staged=False, shared=False)
