"""What of candidates with ratios fits and moves no more than it has to, of several stages at once.

Array axes
    K  candidates of a table
    P  candidates of a table as stages may have them
    B  those that are tried with offload
    C  combinations of ratios, nothing moved first
    J  candidates with ratios
    S  arrangements of devices
    Z  ZeRO stages
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost import CostModel, StageSlot, profiles_of
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.mixed import copy_weights
from lightning_mist.cost.offload import in_flight
from lightning_mist.plan import ZeroStage
from lightning_mist.tuner.moved_known import Arranged, Known
from lightning_mist.tuner.offload_ratios import Ratios
from lightning_mist.tuner.search_space import OFFLOADED
from lightning_mist.tuner.stage_points import StagePoints
from lightning_mist.tuner.tables import Table

BASES_AT_ONCE = 1 << 10
"""Candidates whose combinations are looked at together: their peaks take some megabytes."""

ORDERS: tuple[tuple[str, ...], ...] = (OFFLOADED, ("parameters", "activations"), ("activations",), ())
"""Kinds of state of which a larger ratio is never faster, as candidates may have them."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Candidates with ratios: which of the stages' they are of, their places among what is known, and their peaks."""

    point_J: IntArray
    place_J: IntArray
    peak_J: FloatArray

    @classmethod
    def joined(cls, items: Sequence["Kept"]) -> "Kept":
        """All of several."""
        if len(items) == 1:
            return items[0]
        number, none = np.empty(0, dtype=np.int64), np.empty(0)
        return cls(
            np.concatenate([number, *(item.point_J for item in items)]),
            np.concatenate([number, *(item.place_J for item in items)]),
            np.concatenate([none, *(item.peak_J for item in items)]),
        )

    @classmethod
    def in_order(cls, items: Sequence["Kept"], count: int) -> "Kept":
        """All of several, in the order of their candidates and of their combinations, of which there are so many."""
        some = [item for item in items if len(item.point_J)]
        if len(some) < 2:
            return some[0] if some else items[0]
        every = cls.joined(some)
        order = np.argsort(every.point_J * count + every.place_J % count, kind="stable")
        return cls(every.point_J[order], every.place_J[order], every.peak_J[order])


def arranged(model: CostModel, table: Table, ratios: Ratios) -> Arranged:
    """What is so of the arrangements of a table.

    Args:
        model: The cost model.
        table: The table.
        ratios: What may be moved.
    """
    weights = [copy_weights(model, slot) for slot in table.slots]
    alike = {id(item): item for item in weights}
    places = {key: place for place, key in enumerate(alike)}
    order_SZ = np.array(
        [
            [ORDERS.index(ordered(model, slot, zero, ratios)) for zero in range(max(ZeroStage) + 1)]
            for slot in table.slots
        ]
    )
    return Arranged(
        order_SZ=order_SZ.reshape(-1, max(ZeroStage) + 1),
        corner_S=np.array([places[id(item)] for item in weights], dtype=np.int64),
        corners=tuple(alike.values()),
    )


def ordered(model: CostModel, slot: StageSlot, zero_stage: int, ratios: Ratios) -> tuple[str, ...]:
    """Kinds of state of which a larger ratio is never faster.

    Args:
        model: The cost model.
        slot: An arrangement.
        zero_stage: What is sharded.
        ratios: What may be moved.
    """
    if any(profile.corrections for profile in profiles_of(model)):
        return ()
    if model.memory(slot).states.displaces(ratios.values):
        return ("activations",)
    if slot.shard_degree == 1 or zero_stage == ZeroStage.NONE:
        return OFFLOADED
    return ("activations",) if zero_stage >= ZeroStage.PARAMETERS else ("parameters", "activations")


Wanted = tuple[Known, Arranged, StagePoints, IntArray]
"""What is known of a table, and of its arrangements; the candidates of its stages, and some of them."""


def kept(wanted: Sequence[Wanted], ratios: Ratios, limits: tuple[float, float]) -> list[Kept]:
    """What fits and moves no more than it has to, of the stages of every table.

    Args:
        wanted: The candidates of the stages, whose bytes are known.
        ratios: What may be moved.
        limits: Bytes that a device may use, and of host memory.
    """
    found: list[list[Kept]] = [[] for _ in wanted]
    for block in in_blocks([point_B for _, _, _, point_B in wanted], BASES_AT_ONCE):
        fits, peaks, orders = [], [], []
        for index, point_B in block:
            known, of_table, points, _ = wanted[index]
            peak_BC, fits_BC = _fitting(known, points, point_B, len(ratios), limits)
            peaks.append(peak_BC)
            fits.append(fits_BC)
            index_B = points.index_P[point_B]
            orders.append(of_table.order_SZ[known.table.shape_K[index_B], known.table.zero_stage_K[index_B]])
        least_BC, begin = _least(np.concatenate(fits), np.concatenate(orders), ratios), 0
        for (index, point_B), peak_BC in zip(block, peaks, strict=True):
            kept_J = np.flatnonzero(least_BC[begin : begin + len(point_B)])
            begin += len(point_B)
            of_J, place_J = np.divmod(kept_J, len(ratios))
            known, _, points, _ = wanted[index]
            point_J = point_B[of_J]
            place_J += known.row_K[points.index_P[point_J]] * len(ratios)
            found[index].append(Kept(point_J, place_J, peak_BC.reshape(-1)[kept_J]))
    return [Kept.joined(items) for items in found]


