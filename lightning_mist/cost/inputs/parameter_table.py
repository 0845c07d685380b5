"""Which regions of a network use which parameters, and what a stage reduces of their gradients.

Array axes
    P  parameters
    R  regions
    J  regions at which a stage may begin, as far as they differ
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from lightning_mist.cost.inputs.expressions import BoolArray, FloatArray, IntArray
from lightning_mist.cost.inputs.regions import parameter_regions
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan.mesh import itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTable:
    """Bytes of parameters, and for each how many of the regions before each region use it.

    Attributes:
        trainable_P: Bytes of each trained parameter, 0 for frozen ones.
        dealt_P: Bytes by which owners are assigned: of the whole parameter, also where tensor parallelism splits it.
        is_first_P: Whether it is dealt out first, as what is trained is; owners stay where gradients are offloaded.
        together_P: Whether the gradient of a parameter is made with those of inputs where weights' are made apart: it
            is no matrix, or an embedding.
        uses_PR: Number of regions below ``r`` that use the parameter, ``r`` in ``0 .. L + 2``.
        single_R: Trained bytes of the parameters that exactly one region uses, by region.
        reduced_JR: Bytes of those gradients that are complete, in backward, with the one of region ``r``: of trained
            parameters that no region before uses in a stage that begins with region ``f``. Stages whose first regions
            make no difference share a row.
        reduced_row_R: Row of these two for a stage that begins with each region.
    """

    bytes_P: FloatArray
    trainable_P: FloatArray
    dealt_P: FloatArray
    is_first_P: BoolArray
    together_P: BoolArray
    uses_PR: IntArray
    single_R: FloatArray
    used_R: FloatArray
    trained_R: FloatArray
    reduced_JR: FloatArray
    reductions_JR: FloatArray
    reduced_row_R: IntArray
    count_R: FloatArray

    @classmethod
    def of(cls, spec: ModelSpec) -> "ParameterTable":
        """The table of a network."""
        regions = parameter_regions(spec)
        count = spec.num_layers + 2
        used_PR = np.zeros((len(regions), count), dtype=np.int64)
        for index, used in enumerate(regions):
            used_PR[index, list(used)] = 1
        trainable_P = np.array([p.bytes if p.trainable else 0 for p in spec.parameters], dtype=np.float64)
        bytes_P = np.array([p.bytes for p in spec.parameters], dtype=np.float64)
        known = {use.name: use for use in spec.module_map.parameters}
        dealt = [
            prod(known[p.name].shape) * itemsize(known[p.name].dtype) if p.name in known else p.bytes
            for p in spec.parameters
        ]
        is_matrix = [
            p.name in known and len(known[p.name].shape) == 2 and 0 not in r
            for p, r in zip(spec.parameters, regions, strict=True)
        ]
        uses_PR = np.concatenate([np.zeros((len(regions), 1), dtype=np.int64), used_PR.cumsum(axis=1)], axis=1)
        return cls(
            bytes_P=bytes_P,
            dealt_P=np.array(dealt, dtype=np.float64),
            is_first_P=trainable_P > 0,
            together_P=~np.array(is_matrix, dtype=bool),
            uses_PR=uses_PR,
            used_R=bytes_P @ used_PR.astype(np.float64),
            count_R=used_PR.sum(axis=0).astype(np.float64),
            **_trained(trainable_P, uses_PR),
        )

    def training(self, chosen_P: BoolArray) -> "ParameterTable":
        """The same where of the trained parameters only some are trained."""
        return replace(self, **_trained(self.trainable_P * chosen_P, self.uses_PR))


def _trained(trainable_P: FloatArray, uses_PR: IntArray) -> dict[str, Any]:
    """What of a table depends on which parameters are trained."""
    used_PR = np.diff(uses_PR, axis=1)
    alone_P = uses_PR[:, -1] == 1
    rows, row_R = _first_uses(used_PR, uses_PR)
    return {
        "trainable_P": trainable_P,
        "single_R": (trainable_P * alone_P) @ used_PR.astype(np.float64),
        "trained_R": trainable_P @ used_PR.astype(np.float64),
        "reduced_JR": np.stack([trainable_P @ first_PR for first_PR in rows]),
        "reductions_JR": np.stack([(trainable_P > 0) @ first_PR.astype(np.float64) for first_PR in rows]),
        "reduced_row_R": row_R,
    }


def _first_uses(used_PR: IntArray, uses_PR: IntArray) -> tuple[list[BoolArray], IntArray]:
    """Which regions are the first of a stage that use a parameter, by where the stage begins, and the row of each."""
    rows: list[BoolArray] = []
    row_R = np.zeros(used_PR.shape[1], dtype=np.int64)
    several_P = used_PR.sum(axis=1) > 1
    for low in range(used_PR.shape[1]):
        # Only a stage that begins behind a use of a parameter with several differs from one that begins before it.
        if low == 0 or (used_PR[:, low - 1] * several_P).any():
            rows.append((used_PR > 0) & (uses_PR[:, :-1] <= uses_PR[:, low : low + 1]))
        row_R[low] = len(rows) - 1
    return rows, row_R
