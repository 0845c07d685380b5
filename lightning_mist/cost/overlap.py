"""Seconds of loads on several channels that start together and run at the same time.

A fluid model. While a set ``A`` of channels is active, each advances at its speed ``v_j(A)`` (see
:mod:`lightning_mist.hardware.interference`) until the first of them is done:

    T = sum over phases of  min over j in A of  x_j / v_j(A),     x_j -= v_j(A) * (that time),     A loses what is done

With four channels there are at most four phases, each of them one vectorised step over all candidates. The result is
never below the largest load, as no speed is above 1, and never above the sum of the loads, as the speeds of a set add
up to at least 1.

Array axes
    K  candidates
    M  masks: sets of active channels, bit ``i`` of which is channel ``i`` of ``CHANNELS``
    C  channels
"""

from collections.abc import Set
from functools import lru_cache

import numpy as np

from lightning_mist.cost.compile import FloatArray
from lightning_mist.hardware import CHANNELS, Channel, Interference

_BITS = 1 << np.arange(len(CHANNELS))


def speeds(active: Set[Channel], interference: Interference | None, across_nodes: bool) -> dict[Channel, float]:
    """How fast each of the active channels advances, as a part of what it does alone.

    Args:
        active: Channels that run at the same time.
        interference: The machine's coefficients; None for one whose channels take turns, as on a CPU, whose cores
            compute, copy and communicate.
        across_nodes: Whether the network's group spans several nodes.

    Returns:
        The active channels' speeds, in (0, 1].
    """
    mask = sum(1 << index for index, channel in enumerate(CHANNELS) if channel in active)
    speed_C = speed_table(interference, across_nodes)[mask]
    return {channel: float(speed_C[index]) for index, channel in enumerate(CHANNELS) if channel in active}


def concurrent_seconds(
    compute_K: FloatArray,
    network_K: FloatArray,
    to_device_K: FloatArray,
    to_host_K: FloatArray,
    interference: Interference | None,
    across_nodes: bool,
) -> FloatArray:
    """Seconds until all loads that start together are done.

    Args:
        compute_K: Seconds of computing alone, not negative. The four may be of any shapes that broadcast.
        network_K: Seconds of communicating alone.
        to_device_K: Seconds of copying from the host alone.
        to_host_K: Seconds of copying to the host alone.
        interference: The machine's coefficients; None where channels take turns.
        across_nodes: Whether the network's group spans several nodes.

    Returns:
        Seconds, in the shape that the loads broadcast to.

    Raises:
        ValueError: If a load is negative or not finite.
    """
    loads = np.broadcast_arrays(compute_K, network_K, to_device_K, to_host_K)
    left_CK = np.stack([np.asarray(load, dtype=np.float64) for load in loads])
    if not (np.isfinite(left_CK).all() and (left_CK >= 0.0).all()):
        raise ValueError(f"loads from {left_CK.min()} to {left_CK.max()} s: they are finite and not negative")
    if interference is None:
        summed_K: FloatArray = left_CK.sum(axis=0)
        return summed_K
    low_K, high_K = left_CK.max(axis=0), left_CK.sum(axis=0)
    speed_MC = speed_table(interference, across_nodes)
    total_K = np.zeros(left_CK.shape[1:])
    for _ in CHANNELS:
        mask_K = np.tensordot(_BITS, left_CK > 0.0, axes=1)
        if not mask_K.any():
            break
        speed_CK = np.moveaxis(speed_MC[mask_K], -1, 0)
        needed_CK = np.where(left_CK > 0.0, left_CK / speed_CK, np.inf)
        passed_K = np.where(mask_K > 0, needed_CK.min(axis=0), 0.0)
        total_K += passed_K
        # What ends in this phase is set to nothing: rounding must not leave a phase of its own.
        done_CK = needed_CK <= passed_K
        left_CK = np.where(done_CK, 0.0, np.maximum(left_CK - passed_K * speed_CK, 0.0))
    # Only rounding can exceed the bounds.
    bounded_K: FloatArray = np.clip(total_K, low_K, high_K)
    return bounded_K


@lru_cache(maxsize=64)
def speed_table(interference: Interference | None, across_nodes: bool) -> FloatArray:
    """Speeds of the channels in every set of active ones.

    Args:
        interference: The machine's coefficients; None where channels take turns.
        across_nodes: Whether the network's group spans several nodes.

    Returns:
        ``speed_MC``, read-only; 1 for channels that are not in a set.
    """
    size = len(CHANNELS)
    slow_CC = np.zeros((size, size))
    for first in range(size):
        for second in range(size):
            if first != second:
                pair = (CHANNELS[first], CHANNELS[second])
                slow_CC[first, second] = (
                    1.0 if interference is None else interference.between(*pair, across_nodes=across_nodes)
                )
    active_MC = (np.arange(2**size)[:, None] & _BITS) > 0
    speed_MC: FloatArray = np.where(active_MC, 1.0 / (1.0 + active_MC @ slow_CC), 1.0)
    speed_MC.setflags(write=False)
    return speed_MC
