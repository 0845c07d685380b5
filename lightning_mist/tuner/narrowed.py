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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost.compile import BoolArray
from lightning_mist.tuner.choices import SlotChoices
from lightning_mist.tuner.problem import Family
from lightning_mist.tuner.suffixes import Suffixes
from lightning_mist.tuner.tables import ROOM

Pairs = Sequence[tuple[int, int]]
"""Devices and layers of choices."""


ROUNDS = 3
"""How often the least sum of the steady times is asked for again, as the slowest stage may take less and less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """What stages of a family can be.

    Attributes:
        counts: The numbers of stages, ascending, with which a pipeline may be fast enough.
        slowest: Steady seconds that no stage exceeds.
        first_NL: Devices and layers of first stages.
        middle_NL: The same of stages between others.
        last_NL: The same of last stages.
    """

    counts: tuple[int, ...]
    slowest: float
    first_NL: BoolArray
    middle_NL: BoolArray
    last_NL: BoolArray

    @classmethod
    def nothing(cls, num_devices: int, num_layers: int) -> "Narrowed":
        """Where no pipeline is fast enough.

        Args:
            num_devices: Number of devices.
            num_layers: Number of layers.
        """
        none_NL = [np.zeros((num_devices + 1, num_layers + 1), dtype=bool) for _ in range(3)]
        return cls(counts=(), slowest=0.0, first_NL=none_NL[0], middle_NL=none_NL[1], last_NL=none_NL[2])

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
    suffixes = Suffixes(family)
    found = Narrowed.nothing(family.num_devices[0], family.num_layers)
    slowest = {count: _slowest(suffixes, count, below) for count in sorted(family.heads)}
    paces = {count: pace for count, pace in slowest.items() if pace is not None}
    for count, pace in paces.items():
        tails = [_pairs(slot, pace) for slot in family.tails[: count - 1]]
        _complete(tails, _pairs(family.heads[count], pace), found)
    return replace(found, counts=tuple(paces), slowest=max(paces.values(), default=0.0))


def _slowest(suffixes: Suffixes, count: int, below: float) -> float | None:
    """Steady seconds that no stage of so many exceeds in a pipeline that is fast enough; nothing if there is none."""
    others = suffixes.family.num_microbatches - 1
    pace = below / (others + 1)
    for _ in range(ROUNDS if others else 1):
        least = suffixes.walk(pace).values.get(count)
        if least is None:
            return None
        if not others:
            break
        pace = min(pace, (below - least) / others * ROOM)
    return pace if pace >= 0 else None


def _pairs(slot: SlotChoices, slowest: float) -> Pairs:
    fast_K = slot.steady_K <= slowest
    found = np.unique(np.stack([slot.devices_K[fast_K], slot.layers_K[fast_K]]), axis=1)
    return [(int(devices), int(layers)) for devices, layers in found.T]


def _complete(tails: Sequence[Pairs], head: Pairs, found: Narrowed) -> None:
    """Mark what can be part of a whole pipeline of a first stage and so many others.

    Args:
        tails: What stages can be by how many are behind them.
        head: What the first stage can be.
        found: Where to mark it.
    """
    size, width = found.first_NL.shape
    # What the last stages can hold, by how many they are.
    behind = [np.zeros((size, width), dtype=bool)]
    behind[0][0, 0] = True
    for pairs in tails:
        reached_NL = np.zeros((size, width), dtype=bool)
        for devices, layers in pairs:
            reached_NL[devices:, layers:] |= behind[-1][: size - devices, : width - layers]
        behind.append(reached_NL)
    # What is left for so many last stages, from the first stage on.
    left_NL = np.zeros((size, width), dtype=bool)
    for devices, layers in head:
        rest = size - 1 - devices, width - 1 - layers
        if behind[-1][rest]:
            found.first_NL[devices, layers] = left_NL[rest] = True
    for count in range(len(tails), 0, -1):
        marked_NL, following_NL = found.middle_NL if count > 1 else found.last_NL, np.zeros((size, width), dtype=bool)
        for devices, layers in tails[count - 1]:
            after_NL = left_NL[devices:, layers:] & behind[count - 1][: size - devices, : width - layers]
            if after_NL.any():
                marked_NL[devices, layers] = True
                following_NL[: size - devices, : width - layers] |= after_NL
        left_NL = following_NL
