"""The least that loads on several channels take together, as sums that can be put together of parts.

However channels take turns, while the set ``A`` of them is active each channel ``j`` in it advances at most at the
speed ``v_j(A)`` of :mod:`lightning_mist.hardware.profile.interference`. So the times ``s_A`` that the sets are active
satisfy ``sum over A of s_A v_j(A) >= x_j`` for the loads ``x``, and the loads take at least the least ``sum of s_A``
that does: a linear program, whose dual is

    the largest  y x  with  y >= 0  and  sum over j in A of y_j v_j(A) <= 1  for every set A.

Its corners do not depend on the loads. As a maximum of linear functions it is convex and grows with the loads, and of
loads in several groups one after another it is at most the sum of theirs: so it may be asked about their sums.

Array axes
    C  channels, in the order of ``CHANNELS``
    Y  corners
    K  candidates
"""

from functools import lru_cache
from itertools import combinations

import numpy as np

from lightning_mist.cost.compile import FloatArray
from lightning_mist.hardware.profile import CHANNELS, Interference, speed_table


def corners(interference: Interference | None, across_nodes: bool) -> FloatArray:
    """Weights of the channels; axes ``Y`` and ``C``.

    Args:
        interference: The machine's coefficients; None where channels take turns, whose loads add up.
        across_nodes: Whether the network's group spans several nodes.
    """
    if interference is None:
        return np.ones((1, len(CHANNELS)))
    return _corners(speed_table(interference, across_nodes).tobytes())


@lru_cache(maxsize=64)
def _corners(speeds: bytes) -> FloatArray:
    count = len(CHANNELS)
    bits = (np.arange(1, 2**count)[:, None] >> np.arange(count)) & 1
    rows = np.concatenate([np.frombuffer(speeds).reshape(-1, count)[1:] * bits, np.eye(count)])
    sides = np.concatenate([np.ones(len(bits)), np.zeros(count)])
    tight = np.array(list(combinations(range(len(rows)), count)))
    matrices = rows[tight]
    solvable = np.abs(np.linalg.det(matrices)) > 1e-9
    found = np.linalg.solve(matrices[solvable], sides[tight[solvable]][..., None])[..., 0]
    # Rounding must not make one of them more than it may be.
    inside = (found >= -1e-9).all(axis=1) & (rows[: len(bits)] @ found.T <= 1 + 1e-9).all(axis=0)
    kept = np.unique(np.round(np.maximum(found[inside], 0.0), 12), axis=0) * (1 - 2e-9)
    # Weights that others equal or exceed everywhere add nothing.
    no_more, less = (kept[:, None] <= kept[None]).all(axis=2), np.any(kept[:, None] < kept[None], axis=2)
    beaten = np.any(no_more & less, axis=1)
    weights: FloatArray = kept[~beaten]
    weights.setflags(write=False)
    return weights


def least_seconds(
    weights: FloatArray, compute_K: FloatArray, network_K: FloatArray, to_device_K: FloatArray, to_host_K: FloatArray
) -> FloatArray:
    """Seconds that loads take at least.

    Args:
        weights: Those of :func:`corners`.
        compute_K: Seconds of computing alone.
        network_K: Seconds of communicating alone.
        to_device_K: Seconds of copying from the host alone.
        to_host_K: Seconds of copying to the host alone.
    """
    load_CK = np.stack([compute_K, network_K, to_device_K, to_host_K])
    result_K: FloatArray = (weights @ load_CK).max(axis=0)
    return result_K
