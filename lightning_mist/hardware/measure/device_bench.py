"""Running computation, communication and copies together on a CUDA device, and timing them by events.

Streams and what they order
    Each channel has a stream of its own; nothing but the streams lets the channels run at the same time. All of them
    wait for the event ``begin``, so that no load starts while others are still being launched ahead of it, and the
    current stream waits for all of them before it records ``end``.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lightning_mist.devices import ops_of
from lightning_mist.hardware.catalog import copies_are_staged, interference_of_kind, lanes_are_shared
from lightning_mist.hardware.groups import RankGroup
from lightning_mist.hardware.measure.operators import Session, synchronize
from lightning_mist.hardware.profile import (
    CHANNELS,
    COEFFICIENTS,
    Channel,
    CollectiveCost,
    Interference,
    seconds_together,
    speed_table,
)

# Measuring how much the channels of the machine at hand slow each other down.
#
# Work comes in units (a matrix product, a collective, a copy). Of each channel as many units are taken as last about
# :data:`LOAD_SECONDS` alone; then sets of channels run their loads together, evenly at first and then one of them with
# twice its load, until the budget ends. Loads are timed alone with the very number of units that they have together.
#
# Coefficients ``a`` are those that a normal prior and the measurements ``t_i`` make most likely:
#
#     minimise over 0 <= a <= 1:   sum_i rho((T_i(a) / t_i - 1) / NOISE) + sum_k ((a_k - prior_k) / PRIOR_SPREAD)^2
#
# with ``T_i`` the model's time and ``rho`` SciPy's ``soft_l1``, which grows like a square up to about 1 and like a line
# beyond, so that a disturbed measurement pulls no harder than a good one. A coefficient that nothing was measured of
# keeps the prior's value. The prior is what machines with such copies and such a network do
# (:mod:`lightning_mist.hardware.catalog.interference_kinds`).


NOISE = 0.05
"""Relative error that a time of the best coefficients has: 0.03 to 0.06 on three machines (the record
``interference``, rows of kind "own")."""

PRIOR_SPREAD = 0.24
"""How far a machine's coefficients lie from those of its kind: root mean square over three machines that the kind was
fitted without (the record, row of kind "prior_spread")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrentTimes:
    """Measured times of loads that ran together.

    Attributes:
        loads: Seconds that each load takes alone; channels (in the order of ``CHANNELS``) times measurements.
        seconds: Seconds until all of them were done, positive.
    """

    loads: NDArray[np.float64]
    seconds: NDArray[np.float64]
    across_nodes: NDArray[np.bool_]

    def __post_init__(self) -> None:
        count = len(self.seconds)
        if self.loads.shape != (len(CHANNELS), count) or self.across_nodes.shape != (count,):
            raise ValueError(
                f"loads of shape {self.loads.shape} and {self.across_nodes.shape[0]} groups for {count} times: "
                f"there is a row of loads for each of {len(CHANNELS)} channels, and a column for each time"
            )

    def pick(self, index: NDArray[np.integer] | NDArray[np.bool_]) -> "ConcurrentTimes":
        """Some of the measurements, by position or mask."""
        return ConcurrentTimes(
            loads=self.loads[:, index], seconds=self.seconds[index], across_nodes=self.across_nodes[index]
        )


def predicted_seconds(times: ConcurrentTimes, interference: Interference | None) -> NDArray[np.float64]:
    """What the model says that each of the measurements takes."""
    inside = seconds_together(times.loads, speed_table(interference, False))
    across = seconds_together(times.loads, speed_table(interference, True))
    return np.where(times.across_nodes, across, inside)


def relative_errors(times: ConcurrentTimes, interference: Interference | None) -> NDArray[np.float64]:
    """Predicted over measured times, less one."""
    errors: NDArray[np.float64] = predicted_seconds(times, interference) / times.seconds - 1.0
    return errors


