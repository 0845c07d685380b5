"""Candidates of a table as each of several stages that share it may have them.

Stages with the same role differ in their situations, in how many stages are behind them, and in what they can be at
all. They are looked at together: whatever is compared within a stage is compared within all of them at once.

Array axes
    K  candidates of a table
    P  candidates of a table as stages may have them, stage after stage
    N  numbers of devices
    L  numbers of layers
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.cost.memory import Phase
from lightning_mist.tuner.candidates.candidate_tables import Table

Situations = tuple[Phase, ...]
"""The situations of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One of the stages that share a table.

    Attributes:
        behind: Stages behind it, as far as microbatches are in flight between.
        among_NL: Of which numbers of devices and layers it may be; of all if ``None``.
    """

    phases: Situations
    behind: int = 0
    among_NL: BoolArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePoints:
    """The candidates that stages which share a table may be.

    Attributes:
        stage_P: Which stage each is of, ascending.
        index_P: Which candidate each is, ascending within a stage.
        group_P: A number for the stage, the run of layers and the devices of each, ascending with the stage.
        steady_P: Steady seconds, with what the stages behind cost.
        whole_P: Steady and boundary seconds.
        floor_P: What of these copies cannot hide.
    """

    table: Table
    stages: tuple[Stage, ...]
    stage_P: IntArray
    index_P: IntArray
    group_P: IntArray
    steady_P: FloatArray
    whole_P: FloatArray
    floor_P: FloatArray
    later_P: FloatArray

    def __len__(self) -> int:
        """Number of candidates of all stages."""
        return len(self.stage_P)

    @classmethod
    def of(cls, table: Table, stages: Sequence[Stage], slowest: float) -> "StagePoints":
        """Those that are fast enough.

        Args:
            slowest: The most steady seconds, without what the stages behind cost.
        """
        count = int(np.searchsorted(table.steady_K, slowest, side="right"))
        devices_K, range_K = table.devices_K[:count], table.range_K[:count]
        layers_K = table.ranges.layers_W[range_K]
        inside = np.ones((len(stages), count), dtype=bool)
        for row, stage in enumerate(stages):
            if stage.among_NL is not None:
                inside[row] = stage.among_NL[devices_K, layers_K]
        stage_P, index_P = np.nonzero(inside)
        # By how much groups differ from one run of layers to the next, and from one stage to the next.
        size = int(table.devices_K.max(initial=0)) + 1
        places = len(table.ranges) * size
        place_K = range_K * size + devices_K
        later_P = np.array([stage.behind for stage in stages])[stage_P] * table.again_K[index_P]
        steady_P = table.steady_K[index_P] + later_P
        return cls(
            table=table,
            stages=tuple(stages),
            stage_P=stage_P,
            index_P=index_P,
            group_P=stage_P * places + place_K[index_P],
            steady_P=steady_P,
            whole_P=steady_P + table.boundary_K[index_P],
            floor_P=table.floor_K[index_P] + later_P,
            later_P=later_P,
        )

    def ends(self, at_J: IntArray) -> list[int]:
        """Where the candidates of each stage end among some of all, which come stage after stage."""
        found: list[int] = np.searchsorted(self.stage_P[at_J], np.arange(1, len(self.stages) + 1)).tolist()
        return found

    def peaks(self) -> FloatArray:
        """Peak bytes."""
        parts, begin = self.table.parts.take(self.index_P), 0
        found = [np.empty(0)]
        for stage, end in zip(self.stages, self.ends(np.arange(len(self))), strict=True):
            if end > begin:
                found.append(parts.take(slice(begin, end)).peaks(stage.phases))
            begin = end
        return np.concatenate(found)


def either(*every_NL: BoolArray | None) -> BoolArray | None:
    """Numbers of devices and layers of which one or another is of interest; ``None`` stands for all."""
    some = [among_NL for among_NL in every_NL if among_NL is not None]
    if len(some) < len(every_NL):
        return None
    found_NL: BoolArray = np.any(some, axis=0)
    return found_NL


def covers(known_NL: BoolArray | None, asked_NL: BoolArray | None) -> bool:
    """Whether what is known of some numbers of devices and layers is enough for what is asked; ``None`` for all."""
    return known_NL is None or (asked_NL is not None and not (asked_NL & ~known_NL).any())
