"""When each channel of a stage's devices is busy inside its passes, unit by unit.

The seconds of a plan count what channels take beyond computing (:mod:`lightning_mist.cost.time.offload_seconds`,
:mod:`lightning_mist.cost.time.zero_seconds`); here are the same loads one after another, each with the time at which
its channel is done. Of a pass these are *rows*: units that are alike, how many, and of each its seconds, for how long
from its beginning it communicates and copies to the device and to the host, and how long computing then waits for
parameters that only their owner fetches (ZeRO-3). What hides behind nothing has rows of its own.

Parameters of the two outermost units stay from one pass to the next in the middle of a batch, and are given out in its
first forward: a middle microbatch is what is told.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from lightning_mist.cost.inputs import OffloadCandidates, StageRegions
from lightning_mist.cost.time.offload_loads import BEFORE, NAMES, CopyStages, loads_of, ratios_of
from lightning_mist.cost.time.overlap import CopyRates
from lightning_mist.hardware import Interference
from lightning_mist.hardware.profile import ends_together, speed_table
from lightning_mist.plan import OffloadRatios

Row = tuple[float, float, float, float, float]
"""Seconds of a unit; of these communication, copies to the device and to the host are under way; and what it waits."""

Passes = dict[str, tuple[float, ...]]
"""By what a pass is, its rows one after another, each behind the number of units that are alike."""


def channel_rows(stage: CopyStages, rates: CopyRates | None, interference: Interference) -> Passes:
    """Rows of the passes of a single stage in which anything but computing happens.

    ``"forward"`` and ``"backward"`` of a middle microbatch; ``"first forward"`` of a batch, with the update of the
    batch before, or that ``"update"`` by itself; ``"last backward"``, beside which gradients are averaged.

    Args:
        stage: One place, with one candidate.
        rates: Of copies; ``None`` where nothing is offloaded.
    """
    if rates is None:
        nothing = OffloadCandidates.of(OffloadRatios())
        stage = replace(stage, candidates=replace(stage.candidates, offload=nothing))
    walk = _Walk(stage, rates or CopyRates(to_device=np.inf, to_host=np.inf), interference)
    found = {"forward": list(walk.forward()), "backward": list(walk.backward())}
    if bool(stage.is_deferred_K[0]):
        found["first forward"] = list(walk.forward(first=True))
    elif bool(ratios_of(stage.candidates).is_updated_by_units_K[0]):
        found["update"] = list(walk.update())
    if rates is not None and (last := list(walk.backward(last=True))) != found["backward"]:
        found["last backward"] = last
    return {name: _flat(rows) for name, rows in found.items() if any(any(row[1:]) for row in rows)}


def _flat(rows: Sequence[Row]) -> tuple[float, ...]:
    there = (row for row in rows if row[0] > 0)
    return tuple(value for row, alike in groupby(there) for value in (float(len(list(alike))), *row))


class _Walk:
    """A stage's units one after another, as the docstring of the seconds of copies says."""

    def __init__(self, stage: CopyStages, rates: CopyRates, interference: Interference) -> None:
        (place,), (loads, (row,)) = stage.places, loads_of(stage, rates)
        regions = StageRegions.of(place.memory.spec, stage.candidates)
        self.low, self.high = int(regions.low_K[0]), int(regions.high_K[0])
        self.recomputed = range(int(regions.first_K[0]), int(regions.middle_K[0]))
        # Of a single unit nothing ever takes its place.
        names = (name for name in NAMES if name != "unshard" or not place.memory.holdings.is_one_unit)
        self.loads = {name: loads[name][row, BEFORE:].tolist() for name in names}
        self.waits, self.speeds = bool(loads.waits_Q[row]), speed_table(interference, place.across_nodes)

    def at(self, name: str, unit: int) -> float:
        """What a unit has to do; nothing outside the stage."""
        is_there = self.low <= unit < self.high and name in self.loads
        return self.loads[name][unit] if is_there else 0.0

    def kept(self, direction: str, unit: int) -> float:
        """Moving what a layer keeps for backward."""
        last = "last_" * (unit == self.high - 1)
        return self.at(f"{last}{'checkpoint' if unit in self.recomputed else 'saved'}_{direction}", unit)

    def row(
        self, compute: float = 0.0, network: float = 0.0, down: float = 0.0, up: float = 0.0, fetched: float = 0.0
    ) -> Row:
        """What happens at once, and parameters that are fetched, for which computing waits or not."""
        waited = fetched * self.waits
        ends = ends_together(np.array([[compute], [network], [down + fetched - waited], [up]]), self.speeds)[:, 0]
        return (float(ends.max()) + waited, *ends[1:].tolist(), waited)

    def forward(self, *, first: bool = False) -> Iterator[Row]:
        """A forward in the middle of a batch, or the first of one with the update of the batch before."""
        low, at = self.low, self.at
        if first:
            yield self.row(down=at("state_in", low), fetched=at("frozen_in", low))
            yield self.row(at("update", low), down=at("state_in", low + 1))
            yield self.row(network=at("gather", low) + at("unshard", low))
        for unit in range(low, self.high):
            is_away = first or unit > low
            yield self.row(
                at("forward", unit) + at("update", unit + 1) * first,
                at("unshard", unit + 1) * is_away + at("gather", unit + 1) * first,
                at("state_in", unit + 2) * first,
                self.kept("out", unit - 1) + at("state_out", unit) * first,
                at("frozen_in" if first else "parameters_in", unit + 1) * is_away,
            )
        yield self.row(up=self.kept("out", self.high - 1))

    def backward(self, *, last: bool = False) -> Iterator[Row]:
        """A backward in the middle of a batch, or the last of one, beside which gradients are averaged."""
        at, end = self.at, self.high - 1
        yield self.row(down=self.kept("in", end))
        for unit in reversed(range(self.low, self.high)):
            yield self.row(
                at("backward", unit) + at("again", unit) * (unit in self.recomputed),
                at("unshard", unit - 1) * (unit < end) + at("scatter", unit + 1) + at("reduce", unit + 1) * last,
                at("gradients_in", unit) + self.kept("in", unit - 1),
                at("gradients_out", unit) * (unit > self.low),
                at("parameters_in", unit - 1) * (unit < end),
            )
        yield self.row(network=at("scatter", self.low) + at("reduce", self.low) * last)

    def update(self) -> Iterator[Row]:
        """The update by itself, behind the last backward, and what is fetched for the next batch to begin with."""
        at, low = self.at, self.low
        yield self.row(down=at("state_in", low))
        for unit in range(low, self.high):
            yield self.row(at("update", unit), down=at("state_in", unit + 1), up=at("state_out", unit - 1))
        yield self.row(up=at("state_out", self.high - 1))
        yield self.row(down=at("parameters_in", low))
        yield self.row(down=max(0.0, at("parameters_in", low + 1) - at("forward", low)))
