"""Pipelines of one number of microbatches by what their stages take at least, and passes over all of them.

Of a stage only its layers and devices tell its floors from others, wherever it lies; so all that a stage with so many
behind it can be is one row of a table. As in :mod:`lightning_mist.tuner.suffixes` a pass goes from the last stage to
the first, over states that are the layers and devices of a suffix, leaves out what is idle by too much, and answers for
every number of stages; but all stages reach the same states from the same ones, which are looked up once per pass. A
second pass from the first stage to the last tells of every choice what the pipelines take at least that have it.

Array axes
    B  stages, by how many are behind them
    C  numbers of stages
    V  numbers of layers and devices of a stage
    J  states; in a table of sums one more, which is never reached
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.tuner.space import common_unit
from lightning_mist.tuner.tables import ROOM

_MARGIN = 1e-9
"""Relative margin within which rounding may make a choice look as if it were idle by too much."""

_NO_TIME = 1e-200
"""Seconds that stand for none where they are divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFloors:
    """What a stage takes at least, by layers and devices.

    Attributes:
        layers_V: Layers.
        devices_V: Devices.
        steady_V: Steady seconds.
        reach_V: Steady and boundary seconds together, which another choice may have than the least steady ones.
    """

    layers_V: IntArray
    devices_V: IntArray
    steady_V: FloatArray
    reach_V: FloatArray

    def __len__(self) -> int:
        """Number of choices."""
        return len(self.layers_V)

    def within(self, pace: float) -> "StageFloors":
        """Those that take no longer than a pace, and not forever."""
        fast_V = (self.steady_V <= pace) & (self.steady_V < np.inf)
        return StageFloors(**{name: getattr(self, name)[fast_V] for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorFamily:
    """Pipelines of several stages that differ in their number of stages only.

    Attributes:
        num_layers: Layers to deal out.
        num_devices: Devices to deal out.
        num_microbatches: Microbatches per batch.
        layers_V: Layers.
        devices_V: Devices.
        tails_BV: Steady seconds of a stage other than the first; infinite where there is no choice.
        counts_C: Numbers of stages.
        heads_CV: Steady seconds of the first stage.
        reach_CV: The same with its boundary seconds.
    """

    num_layers: int
    num_devices: int
    num_microbatches: int
    layers_V: IntArray
    devices_V: IntArray
    tails_BV: FloatArray
    counts_C: IntArray
    heads_CV: FloatArray
    reach_CV: FloatArray

    @classmethod
    def of(
        cls, sizes: tuple[int, int, int], tails: Sequence[StageFloors], heads: Mapping[int, StageFloors]
    ) -> "FloorFamily":
        """The pipelines of some numbers of stages, as far as every stage has a choice.

        Args:
            sizes: Layers and devices to deal out, and microbatches per batch.
            tails: What a stage other than the first takes at least, by how many are behind it.
            heads: What the first stage does, by the number of stages.
        """
        tails = tails[: next((behind for behind, found in enumerate(tails) if not len(found)), len(tails))]
        kept = [(count, found) for count, found in sorted(heads.items()) if count <= len(tails) + 1 and len(found)]
        num_layers, num_devices, num_microbatches = sizes
        every = [*tails, *(found for _, found in kept)]
        flat, row = _places(every, num_layers)
        wide = num_layers + 1
        used = np.zeros((num_devices + 1) * wide, dtype=bool)
        used[flat] = True
        at_V = np.flatnonzero(used)
        number = np.zeros(len(used), dtype=np.int64)
        number[at_V] = np.arange(len(at_V))
        steady, reach = np.full((2, len(every), len(at_V)), np.inf)
        for values, name in ((steady, "steady_V"), (reach, "reach_V")):
            found_K = np.concatenate([getattr(item, name) for item in every]) if every else np.empty(0)
            np.minimum.at(values, (row, number[flat]), found_K)
        return cls(
            num_layers=num_layers,
            num_devices=num_devices,
            num_microbatches=num_microbatches,
            layers_V=at_V % wide,
            devices_V=at_V // wide,
            tails_BV=steady[: len(tails)],
            counts_C=np.array([count for count, _ in kept], dtype=np.int64),
            heads_CV=steady[len(tails) :],
            reach_CV=reach[len(tails) :],
        )


def _places(every: Sequence[StageFloors], num_layers: int) -> tuple[IntArray, IntArray]:
    """The number of layers and devices of all choices as one, and which stage each belongs to."""
    none = np.empty(0, dtype=np.int64)
    row = np.repeat(np.arange(len(every)), [len(item) for item in every])
    flat = [item.devices_V * (num_layers + 1) + item.layers_V for item in every]
    return np.concatenate([none, *flat]), row


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorWalk:
    """What one pass found.

    Attributes:
        pace: The most steady seconds of a stage.
        least_C: Least sum of steady times, with the boundary time of the first stage; infinite without a pipeline.
        sums_BJ: The same of suffixes whose first stage has so many behind it.
        depth: How many rows of it there may be anything in.
        kept_V: The choices of a stage between others that can be part of a pipeline at this pace.
        source_VJ: The state behind each of these, by that with it.
        follower_VJ: The state with it, by that behind.
        last_V: The state that each choice of a last stage makes.
        behind_V: The state behind each choice of a first stage.
    """

    pace: float
    least_C: FloatArray
    sums_BJ: FloatArray
    depth: int
    kept_V: IntArray
    source_VJ: IntArray
    follower_VJ: IntArray
    last_V: IntArray
    behind_V: IntArray


class FloorWalks:
    """Passes over a family.

    Args:
        family: The pipelines.
        below: Step seconds; pipelines that take no less may be left out.
    """

    def __init__(self, family: FloorFamily, below: float = np.inf) -> None:
        self.family = family
        self.unit = common_unit([*np.unique(family.devices_V).tolist(), family.num_devices])
        self.least_V = np.concatenate([family.tails_BV, family.heads_CV]).min(axis=0, initial=np.inf)
        rate_V = self.least_V * family.devices_V / family.layers_V
        self.rate = max(float(rate_V.min(initial=np.inf)), _NO_TIME)
        # All devices together take their least time for all layers, and so does some stage.
        least = self.rate * family.num_layers / family.num_devices if self.rate < np.inf else 0.0
        self.most = below * ROOM - (family.num_microbatches - 1) * least
        self.inner_V = family.tails_BV[1:].min(axis=0, initial=np.inf)

    def paces(self, most: float) -> FloatArray:
        """The steady times of all choices up to one, ascending."""
        times = np.concatenate([self.family.tails_BV.ravel(), self.family.heads_CV.ravel()])
        return np.unique(times[times <= most])

    def walk(self, pace: float) -> FloorWalk | None:
        """The least sums of steady times; nothing if no pipeline has only stages that take at most a pace."""
        family = self.family
        if not family.num_layers or not len(family.counts_C) or not self.rate < np.inf:
            return None
        layers_V, units_V, units = family.layers_V, family.devices_V // self.unit, family.num_devices // self.unit
        margin = _MARGIN * (family.num_layers + pace * family.num_devices / self.rate)
        idle_V = pace * family.devices_V / self.rate - layers_V
        slack = pace * family.num_devices / self.rate - family.num_layers
        least_head = float(idle_V[(family.heads_CV <= pace).any(axis=0)].min(initial=np.inf))
        least_last = float(idle_V[family.tails_BV[0] <= pace].min(initial=np.inf))
        if not slack - least_head - least_last >= -margin:
            return None
        # The states that are not idle by too little or too much.
        idle_RU = pace * self.unit / self.rate * np.arange(units + 1) - np.arange(1, family.num_layers)[:, None]
        inside_RU = (idle_RU >= least_last - margin) & (idle_RU <= slack - least_head + margin)
        row_J, units_J = np.nonzero(inside_RU)
        row_J = row_J + 1
        number_RU = np.full((family.num_layers + 1, units + 1), len(row_J), dtype=np.int64)
        number_RU[row_J, units_J] = np.arange(len(row_J))
        kept_V = np.flatnonzero(
            (self.inner_V <= pace) & (idle_V <= slack - least_head - least_last + margin) & (units_V <= units)
        )
        inside_V = (layers_V < family.num_layers) & (units_V <= units)
        safe_V = np.where(inside_V, layers_V, 0), np.where(inside_V, units_V, 0)
        found = {
            "last_V": number_RU[safe_V],
            "behind_V": number_RU[family.num_layers - safe_V[0], units - safe_V[1]],
            "source_VJ": _moved(number_RU, (row_J, units_J), -layers_V[kept_V], -units_V[kept_V]),
            "follower_VJ": _moved(number_RU, (row_J, units_J), layers_V[kept_V], units_V[kept_V]),
        }
        # What is in front of a suffix takes at least its least time.
        rest_J = self.most - self.rate * (family.num_layers - row_J) / ((units - units_J) * self.unit).clip(self.unit)
        sums_BJ, depth = self._sums(pace, kept_V, found["last_V"], found["source_VJ"], rest_J)
        first_CV = np.where(family.heads_CV <= pace, family.reach_CV, np.inf)
        least_C = (first_CV + sums_BJ[family.counts_C - 2][:, found["behind_V"]]).min(axis=1, initial=np.inf)
        return FloorWalk(pace=pace, least_C=least_C, sums_BJ=sums_BJ, depth=depth, kept_V=kept_V, **found)

    def _sums(
        self, pace: float, kept_V: IntArray, last_V: IntArray, source_VJ: IntArray, most_J: FloatArray
    ) -> tuple[FloatArray, int]:
        """The least sums of suffixes, of as many stages as may be of interest, and how many these are."""
        steady_BV = np.where(self.family.tails_BV <= pace, self.family.tails_BV, np.inf)
        sums_BJ = np.full((len(steady_BV), len(most_J) + 1), np.inf)
        np.minimum.at(sums_BJ[0], last_V, steady_BV[0])
        sums_BJ[0, -1] = np.inf
        inner_BV = steady_BV[:, kept_V, None]
        for behind in range(1, len(steady_BV)):
            if not (sums_BJ[behind - 1, :-1] <= most_J).any():
                return sums_BJ, behind  # With more stages pipelines take longer.
            sums_BJ[behind, :-1] = (sums_BJ[behind - 1][source_VJ] + inner_BV[behind]).min(axis=0, initial=np.inf)
        return sums_BJ, len(steady_BV)

    def fastest(self, walk: FloorWalk) -> FloatArray:
        """Least steady seconds of the slowest stage, by number of stages; infinite without a pipeline."""
        family, pace = self.family, walk.pace
        steady_BV = np.where(family.tails_BV <= pace, family.tails_BV, np.inf)
        slowest_BJ = np.full(walk.sums_BJ.shape, np.inf)
        np.minimum.at(slowest_BJ[0], walk.last_V, steady_BV[0])
        slowest_BJ[0, -1] = np.inf
        inner_BV = steady_BV[:, walk.kept_V, None]
        for behind in range(1, walk.depth):
            with_VJ = np.maximum(slowest_BJ[behind - 1][walk.source_VJ], inner_BV[behind])
            slowest_BJ[behind, :-1] = with_VJ.min(axis=0, initial=np.inf)
        with_CV = np.maximum(family.heads_CV, slowest_BJ[family.counts_C - 2][:, walk.behind_V])
        fastest_C: FloatArray = with_CV.min(axis=1, initial=np.inf)
        return fastest_C

    def through(self, walk: FloorWalk, open_C: BoolArray) -> tuple[FloatArray, FloatArray]:
        """Least sums of steady times of pipelines by what each of their stages is.

        Args:
            walk: A pass.
            open_C: Which numbers of stages are of interest.

        Returns:
            Of stages by how many are behind them, with axes ``BV``, and of first stages, with axes ``CV``.
        """
        family, pace = self.family, walk.pace
        steady_BV = np.where(family.tails_BV <= pace, family.tails_BV, np.inf)
        through_BV = np.full(steady_BV.shape, np.inf)
        first_CV = np.where((family.heads_CV <= pace) & open_C[:, None], family.reach_CV, np.inf)
        through_CV = first_CV + walk.sums_BJ[family.counts_C - 2][:, walk.behind_V]
        first_of = {int(count): first_V for count, first_V in zip(family.counts_C, first_CV, strict=True)}
        # The least sum of what is in front of a suffix.
        front_J = np.full(walk.sums_BJ.shape[1], np.inf)
        for behind in range(walk.depth - 1, -1, -1):
            if behind + 2 in first_of:
                np.minimum.at(front_J, walk.behind_V, first_of[behind + 2])
            front_J[-1] = np.inf
            if not behind:
                through_BV[0] = steady_BV[0] + front_J[walk.last_V]
                break
            inner_V = steady_BV[behind, walk.kept_V]
            behind_VJ = walk.sums_BJ[behind - 1][walk.source_VJ]
            through_BV[behind, walk.kept_V] = inner_V + (front_J[:-1] + behind_VJ).min(axis=1, initial=np.inf)
            front_J[:-1] = (front_J[walk.follower_VJ] + inner_V[:, None]).min(axis=0, initial=np.inf)
        return through_BV, through_CV


def _moved(number_RU: IntArray, state_J: tuple[IntArray, IntArray], layers_V: IntArray, units_V: IntArray) -> IntArray:
    """The states that have so many layers and units more than others."""
    rows, width = number_RU.shape
    row_VJ, units_VJ = state_J[0] + layers_V[:, None], state_J[1] + units_V[:, None]
    fits_VJ = (row_VJ > 0) & (row_VJ < rows - 1) & (units_VJ >= 0) & (units_VJ < width)
    # No state has no layers.
    found_VJ: IntArray = number_RU.ravel()[np.where(fits_VJ, row_VJ * width + units_VJ, 0)]
    return found_VJ
