"""What stages hold of a network's parameters, and who owns how much of them.

Array axes
    K  candidates
    J  distinct layer ranges among them
    P  parameters
    R  regions; of what is there for a pass only the head, the first layer, other layers, the tail
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import (
    BoolArray,
    FloatArray,
    IntArray,
    ParameterTable,
    StageCandidates,
    covered,
    distinct,
    distinct_codes,
)
from lightning_mist.cost.memory.ownership import Owners, Together
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan.sharding import BUCKET_BYTES

BUCKETS_IN_FLIGHT = 2
"""Buckets of updated parameters under way at once when ZeRO-1 and ZeRO-2 gather them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What stages hold: parameters and their gradients, in bytes.

    Attributes:
        head_only_K: Trained, and used by no part of the stage but its head.
        tail_K: Trained, and used by its tail.
        shared_K: Trained, and also held by another stage.
        reused_K: Trained, and used by several parts of this stage.
        unit_K: Trained, of the unit that uses most.
        together_K: Trained, with a gradient that is made with those of inputs where weights' are made apart.
        count_K: Number of trained parameters, not bytes.
    """

    all_K: FloatArray
    trained_K: FloatArray
    head_only_K: FloatArray
    tail_K: FloatArray
    shared_K: FloatArray
    reused_K: FloatArray
    largest_K: FloatArray
    unit_K: FloatArray
    together_K: FloatArray
    count_K: FloatArray

    @property
    def bucket_K(self) -> FloatArray:
        """The most that a bucket of gradients, or of updated parameters, holds."""
        return np.minimum(self.trained_K, BUCKET_BYTES + self.largest_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOut:
    """What the fullest rank of stages has where parameters are dealt out, in bytes.

    Attributes:
        every_K: All parameters that it owns where frozen ones are dealt out too, as they lie in flat storages.
        forward_RK: Parameters that are there for a forward only; see
            :class:`~lightning_mist.cost.memory.ownership.Away`.
    """

    trained_K: FloatArray
    every_K: FloatArray
    forward_RK: FloatArray
    backward_RK: FloatArray


class Holdings:
    """Parameters of stages of one network; keeps what it has computed.

    Attributes:
        is_one_unit: Whether a stage's parameters cannot be told apart by layer, so that ZeRO-2 and ZeRO-3 take them for
            one unit.
        is_even: Whether ZeRO gives ranks even pieces of what no other stage of a pipeline holds.
        owners: Who has what of them.
    """

    def __init__(self, spec: ModelSpec, table: ParameterTable | None = None, networks: int = 1) -> None:
        self.spec = spec
        self.table = ParameterTable.of(spec) if table is None else table
        self.is_one_unit = not spec.module_map.blocks or bool(spec.module_map.excludes("shards"))
        self.is_even = spec.module_map.even_shards
        self.owners = Owners(self.table, is_one_unit=self.is_one_unit, is_even=self.is_even)
        self._networks = networks
        self._held = ByRange(self.table.uses_PR.shape[1], len(HeldBytes.__slots__), networks)
        self._shares: dict[int, ByRange] = {}

    def of(self, candidates: StageCandidates) -> HeldBytes:
        """Parameters and gradients of each candidate."""
        ranges = covered(self.spec, candidates.start_K, candidates.end_K)
        figures_K = self._held.of(*ranges, self.held_of, self._network(candidates))
        return HeldBytes(**dict(zip(HeldBytes.__slots__, figures_K, strict=True)))

    def _network(self, candidates: StageCandidates) -> IntArray | None:
        """Which of several networks each candidate is of, if there are several."""
        return None

    def held_of(self, network: int, low_J: IntArray, high_J: IntArray) -> FloatArray:
        """What is held of ranges of regions, in the order of :class:`HeldBytes`; axes figure and ``J``."""
        uses = self.table.uses_PR
        inside_PJ = uses[:, high_J] - uses[:, low_J]
        held_PJ = inside_PJ > 0
        head_PJ = (uses[:, np.minimum(low_J + 1, high_J)] - uses[:, low_J]) * (low_J == 0)
        tail_PJ = (uses[:, -1] - uses[:, -2])[:, None] * (high_J == uses.shape[1] - 1)
        trained_P, ranges = self.table.trainable_P, zip(low_J.tolist(), high_J.tolist(), strict=True)
        of_units = [self.table.trained_R[low:high].max(initial=0.0) for low, high in ranges]

        def trained(chosen_PJ: BoolArray) -> FloatArray:
            return trained_P @ chosen_PJ.astype(np.float64)

        found = HeldBytes(
            all_K=self.table.bytes_P @ held_PJ,
            trained_K=trained(held_PJ),
            head_only_K=trained((head_PJ > 0) & (inside_PJ == head_PJ)),
            tail_K=trained(tail_PJ > 0),
            shared_K=trained((inside_PJ > 0) & (inside_PJ < uses[:, -1:])),
            reused_K=trained(inside_PJ > 1),
            largest_K=(trained_P[:, None] * held_PJ).max(axis=0, initial=0.0),
            unit_K=trained(held_PJ) if self.is_one_unit else np.array(of_units),
            together_K=trained(held_PJ & self.table.together_P[:, None]),
            count_K=(trained_P > 0).astype(np.float64) @ held_PJ,
        )
        return np.stack([getattr(found, name) for name in HeldBytes.__slots__])

    def shares(self, candidates: StageCandidates, ranks: int) -> SharedOut:
        """What the fullest of the data-parallel ranks of each candidate has where they share parameters out."""
        if ranks not in self._shares:
            self._shares[ranks] = ByRange(self.table.uses_PR.shape[1], 10, self._networks)
        ranges = covered(self.spec, candidates.start_K, candidates.end_K)
        figures_K = self._shares[ranks].of(*ranges, partial(self.shared_of, ranks=ranks), self._network(candidates))
        return SharedOut(
            trained_K=figures_K[8], every_K=figures_K[9], forward_RK=figures_K[:4], backward_RK=figures_K[4:8]
        )

    def shared_of(self, network: int, low_J: IntArray, high_J: IntArray, ranks: int) -> FloatArray:
        """Parameters that are there only for a forward, for a backward; those owned that are trained, and all."""
        ranges = zip(low_J.tolist(), high_J.tolist(), strict=True)
        found = [self.owners.of(*item, ranks) for item in ranges]
        each = [(*item.forward, *item.backward, item.trained, item.every) for item in found]
        figures_J: FloatArray = np.array(each, dtype=np.float64).reshape(len(found), 10).T
        return figures_J

    def together(self, stages: Sequence[StageCandidates], ranks: int) -> Together:
        """What the fullest rank of devices that run several stages has, their parameters dealt out together."""
        ranges = [(int(low_J[0]), int(high_J[0])) for low_J, high_J, _ in map(self._ranges, stages)]
        return self.owners.together(ranges, ranks)

    def doubled(self, stages: Sequence[StageCandidates]) -> tuple[float, float]:
        """Bytes by which the sum over some stages exceeds what they hold together: of all and of trained parameters."""
        uses = self.table.uses_PR
        count_P = np.zeros(len(uses), dtype=np.int64)
        for candidates in stages:
            low_J, high_J, _ = self._ranges(candidates)
            count_P += uses[:, high_J[0]] > uses[:, low_J[0]]
        extra_P = np.maximum(count_P - 1, 0)
        return float(self.table.bytes_P @ extra_P), float(self.table.trainable_P @ extra_P)

    def _ranges(self, candidates: StageCandidates) -> tuple[IntArray, IntArray, IntArray]:
        """Distinct ranges of regions, and which of them each candidate has."""
        low_K, high_K = covered(self.spec, candidates.start_K, candidates.end_K)
        width = self.table.uses_PR.shape[1]
        code_J, inverse_K = distinct_codes(low_K * width + high_K, width * width)
        return code_J // width, code_J % width, inverse_K


Ranges: TypeAlias = Callable[[int, IntArray, IntArray], FloatArray]
"""Gives the figures of ranges of regions of one network, by their first regions and those past the last; axes figure
and ``J``."""


class ByRange:
    """Figures of ranges of regions, worked out when they are asked for the first time."""

    def __init__(self, width: int, count: int, networks: int = 1) -> None:
        self._width = width
        # The column of every range among those that are known, -1 if it is not one of them.
        self._column = np.full(networks * width * width, -1, dtype=np.int32)
        self._known_figures = np.empty((count, 0))

    def of(self, low_K: IntArray, high_K: IntArray, make: Ranges, network_K: IntArray | None = None) -> FloatArray:
        """The figures of each range; axes figure and ``K``."""
        first_K = low_K if network_K is None else network_K * self._width + low_K
        code_K = first_K * self._width + high_K
        column_K = self._column[code_K]
        if len(column_K) and column_K.min() < 0:
            self._add(code_K[column_K < 0], make)
            column_K = self._column[code_K]
        figures_K: FloatArray = self._known_figures.take(column_K, axis=1)
        return figures_K

    def _add(self, code_K: IntArray, make: Ranges) -> None:
        code_J, _ = distinct_codes(code_K, len(self._column))
        network_J, ranges_J = np.divmod(code_J, self._width**2)
        made = [self._known_figures]
        for network in distinct(network_J).tolist():
            range_J = ranges_J[network_J == network]
            made.append(make(network, range_J // self._width, range_J % self._width))
        # Codes ascend, and networks with them.
        self._column[code_J] = self._known_figures.shape[1] + np.arange(len(code_J))
        self._known_figures = np.concatenate(made, axis=1)


class VariantHoldings(Holdings):
    """Parameters of stages of networks that differ in which of these are trained; keeps what it has computed.

    Args:
        each: The networks; gradients are made and reduced as in the first, wherever they stay afterwards.
        network_by_variant: Which of them each variant is.

    Attributes:
        table: Parameters of the first network, with ``single_R`` and ``trained_R`` of every variant.
    """

    def __init__(self, each: Sequence[Holdings], network_by_variant: IntArray) -> None:
        super().__init__(each[0].spec, each[0].table, len(each))
        self._each, self._network_by_variant = tuple(each), network_by_variant
        tables = [holdings.table for holdings in self._each]
        self.table = replace(
            self.table,
            single_R=np.stack([table.single_R for table in tables])[network_by_variant],
            trained_R=np.repeat(self.table.trained_R[None], len(network_by_variant), axis=0),
        )

    def held_of(self, network: int, low_J: IntArray, high_J: IntArray) -> FloatArray:
        """What is held of ranges of regions of one of the networks."""
        return self._each[network].held_of(0, low_J, high_J)

    def shared_of(self, network: int, low_J: IntArray, high_J: IntArray, ranks: int) -> FloatArray:
        """What the fullest rank has of ranges of regions of one of the networks."""
        return self._each[network].shared_of(0, low_J, high_J, ranks)

    def _network(self, candidates: StageCandidates) -> IntArray:
        if candidates.variant_K is None:
            raise ValueError("candidates.variant_K = None: it says which variant of the network each is of")
        return self._network_by_variant[candidates.variant_K]