def in_blocks(index: Sequence[IntArray], most: int) -> Iterator[list[tuple[int, IntArray]]]:
    """Candidates of several stages or tables in blocks of not too many to look at together.

    Args:
        index: The candidates of each.
        most: The most of a block.

    Yields:
        Of which the candidates are, and some of them.
    """
    block: list[tuple[int, IntArray]] = []
    room = most
    for place, index_B in enumerate(index):
        for begin in range(0, len(index_B), most):
            some_B = index_B[begin : begin + most]
            if len(some_B) > room:
                yield block
                block, room = [], most
            block.append((place, some_B))
            room -= len(some_B)
    if block:
        yield block


def _fitting(
    known: Known, points: StagePoints, point_B: IntArray, count: int, limits: tuple[float, float]
) -> tuple[FloatArray, BoolArray]:
    """Peaks of bases with every combination of ratios, and whether they fit."""
    if known.parts is None:
        raise ValueError("known.parts = None: nothing was learned about candidates that are asked about")
    some = known.parts.take(known.row_K[points.index_P[point_B]])
    pairs = len(some.host_activations_K) // len(point_B)

    def of_pairs(cut: slice) -> slice:
        return slice(cut.start * pairs, cut.stop * pairs)

    peak_K = points.of_each(point_B, lambda cut, phases: some.stays.take(of_pairs(cut)).peaks(phases))
    peak_BC = some.peaks_beside(peak_K).reshape(-1, count)
    fits_BC: BoolArray = peak_BC <= limits[0]
    if np.isfinite(limits[1]):
        host_K = points.of_each(point_B, lambda cut, phases: in_flight(phases) * some.host_activations_K[of_pairs(cut)])
        # Mostly hosts have room for all that can be moved.
        if some.most_host_bytes(host_K) > limits[1]:
            fits_BC &= some.host_bytes_beside(host_K).reshape(-1, count) <= limits[1]
    return peak_BC, fits_BC


def _least(fits_BC: BoolArray, order_B: IntArray, ratios: Ratios) -> BoolArray:
    """Of combinations that fit those that move no more than they have to.

    Args:
        fits_BC: Which fit.
        order_B: What of each candidate is never faster with a larger ratio; which of :data:`ORDERS`.
        ratios: What may be moved.
    """
    every = np.unique(order_B).tolist()
    if len(every) == 1:
        return ratios.least(fits_BC, ORDERS[every[0]])
    least_BC = np.zeros_like(fits_BC)
    for order in every:
        at_B = np.flatnonzero(order_B == order)
        least_BC[at_B] = ratios.least(fits_BC[at_B], ORDERS[order])
    return least_BC


def floors_of(
    known: Known, of_table: Arranged, ratios: Ratios, index_J: IntArray, place_J: IntArray
) -> tuple[FloatArray, FloatArray]:
    """What copies add at least to candidates of a table, per microbatch and of a batch.

    Args:
        known: What is known of the table.
        of_table: What is so of its arrangements.
        ratios: What may be moved.
        index_J: The candidates.
        place_J: Their places among what is known.
    """
    if not len(index_J):
        return np.empty(0), np.empty(0)
    if known.floors is None:
        raise ValueError("known.floors = None: nothing was learned about candidates that are asked about")
    row_J, combination_J = np.divmod(place_J, len(ratios))
    place_JO, ratio_J = ratios.of_kinds(combination_J), ratios.offload_CO[combination_J, -1]
    if len(of_table.corners) == 1:
        return known.floors.added(of_table.corners[0], row_J, place_JO[:, :3], ratio_J)
    more_J, once_J = np.empty(len(row_J)), np.empty(len(row_J))
    corner_J = of_table.corner_S[known.table.shape_K[index_J]]
    for corner, weights in enumerate(of_table.corners):
        at_N = np.flatnonzero(corner_J == corner)
        if len(at_N):
            found = known.floors.added(weights, row_J[at_N], place_JO[at_N, :3], ratio_J[at_N])
            more_J[at_N], once_J[at_N] = found
    return more_J, once_J
