"""Which stages a pipeline that is fast enough can have, by their layers and devices.

With what stages take at least (:mod:`lightning_mist.tuner.floors`) it is cheap to find out what pipelines take at least
in which a stage has so many layers and devices. Where that is too long nothing has to be evaluated. Nor of what is too
slow: with ``Z`` the least sum of the steady times of all stages, a pipeline of fewer than ``V`` seconds has

    (G - 1) max_i t_i + Z < V.

Array axes
    B  stages, by how many are behind them
    C  numbers of stages
    N  numbers of devices, from 0 to all
    L  numbers of layers, from 0 to all
    V  numbers of layers and devices of a stage
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray
from lightning_mist.tuner.floor_family import FloorFamily, FloorWalk, FloorWalks
from lightning_mist.tuner.tables import ROOM

ROUNDS = 3
"""How often the least sum of the steady times is asked for again, as the slowest stage may take less and less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """What stages of a family can be.

    Attributes:
        counts: The numbers of stages, ascending, with which a pipeline may be fast enough.
        slowest: Steady seconds that no stage exceeds.
        heads_CNL: Devices and layers of first stages, by the numbers of stages.
        tails_BNL: The same of other stages, by how many are behind them.
    """

    counts: tuple[int, ...]
    slowest: float
    heads_CNL: BoolArray
    tails_BNL: BoolArray

    @classmethod
    def nothing(cls, num_devices: int, num_layers: int) -> "Narrowed":
        """Where no pipeline is fast enough.

        Args:
            num_devices: Number of devices.
            num_layers: Number of layers.
        """
        none = np.zeros((0, num_devices + 1, num_layers + 1), dtype=bool)
        return cls(counts=(), slowest=0.0, heads_CNL=none, tails_BNL=none)

    def of(self, stage_index: int, num_stages: int) -> BoolArray:
        """What one stage can be; nothing if no pipeline that has it is fast enough.

        Args:
            stage_index: Index of the stage.
            num_stages: Number of stages.
        """
        behind, none_NL = num_stages - 1 - stage_index, np.zeros(self.tails_BNL.shape[1:], dtype=bool)
        if stage_index:
            return self.tails_BNL[behind] if behind < len(self.tails_BNL) else none_NL
        return self.heads_CNL[self.counts.index(num_stages)] if num_stages in self.counts else none_NL


def narrowed(family: FloorFamily, below: float) -> Narrowed:
    """What stages can be of pipelines that take fewer seconds than something.

    Args:
        family: What they take at least.
        below: Seconds.
    """
    walks, others = FloorWalks(family, below), family.num_microbatches - 1
    walk, slowest = _slowest(walks, below)
    open_C = np.zeros(0, dtype=bool) if walk is None else walk.least_C < np.inf
    if walk is None or not open_C.any():
        return Narrowed.nothing(family.num_devices, family.num_layers)
    fastest_C = walks.fastest(walk)
    open_C &= others * np.where(open_C, fastest_C, 0.0) + walk.least_C <= below * ROOM
    through_BV, through_CV = walks.through(walk, open_C)
    fastest = float(fastest_C[open_C].min(initial=np.inf))

    def table(steady: FloatArray, through: FloatArray) -> BoolArray:
        """Devices and layers of those that pipelines can have that are fast enough."""
        row, at = np.nonzero((through < np.inf) & (steady <= slowest))
        fits = others * np.maximum(steady[row, at], fastest) + through[row, at] <= below * ROOM
        found = np.zeros((len(steady), family.num_devices + 1, family.num_layers + 1), dtype=bool)
        found[row[fits], family.devices_V[at[fits]], family.layers_V[at[fits]]] = True
        return found

    return Narrowed(
        counts=tuple(family.counts_C[open_C].tolist()),
        slowest=slowest,
        heads_CNL=table(family.heads_CV[open_C], through_CV[open_C]),
        tails_BNL=table(family.tails_BV, through_BV),
    )


def _slowest(walks: FloorWalks, below: float) -> tuple[FloorWalk | None, float]:
    """A pass, none if no pipeline is fast enough, and the steady seconds that no stage exceeds in one that is."""
    others = walks.family.num_microbatches - 1
    pace, walk = below / (others + 1), None
    for _ in range(ROUNDS if others else 1):
        walk = walks.walk(pace)
        least = float(walk.least_C.min(initial=np.inf)) if walk is not None else np.inf
        if least >= below * ROOM:
            return None, 0.0
        if others:
            pace = min(pace, (below - least) / others * ROOM)
    return walk, pace
