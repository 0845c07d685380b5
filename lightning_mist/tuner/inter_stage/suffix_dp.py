"""Passes over the suffixes of pipelines, from the last stage to the first, for all numbers of stages at once.

A suffix is what the last ``k`` stages of a pipeline hold: its state is its number of layers and of units of devices.
One pass finds for every ``k`` and state the least sum of steady times, with every steady time at most ``T`` (the
bottleneck time), and if asked with every ``suffix sum + t + d`` at most ``V`` (the cap). A first stage in front of a
suffix of ``S - 1`` stages makes a pipeline of ``S``, so one pass answers for every ``S``.

A stage in front makes both numbers of a state larger by what it holds itself, so in a table of all states it comes from
the one that lies as far before, always as far: with empty rows and columns before the table (:class:`PaddedSums`)
nothing has to be asked about where that is. On unlike devices the parts of a cluster lie in a row, as stages take them
from the last one to the first (:class:`PartChain`): the stages of one part are neighbours, and the parts follow each
other in a settled order, so that what a suffix holds of every part is one number. Where a stage's own begin and end in
the row says whether the stages next to it lie in other parts.

What cannot be part of an answer at a bottleneck time is left out beforehand. With ``r_p`` the least seconds times
devices per layer of any choice in part ``p``, ``n`` devices of it hold at most ``T n / r_p`` layers; what they hold
less is idle.
All devices can be idle by ``sum_p T N_p / r_p - L`` layers together, the slack, so no stage and no suffix may be idle
by more, nor may a suffix hold more layers than its devices can.

Array axes
    C  options (see :mod:`lightning_mist.tuner.inter_stage.slot_options`)
    J  states that can be part of an answer; in a table of sums one more, which is never reached
    K  choices of a first or last stage
    P  parts of the cluster
    T  kinds of stages: their part, and which of those next to them lie in others
    U  numbers of units of devices
    M  some options
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray, distinct
from lightning_mist.tuner.candidates import ANY_SEAMS, BEHIND, FRONT
from lightning_mist.tuner.inter_stage.problem import Family
from lightning_mist.tuner.inter_stage.slot_options import EndOptions, SlotOptions, end_options, slot_options
from lightning_mist.tuner.space import common_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChain:
    """Units of devices of all parts in a row, those of the part passed last first.

    Attributes:
        order: The parts, that which is passed first in front.
        unit_P: Devices of a unit.
        begin_P: Units in the row before those of each part.
        end_P: The same with its own.
        used_PU: Of the first units of the row those of each part.
        ends_TU: Where in the row stages of every kind (:func:`kinds`) may end.
        first_begin_T: From where on in the row they may begin.
        last_begin_T: Up to where they may.
        size: Numbers of units that there may be: one more than there are.
    """

    order: tuple[int, ...]
    unit_P: IntArray
    begin_P: IntArray
    end_P: IntArray
    used_PU: IntArray
    ends_TU: BoolArray
    first_begin_T: IntArray
    last_begin_T: IntArray
    size: int

    @classmethod
    @lru_cache(maxsize=256)  # Many families of a search have the same.
    def of(
        cls, num_devices: tuple[int, ...], order: tuple[int, ...], taken: tuple[tuple[int, ...], ...]
    ) -> "PartChain":
        """The row in units that all stages take whole.

        Args:
            num_devices: Devices of every part.
            order: The parts, that which is passed first in front.
            taken: The numbers of devices of every part that stages take.
        """
        unit_P = np.array([common_unit([*own, count]) for own, count in zip(taken, num_devices, strict=True)])
        units_P, begin_P, total = np.array(num_devices) // unit_P, np.zeros(len(unit_P), dtype=np.int64), 0
        for part in reversed(order):
            begin_P[part], total = total, total + int(units_P[part])
        end_P, end_U = begin_P + units_P, np.arange(total + 1)
        ends, begins = [], []
        for part, own in enumerate(taken):
            begin, end = int(begin_P[part]), int(end_P[part])
            inside_U = (end_U > begin) & (end_U <= end)
            first_U = inside_U & np.isin(end_U, begin + np.array(own, dtype=np.int64) // unit_P[part])
            # Where the first part ends, the row does.
            front_U = (end_U == end) & (part != order[0])
            for seams in range(ANY_SEAMS):
                ends.append((first_U if seams & BEHIND else inside_U) & (front_U == bool(seams & FRONT)))
                is_alone = part == order[-1]
                begins.append((begin, end) if is_alone else (begin, begin) if seams & BEHIND else (begin + 1, end))
            ends.append(inside_U)
            begins.append((begin, end))
        first_begin_T, last_begin_T = np.array(begins).T
        return cls(
            order=order,
            unit_P=unit_P,
            begin_P=begin_P,
            end_P=end_P,
            used_PU=np.clip(end_U - begin_P[:, None], 0, units_P[:, None]),
            ends_TU=np.stack(ends),
            first_begin_T=first_begin_T,
            last_begin_T=last_begin_T,
            size=total + 1,
        )

    def seams(self, part_C: IntArray, begin_C: IntArray, end_C: IntArray) -> IntArray:
        """Which of the stages next to some lie in other parts, as :attr:`SlotChoices.seams_K` says it.

        Args:
            begin_C: Units of the row behind each stage.
            end_C: Units with its own.
        """
        is_behind_C = (begin_C == self.begin_P[part_C]) & (part_C != self.order[-1])
        is_front_C = (end_C == self.end_P[part_C]) & (part_C != self.order[0])
        found_C: IntArray = FRONT * is_front_C + BEHIND * is_behind_C
        return found_C

    def fits(self, part_C: IntArray, seams_C: IntArray, units_C: IntArray, end_C: IntArray) -> BoolArray:
        """Whether stages may have so many units of a part up to somewhere in the row; arguments that broadcast."""
        begin_C = end_C - units_C
        inside_C = (begin_C >= self.begin_P[part_C]) & (end_C <= self.end_P[part_C])
        if len(self.order) > 1:
            inside_C &= (seams_C == ANY_SEAMS) | (seams_C == self.seams(part_C, begin_C, end_C))
        return inside_C


def kinds(part_C: IntArray, seams_C: IntArray) -> IntArray:
    """A number for the part of stages and which of those next to them lie in others."""
    return part_C * (ANY_SEAMS + 1) + seams_C


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
class SuffixWalk:
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


_MARGIN = 1e-9
"""Relative margin within which rounding may make a choice look as if it were idle by too much."""

_NO_TIME = 1e-200
"""Seconds that stand for none where they are divided by: so few that even bytes in their place do not overflow."""

_AT_ONCE = 1 << 19
"""Sums that are formed at once: 4 MiB, so that they stay near the processor."""

_FEW = 1 << 14
"""Sums of options of any part up to which all are formed at once: asking part by part takes longer than these do."""


Sources: TypeAlias = tuple[SlotOptions, IntArray, IntArray]
"""Options, states in which a stage can end that is one of them, and by both the state behind it, or its place in padded
sums; axes ``J`` and ``CJ``."""

Maps: TypeAlias = dict[int, tuple[IntArray, dict[int, IntArray]]]
"""By part and seams of a stage the states in which it can end, and for these the one behind it, by how much it makes
the number of a state larger."""


class Suffixes:
    """The stages of a family of pipelines, prepared for passes."""

    def __init__(self, family: Family) -> None:
        layers, devices, order = family.num_layers, family.num_devices, family.order
        self.family = family
        heads = family.heads.items()
        self.heads = {count: end_options(slot, layers, devices, order, is_first=True) for count, slot in heads}
        self.last = end_options(family.tails[0], layers, devices, order, is_first=False)
        # Bounds of many stages are the same choices.
        alike = {id(slot): slot for slot in family.tails[1:]}
        options = {key: slot_options(slot, layers, devices) for key, slot in alike.items()}
        self.middle = [options[id(slot)] for slot in family.tails[1:]]
        self._repeats = Counter(map(id, self.middle))
        self._used: dict[int, tuple[IntArray, IntArray]] = {}
        pairs = [(item.part_K, item.devices_K) for item in (*self.heads.values(), self.last)]
        pairs += [(options.part_C, options.devices_C) for options in options.values()]
        taken = (
            distinct(np.concatenate([devices_K[part_K == part] for part_K, devices_K in pairs])).tolist()
            for part in range(len(devices))
        )
        self.chain = PartChain.of(devices, order, tuple(map(tuple, taken)))
        most = [
            (int(item.layers_C.max()), int(self._units(item.devices_C, item.part_C).max()))
            for item in options.values()
            if len(item)
        ]
        self._most = max((layers for layers, _ in most), default=0), max((units for _, units in most), default=0)
        self.rate_P = self._rates()
        self._capacity_P = np.array(devices) / self.rate_P

    def _rates(self) -> FloatArray:
        """Least seconds times devices per layer in every part, infinite without choices.

        Where a layer takes no time it is so little that all layers fit, and not so little that numbers overflow.
        """
        rate_P = np.full(len(self.family.num_devices), np.inf)
        for item in (*self.heads.values(), self.last):
            np.minimum.at(rate_P, item.part_K, item.steady_K * item.devices_K / item.layers_K)
        for options in self.middle:
            np.minimum.at(rate_P, options.part_C, options.least_C * options.devices_C / options.layers_C)
        floor_P: FloatArray = np.maximum(rate_P, _NO_TIME)
        return floor_P

    def bottlenecks(self) -> FloatArray:
        """The steady times of all choices, ascending: one of them is that of the slowest stage."""
        times = [item.steady_K for item in (*self.heads.values(), self.last)]
        times += [options.steady_CR[options.index_CR >= 0] for options in self.middle]
        return distinct(np.concatenate(times))

    def least_bottleneck(self) -> float:
        """Steady seconds that the slowest stage takes at least, so that all devices together hold all layers."""
        speed = float(self._capacity_P.sum())
        return self.family.num_layers / speed if speed > 0 else np.inf

    def walk(
        self, bottleneck: float, cap: float | None = None, only: int | None = None, limit: float = np.inf
    ) -> SuffixWalk:
        """One pass.

        Args:
            bottleneck: The most steady seconds of a stage.
            cap: The most that ``sum t + D`` may be; by default anything.
            only: The only number of stages that is of interest; by default all are.
            limit: Sums of steady times above which suffixes are of no interest.
        """
        heads = self.heads if only is None else {only: self.heads[only]}
        least_head = min((self._least_idle(head, bottleneck) for head in heads.values()), default=np.inf)
        least_last = self._least_idle(self.last, bottleneck)
        states = self._states(bottleneck, least_head, least_last)
        slack = states.slack - least_head - least_last
        values: dict[int, float] = {}
        sums: list[FloatArray] = []
        if not len(states.row_J) or not slack >= -self._margin(bottleneck):
            return SuffixWalk(
                bottleneck=bottleneck, cap=cap, only=only, limit=limit, values=values, states=states, sums=()
            )
        sums.append(self._last_sums(states, bottleneck, cap))
        maps: Maps = {}
        made: dict[int, list[Sources]] = {}
        padded = PaddedSums.of(states, *self._most, self.chain.size) if len(self.chain.order) == 1 else None
        for count in range(2, max(heads) + 1):
            if count in heads:
                total_K = self._totals(heads[count], states, sums[-1], bottleneck, cap)
                best = float(total_K.min(initial=np.inf))
                if best < np.inf:
                    values[count] = best
            if count in (only, len(self.middle) + 2) or not (sums[-1] < np.inf).any():
                break
            key = id(self.middle[count - 2])
            if key not in made:
                options = self._kept(self.middle[count - 2], bottleneck, cap, slack)
                if cap is not None:
                    options = _needed(options, sums[-1], cap)
                sources: Iterable[Sources] = (
                    self.sources(options, states, maps)
                    if padded is None
                    else padded.sources(options, self._units(options.devices_C, options.part_C), _AT_ONCE)
                )
                if cap is None and self._repeats[key] > 1:
                    made[key] = list(sources)
            behind = sums[-1] if padded is None else padded.filled(sums[-1])
            sums.append(self._extended(made.get(key, sources), states, behind, cap, bottleneck))
            sums[-1][sums[-1] > limit] = np.inf
        return SuffixWalk(
            bottleneck=bottleneck, cap=cap, only=only, limit=limit, values=values, states=states, sums=tuple(sums)
        )

    def first_walk(self, bottlenecks_K: FloatArray) -> SuffixWalk | None:
        """The pass at the least of some bottleneck times, ascending, at which there is an answer."""
        low, high, found = 0, len(bottlenecks_K), None
        while low < high:
            middle = (low + high) // 2
            walk = self.walk(float(bottlenecks_K[middle]))
            if walk.values:
                high, found = middle, walk
            else:
                low = middle + 1
        return found

    def chosen(self, walk: SuffixWalk, num_stages: int) -> tuple[int, ...]:
        """The choice of every stage of an answer that a pass found."""
        head, states = self.heads[num_stages], walk.states
        total_K = self._totals(head, states, walk.sums[num_stages - 2], walk.bottleneck, walk.cap)
        index = int(total_K.argmin())
        chosen = [int(head.index_K[index])]
        place = int(self.behind_head(head, states)[index])
        for stage in range(num_stages - 2, 0, -1):
            options, row = self.middle[stage - 1], int(states.row_J[place])
            column = 0 if options.steady_CR.shape[1] == 1 else row
            flat = int(states.flat_J[place])
            steady_C, (units_C, offset_C) = options.steady_CR[:, column], self._uses(stage - 1)
            fits_C = self.chain.fits(options.part_C, options.seams_C, units_C, np.array(flat % self.chain.size))
            fits_C &= (options.layers_C < row) & (steady_C <= walk.bottleneck)
            # The pass has left out only options from which no answer can come, and none leads from here to a state.
            at_N = np.flatnonzero(fits_C)
            behind_N = states.number[flat - offset_C[at_N]]
            sum_N = steady_C[at_N] + walk.sums[stage - 1][behind_N]
            if walk.cap is not None:
                reach_N = options.reach_CR[at_N, column] + walk.sums[stage - 1][behind_N]
                sum_N = np.where(reach_N <= walk.cap, sum_N, np.inf)
            best = int(sum_N.argmin())
            chosen.append(int(options.index_CR[at_N[best], column]))
            place = int(behind_N[best])
        total_K = self._last_total(walk.bottleneck, walk.cap)
        total_K = np.where(self.last_places(states) == place, total_K, np.inf)
        chosen.append(int(self.last.index_K[int(total_K.argmin())]))
        return tuple(chosen)

    def _margin(self, bottleneck: float) -> float:
        return _MARGIN * (self.family.num_layers + bottleneck * float(self._capacity_P.sum()))

    def _least_idle(self, item: EndOptions, bottleneck: float) -> float:
        """Layers by which the devices of a choice are idle at least; infinite if all take longer."""
        idle_K = bottleneck * item.devices_K / self.rate_P[item.part_K] - item.layers_K
        return float(idle_K.min(where=item.steady_K <= bottleneck, initial=np.inf))

    def _states(self, bottleneck: float, least_head: float, least_last: float) -> States:
        rows, margin = np.arange(1, self.family.num_layers), self._margin(bottleneck)
        slack = bottleneck * float(self._capacity_P.sum()) - self.family.num_layers
        hold_U = bottleneck * ((self.chain.unit_P / self.rate_P) @ self.chain.used_PU)
        idle_RU = hold_U[None, :] - rows[:, None]
        inside_RU = (idle_RU >= least_last - margin) & (idle_RU <= slack - least_head + margin)
        row_J, used_J = np.nonzero(inside_RU)
        row_J = row_J + 1
        number = np.full(self.family.num_layers * self.chain.size, len(row_J), dtype=np.int64)
        flat_J = row_J * self.chain.size + used_J
        number[flat_J] = np.arange(len(row_J))
        return States(row_J=row_J, used_J=used_J, flat_J=flat_J, number=number, slack=slack)

    def _offsets(self, options: SlotOptions) -> IntArray:
        """How much smaller the number of the state behind a stage is than that with it."""
        offset_C: IntArray = options.layers_C * self.chain.size + self._units(options.devices_C, options.part_C)
        return offset_C

    def _units(self, devices_C: IntArray, part_C: IntArray) -> IntArray:
        units_C: IntArray = devices_C // self.chain.unit_P[part_C]
        return units_C

    def _uses(self, place: int) -> tuple[IntArray, IntArray]:
        """The units that the options of a stage between others use up, and their offsets; kept."""
        found = self._used.get(place)
        if found is None:
            options = self.middle[place]
            found = self._units(options.devices_C, options.part_C), self._offsets(options)
            self._used[place] = found
        return found

    def behind_head(self, head: EndOptions, states: States) -> IntArray:
        """The state behind each choice of a first stage."""
        rows_K = self.family.num_layers - head.layers_K
        flat_K = (rows_K + 1) * self.chain.size - 1 - self._units(head.devices_K, head.part_K)
        behind_K: IntArray = states.number[flat_K]
        return behind_K

    def last_places(self, states: States) -> IntArray:
        """The state that each choice of the last stage makes."""
        last = self.last
        flat_K = last.layers_K * self.chain.size + self._units(last.devices_K, last.part_K)
        inside_K = last.layers_K < self.family.num_layers
        return np.where(inside_K, states.number[np.where(inside_K, flat_K, 0)], len(states.row_J))

    def _last_total(self, bottleneck: float, cap: float | None) -> FloatArray:
        total_K = np.where(self.last.steady_K <= bottleneck, self.last.steady_K, np.inf)
        return total_K if cap is None else np.where(self.last.reach_K <= cap, total_K, np.inf)

    def _last_sums(self, states: States, bottleneck: float, cap: float | None) -> FloatArray:
        sums_J = np.full(len(states.row_J) + 1, np.inf)
        np.minimum.at(sums_J, self.last_places(states), self._last_total(bottleneck, cap))
        sums_J[-1] = np.inf
        return sums_J

    def _totals(
        self, head: EndOptions, states: States, sums_J: FloatArray, bottleneck: float, cap: float | None
    ) -> FloatArray:
        """Sums with each choice of a first stage in front."""
        behind_K = sums_J[self.behind_head(head, states)]
        if cap is None:
            total_K = np.maximum(head.steady_K, head.reach_K) + behind_K
        else:
            total_K = head.steady_K + behind_K
            total_K = np.where((head.reach_K + behind_K <= cap) & (total_K <= cap), total_K, np.inf)
        return np.where(head.steady_K <= bottleneck, total_K, np.inf)

    def _kept(self, options: SlotOptions, bottleneck: float, cap: float | None, slack: float) -> SlotOptions:
        """The options that can be part of an answer."""
        idle_C = bottleneck * options.devices_C / self.rate_P[options.part_C] - options.layers_C
        kept_C: BoolArray = (options.least_C <= bottleneck) & (idle_C <= slack + self._margin(bottleneck))
        if cap is None:
            kept_C &= options.rank_C == 0  # Nothing but the steady time counts.
        return options.take(kept_C)

    def _extended(
        self,
        sources: Iterable[Sources],
        states: States,
        behind: FloatArray,
        cap: float | None,
        bottleneck: float,
    ) -> FloatArray:
        """Put a stage in front of all suffixes."""
        best_J = np.full(len(states.row_J) + 1, np.inf)
        for some, at_J, source_CJ in sources:
            behind_CJ = behind.take(source_CJ)
            if some.steady_CR.shape[1] == 1:
                steady_CJ, reach_CJ = some.steady_CR, some.reach_CR
            else:
                row_J = states.row_J[at_J]
                steady_CJ, reach_CJ = some.steady_CR[:, row_J], some.reach_CR[:, row_J]
                steady_CJ = np.where(steady_CJ <= bottleneck, steady_CJ, np.inf)
            sum_CJ = steady_CJ + behind_CJ
            if cap is not None:
                behind_CJ += reach_CJ
                np.copyto(sum_CJ, np.inf, where=behind_CJ > cap)
            best_J[at_J] = np.minimum(best_J[at_J], sum_CJ.min(axis=0, initial=np.inf))
        return best_J

    def sources(self, options: SlotOptions, states: States, maps: Maps) -> Iterator[Sources]:
        """Some options at a time, some states that they can end in, and for each of these the one behind them."""
        kind_C = kinds(options.part_C, options.seams_C)
        if len(self.chain.order) > 1 and 0 < len(options) * len(states.row_J) <= _FEW:
            yield options, np.arange(len(states.row_J)), self._behind_all(options, kind_C, states)
            return
        # Options of one kind come one after another.
        edges = [0, *(np.flatnonzero(np.diff(kind_C)) + 1).tolist(), len(options)] if len(options) else []
        for first, end in pairwise(edges):
            kind = int(kind_C[first])
            at_J, known = maps.setdefault(kind, (np.flatnonzero(self.chain.ends_TU[kind, states.used_J]), {}))
            step = max(1, _AT_ONCE // max(1, len(at_J)))
            for begin in range(first, end, step):
                here = slice(begin, min(begin + step, end))
                some = options if end - first == len(options) <= step else options.take(here)
                offsets = self._offsets(some).tolist()
                if new_M := [place for place, offset in enumerate(offsets) if offset not in known]:
                    behind_MJ = self._behind(some, new_M, at_J, states)
                    known |= zip((offsets[place] for place in new_M), behind_MJ, strict=True)
                yield some, at_J, np.stack([known[offset] for offset in offsets])

    def _behind_all(self, options: SlotOptions, kind_C: IntArray, states: States) -> IntArray:
        """For all states the one behind options of any kind; axes ``CJ``."""
        units_C = self._units(options.devices_C, options.part_C)
        begin_CU = np.arange(self.chain.size) - units_C[:, None]
        inside_CU = self.chain.ends_TU[kind_C] & (begin_CU >= self.chain.first_begin_T[kind_C, None])
        inside_CU &= begin_CU <= self.chain.last_begin_T[kind_C, None]
        fits_CJ = inside_CU.take(states.used_J, axis=1)
        fits_CJ &= states.row_J > options.layers_C[:, None]
        found_CJ = states.flat_J - (options.layers_C * self.chain.size + units_C)[:, None]
        # No state has no layers, as those in the first places of the table would.
        return states.number.take(found_CJ * fits_CJ)

    def _behind(self, some: SlotOptions, at_M: list[int], at_J: IntArray, states: States) -> IntArray:
        """For some states the one behind options of one kind; axes ``MJ``."""
        kind, layers_M = int(kinds(some.part_C[0], some.seams_C[0])), some.layers_C[at_M]
        units_M = some.devices_C[at_M] // self.chain.unit_P[some.part_C[0]]
        low, high = self.chain.first_begin_T[kind], self.chain.last_begin_T[kind]
        used_J = states.used_J[at_J]
        fits_MJ = (states.row_J[at_J] > layers_M[:, None]) & (used_J >= (units_M + low)[:, None])
        if high == low:
            fits_MJ &= used_J <= (units_M + high)[:, None]
        found_MJ = states.flat_J[at_J] - (layers_M * self.chain.size + units_M)[:, None]
        return np.where(fits_MJ, states.number[np.where(fits_MJ, found_MJ, 0)], len(states.row_J))


def _needed(options: SlotOptions, behind_J: FloatArray, cap: float) -> SlotOptions:
    """The options that a cap lets stand in front of some suffix, without those that a faster one can always replace."""
    reached_J = behind_J[behind_J < np.inf]
    if not len(options) or not len(reached_J) or options.steady_CR.shape[1] > 1:
        return options
    reach_C = options.reach_CR[:, 0]
    # Options with the same layers and devices come one after another, by rising steady time.
    faster_C = np.where(options.rank_C > 0, np.concatenate([[np.inf], reach_C[:-1]]), np.inf)
    return options.take((reach_C + reached_J.min() <= cap) & (faster_C + reached_J.max() > cap))
