"""How much channels that run at the same time slow each other down, and how long loads on them take.

A device works on four things at once: it computes, exchanges bytes with other devices, and copies from and to the host.
Each pair of these channels has one coefficient between 0 (they run beside each other freely) and 1 (they take turns).
While the set ``A`` of channels is active, channel ``j`` advances at the speed

    v_j(A) = 1 / (1 + W_j(A))

of what it does alone: for every second of its own it waits ``W_j(A)`` seconds in which the others have their turns.
Those are of ``a_jk`` seconds for each other channel ``k``, and the others do their turns together, as slow or fast as
the very same rule lets them:

    W_j({j, k}) = a_jk,        W_j(A) = T(loads a_jk of the channels k in A other than j),        a_jk = a_kj

with ``T`` from below. Two channels with ``a = 1`` run at half their speed each, as if they took turns; a third one that
takes turns with both of them waits for both, one after the other, if they take turns with each other, and for only one
of them if they are free of each other. As no coefficient is above 1, ``W_j`` is at most the number of the others, and
all speeds together are never below 1: running together is never slower than taking turns.

Loads ``x_j``, the seconds that each channel would take alone, start together and flow like fluids until the last one
is done:

    T = sum over phases of  min over j in A of  x_j / v_j(A),     x_j -= v_j(A) * (that time),     A loses what is done

What communication does to the others depends on the link: inside a node a device moves the bytes itself, over NVLink or
over the PCIe lanes that copies use; between nodes the network card fetches them, over those lanes or through host
memory, and the device's cores have little to do. The three coefficients of the network exist for both kinds of groups,
which makes nine numbers.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Channel = Literal["compute", "network", "to_device", "to_host"]
"""What a device does at the same time: computing, communicating with other devices, copying from and to the host."""

CHANNELS: tuple[Channel, ...] = ("compute", "network", "to_device", "to_host")
"""All channels, in the order of their bits in a mask."""

_BITS = 1 << np.arange(len(CHANNELS))

_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Coefficients of a machine, each from 0 (free of each other) to 1 (taking turns).

    ``network`` is communication inside a node, ``across`` communication between nodes.

    Attributes:
        spread: Mean relative error of the times that they were fitted to; 0 where nothing was measured.
    """

    compute_to_device: float
    compute_to_host: float
    to_device_to_host: float
    compute_network: float
    network_to_device: float
    network_to_host: float
    compute_across: float
    across_to_device: float
    across_to_host: float
    source: str
    spread: float = 0.0

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} = {value}: a coefficient is between 0 (free) and 1 (taking turns)")


COEFFICIENTS = tuple(field.name for field in fields(Interference) if field.name not in ("source", "spread"))
"""Names of the coefficients, in their order in vectors."""


def speed_table(interference: Interference | None, across_nodes: bool) -> NDArray[np.float64]:
    """Speeds of the channels in every set of active ones, as parts of what they do alone.

    Args:
        interference: The machine's coefficients; None for one whose channels take turns, as on a CPU, whose cores
            compute, copy and communicate.

    Returns:
        ``v``, sets times channels, read-only: bit ``i`` of a set's number is channel ``i`` of :data:`CHANNELS`; 1 for
        channels that are not in a set.
    """
    if interference is None:
        return _speeds(tuple([1.0] * len(COEFFICIENTS)), across_nodes)
    return _speeds(tuple(getattr(interference, name) for name in COEFFICIENTS), across_nodes)


@lru_cache(maxsize=256)
def _speeds(coefficients: tuple[float, ...], across_nodes: bool) -> NDArray[np.float64]:
    value = dict(zip(COEFFICIENTS, coefficients, strict=True))
    slow = np.zeros((len(CHANNELS), len(CHANNELS)))
    for high, second in enumerate(CHANNELS):
        for low, first in enumerate(CHANNELS[:high]):
            name = f"{first}_{second}".replace("network", "across" if across_nodes else "network")
            slow[low, high] = slow[high, low] = value[name]
    bits = (np.arange(2 ** len(CHANNELS))[:, None] & _BITS) > 0
    table: NDArray[np.float64] = np.ones(bits.shape)
    for size in range(2, len(CHANNELS) + 1):
        sets, waiting = np.nonzero(bits & (bits.sum(axis=1) == size)[:, None])
        turns = np.where(bits[sets], slow[waiting], 0.0)
        # The diagonal of ``slow`` is zero: a channel does not wait for itself, so that only smaller sets are active.
        table[sets, waiting] = 1.0 / (1.0 + seconds_together(turns.T, table))
    table.setflags(write=False)
    return table


def seconds_together(loads: NDArray[np.float64], speeds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds until loads that start together are all done.

    With four channels there are at most four phases, each of them one vectorised step.

    Args:
        loads: Seconds that each channel takes alone, not negative; channels first, then any shape.
        speeds: The table of :func:`speed_table`.

    Returns:
        Seconds, in the shape that follows the channels; from the largest load to the sum of all.
    """
    flat = loads.reshape(len(CHANNELS), -1)
    slowness = np.ascontiguousarray(1.0 / speeds.T)
    # Block by block, so that what a phase works on stays in the processor's cache: 35 ms instead of 60 for 100,000.
    parts = [_flow(flat[:, start : start + _BLOCK], slowness) for start in range(0, flat.shape[1], _BLOCK)]
    total = np.concatenate(parts) if parts else np.zeros(0)
    # Only rounding can exceed these bounds.
    bounded: NDArray[np.float64] = np.clip(total, flat.max(axis=0, initial=0.0), flat.sum(axis=0))
    return bounded.reshape(loads.shape[1:])


def ends_together(loads: NDArray[np.float64], speeds: NDArray[np.float64]) -> NDArray[np.float64]:
    """When each of some loads that start together is done: what :func:`seconds_together` is the largest of.

    Args:
        loads: As there, channels times any number.

    Returns:
        Seconds, in the shape of the loads; 0 for those that are nothing.
    """
    left, ends, now = loads.copy(), np.zeros_like(loads), np.zeros(loads.shape[1])
    while (left > 0.0).any():
        active = left > 0.0
        speed = speeds[_BITS @ active].T
        needed = np.where(active, left / speed, np.inf)
        passed = np.where(active.any(axis=0), needed.min(axis=0), 0.0)
        now = now + passed
        is_done = active & (needed <= passed)
        ends = np.where(is_done, now, ends)
        left = np.where(active & ~is_done, left - passed * speed, 0.0)
    return ends


def _flow(left: NDArray[np.float64], slowness: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds until loads (channels times any number) are done, with slownesses (channels times sets)."""
    total = np.zeros(left.shape[1])
    at: NDArray[np.int64] | None = None
    for phase in range(len(CHANNELS)):
        active = left > 0.0
        bits = active.view(np.uint8)
        mask = bits[0] | (bits[1] << 1) | (bits[2] << 2) | (bits[3] << 3)
        if phase:
            # What is done is left out, as soon as that is much.
            alive = np.flatnonzero(mask)
            if not len(alive):
                break
            if 4 * len(alive) < 3 * len(mask):
                left, active, mask = left[:, alive], active[:, alive], mask[alive]
                at = alive if at is None else at[alive]
        slow = slowness.take(mask, axis=1)
        needed = left * slow
        passed = np.where(active, needed, np.inf).min(axis=0)
        passed[mask == 0] = 0.0
        if at is None:
            total += passed
        else:
            total[at] += passed
        # What ends in this phase is set to nothing: rounding must not leave a phase of its own.
        left = np.where(needed > passed, np.maximum(left - passed / slow, 0.0), 0.0)
    return total
