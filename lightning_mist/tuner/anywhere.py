"""Stages between others whose choices cost the same wherever they lie, as passes over suffixes want them.

What such a stage uses up, its devices and layers, is the same for many stages and tells alone which state lies behind
it. So where it leads from every state is looked up once per pass, for all stages.

Array axes
    C  lines of a stage (see :mod:`lightning_mist.tuner.lines`)
    E  part, devices and layers of lines of any stage
    J  states
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.tuner.lines import Lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The states behind others, by what the stage between them uses up.

    Attributes:
        row_E: The row of each; -1 where it cannot be part of an answer.
        source_EJ: The states, by row; where there is none their number.
    """

    row_E: IntArray
    source_EJ: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStage:
    """The lines of one stage.

    Attributes:
        use_C: What they use up.
        is_fastest_C: Whether no other line that uses up the same is faster.
        steady_C: Steady seconds.
        reach_C: Steady and boundary seconds together.
        faster_C: The same of the next faster one that uses up the same; infinite if there is none.
    """

    use_C: IntArray
    is_fastest_C: BoolArray
    steady_C: FloatArray
    reach_C: FloatArray
    faster_C: FloatArray

    def in_front(self, behind_J: FloatArray, sources: "Sources", pace: float, cap: float | None) -> FloatArray:
        """Put the stage in front of all suffixes.

        Args:
            behind_J: Least sums of suffixes, some finite, with one more that is infinite.
            sources: The states behind others.
            pace: The most steady seconds.
            cap: The most that ``sum t + D`` may be; by default anything.
        """
        row_C = sources.row_E[self.use_C]
        kept_C = (self.steady_C <= pace) & (row_C >= 0)
        if cap is None:
            kept_C &= self.is_fastest_C  # Nothing but the steady time counts.
        else:
            # What a cap lets stand in front of some suffix, and no faster one can always replace.
            reached_J = behind_J[behind_J < np.inf]
            kept_C &= (self.reach_C + reached_J.min() <= cap) & (self.faster_C + reached_J.max() > cap)
        at_C = np.flatnonzero(kept_C)
        behind_CJ = behind_J[sources.source_EJ[row_C[at_C]]]
        sum_CJ = self.steady_C[at_C, None] + behind_CJ
        if cap is not None:
            behind_CJ += self.reach_C[at_C, None]
            sum_CJ[behind_CJ > cap] = np.inf
        best_J: FloatArray = np.append(sum_CJ.min(axis=0, initial=np.inf), np.inf)
        return best_J


@dataclass(frozen=True, slots=True, kw_only=True)
class Anywhere:
    """All such stages.

    Attributes:
        part_E: Part of the cluster.
        devices_E: Devices.
        layers_E: Layers.
        stages: The stages.
    """

    part_E: IntArray
    devices_E: IntArray
    layers_E: IntArray
    stages: tuple[OfStage, ...]

    @classmethod
    def of(cls, stages: Sequence[Lines]) -> "Anywhere | None":
        """The same of the lines of stages, unless some stage's depend on where it lies."""
        if any(lines.steady_CR.shape[1] > 1 for lines in stages):
            return None
        none = np.empty((3, 0), dtype=np.int64)
        uses = [np.stack([lines.part_C, lines.devices_C, lines.layers_C]) for lines in stages]
        found, number = np.unique(np.concatenate([none, *uses], axis=1), axis=1, return_inverse=True)
        begin, of_stages = 0, []
        for lines in stages:
            # Lines that use up the same come one after another, by rising steady time.
            reach_C = lines.reach_CR[:, 0]
            before_C = np.concatenate([[np.inf], reach_C])[:-1]
            of_stages.append(
                OfStage(
                    use_C=number.reshape(-1)[begin : begin + len(lines)],
                    is_fastest_C=lines.rank_C == 0,
                    steady_C=lines.steady_CR[:, 0],
                    reach_C=reach_C,
                    faster_C=np.where(lines.rank_C > 0, before_C, np.inf),
                )
            )
            begin += len(lines)
        return cls(part_E=found[0], devices_E=found[1], layers_E=found[2], stages=tuple(of_stages))
