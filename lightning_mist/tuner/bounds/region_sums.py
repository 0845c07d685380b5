"""Least sums of what regions have, over ranges of layers.

Array axes
    L  layers; lengths of ranges ``0 .. L``
    R  regions
    X  positions in a pipeline
"""

import numpy as np

from lightning_mist.cost.inputs import FloatArray


def least_sums(values_L: FloatArray) -> FloatArray:
    """The least sum over any layers that follow each other, by their number from none to all."""
    if not len(values_L) or not np.ptp(values_L):
        multiples: FloatArray = np.arange(len(values_L) + 1) * np.float64(values_L[0] if len(values_L) else 0.0)
        return multiples
    prefix = np.concatenate([[0.0], np.cumsum(values_L)])
    return np.array([(prefix[length:] - prefix[: len(prefix) - length]).min() for length in range(len(prefix))])


def of_layers(values_R: FloatArray) -> FloatArray:
    """The least sums over ranges of layers of what regions have."""
    return least_sums(values_R[1:-1])


def edges(values_R: FloatArray) -> FloatArray:
    """What the head or the tail adds at every position, with axis ``X``."""
    return np.array([values_R[0], 0.0, values_R[-1]])