def fit_interference(times: ConcurrentTimes, prior: Interference, source: str) -> Interference:
    """Coefficients that measured times and a prior make most likely; see the module's text.

    Returns:
        The coefficients; their spread is the mean relative error of the measured times, 0 if there are none.
    """
    start = vector_of(prior)

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        errors = relative_errors(times, of_vector(values, prior)) / NOISE
        # With rho the loss, soft_l1 of r is about |r| for large r: written out, as the prior's terms stay squares.
        robust = np.sign(errors) * np.sqrt(2.0 * (np.sqrt(1.0 + errors**2) - 1.0))
        return np.concatenate([robust, (values - start) / PRIOR_SPREAD])

    # Not on a bound, where the solver could not start.
    found = least_squares(residuals, np.clip(start, 0.02, 0.98), bounds=(0.0, 1.0))
    fitted = of_vector(found.x, replace(prior, source=source, spread=0.0))
    if not len(times.seconds):
        return fitted
    return replace(fitted, spread=float(np.abs(relative_errors(times, fitted)).mean()))


def vector_of(interference: Interference) -> NDArray[np.float64]:
    """The coefficients in the order of ``COEFFICIENTS``."""
    return np.array([getattr(interference, name) for name in COEFFICIENTS])


def of_vector(values: NDArray[np.float64], like: Interference) -> Interference:
    """An interference with other coefficients, clipped to [0, 1], which rounding may leave."""
    cut = {name: float(value) for name, value in zip(COEFFICIENTS, np.clip(values, 0.0, 1.0), strict=True)}
    return Interference(**cut, source=like.source, spread=like.spread)


LOAD_SECONDS = 1e-2
"""Seconds of an even load alone: a thousand times what launching a unit takes."""

MAX_UNITS = 1000
"""Units of a load at most, should one take next to no time."""

REPEATS = 3
"""Times that a set runs; the median counts."""

Counts = tuple[int, ...]
"""Units on each of the channels, in the order of ``CHANNELS``."""


def concurrent_times(
    bench: Callable[[Counts, bool], float], networks: Sequence[bool], budget_seconds: float
) -> ConcurrentTimes:
    """Times of loads together, and of each of them alone.

    Args:
        bench: Runs loads that start together, across nodes or not, until all of them are done; says the seconds on the
            slowest rank, the same on all ranks.
        networks: Kinds of groups that the bench has: False for one inside the nodes, True for one that spans them.
        budget_seconds: Roughly how long it may take; even loads of all pairs are measured in any case.
    """
    known: dict[tuple[Counts, bool], float] = {}
    spent = 0.0

    def timed(counts: Counts, across: bool) -> float:
        nonlocal spent
        across = across and counts[1] > 0
        if (counts, across) not in known:
            samples = [bench(counts, across) for _ in range(REPEATS)]
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
        counts = tuple(weight * unit for weight, unit in zip(weights, units[across], strict=True))
        loads.append([timed(_only(index, count), across) if count else 0.0 for index, count in enumerate(counts)])
        seconds.append(timed(counts, across))
        far.append(across)
    return ConcurrentTimes(
        loads=np.array(loads).reshape(-1, len(CHANNELS)).T,
        seconds=np.array(seconds),
        across_nodes=np.array(far, dtype=np.bool_),
    )


def kind_of(to_device: float, to_host: float, collectives: Sequence[CollectiveCost]) -> Interference:
    """Coefficients of machines with such rates of copies (bytes per second) and such collectives."""
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
        found[across] = tuple(counts)
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
                places = range(len(CHANNELS))
                yield tuple(0 if index not in members else 2 if index == doubled else 1 for index in places), across


def _only(index: int, count: int) -> Counts:
    return tuple(count if place == index else 0 for place in range(len(CHANNELS)))


MATMUL_EDGE = 4096
"""Edge of the products, that of the published measurements (mist): 0.14 TFLOP each."""

PAYLOAD_BYTES = 2**25
"""Bytes of a copy or a collective: more than latencies hide, less than a load has."""


