"""The devices of all parts of a cluster in a row, as stages take them from the last one to the first.

The stages of one part are neighbours, and the parts follow each other in a settled order. So what a suffix of a
pipeline holds of every part is one number: how many units of devices of the row. Where a stage's own begin and end in
the row says whether the stages next to it lie in other parts.

Array axes
    C  options or choices
    J  states
    P  parts of the cluster
    U  numbers of units, from none to all
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        taken: The numbers of units of every part that stages take.
        size: Numbers of units that there may be: one more than there are.
    """

    order: tuple[int, ...]
    unit_P: IntArray
    begin_P: IntArray
    end_P: IntArray
    used_PU: IntArray
    taken: tuple[IntArray, ...]
    size: int

    @classmethod
    def of(cls, num_devices: tuple[int, ...], order: tuple[int, ...], taken: Sequence[Sequence[int]]) -> "PartChain":
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
        used_PU = np.clip(np.arange(total + 1) - begin_P[:, None], 0, units_P[:, None])
        return cls(
            order=order,
            unit_P=unit_P,
            begin_P=begin_P,
            end_P=begin_P + units_P,
            used_PU=used_PU,
            taken=tuple(np.array(own, dtype=np.int64) // unit for own, unit in zip(taken, unit_P, strict=True)),
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

    def ends(self, part: int, seams: int) -> BoolArray:
        """Where in the row stages of a part may end, with axis ``U``."""
        end_U, begin, end = np.arange(self.size), self.begin_P[part], self.end_P[part]
        inside_U: BoolArray = (end_U > begin) & (end_U <= end)
        if seams == ANY_SEAMS or len(self.order) == 1:
            return inside_U
        if seams & BEHIND:
            inside_U &= np.isin(end_U, begin + self.taken[part])
        # Where the first part ends, the row does.
        inside_U &= ((end_U == end) & (part != self.order[0])) == bool(seams & FRONT)
        return inside_U

    def begins(self, part: int, seams: int) -> tuple[int, int]:
        """Where in the row stages of a part may begin: from one place to another."""
        begin, end = int(self.begin_P[part]), int(self.end_P[part])
        if seams == ANY_SEAMS or part == self.order[-1]:
            return begin, end
        return (begin, begin) if seams & BEHIND else (begin + 1, end)
