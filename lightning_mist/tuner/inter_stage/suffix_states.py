"""States of suffixes of pipelines, what one pass over them finds, and their sums laid out so that a stage is a shift.

A state is how many layers and units of devices the last stages of a pipeline hold. A stage in front makes both larger
by what it holds itself, so in a table of all states it comes from the one that lies as far before, always as far. With
empty rows and columns before the table nothing has to be asked about where that is.

Array axes
    C  options (see :mod:`lightning_mist.tuner.inter_stage.slot_options`)
    J  states that can be part of an answer; in a table of sums one more, which is never reached
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.tuner.inter_stage.slot_options import SlotOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The states that can be part of an answer at a bottleneck time.

    Attributes:
        row_J: Layers.
        used_J: Units of devices.
        flat_J: Number of the state among all, also those that cannot.
        number: The place in J of every state; the number of states where there is none.
        slack: Layers by which all devices together can be idle.
    """

    row_J: IntArray
    used_J: IntArray
    flat_J: IntArray
    number: IntArray
    slack: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What one pass found.

    Attributes:
        bottleneck: The most steady seconds of a stage.
        cap: The most that ``sum t + D`` may be, or ``None``.
        only: The number of stages that was of interest, or ``None`` where all were.
        limit: Sums of steady times above which suffixes were of no interest.
        values: For every number of stages with an answer the least sum of steady times; without a cap the boundary
            time of the first stage counts with them.
        states: The states that were looked at.
        sums: For every number of stages of a suffix the least sum by state.
    """

    bottleneck: float
    cap: float | None
    only: int | None
    limit: float
    values: dict[int, float]
    states: States
    sums: tuple[FloatArray, ...]


MOST_PADDED = 1 << 15
"""Sums of a padded table at most: 256 KiB, which stay near the processor. Of larger ones looking sums up takes longer
than finding out where they are."""


class PaddedSums:
    """Sums by state of one pass, all stages of which take devices of the same part.

    Args:
        place_J: Where each state is in the table.
        width: Places of a row.
    """

    def __init__(self, place_J: IntArray, width: int) -> None:
        self._place_J, self._width = place_J, width
        self._sums = np.full(int(place_J.max(initial=0)) + 1, np.inf)
        self._every_J = np.arange(len(place_J))

    @classmethod
    def of(cls, states: States, most_layers: int, most_units: int, size: int) -> "PaddedSums | None":
        """A table of some states, if it is small.

        Args:
            most_layers: Layers that a stage has at most.
            most_units: Units of devices that it has at most.
            size: Numbers of units that there may be.
        """
        width = size + most_units
        place_J = (states.row_J + most_layers) * width + states.used_J + most_units
        return cls(place_J, width) if place_J.max(initial=0) < MOST_PADDED else None

    def filled(self, sums_J: FloatArray) -> FloatArray:
        """Sums in their places, until others are asked for."""
        self._sums[self._place_J] = sums_J[:-1]
        return self._sums

    def sources(
        self, options: SlotOptions, units_C: IntArray, at_once: int
    ) -> Iterator[tuple[SlotOptions, IntArray, IntArray]]:
        """Some options at a time, all states, and the places of those behind them, axes ``CJ``."""
        step = max(1, at_once // max(1, len(self._every_J)))
        for begin in range(0, len(options), step):
            here = slice(begin, begin + step)
            shift_C = options.layers_C[here] * self._width + units_C[here]
            some = options if step >= len(options) else options.take(here)
            yield some, self._every_J, self._place_J - shift_C[:, None]