class DeviceBench:
    """Loads on this rank's device and its channels; all ranks run the same at the same time."""

    def __init__(self, session: Session, inside: RankGroup | None, across: RankGroup | None) -> None:
        """Allocate what the units work on."""
        device = session.device
        self._session = session
        self._groups = {False: inside, True: across}
        self._ops = ops_of(device)
        self._streams = tuple(self._ops.stream() for _ in CHANNELS)
        random = torch.Generator(device=device).manual_seed(0)
        shape = (MATMUL_EDGE, MATMUL_EDGE)
        self._left = torch.randn(shape, generator=random, device=device).half()
        self._right = torch.randn(shape, generator=random, device=device).half()
        self._out = torch.empty(shape, dtype=torch.float16, device=device)
        # Zeros: sums of them stay finite however often they are reduced.
        self._message = torch.zeros(PAYLOAD_BYTES // 4, device=device, dtype=torch.float32)
        # Both directions have buffers of their own: a copy must not wait for another one's bytes.
        self._host = [self._ops.host_memory(PAYLOAD_BYTES) for _ in range(2)]
        self._device = [torch.empty(PAYLOAD_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        # The buffers were filled on the current stream, which the channels' streams do not wait for by themselves.
        synchronize(device)

    def seconds(self, counts: Counts, across_nodes: bool) -> float:
        """Seconds until all loads are done, on the slowest rank; see :func:`concurrent_times`."""
        ops = self._ops
        synchronize(self._session.device)
        self._session.agree([0.0])
        synchronize(self._session.device)
        begin = ops.record(timed=True)
        for stream in self._streams:
            ops.wait(begin, stream)
        # Launched in turns, by the part of its load that a channel has launched: no load waits for another's launches.
        turns = [((unit + 0.5) / count, index) for index, count in enumerate(counts) for unit in range(count)]
        for _, index in sorted(turns):
            ops.launch(partial(self._launch, index, across_nodes), self._streams[index])
        for stream in self._streams:
            ops.wait(ops.record(stream))
        end = ops.record(timed=True)
        ops.synchronize(end)
        (slowest,) = self._session.agree([ops.seconds(begin, end)])
        return slowest

    def _launch(self, index: int, across_nodes: bool) -> None:
        """One unit of a channel, on the current stream."""
        channel = CHANNELS[index]
        if channel == "compute":
            torch.mm(self._left, self._right, out=self._out)
        elif channel == "to_device":
            self._device[0].copy_(self._host[0], non_blocking=True)
        elif channel == "to_host":
            self._host[1].copy_(self._device[1], non_blocking=True)
        else:
            group = self._groups[across_nodes]
            if group is None:
                raise ValueError(f"no group {'across nodes' if across_nodes else 'inside the node'} to communicate in")
            dist.all_reduce(self._message, group=group.handle)


def measure_on_device(
    session: Session,
    groups: Sequence[RankGroup],
    *,
    copies: tuple[float, float],
    collectives: Sequence[CollectiveCost],
    budget_seconds: float,
    report: Callable[[], None],
) -> Interference | None:
    """Measure how much the channels of this machine slow each other down, on all ranks at once.

    Returns:
        The coefficients, the same on every rank; None on a CPU, which has no such channels.
    """
    if session.device.type != "cuda":
        return None
    report()
    inside, across = network_groups(groups, 0 if session.world is None else dist.get_rank())
    try:
        networks = [far for far, group in ((False, inside), (True, across)) if group is not None]
        times = concurrent_times(DeviceBench(session, inside, across).seconds, networks, budget_seconds)
        return fit_interference(times, kind_of(*copies, collectives), "measured")
    finally:
        # Products on a stream of their own got a workspace of their own, which torch gives back in no other way.
        torch._C._cuda_clearCublasWorkspaces()


def network_groups(groups: Sequence[RankGroup], rank: int) -> tuple[RankGroup | None, RankGroup | None]:
    """The largest group of this rank inside its node, and the largest of all that span nodes."""
    mine = [group for group in groups if rank in group.ranks]
    inside = max((group for group in mine if group.num_nodes == 1), key=lambda group: len(group.ranks), default=None)
    across = max((group for group in mine if group.num_nodes > 1), key=lambda group: len(group.ranks), default=None)
    return inside, across
