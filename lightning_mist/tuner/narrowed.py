"""Which stages a pipeline that is fast enough can have, by their layers and devices.

With choices that take no more than any that there are (:mod:`lightning_mist.tuner.floors`) it is cheap to find out
which numbers of layers and devices of a stage the others can complete to a pipeline. Of anything else nothing has to be
evaluated. Nor of what is too slow: with ``Z`` the least sum of the steady times of all stages, a pipeline of fewer than
``V`` seconds has

    (G - 1) max_i t_i + Z < V.

Array axes
    N  numbers of devices, from 0 to all
    L  numbers of layers, from 0 to all
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.compile import BoolArray
from lightning_mist.tuner.choices import SlotChoices
from lightning_mist.tuner.problem import Family
from lightning_mist.tuner.suffixes import Suffixes

Pairs = Sequence[tuple[int, int]]
"""Devices and layers of choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """What stages of a family can be.

    Attributes:
        slowest: Steady seconds that none of them exceeds.
        first_NL: Devices and layers of first stages.
        middle_NL: The same of stages between others.
        last_NL: The same of last stages.
    """

    slowest: float
    first_NL: BoolArray
    middle_NL: BoolArray
    last_NL: BoolArray

    def of(self, stage_index: int, num_stages: int) -> BoolArray:
        """What one stage can be.

        Args:
            stage_index: Index of the stage.
            num_stages: Number of stages.
        """
        if not stage_index:
            return self.first_NL
        return self.last_NL if stage_index == num_stages - 1 else self.middle_NL


def narrowed(family: Family, below: float) -> Narrowed:
    """What stages can be of pipelines that take fewer seconds than something.

    Args:
        family: Pipelines on devices that are all alike, whose choices take no more than those that there are.
        below: Seconds.
    """
    slowest, others = below / family.num_microbatches, family.num_microbatches - 1
    suffixes = Suffixes(family)
    least = min(suffixes.walk(slowest).values.values(), default=np.inf)
    if others and least < np.inf:
        slowest = min(slowest, max(0.0, (below - least) / others))
    tails = [_pairs(slot, slowest) for slot in family.tails]
    heads = {count: _pairs(slot, slowest) for count, slot in family.heads.items()}
    return _Reach(family, tails, heads).narrowed(slowest)


def _pairs(slot: SlotChoices, slowest: float) -> Pairs:
    fast_K = slot.steady_K <= slowest
    found = np.unique(np.stack([slot.devices_K[fast_K], slot.layers_K[fast_K]]), axis=1)
    return [(int(devices), int(layers)) for devices, layers in found.T]


class _Reach:
    """States, devices and layers that are left, from both ends of pipelines."""

    def __init__(self, family: Family, tails: Sequence[Pairs], heads: Mapping[int, Pairs]) -> None:
        self.tails, self.heads = tails, heads
        self.shape = family.num_devices[0] + 1, family.num_layers + 1
        # What the last stages can hold, by how many they are.
        self.behind = [self._none()]
        self.behind[0][0, 0] = True
        for pairs in tails:
            reached_NL = self._none()
            for devices, layers in pairs:
                reached_NL[devices:, layers:] |= self.behind[-1][: self.shape[0] - devices, : self.shape[1] - layers]
            self.behind.append(reached_NL)

    def _none(self) -> BoolArray:
        return np.zeros(self.shape, dtype=bool)

    def narrowed(self, slowest: float) -> Narrowed:
        """From the first stage to the last what can be part of a whole pipeline."""
        first_NL, middle_NL, last_NL = self._none(), self._none(), self._none()
        left_NL = self._none()
        for count in range(len(self.tails), 0, -1):
            # What is left for so many last stages, behind a first one or others.
            for devices, layers in self.heads.get(count + 1, ()):
                rest = self.shape[0] - 1 - devices, self.shape[1] - 1 - layers
                if self.behind[count][rest]:
                    first_NL[devices, layers] = left_NL[rest] = True
            following_NL = self._none()
            for devices, layers in self.tails[count - 1]:
                after_NL = (
                    left_NL[devices:, layers:]
                    & self.behind[count - 1][: self.shape[0] - devices, : self.shape[1] - layers]
                )
                if after_NL.any():
                    (last_NL if count == 1 else middle_NL)[devices, layers] = True
                    following_NL[: self.shape[0] - devices, : self.shape[1] - layers] |= after_NL
            left_NL = following_NL
        return Narrowed(slowest=slowest, first_NL=first_NL, middle_NL=middle_NL, last_NL=last_NL)
