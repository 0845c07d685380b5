"""The choices of a stage as the dynamic program wants them: only those that count, and by what they use up.

Of a choice only its steady time ``t`` and ``t + d``, with its boundary time ``d``, enter the step (see
:mod:`lightning_mist.tuner.inter_stage.exact_solver`), and more of either never helps. So a choice counts only if no
other with the same layers at the same place on as many devices of the same part is at least as good in both.

Array axes
    K  choices of a slot, or options: choices with the same layers and devices at different places
    L  layers of the suffix of the network that begins with the stage; one entry if the place does not matter
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import ArrayRecord, BoolArray, FloatArray, IntArray
from lightning_mist.tuner.candidates import ANY_SEAMS, BEHIND, EVERY_PART, FRONT, SlotChoices, non_dominated
from lightning_mist.tuner.space import ANYWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOptions(ArrayRecord):
    """Choices by what they use up; infinite where an option has none.

    Attributes:
        seams_K: For what stages next to it each is priced, as of choices.
        rank_K: How many options use up the same at the same seams and are faster everywhere.
        steady_KL: Steady seconds.
        reach_KL: Steady and boundary seconds together.
        index_KL: Index of the choice in its slot, -1 where there is none.
        least_K: Least steady seconds of each option.
    """

    part_K: IntArray
    seams_K: IntArray
    devices_K: IntArray
    layers_K: IntArray
    rank_K: IntArray
    steady_KL: FloatArray
    reach_KL: FloatArray
    index_KL: IntArray
    least_K: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOptions(ArrayRecord):
    """Choices whose place is known: of a first or last stage.

    Attributes:
        steady_K: Steady seconds.
        reach_K: Steady and boundary seconds together.
        index_K: Index of the choice in its slot.
    """

    part_K: IntArray
    devices_K: IntArray
    layers_K: IntArray
    steady_K: FloatArray
    reach_K: FloatArray
    index_K: IntArray


def end_options(
    slot: SlotChoices, num_layers: int, num_devices: tuple[int, ...], order: tuple[int, ...], *, is_first: bool
) -> EndOptions:
    """The choices of the first or the last stage that count.

    Args:
        order: The parts in the order in which stages pass them.
        is_first: Whether it is the first stage, which starts with the network, or the last, which ends with it.
    """
    start_K = 0 if is_first else num_layers - slot.layers_K
    inside_K = ((slot.start_K == ANYWHERE) | (slot.start_K == start_K)) & (slot.part_K == order[0 if is_first else -1])
    if len(order) > 1:
        # A stage with all devices of its part has the next one in another.
        beside_K = np.where(
            slot.devices_K == num_devices[order[0 if is_first else -1]], BEHIND if is_first else FRONT, 0
        )
        inside_K &= (slot.seams_K == ANY_SEAMS) | (slot.seams_K == beside_K)
    index_K = _that_count(slot, num_layers, num_devices, inside_K, start_K)
    return EndOptions(
        part_K=slot.part_K[index_K],
        devices_K=slot.devices_K[index_K],
        layers_K=slot.layers_K[index_K],
        steady_K=slot.steady_K[index_K],
        reach_K=slot.steady_K[index_K] + slot.boundary_K[index_K],
        index_K=index_K,
    )


def slot_options(slot: SlotChoices, num_layers: int, num_devices: tuple[int, ...]) -> SlotOptions:
    """The choices of a stage between others that count."""
    index_K = _that_count(slot, num_layers, num_devices, np.ones(len(slot), dtype=bool), slot.start_K)
    row_K = np.where(slot.start_K[index_K] == ANYWHERE, 0, num_layers - slot.start_K[index_K])
    num_rows = 1
    if (slot.start_K[index_K] != ANYWHERE).any():
        num_rows = num_layers + 1
        index_K, row_K = _spread(slot, index_K, row_K, num_rows)
    kind_K = _kinds(slot, index_K, num_layers)
    order_K = np.lexsort((slot.steady_K[index_K], row_K, kind_K))
    index_K, row_K, kind_K = index_K[order_K], row_K[order_K], kind_K[order_K]
    # The rank of each among those of its kind at its place, by rising steady time.
    place_K = kind_K * num_rows + row_K
    rank_K = np.arange(len(place_K)) - np.searchsorted(place_K, place_K)
    depth = 1 + int(rank_K.max(initial=0))
    _, first_J, option_K = np.unique(kind_K * depth + rank_K, return_index=True, return_inverse=True)
    index_KL = np.full((len(first_J), num_rows), -1, dtype=np.int64)
    index_KL[option_K.reshape(-1), row_K] = index_K
    steady_KL = np.where(index_KL >= 0, _at(slot.steady_K, index_KL), np.inf)
    return SlotOptions(
        part_K=slot.part_K[index_K[first_J]],
        seams_K=slot.seams_K[index_K[first_J]],
        devices_K=slot.devices_K[index_K[first_J]],
        layers_K=slot.layers_K[index_K[first_J]],
        rank_K=rank_K[first_J],
        steady_KL=steady_KL,
        reach_KL=np.where(index_KL >= 0, _at(slot.steady_K + slot.boundary_K, index_KL), np.inf),
        index_KL=index_KL,
        least_K=steady_KL.min(axis=1),
    )


def _at(values_K: FloatArray, index_KL: IntArray) -> FloatArray:
    found: FloatArray = values_K[index_KL] if len(values_K) else np.empty(index_KL.shape)
    return found


def _kinds(slot: SlotChoices, index_K: IntArray, num_layers: int) -> IntArray:
    """A number for the part, seams, devices and layers of some choices."""
    most = int(slot.devices_K.max(initial=0)) + 1
    place_K = slot.part_K[index_K] * (ANY_SEAMS + 1) + slot.seams_K[index_K]
    kind_K: IntArray = (place_K * most + slot.devices_K[index_K]) * (num_layers + 1)
    return kind_K + slot.layers_K[index_K]


def _that_count(
    slot: SlotChoices,
    num_layers: int,
    num_devices: tuple[int, ...],
    inside_K: BoolArray,
    start_K: IntArray | int,
) -> IntArray:
    """Indices of choices that can be part of an answer and are not worse than others, by rising steady time."""
    limit_K = np.array([*num_devices, -1])[slot.part_K]  # The last one is that of every part.
    inside_K = inside_K & (slot.part_K != EVERY_PART) & (slot.devices_K <= limit_K) & (slot.layers_K <= num_layers)
    index_K = np.flatnonzero(inside_K)
    place_K = np.broadcast_to(np.asarray(start_K), inside_K.shape)[index_K] + 1
    group_K = _kinds(slot, index_K, num_layers) * (num_layers + 2) + place_K
    steady_K = slot.steady_K[index_K]
    kept_K: IntArray = index_K[non_dominated(group_K, steady_K, steady_K + slot.boundary_K[index_K])]
    return kept_K


def _spread(slot: SlotChoices, index_K: IntArray, row_K: IntArray, num_rows: int) -> tuple[IntArray, IntArray]:
    """Choices that may lie anywhere at every place, beside those whose place is known."""
    is_open_K = slot.start_K[index_K] == ANYWHERE
    open_K = index_K[is_open_K]
    spread_K, rows = np.repeat(open_K, num_rows), np.tile(np.arange(num_rows), len(open_K))
    return np.concatenate([index_K[~is_open_K], spread_K]), np.concatenate([row_K[~is_open_K], rows])
