"""When each channel of a stage's devices is busy inside its passes, unit by unit.

The seconds of a plan count what channels take beyond computing (:mod:`lightning_mist.cost.time.offload_seconds`,
:mod:`lightning_mist.cost.time.zero_seconds`); here are the same loads one after another, each with the time at which
its channel is done. Of a pass these are *rows*: units that are alike, how many, and of each its seconds, for how long
from its beginning it communicates and copies to the device and to the host, and how long computing then waits for
parameters that only their owner fetches (ZeRO-3). What hides behind nothing has rows of its own.

Parameters of the two outermost units stay from one pass to the next in the middle of a batch, and are given out in its
first forward: a middle microbatch is what is told.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from lightning_mist.cost.inputs import FloatArray, OffloadCandidates, StageRegions
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
    offloads = rates is not None
    if not offloads:
        some = replace(stage.candidates, offload=OffloadCandidates.of(OffloadRatios()))
        stage = replace(stage, candidates=some)
    walk = _Walk.of(stage, rates or CopyRates(to_device=np.inf, to_host=np.inf), interference)
    found = {"forward": walk.forward(), "backward": walk.backward()}
    if bool(stage.is_deferred_K[0]):
        found["first forward"] = walk.first_forward()
    elif bool(ratios_of(stage.candidates).is_updated_by_units_K[0]):
        found["update"] = walk.update()
    if offloads and (last := walk.backward(averages=True)) != found["backward"]:
        found["last backward"] = last
    rows = {name: [row for row in lines if row[0] > 0] for name, lines in found.items()}
    return {name: _flat(lines) for name, lines in rows.items() if any(any(row[1:]) for row in lines)}


def _flat(rows: list[Row]) -> tuple[float, ...]:
    return tuple(value for row, alike in groupby(rows) for value in (float(len(list(alike))), *row))


@dataclass(frozen=True, slots=True)
class _Walk:
    """A stage's units one after another, as the docstring of the seconds of copies says."""

    loads: dict[str, list[float]]
    low: int
    high: int
    recomputed: range
    waits: bool
    speeds: FloatArray

    @classmethod
    def of(cls, stage: CopyStages, rates: CopyRates, interference: Interference) -> "_Walk":
        found, row_K = loads_of(stage, rates)
        memory = stage.places[0].memory
        regions = StageRegions.of(memory.spec, stage.candidates)
        row = int(row_K[0])
        loads = {name: found[name][row, BEFORE:].tolist() for name in NAMES}
        if memory.holdings.is_one_unit:
            # Nothing ever takes its place.
            loads["unshard"] = [0.0] * len(loads["unshard"])
        return cls(
            loads,
            int(regions.low_K[0]),
            int(regions.high_K[0]),
            range(int(regions.first_K[0]), int(regions.middle_K[0])),
            bool(found.waits_Q[row]),
            speed_table(interference, stage.places[0].across_nodes),
        )

    def at(self, name: str, unit: int) -> float:
        """What a unit has to do; nothing outside the stage."""
        return self.loads[name][unit] if self.low <= unit < self.high else 0.0

    def kept(self, direction: str, unit: int) -> float:
        """Moving what a layer keeps for backward."""
        return self.at(f"{'checkpoint' if unit in self.recomputed else 'saved'}_{direction}", unit)

    def row(
        self, compute: float = 0.0, network: float = 0.0, down: float = 0.0, up: float = 0.0, fetched: float = 0.0
    ) -> Row:
        """What happens at once, and parameters that are fetched, for which computing waits or not."""
        waited = fetched if self.waits else 0.0
        ends = ends_together(np.array([[compute], [network], [down + fetched - waited], [up]]), self.speeds)[:, 0]
        return (float(ends.max()) + waited, *ends[1:].tolist(), waited)

    def forward(self) -> list[Row]:
        """A forward in the middle of a batch."""
        return [
            *(
                self.row(
                    self.at("forward", unit),
                    self.at("unshard", unit + 1) * (unit > self.low),
                    up=self.kept("out", unit - 1),
                    fetched=self.at("parameters_in", unit + 1) * (unit > self.low),
                )
                for unit in range(self.low, self.high)
            ),
            self.row(up=self.kept("out", self.high - 1)),
        ]

    def first_forward(self) -> list[Row]:
        """The first forward of a batch, with the update of the one before."""
        low, at = self.low, self.at
        return [
            self.row(down=at("state_in", low), fetched=at("frozen_in", low)),
            self.row(at("update", low), down=at("state_in", low + 1)),
            self.row(network=at("gather", low) + at("unshard", low)),
            *(
                self.row(
                    at("forward", unit) + at("update", unit + 1),
                    at("unshard", unit + 1) + at("gather", unit + 1),
                    at("state_in", unit + 2),
                    self.kept("out", unit - 1) + at("state_out", unit),
                    at("frozen_in", unit + 1),
                )
                for unit in range(low, self.high)
            ),
            self.row(up=self.kept("out", self.high - 1)),
        ]

    def backward(self, *, averages: bool = False) -> list[Row]:
        """A backward; if ``averages`` the last one, beside which gradients are averaged."""
        return list(self._backward(averages=averages))

    def _backward(self, *, averages: bool) -> Iterator[Row]:
        at, last = self.at, self.high - 1
        yield self.row(down=self.kept("in", last))
        for unit in reversed(range(self.low, self.high)):
            inner = unit < last
            yield self.row(
                at("backward", unit) + at("again", unit) * (unit in self.recomputed),
                at("unshard", unit - 1) * inner + at("scatter", unit + 1) + at("reduce", unit + 1) * averages,
                at("gradients_in", unit) + self.kept("in", unit - 1),
                at("gradients_out", unit) * (unit > self.low),
                at("parameters_in", unit - 1) * inner,
            )
        yield self.row(network=at("scatter", self.low) + at("reduce", self.low) * averages)

    def update(self) -> list[Row]:
        """The update by itself, behind the last backward, and what is fetched for the next batch."""
        at, low = self.at, self.low
        return [
            self.row(down=at("state_in", low)),
            *(
                self.row(at("update", unit), down=at("state_in", unit + 1), up=at("state_out", unit - 1))
                for unit in range(low, self.high)
            ),
            self.row(up=at("state_out", self.high - 1)),
            # With these the next batch begins.
            self.row(down=at("parameters_in", low)),
            self.row(down=max(0.0, at("parameters_in", low + 1) - at("forward", low))),
        ]
