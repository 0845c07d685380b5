"""How much longer stages receive, at least, from neighbours in given parts than from those that are nearest.

Lower bounds of ranges (:mod:`lightning_mist.tuner.bounds.range_bounds`) receive from whichever part that takes least.
Once it is known in which parts the stages next to one lie, what it takes beyond that counts too.

Array axes
    N  numbers of devices, from 0 to all
    S  slots, one for every arrangement of devices
    K  choices
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost import StageCostModel, StageSlot
from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.tuner.bounds.range_bounds import received
from lightning_mist.tuner.candidates import BEHIND, FRONT, SlotChoices


@dataclass(frozen=True, slots=True, kw_only=True)
class SeamBounds:
    """Of stages in one part, by the parts of those next to them.

    Attributes:
        arrivals_S: Seconds of receiving what comes from the front beyond the least, from each part.
        returns_S: The same from behind.
    """

    part: int
    size: int
    devices_S: IntArray
    arrivals_S: tuple[FloatArray, ...]
    returns_S: tuple[FloatArray, ...]

    @classmethod
    def of(
        cls, model: StageCostModel, slots: Sequence[StageSlot], part: int, num_parts: int, num_layers: int
    ) -> "SeamBounds":
        """Those of stages in a part, with any of its arrangements of devices.

        Args:
            slots: A slot for each of them.
        """
        each = [
            [received(model, replace(slot, parts=(other, part, other)), num_layers) for other in range(num_parts)]
            for slot in slots
        ]
        received_SPW = np.array(each).reshape(len(slots), num_parts, 2)
        beyond_SPW = received_SPW - received_SPW.min(axis=1, keepdims=True)
        return cls(
            part=part,
            size=model.cluster.world_size,
            devices_S=np.array([slot.devices for slot in slots], dtype=np.int64),
            arrivals_S=tuple(beyond_SPW[:, other, 0] for other in range(num_parts)),
            returns_S=tuple(beyond_SPW[:, other, 1] for other in range(num_parts)),
        )

    def at(self, choices: SlotChoices, front: int | None, behind: int | None, slowest: float) -> Iterator[SlotChoices]:
        """Choices for every way in which the stages next to one may lie.

        Args:
            choices: Lower bounds wherever these lie.
            front: The part that comes before this one; this one, if there is none; ``None`` of a first stage.
            behind: The same behind, ``None`` of a last stage.
            slowest: The most steady seconds.
        """
        sides = (front, FRONT), (behind, BEHIND)
        for seams in range(FRONT + BEHIND + 1):
            if any(seams & bit and other in (None, self.part) for other, bit in sides):
                continue
            # Without a stage of its part next to it one has all its devices.
            is_alone = all(other is None or seams & bit for other, bit in sides)
            fits_K = (choices.devices_K == self.size) == is_alone
            from_front = None if front is None else front if seams & FRONT else self.part
            from_behind = None if behind is None else behind if seams & BEHIND else self.part
            seconds_K = choices.steady_K + self._beyond(from_front, from_behind)[choices.devices_K]
            fits_K &= seconds_K <= slowest
            found = replace(choices, steady_K=seconds_K, seams_K=np.full(len(choices), seams))
            yield found.take(fits_K)

    def _beyond(self, front: int | None, behind: int | None) -> FloatArray:
        """Seconds of receiving beyond the least, by devices, with axis ``N``."""
        beyond_S = np.zeros(len(self.devices_S))
        if front is not None:
            beyond_S = beyond_S + self.arrivals_S[front]
        if behind is not None:
            beyond_S = beyond_S + self.returns_S[behind]
        beyond_N = np.full(self.size + 1, np.inf)
        np.minimum.at(beyond_N, self.devices_S, beyond_S)
        return beyond_N
