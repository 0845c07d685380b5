"""Seconds of loads on several channels that start together and run at the same time.

The model, a fluid whose speeds depend on which channels are active, is that of
:mod:`lightning_mist.hardware.profile.interference_model`. Its result is never below the largest load and never above
their sum.

While the channels ``S`` of a device are active, channel ``i`` advances at ``v_i(S)`` of what it does alone. Dual
weights (Lagrangian multipliers of the channels) with

    sum_{i in S} w_i v_i(S) <= 1    for every S

grow by at most 1 in any second, counted over what has been done. So loads ``x_i`` take at least ``sum_i w_i x_i``.

Array axes
    K  candidates; of several loads channels come first, in the order of ``CHANNELS``
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_mist.cost.inputs import FloatArray
from lightning_mist.errors import ProfileError
from lightning_mist.hardware import Cluster, HardwareProfile
from lightning_mist.hardware.profile import CHANNELS, COEFFICIENTS, Interference, seconds_together, speed_table

COMPUTE, NETWORK, TO_DEVICE, TO_HOST = range(len(CHANNELS))

_FAVOURED: tuple[tuple[int, int | None], ...] = (
    (TO_HOST, TO_DEVICE),
    (COMPUTE, COMPUTE),
    (COMPUTE, TO_DEVICE),
    (TO_DEVICE, TO_DEVICE),
    (TO_DEVICE, NETWORK),
    (TO_HOST, None),
    (TO_DEVICE, None),
)
"""What the weights of a forward and of a backward favour, in the pairs that are looked at; with ``None`` the backward
has no weights, and takes what it does with nothing copied beside it."""


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
        to_device_K: Seconds of copying from the host alone.
        to_host_K: Seconds of copying to the host alone.

    Raises:
        ValueError: If a load is negative or not finite.
    """
    loads = np.broadcast_arrays(compute_K, network_K, to_device_K, to_host_K)
    loads_K = np.stack([np.asarray(load, dtype=np.float64) for load in loads])
    least, most = loads_K.min(initial=0.0), loads_K.max(initial=0.0)
    # What is not a number is neither.
    if not (least >= 0.0 and most < np.inf):
        raise ValueError(f"loads from {least} to {most} s: they are finite and not negative")
    if interference is None:
        summed_K: FloatArray = loads_K.sum(axis=0)
        return summed_K
    return seconds_together(loads_K, speed_table(interference, across_nodes))


def beyond_computing(
    compute_K: FloatArray, network_K: FloatArray, interference: Interference | None, across_nodes: bool
) -> FloatArray:
    """Seconds that communication takes beside computation beyond those of computing alone.

    Two channels with the coefficient ``a`` run at ``1 / (1 + a)`` of their speeds until the smaller load ``x`` is done,
    for ``x + a x`` seconds, and the rest of the larger one ``y`` takes ``y - x``: together ``y + a x``.
    """
    if interference is None:
        return network_K
    coefficient = interference.compute_across if across_nodes else interference.compute_network
    less_K = np.minimum(compute_K, network_K)
    return (network_K - less_K) + coefficient * less_K


FREE = Interference(**dict.fromkeys(COEFFICIENTS, 0.0), source="not known, so none")
"""Channels that do not slow each other down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Bytes per second that one device copies from and to the host, all devices of its node copying."""

    to_device: float
    to_host: float


def interference_of(profile: HardwareProfile, cluster: Cluster) -> Interference | None:
    """How the channels of a machine's devices slow each other down; ``None`` where they take turns."""
    if cluster.device.kind != "cuda":
        return None
    return profile.interference or FREE


def copy_rates(profile: HardwareProfile, cluster: Cluster) -> CopyRates:
    """How fast one device copies.

    Raises:
        ProfileError: If nothing is known of a device's copies.
    """
    rates = profile.host_to_device_bytes_per_second, profile.device_to_host_bytes_per_second
    if cluster.device.kind != "cuda":
        # Every byte is read once and written once.
        within = profile.memory_bytes_per_second / 2
        return CopyRates(to_device=rates[0] or within, to_host=rates[1] or within)
    if min(rates) <= 0:
        raise ProfileError(
            f"the profile of {profile.device} copies {rates[0]:g} bytes/s from the host and {rates[1]:g} to it: "
            "offload needs both rates; measure the machine, or describe its host link"
        )
    share = profile.host_bytes_per_second_per_node / cluster.devices_per_node or float("inf")
    return CopyRates(to_device=min(rates[0], share), to_host=min(rates[1], share))


@lru_cache(maxsize=256)
def dual_weights(interference: Interference | None, across_nodes: bool) -> FloatArray:
    """Weights of the channels, a row for each channel, which has the most that it can have, then the others in turn.

    Args:
        interference: How channels slow each other down; ``None`` where they take turns, so that all loads add up.
        across_nodes: Whether the network's group spans several nodes.
    """
    if interference is None:
        return np.ones((len(CHANNELS), len(CHANNELS)))
    table = speed_table(interference, across_nodes)
    weights = np.zeros((len(CHANNELS), len(CHANNELS)))
    for favoured, row in enumerate(weights):
        for channel in dict.fromkeys((favoured, COMPUTE, TO_DEVICE, TO_HOST, NETWORK)):
            # What the channels so far leave to this one in the set where that is least.
            masks = np.flatnonzero(np.arange(len(table)) >> channel & 1)
            active = (masks[:, None] >> np.arange(len(CHANNELS))) & 1
            left = 1 - (active * table[masks] * row).sum(axis=1)
            row[channel] = max(0.0, float((left / table[masks, channel]).min()))
    weights.setflags(write=False)
    return weights


def weights_of_passes(interference: Interference | None, across_nodes: bool) -> tuple[FloatArray, FloatArray]:
    """Weights of a forward and of a backward that bound both together: some pairs, each a row of either.

    Where all of a backward are zero its seconds with nothing copied beside it are to be added. Arguments as for
    :func:`dual_weights`.
    """
    weights = dual_weights(interference, across_nodes)
    none = np.zeros(len(CHANNELS))
    first, then = zip(*_FAVOURED, strict=True)
    return weights[list(first)], np.stack([none if item is None else weights[item] for item in then])
