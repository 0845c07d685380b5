"""Candidate stages as runs of layers, and what holds for each of them among values of regions.

Array axes
    K  candidate stages
    R  regions
    A  where in a stage: the head, the layer behind it (of several), other layers, the tail
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRuns:
    """Candidate stages as runs of layers.

    Attributes:
        start_K: First layer.
        middle_K: First layer that is not checkpointed.
        end_K: One past the last layer.
        is_first_K: Whether the head belongs to it.
        is_last_K: Whether the tail belongs to it.
        gradient_bytes_K: Bytes of all its gradients.
        head_gradient_bytes_K: Of these, what only its head uses.
        tail_gradient_bytes_K: Of these, what its tail uses.
        last_gradient_bytes_K: Gradient bytes of its first region: the last one whose gradients a backward makes. From
            ZeRO-2 on they are still under way when the next backward begins.
        together_gradient_bytes_K: Of all its gradients, those that are made with gradients of inputs where weights'
            are made apart.
        imbalance_K: From ZeRO-2 on, what the fullest rank owns of all gradients beyond an equal share.
        forward_away_AK: Under ZeRO-3 parameters that are there only for a forward, by where it is (axis ``A``).
        backward_away_AK: The same for a backward.
        variant_K: Which of several variants of the network each is of, if there are several.
    """

    start_K: IntArray
    middle_K: IntArray
    end_K: IntArray
    is_first_K: BoolArray
    is_last_K: BoolArray
    gradient_bytes_K: FloatArray
    head_gradient_bytes_K: FloatArray
    tail_gradient_bytes_K: FloatArray
    last_gradient_bytes_K: FloatArray
    together_gradient_bytes_K: FloatArray
    imbalance_K: FloatArray
    forward_away_AK: FloatArray
    backward_away_AK: FloatArray
    variant_K: IntArray | None = None

    def take(self, index_J: IntArray) -> "StageRuns":
        """The candidates at some indices."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        some: dict[str, Any] = {name: None if item is None else item[..., index_J] for name, item in arrays.items()}
        return StageRuns(**some)


def looked_up(values_R: FloatArray, row_K: IntArray | None, at_K: IntArray | int) -> FloatArray:
    """Values at places: of a row for all, or of each candidate's own.

    Args:
        values_R: One row of values, or several.
        row_K: Which of several rows each candidate has.
        at_K: Where in the row.
    """
    if values_R.ndim == 1:
        return np.asarray(values_R[at_K])
    found_K: FloatArray = values_R.ravel().take(row_K * values_R.shape[1] + at_K)
    return found_K


def edge_of(values_R: FloatArray, runs: StageRuns, at: int) -> FloatArray:
    """The value of the head or the tail: one for all, or of each candidate's variant.

    Args:
        values_R: One row of values of regions, or one of each variant.
        runs: The candidates.
        at: 0 for the head, -1 for the tail.
    """
    return np.asarray(values_R[at] if values_R.ndim == 1 else values_R[runs.variant_K, at])
