"""What one stage may be: choices as arrays, and which of them no other equals or beats.

Array axes
    K  choices, or points
    J  points that are kept
    O  kinds of state, in the order of ``OFFLOAD_KINDS``
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_mist.cost.inputs import ArrayRecord, BoolArray, FloatArray, IntArray
from lightning_mist.plan import OFFLOAD_KINDS, OffloadRatios, StageMethod
from lightning_mist.tuner.space import ANYWHERE, Shape

EVERY_PART = -1
"""Part of a choice that takes all devices of all parts of a cluster, as the only stage of a plan may."""

FRONT, BEHIND = 1, 2
"""Bits of :attr:`SlotChoices.seams_K`: the stage in front, or that behind, lies in another part."""

ANY_SEAMS = 4
"""In place of these bits: what a choice takes holds wherever the stages next to it lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChoices(ArrayRecord):
    """What one stage may be.

    Attributes:
        start_K: First layer, or :data:`~lightning_mist.tuner.space.applied_space.ANYWHERE`.
        part_K: Part of the cluster that they lie in, 0 if it has one, or :data:`EVERY_PART`.
        seams_K: For which of the stages next to it, bits :data:`FRONT` and :data:`BEHIND`, lie in other parts it is
            priced, or :data:`ANY_SEAMS`; 0 if the cluster has one part.
        steady_K: Steady seconds.
        boundary_K: Boundary seconds.
        peak_K: Peak bytes.
        method_K: Code of how it computes what it computes.
        shard_K: Ranks that ZeRO shards over, 0 if all with the same parameters.
        sequence_K: 1 if tensor-parallel devices are sequence-parallel too, else 0.
        offload_KO: What part of parameters, gradients, optimizer state and activations is in host memory.
    """

    start_K: IntArray
    layers_K: IntArray
    devices_K: IntArray
    part_K: IntArray
    seams_K: IntArray
    steady_K: FloatArray
    boundary_K: FloatArray
    peak_K: FloatArray
    checkpointed_K: IntArray
    zero_stage_K: IntArray
    shard_K: IntArray
    tensor_K: IntArray
    sequence_K: IntArray
    method_K: IntArray
    offload_KO: FloatArray

    def shape(self, index: int) -> Shape:
        """How the devices of one choice are arranged."""
        tensor = int(self.tensor_K[index])
        method = StageMethod.of_code(int(self.method_K[index]))
        data, shard = int(self.devices_K[index]) // tensor, int(self.shard_K[index])
        return Shape(data, tensor, bool(self.sequence_K[index]), method, shard)

    def offload(self, index: int) -> OffloadRatios:
        """What one choice keeps in host memory."""
        return OffloadRatios(**dict(zip(OFFLOAD_KINDS, self.offload_KO[index].tolist(), strict=True)))

    @classmethod
    def anywhere(
        cls, layers_K: IntArray, devices_K: IntArray, steady_K: FloatArray, boundary_K: FloatArray
    ) -> "SlotChoices":
        """Choices of which any layers and whatever they save take so long."""
        zero_K = np.zeros(len(layers_K), dtype=np.int64)
        return cls(
            start_K=zero_K + ANYWHERE,
            layers_K=layers_K,
            devices_K=devices_K,
            part_K=zero_K,
            seams_K=zero_K,
            steady_K=steady_K,
            boundary_K=boundary_K,
            peak_K=np.zeros(len(layers_K)),
            checkpointed_K=zero_K,
            zero_stage_K=zero_K,
            shard_K=zero_K,
            tensor_K=zero_K + 1,
            sequence_K=zero_K,
            method_K=zero_K,
            offload_KO=np.zeros((len(layers_K), len(OFFLOAD_KINDS))),
        )

    def placed(self, part: int, seams: int) -> "SlotChoices":
        """The same in a part, next to stages of others as the seams say."""
        part_K, seams_K = (np.full(len(self), value, dtype=np.int64) for value in (part, seams))
        return replace(self, part_K=part_K, seams_K=seams_K)

    @classmethod
    def none(cls) -> "SlotChoices":
        """No choices."""
        whole, seconds = np.empty(0, dtype=np.int64), np.empty(0)
        return cls.anywhere(whole, whole, seconds, seconds)


def within(choices: SlotChoices, stage_index: int, num_stages: int, num_layers: int, most_devices: int) -> BoolArray:
    """Which choices leave every other stage a layer and a device.

    Args:
        most_devices: Devices of the largest stage that leaves the others one each.
    """
    behind = num_stages - stage_index - 1
    start_K, layers_K = choices.start_K, choices.layers_K
    inside_K = (start_K == ANYWHERE) | ((start_K >= stage_index) & (start_K <= num_layers - behind - layers_K))
    # An open start has room somewhere if every other stage can have a layer.
    inside_K &= layers_K <= max(num_layers - num_stages + 1, 0 if num_layers else 1)
    result_K: BoolArray = inside_K & (choices.devices_K <= most_devices)
    return result_K


def _ranks(values_K: FloatArray) -> IntArray:
    """The rank of each of some values, of equal ones that of the earlier first."""
    rank_K = np.empty(len(values_K), dtype=np.int64)
    rank_K[np.argsort(values_K, kind="stable")] = np.arange(len(values_K))
    return rank_K


def _numbers(sorted_K: IntArray) -> IntArray:
    """Numbers of the groups of points that come group by group."""
    number_K = np.zeros(len(sorted_K), dtype=np.int64)
    np.cumsum(sorted_K[1:] != sorted_K[:-1], out=number_K[1:])
    return number_K


def non_dominated(group_K: npt.ArrayLike, first_K: FloatArray, second_K: FloatArray) -> IntArray:
    """Indices of the points that no other point of their group equals or beats in both values.

    They come by group, then by rising first and falling second value. Of equal points the earliest is kept.

    Args:
        group_K: Group of each point, an integer; groups are independent of each other.
    """
    group = np.asarray(group_K, dtype=np.int64)
    order_K = np.lexsort((second_K, first_K, group))
    # Ranks are exact where offsets on floats would not be; the offset makes the running minimum restart in each group.
    rank_K = _ranks(second_K[order_K]) - _numbers(group[order_K]) * (len(order_K) + 1)
    is_kept_K = np.ones(len(order_K), dtype=bool)
    np.less(rank_K[1:], np.minimum.accumulate(rank_K)[:-1], out=is_kept_K[1:])
    kept_J: IntArray = order_K[is_kept_K]
    return kept_J


def not_beaten(
    group_K: IntArray, first_K: FloatArray, second_K: FloatArray, by: tuple[IntArray, FloatArray, FloatArray]
) -> BoolArray:
    """Which points no other of some points, of the same group, equals or beats in both values."""
    count = len(by[0])
    group, first, second = (np.concatenate(pair) for pair in zip(by, (group_K, first_K, second_K), strict=True))
    is_other = np.arange(len(group)) < count
    # By group, in each by rising first value, in each of these the others first.
    order = np.lexsort((~is_other, first, group))
    # Ranks fall from group to group, so that the running minimum begins anew in each. Of equal values that of another
    # comes first, so that it is less.
    rank = _ranks(second[order]) - _numbers(group[order]) * (len(order) + 1)
    least = np.minimum.accumulate(np.where(is_other[order], rank, np.iinfo(np.int64).max))
    found_K = np.empty(len(group), dtype=bool)
    found_K[order] = rank < least
    result_K: BoolArray = found_K[count:]
    return result_K
