"""What stages hold of a network's parameters, and who owns how much of them.

Array axes
    K  candidates
    U  distinct layer ranges among them
    P  parameters
    R  regions
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.candidates import StageCandidates
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.distinct import distinct_codes
from lightning_mist.cost.regions import ParameterTable, covered
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan.sharding import assign_owners


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What stages hold: parameters and their gradients, in bytes.

    Attributes:
        all_K: Parameters.
        trained_K: Trained parameters, and so gradients.
        head_only_K: Trained, and used by no part of the stage but its head.
        tail_K: Trained, and used by its tail.
        shared_K: Trained, and also held by another stage.
        reused_K: Trained, and used by several parts of this stage.
        largest_K: The largest trained parameter.
        count_K: Number of trained parameters, not bytes.
    """

    all_K: FloatArray
    trained_K: FloatArray
    head_only_K: FloatArray
    tail_K: FloatArray
    shared_K: FloatArray
    reused_K: FloatArray
    largest_K: FloatArray
    count_K: FloatArray


class Holdings:
    """Parameters of stages of one network; keeps what it has computed.

    Args:
        spec: The network.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.table = ParameterTable.of(spec)
        self._shares: dict[tuple[int, tuple[int, ...]], float] = {}
        self._away: dict[int, FloatArray] = {}

    def of(self, candidates: StageCandidates) -> HeldBytes:
        """Parameters and gradients of each candidate."""
        low_U, high_U, inverse_K = self._ranges(candidates)
        uses = self.table.uses_PR
        inside_PU = uses[:, high_U] - uses[:, low_U]
        held_PU = inside_PU > 0
        head_PU = (uses[:, np.minimum(low_U + 1, high_U)] - uses[:, low_U]) * (low_U == 0)
        tail_PU = (uses[:, -1] - uses[:, -2])[:, None] * (high_U == uses.shape[1] - 1)
        trained_P = self.table.trainable_P

        def trained(chosen_PU: BoolArray) -> FloatArray:
            return (trained_P @ chosen_PU.astype(np.float64))[inverse_K]

        largest_U = (trained_P[:, None] * held_PU).max(axis=0, initial=0.0)
        return HeldBytes(
            all_K=(self.table.bytes_P @ held_PU)[inverse_K],
            trained_K=trained(held_PU),
            head_only_K=trained((head_PU > 0) & (inside_PU == head_PU)),
            tail_K=trained(tail_PU > 0),
            shared_K=trained((inside_PU > 0) & (inside_PU < uses[:, -1:])),
            reused_K=trained(inside_PU > 1),
            largest_K=largest_U[inverse_K],
            count_K=((trained_P > 0).astype(np.float64) @ held_PU)[inverse_K],
        )

    def largest_share(self, candidates: StageCandidates, ranks: int, *, frozen: bool = False) -> FloatArray:
        """Bytes of the data-parallel rank that owns most, by the rule of :func:`assign_owners`.

        Args:
            candidates: The stages.
            ranks: Data-parallel ranks.
            frozen: Whether parameters that are not trained are dealt out too, and counted.
        """
        low_U, high_U, inverse_K = self._ranges(candidates)
        uses, bytes_P = self.table.uses_PR, self.table.bytes_P if frozen else self.table.trainable_P
        share_U = np.empty(len(low_U))
        for index, (low, high) in enumerate(zip(low_U, high_U, strict=True)):
            held_P = uses[:, high] > uses[:, low]
            share_U[index] = self._share(self._sizes(bytes_P[held_P]), ranks)
        return share_U[inverse_K]

    def doubled(self, stages: Sequence[StageCandidates]) -> tuple[float, float]:
        """Bytes by which the sum over some stages exceeds what they hold together: of all and of trained parameters.

        Args:
            stages: One candidate each.
        """
        uses = self.table.uses_PR
        count_P = np.zeros(len(uses), dtype=np.int64)
        for candidates in stages:
            low_U, high_U, _ = self._ranges(candidates)
            count_P += uses[:, high_U[0]] > uses[:, low_U[0]]
        extra_P = np.maximum(count_P - 1, 0)
        return float(self.table.bytes_P @ extra_P), float(self.table.trainable_P @ extra_P)

    def away(self, ranks: int) -> FloatArray:
        """Bytes of neighbouring regions' parameters that the rank that owns least of them does not own.

        Entry ``r`` of ``R + 1`` is about regions ``r - 1`` and ``r``, as far as they exist. Owners are taken as if
        these regions were all that is dealt out: of layers every rank owns about as much, but only one rank owns the
        one parameter of an embedding.
        """
        if ranks not in self._away:
            used_PR = np.diff(self.table.uses_PR, axis=1) > 0
            none_P1 = np.zeros_like(used_PR[:, :1])
            pairs_RP = (np.concatenate([none_P1, used_PR], axis=1) | np.concatenate([used_PR, none_P1], axis=1)).T
            found = [self._sizes(self.table.bytes_P[pair_P]) for pair_P in pairs_RP]
            self._away[ranks] = np.array([sum(sizes) - self._share(sizes, ranks, least=True) for sizes in found])
        return self._away[ranks]

    def _ranges(self, candidates: StageCandidates) -> tuple[IntArray, IntArray, IntArray]:
        """Distinct ranges of regions, and which of them each candidate has."""
        low_K, high_K = covered(self.spec, candidates.start_K, candidates.end_K)
        width = self.table.uses_PR.shape[1]
        code_U, inverse_K = distinct_codes(low_K * width + high_K, width * width)
        return code_U // width, code_U % width, inverse_K

    @staticmethod
    def _sizes(bytes_P: FloatArray) -> tuple[int, ...]:
        return tuple(np.sort(bytes_P).astype(np.int64).tolist())

    def _share(self, sizes: tuple[int, ...], ranks: int, *, least: bool = False) -> float:
        key = (-ranks if least else ranks, sizes)
        if key not in self._shares:
            loads = [0] * ranks
            for owner, size in zip(assign_owners(sizes, ranks), sizes, strict=True):
                loads[owner] += size
            self._shares[key] = float(min(loads) if least else max(loads))
        return self._shares[key]
