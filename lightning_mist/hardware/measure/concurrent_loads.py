"""Measuring how much the channels of the machine at hand slow each other down.

Work comes in units (a matrix product, a collective, a copy). Of each channel as many units are taken as last about
:data:`LOAD_SECONDS` alone; then sets of channels run their loads together, evenly at first and then one of them with
twice its load, until the budget ends. Loads are timed alone with the very number of units that they have together. The
coefficients are fitted to these times (:mod:`lightning_mist.hardware.measure.interference_fit`), starting from what
machines with such copies and such a network do.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Protocol

import numpy as np

from lightning_mist.hardware.catalog import copies_are_staged, interference_of_kind, lanes_are_shared
from lightning_mist.hardware.measure.interference_fit import ConcurrentTimes, fit_interference
from lightning_mist.hardware.profile import CHANNELS, Channel, CollectiveCost, Interference

LOAD_SECONDS = 1e-2
"""Seconds of an even load alone: a thousand times what launching a unit takes."""

MAX_UNITS = 1000
"""Units of a load at most, should one take next to no time."""

REPEATS = 3
"""Times that a set runs; the median counts."""

Counts = tuple[int, int, int, int]
"""Units on each of the channels, in the order of ``CHANNELS``."""


class Bench(Protocol):
    """Where loads run together."""

    def seconds(self, counts: Counts, across_nodes: bool) -> float:
        """Run loads that start together until all of them are done.

        Args:
            across_nodes: Whether the network's units are of the group that spans the nodes.

        Returns:
            Seconds on the slowest rank, the same on all ranks.
        """
        ...


def measure_interference(
    bench: Bench,
    *,
    networks: Sequence[bool],
    prior: Interference,
    source: str,
    budget_seconds: float,
) -> Interference:
    """Measure the coefficients of a machine.

    Args:
        networks: Kinds of groups that it has: False for one inside the nodes, True for one that spans them.
        prior: What machines of its kind do; kept where nothing can be measured.
        budget_seconds: Roughly how long it may take; even loads of all pairs are measured in any case.
    """
    return fit_interference(concurrent_times(bench, networks, budget_seconds), prior, source)


def concurrent_times(bench: Bench, networks: Sequence[bool], budget_seconds: float) -> ConcurrentTimes:
    """Times of loads together, and of each of them alone."""
    known: dict[tuple[Counts, bool], float] = {}
    spent = 0.0

    def timed(counts: Counts, across: bool) -> float:
        nonlocal spent
        across = across and counts[1] > 0
        if (counts, across) not in known:
            samples = [bench.seconds(counts, across) for _ in range(REPEATS)]
            known[counts, across] = statistics.median(samples)
            spent += sum(samples)
        return known[counts, across]

    loads: list[list[float]] = []
    seconds: list[float] = []
    far: list[bool] = []
    units = _units(timed, networks)
    for weights, across in _design(networks):
        # All ranks know the same times, so that all stop at the same set.
        if sum(weight > 0 for weight in weights) > 2 and spent > budget_seconds:
            break
        counts = _counts(weights, units[across])
        loads.append([timed(_only(index, count), across) if count else 0.0 for index, count in enumerate(counts)])
        seconds.append(timed(counts, across))
        far.append(across)
    return ConcurrentTimes(
        loads=np.array(loads).reshape(-1, len(CHANNELS)).T,
        seconds=np.array(seconds),
        across_nodes=np.array(far, dtype=np.bool_),
    )


def kind_of(to_device: float, to_host: float, collectives: Sequence[CollectiveCost]) -> Interference:
    """What machines with such rates do."""
    copies = (to_device + to_host) / 2
    inside = [
        cost.bytes_per_second * (cost.group_size - 1) / cost.group_size
        for cost in collectives
        if cost.operation == "all_gather" and cost.num_nodes == 1
    ]
    shared = bool(inside) and lanes_are_shared(max(inside), copies)
    return interference_of_kind(staged=copies_are_staged(copies), shared=shared)


def _units(timed: Callable[[Counts, bool], float], networks: Sequence[bool]) -> dict[bool, Counts]:
    """Units of an even load of every channel, by kind of group."""
    found = {}
    for across in networks or (False,):
        counts = [0] * len(CHANNELS)
        for index, channel in enumerate(CHANNELS):
            if channel == "network" and not networks:
                continue
            # The first unit pays for what libraries set up when they are first used.
            few = timed(_only(index, 2), across)
            many = timed(_only(index, 6), across)
            each = max((many - few) / 4, many / 12, 1e-9)
            counts[index] = max(1, min(MAX_UNITS, round(LOAD_SECONDS / each)))
        found[across] = (counts[0], counts[1], counts[2], counts[3])
    return found


def _design(networks: Sequence[bool]) -> Iterator[tuple[Counts, bool]]:
    """Multiples of even loads, kinds of groups: all sets evenly, pairs first; then one channel with twice its load."""
    sets: list[tuple[tuple[int, ...], bool]] = []
    present: list[Channel] = [channel for channel in CHANNELS if channel != "network" or networks]
    for size in range(2, len(present) + 1):
        for members in combinations([CHANNELS.index(channel) for channel in present], size):
            kinds = list(networks) if CHANNELS.index("network") in members else list(networks or (False,))[:1]
            sets.extend((members, across) for across in kinds)
    for doubled in range(-1, len(CHANNELS)):
        for members, across in sets:
            if doubled == -1 or doubled in members:
                weights = [
                    0 if index not in members else 2 if index == doubled else 1 for index in range(len(CHANNELS))
                ]
                yield (weights[0], weights[1], weights[2], weights[3]), across


def _counts(weights: Counts, units: Counts) -> Counts:
    one, two, three, four = (weight * unit for weight, unit in zip(weights, units, strict=True))
    return one, two, three, four


def _only(index: int, count: int) -> Counts:
    counts = [0] * len(CHANNELS)
    counts[index] = count
    return counts[0], counts[1], counts[2], counts[3]
