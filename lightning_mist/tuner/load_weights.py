"""How long loads on several channels take at least, in whatever order they are done.

While the channels ``S`` of a device are active, channel ``i`` advances at ``v_i(S)`` of what it does alone
(:mod:`lightning_mist.hardware.profile.interference_model`). Weights with

    sum_{i in S} w_i v_i(S) <= 1    for every S

grow by at most 1 in any second, counted over what has been done. So loads ``x_i`` take at least ``sum_i w_i x_i``.

Array axes
    W  weights: those that favour computing, the network, copies to the device, copies to the host
    C  channels, in the order of ``CHANNELS``
"""

from functools import lru_cache

import numpy as np

from lightning_mist.cost.inputs import FloatArray
from lightning_mist.hardware import Interference
from lightning_mist.hardware.profile import CHANNELS, speed_table

COMPUTE, NETWORK, TO_DEVICE, TO_HOST = range(len(CHANNELS))


@lru_cache(maxsize=256)
def load_weights(interference: Interference | None, across_nodes: bool) -> FloatArray:
    """Weights, one set for each channel, which has the most that it can have; then computing, and the others in order.

    Args:
        interference: How channels slow each other down; ``None`` where they take turns, so that all loads add up.
        across_nodes: Whether the network's group spans several nodes.
    """
    if interference is None:
        return np.ones((len(CHANNELS), len(CHANNELS)))
    table = speed_table(interference, across_nodes)
    weights_WC = np.zeros((len(CHANNELS), len(CHANNELS)))
    for favoured, weights_C in enumerate(weights_WC):
        for channel in dict.fromkeys((favoured, COMPUTE, TO_DEVICE, TO_HOST, NETWORK)):
            # What the channels so far leave to this one in the set where that is least.
            masks = np.flatnonzero(np.arange(len(table)) >> channel & 1)
            active = (masks[:, None] >> np.arange(len(CHANNELS))) & 1
            left = 1 - (active * table[masks] * weights_C).sum(axis=1)
            weights_C[channel] = max(0.0, float((left / table[masks, channel]).min()))
    weights_WC.setflags(write=False)
    return weights_WC
