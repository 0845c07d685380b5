"""The devices of all parts of a cluster in a row, as stages take them from the last one to the first.

The stages of one part are neighbours, and the parts follow each other in a settled order. So what a suffix of a
pipeline holds of every part is one number: how many units of devices of the row. Where a stage's own begin and end in
the row says whether the stages next to it lie in other parts.

Array axes
    C  options or choices
    J  states
    P  parts of the cluster
    T  kinds of stages: their part, and which of those next to them lie in others
    U  numbers of units, from none to all
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_mist.cost.inputs import BoolArray, IntArray
from lightning_mist.tuner.candidates import ANY_SEAMS, BEHIND, FRONT
from lightning_mist.tuner.space import common_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChain:
    """Units of devices of all parts in a row, those of the part passed last first.

    Attributes:
        order: The parts, that which is passed first in front.
        unit_P: Devices of a unit.
        begin_P: Units in the row before those of each part.
        end_P: The same with its own.
        used_PU: Of the first units of the row those of each part.
        ends_TU: Where in the row stages of every kind (:func:`kinds`) may end.
        first_begin_T: From where on in the row they may begin.
        last_begin_T: Up to where they may.
        size: Numbers of units that there may be: one more than there are.
    """

    order: tuple[int, ...]
    unit_P: IntArray
    begin_P: IntArray
    end_P: IntArray
    used_PU: IntArray
    ends_TU: BoolArray
    first_begin_T: IntArray
    last_begin_T: IntArray
    size: int

    @classmethod
    @lru_cache(maxsize=256)  # Many families of a search have the same.
    def of(
        cls, num_devices: tuple[int, ...], order: tuple[int, ...], taken: tuple[tuple[int, ...], ...]
    ) -> "PartChain":
        """The row in units that all stages take whole.

        Args:
            num_devices: Devices of every part.
            order: The parts, that which is passed first in front.
            taken: The numbers of devices of every part that stages take.
        """
        unit_P = np.array([common_unit([*own, count]) for own, count in zip(taken, num_devices, strict=True)])
        units_P, begin_P, total = np.array(num_devices) // unit_P, np.zeros(len(unit_P), dtype=np.int64), 0
        for part in reversed(order):
            begin_P[part], total = total, total + int(units_P[part])
        end_P, end_U = begin_P + units_P, np.arange(total + 1)
        ends, begins = [], []
        for part, own in enumerate(taken):
            begin, end = int(begin_P[part]), int(end_P[part])
            inside_U = (end_U > begin) & (end_U <= end)
            first_U = inside_U & np.isin(end_U, begin + np.array(own, dtype=np.int64) // unit_P[part])
            # Where the first part ends, the row does.
            front_U = (end_U == end) & (part != order[0])
            for seams in range(ANY_SEAMS):
                ends.append((first_U if seams & BEHIND else inside_U) & (front_U == bool(seams & FRONT)))
                is_alone = part == order[-1]
                begins.append((begin, end) if is_alone else (begin, begin) if seams & BEHIND else (begin + 1, end))
            ends.append(inside_U)
            begins.append((begin, end))
        first_begin_T, last_begin_T = np.array(begins).T
        return cls(
            order=order,
            unit_P=unit_P,
            begin_P=begin_P,
            end_P=end_P,
            used_PU=np.clip(end_U - begin_P[:, None], 0, units_P[:, None]),
            ends_TU=np.stack(ends),
            first_begin_T=first_begin_T,
            last_begin_T=last_begin_T,
            size=total + 1,
        )

    def seams(self, part_C: IntArray, begin_C: IntArray, end_C: IntArray) -> IntArray:
        """Which of the stages next to some lie in other parts, as :attr:`SlotChoices.seams_K` says it.

        Args:
            begin_C: Units of the row behind each stage.
            end_C: Units with its own.
        """
        is_behind_C = (begin_C == self.begin_P[part_C]) & (part_C != self.order[-1])
        is_front_C = (end_C == self.end_P[part_C]) & (part_C != self.order[0])
        found_C: IntArray = FRONT * is_front_C + BEHIND * is_behind_C
        return found_C

    def fits(self, part_C: IntArray, seams_C: IntArray, units_C: IntArray, end_C: IntArray) -> BoolArray:
        """Whether stages may have so many units of a part up to somewhere in the row; arguments that broadcast."""
        begin_C = end_C - units_C
        inside_C = (begin_C >= self.begin_P[part_C]) & (end_C <= self.end_P[part_C])
        if len(self.order) > 1:
            inside_C &= (seams_C == ANY_SEAMS) | (seams_C == self.seams(part_C, begin_C, end_C))
        return inside_C


def kinds(part_C: IntArray, seams_C: IntArray) -> IntArray:
    """A number for the part of stages and which of those next to them lie in others."""
    return part_C * (ANY_SEAMS + 1) + seams_C
