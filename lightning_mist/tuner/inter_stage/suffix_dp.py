"""Passes over the suffixes of pipelines, from the last stage to the first, for all numbers of stages at once.

A suffix is what the last ``k`` stages of a pipeline hold: its state is its number of layers and of units of devices.
One pass finds for every ``k`` and state the least sum of steady times, with every steady time at most ``T`` (the
bottleneck time), and if asked with every ``suffix sum + t + d`` at most ``V`` (the cap). A first stage in front of a
suffix of ``S - 1`` stages makes a pipeline of ``S``, so one pass answers for every ``S``.

A stage in front makes both numbers of a state larger by what it holds itself, so in a table of all states it comes from
the one that lies as far before, always as far. On unlike devices the parts of a cluster lie in a row, as stages take
them from the last one to the first (:class:`PartChain`): the stages of one part are neighbours, and the parts follow
each other in a settled order, so that what a suffix holds of every part is one number. Where a stage's own begin and
end in the row says whether the stages next to it lie in other parts.

What cannot be part of an answer at a bottleneck time is left out beforehand. With ``r_p`` the least seconds times
devices per layer of any choice in part ``p``, ``n`` devices of it hold at most ``T n / r_p`` layers; what they hold
less is idle. All devices can be idle by ``sum_p T N_p / r_p - L`` layers together, the slack, so no stage and no suffix
may be idle by more, nor may a suffix hold more layers than its devices can.

Array axes
    K  options (see :mod:`lightning_mist.tuner.inter_stage.problem`), or choices of a first or last stage
    J  states that can be part of an answer; in a table of sums one more, which is never reached
    L  layers
    N  numbers of units of devices
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray, distinct
from lightning_mist.tuner.candidates import ANY_SEAMS, BEHIND, FRONT
from lightning_mist.tuner.inter_stage.problem import EndOptions, Family, SlotOptions, end_options, slot_options
from lightning_mist.tuner.space import common_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChain:
    """Units of devices of all parts in a row, those of the part passed last first.

    Attributes:
        order: The parts, that which is passed first in front.
        unit_by_part: Devices of a unit.
        begin_by_part: Units in the row before those of each part.
        end_by_part: The same with its own.
        used_by_part_N: Of the first units of the row those of each part.
        ends_by_kind_N: Where in the row stages of every kind (:func:`kinds`) may end.
        first_begin_by_kind: From where on in the row they may begin.
        last_begin_by_kind: Up to where they may.
        size: Numbers of units that there may be: one more than there are.
    """

    order: tuple[int, ...]
    unit_by_part: IntArray
    begin_by_part: IntArray
    end_by_part: IntArray
    used_by_part_N: IntArray
    ends_by_kind_N: BoolArray
    first_begin_by_kind: IntArray
    last_begin_by_kind: IntArray
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
        unit_by_part = np.array([common_unit([*own, count]) for own, count in zip(taken, num_devices, strict=True)])
        units_by_part, begin_by_part, total = (
            np.array(num_devices) // unit_by_part,
            np.zeros(len(unit_by_part), dtype=np.int64),
            0,
        )
        for part in reversed(order):
            begin_by_part[part], total = total, total + int(units_by_part[part])
        end_by_part, end_N = begin_by_part + units_by_part, np.arange(total + 1)
        ends, begins = [], []
        for part, own in enumerate(taken):
            begin, end = int(begin_by_part[part]), int(end_by_part[part])
            inside_N = (end_N > begin) & (end_N <= end)
            first_N = inside_N & np.isin(end_N, begin + np.array(own, dtype=np.int64) // unit_by_part[part])
            # Where the first part ends, the row does.
            front_N = (end_N == end) & (part != order[0])
            for seams in range(ANY_SEAMS):
                ends.append((first_N if seams & BEHIND else inside_N) & (front_N == bool(seams & FRONT)))
                is_alone = part == order[-1]
                begins.append((begin, end) if is_alone else (begin, begin) if seams & BEHIND else (begin + 1, end))
            ends.append(inside_N)
            begins.append((begin, end))
        first_begin_by_kind, last_begin_by_kind = np.array(begins).T
        return cls(
            order=order,
            unit_by_part=unit_by_part,
            begin_by_part=begin_by_part,
            end_by_part=end_by_part,
            used_by_part_N=np.clip(end_N - begin_by_part[:, None], 0, units_by_part[:, None]),
            ends_by_kind_N=np.stack(ends),
            first_begin_by_kind=first_begin_by_kind,
            last_begin_by_kind=last_begin_by_kind,
            size=total + 1,
        )

    def seams(self, part_K: IntArray, begin_K: IntArray, end_K: IntArray) -> IntArray:
        """Which of the stages next to some lie in other parts, as :attr:`SlotChoices.seams_K` says it.

        Args:
            begin_K: Units of the row behind each stage.
            end_K: Units with its own.
        """
        is_behind_K = (begin_K == self.begin_by_part[part_K]) & (part_K != self.order[-1])
        is_front_K = (end_K == self.end_by_part[part_K]) & (part_K != self.order[0])
        found_K: IntArray = FRONT * is_front_K + BEHIND * is_behind_K
        return found_K

    def fits(self, part_K: IntArray, seams_K: IntArray, units_K: IntArray, end_K: IntArray) -> BoolArray:
        """Whether stages may have so many units of a part up to somewhere in the row; arguments that broadcast."""
        begin_K = end_K - units_K
        inside_K = (begin_K >= self.begin_by_part[part_K]) & (end_K <= self.end_by_part[part_K])
        if len(self.order) > 1:
            inside_K &= (seams_K == ANY_SEAMS) | (seams_K == self.seams(part_K, begin_K, end_K))
        return inside_K


def kinds(part_K: IntArray, seams_K: IntArray) -> IntArray:
    """A number for the part of stages and which of those next to them lie in others."""
    return part_K * (ANY_SEAMS + 1) + seams_K


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
        values: For every number of stages with an answer the least sum of steady times; without a cap the boundary
            time of the first stage counts with them.
        states: The states that were looked at.
        sums: For every number of stages of a suffix the least sum by state.
    """

    bottleneck: float
    cap: float | None
    values: dict[int, float]
    states: States
    sums: tuple[FloatArray, ...]


_MARGIN = 1e-9
"""Relative margin within which rounding may make a choice look as if it were idle by too much."""

_NO_TIME = 1e-200
"""Seconds that stand for none where they are divided by: so few that even bytes in their place do not overflow."""

_AT_ONCE = 1 << 19
"""Sums that are formed at once: 4 MiB, so that they stay near the processor."""

Source: TypeAlias = tuple[slice, IntArray, IntArray]
"""Some of the options that are looked at, states in which a stage can end that is one of them, and by both the state
behind it; axes ``J``, ``KJ``."""


class Suffixes:
    """The stages of a family of pipelines, prepared for passes.

    Attributes:
        options: Those of all different stages between others, one stage after another.
        edges: Where those of each begin, and the last end.
        slots: Which of them a stage is, by how many stages between others are behind it.
        kind_K: See :func:`kinds`.
        offset_K: How much smaller the number of the state behind a stage is than that with it.
    """

    def __init__(self, family: Family) -> None:
        layers, devices, order = family.num_layers, family.num_devices, family.order
        self.family = family
        heads = family.heads.items()
        self.heads = {count: end_options(slot, layers, devices, order, is_first=True) for count, slot in heads}
        self.last = end_options(family.tails[0], layers, devices, order, is_first=False)
        # Bounds of many stages are the same choices.
        alike = {id(slot): slot for slot in family.tails[1:]}
        each = [slot_options(slot, layers, devices) for slot in alike.values() or (family.tails[0].take(slice(0)),)]
        self.options, self.edges = _all(each), np.cumsum([0, *map(len, each)])
        numbers = {key: number for number, key in enumerate(alike)}
        self.slots = [numbers[id(slot)] for slot in family.tails[1:]]
        pairs = [(item.part_K, item.devices_K) for item in (*self.heads.values(), self.last)]
        pairs.append((self.options.part_K, self.options.devices_K))
        taken = (
            distinct(np.concatenate([devices_K[part_K == part] for part_K, devices_K in pairs])).tolist()
            for part in range(len(devices))
        )
        self.chain = PartChain.of(devices, order, tuple(map(tuple, taken)))
        self.rate_by_part = self._rates()
        self._capacity_by_part = np.array(devices) / self.rate_by_part
        self._every_head = EndOptions.joined([*self.heads.values(), self.last.take(slice(0))])
        options = self.options
        self._speed_K = options.devices_K / self.rate_by_part[options.part_K]
        self.kind_K = kinds(options.part_K, options.seams_K)
        self._units_K = self._units(options.devices_K, options.part_K)
        self.offset_K = options.layers_K * self.chain.size + self._units_K

    def _rates(self) -> FloatArray:
        """Least seconds times devices per layer in every part, infinite without choices.

        Where a layer takes no time it is so little that all layers fit, and not so little that numbers overflow.
        """
        rate_by_part = np.full(len(self.family.num_devices), np.inf)
        for item in (*self.heads.values(), self.last):
            np.minimum.at(rate_by_part, item.part_K, item.steady_K * item.devices_K / item.layers_K)
        options = self.options
        np.minimum.at(rate_by_part, options.part_K, options.least_K * options.devices_K / options.layers_K)
        floor_by_part: FloatArray = np.maximum(rate_by_part, _NO_TIME)
        return floor_by_part

    def bottlenecks(self) -> FloatArray:
        """The steady times of all choices, ascending: one of them is that of the slowest stage."""
        times = [item.steady_K for item in (*self.heads.values(), self.last)]
        return distinct(np.concatenate([*times, self.options.steady_KL[self.options.index_KL >= 0]]))

    def least_bottleneck(self) -> float:
        """Steady seconds that the slowest stage takes at least, so that all devices together hold all layers."""
        speed = float(self._capacity_by_part.sum())
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
        least_head = self._least_idle(self._every_head if only is None else self.heads[only], bottleneck)
        least_last = self._least_idle(self.last, bottleneck)
        states = self._states(bottleneck, least_head, least_last)
        slack = states.slack - least_head - least_last
        values: dict[int, float] = {}
        sums: list[FloatArray] = []
        if not len(states.row_J) or not slack >= -self._margin(bottleneck):
            return SuffixWalk(bottleneck=bottleneck, cap=cap, values=values, states=states, sums=())
        sums.append(self._last_sums(states, bottleneck, cap))
        passed = PassedOptions(self, self._kept(bottleneck, cap, slack), states)
        for count in range(2, max(heads) + 1):
            if count in heads:
                total_K = self._totals(heads[count], states, sums[-1], bottleneck, cap)
                best = float(total_K.min(initial=np.inf))
                if best < np.inf:
                    values[count] = best
            if count in (only, len(self.slots) + 2) or not (sums[-1] < np.inf).any():
                break
            sums.append(passed.extended(count - 2, sums[-1], cap, bottleneck))
            sums[-1][sums[-1] > limit] = np.inf
        return SuffixWalk(bottleneck=bottleneck, cap=cap, values=values, states=states, sums=tuple(sums))

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
            options, row, here = self.options, int(states.row_J[place]), self.place(stage - 1)
            column = 0 if options.steady_KL.shape[1] == 1 else row
            flat = int(states.flat_J[place])
            units_K, end = self._units_K[here], np.array(flat % self.chain.size)
            fits_K = self.chain.fits(options.part_K[here], options.seams_K[here], units_K, end)
            fits_K &= (options.layers_K[here] < row) & (options.steady_KL[here, column] <= walk.bottleneck)
            # The pass has left out only options from which no answer can come, and none leads from here to a state.
            at_J = np.flatnonzero(fits_K) + here.start
            behind_J = states.number[flat - self.offset_K[at_J]]
            sum_J = options.steady_KL[at_J, column] + walk.sums[stage - 1][behind_J]
            if walk.cap is not None:
                reach_J = options.reach_KL[at_J, column] + walk.sums[stage - 1][behind_J]
                sum_J = np.where(reach_J <= walk.cap, sum_J, np.inf)
            best = int(sum_J.argmin())
            chosen.append(int(options.index_KL[at_J[best], column]))
            place = int(behind_J[best])
        total_K = self._last_total(walk.bottleneck, walk.cap)
        total_K = np.where(self.last_places(states) == place, total_K, np.inf)
        chosen.append(int(self.last.index_K[int(total_K.argmin())]))
        return tuple(chosen)

    def _margin(self, bottleneck: float) -> float:
        return _MARGIN * (self.family.num_layers + bottleneck * float(self._capacity_by_part.sum()))

    def _least_idle(self, item: EndOptions, bottleneck: float) -> float:
        """Layers by which the devices of a choice are idle at least; infinite if all take longer."""
        idle_K = bottleneck * item.devices_K / self.rate_by_part[item.part_K] - item.layers_K
        return float(idle_K.min(where=item.steady_K <= bottleneck, initial=np.inf))

    def _states(self, bottleneck: float, least_head: float, least_last: float) -> States:
        rows, margin = np.arange(1, self.family.num_layers), self._margin(bottleneck)
        slack = bottleneck * float(self._capacity_by_part.sum()) - self.family.num_layers
        hold_N = bottleneck * ((self.chain.unit_by_part / self.rate_by_part) @ self.chain.used_by_part_N)
        idle_LN = hold_N[None, :] - rows[:, None]
        inside_LN = (idle_LN >= least_last - margin) & (idle_LN <= slack - least_head + margin)
        row_J, used_J = np.nonzero(inside_LN)
        row_J = row_J + 1
        number = np.full(self.family.num_layers * self.chain.size, len(row_J), dtype=np.int64)
        flat_J = row_J * self.chain.size + used_J
        number[flat_J] = np.arange(len(row_J))
        return States(row_J=row_J, used_J=used_J, flat_J=flat_J, number=number, slack=slack)

    def _units(self, devices_K: IntArray, part_K: IntArray) -> IntArray:
        units_K: IntArray = devices_K // self.chain.unit_by_part[part_K]
        return units_K

    def place(self, index: int) -> slice:
        """Which options a stage between others has, by how many such stages are behind it."""
        slot = self.slots[index]
        return slice(int(self.edges[slot]), int(self.edges[slot + 1]))

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

    def _kept(self, bottleneck: float, cap: float | None, slack: float) -> IntArray:
        """The options that can be part of an answer."""
        options, most = self.options, slack + self._margin(bottleneck)
        kept_K: BoolArray = (options.least_K <= bottleneck) & (bottleneck * self._speed_K - options.layers_K <= most)
        if cap is None:
            kept_K &= options.rank_K == 0  # Nothing but the steady time counts.
        return np.flatnonzero(kept_K)

    def behind(self, at_K: IntArray, at_J: IntArray, states: States) -> IntArray:
        """For some states the one behind options of one kind; axes ``KJ``."""
        kind, layers_K, units_K = int(self.kind_K[at_K[0]]), self.options.layers_K[at_K], self._units_K[at_K]
        low, high = self.chain.first_begin_by_kind[kind], self.chain.last_begin_by_kind[kind]
        used_J = states.used_J[at_J]
        fits_KJ = (states.row_J[at_J] > layers_K[:, None]) & (used_J >= (units_K + low)[:, None])
        if high == low:
            fits_KJ &= used_J <= (units_K + high)[:, None]
        found_KJ = states.flat_J[at_J] - self.offset_K[at_K][:, None]
        return np.where(fits_KJ, states.number[np.where(fits_KJ, found_KJ, 0)], len(states.row_J))


class PassedOptions:
    """Options of stages between others that a pass looks at.

    Args:
        at_K: Which options, ascending.
        states: The states that count.

    Attributes:
        options: Those options.
    """

    def __init__(self, suffixes: Suffixes, at_K: IntArray, states: States) -> None:
        self.options, self.states = suffixes.options.take(at_K), states
        self._suffixes, self._at_K, self._kind_K = suffixes, at_K, suffixes.kind_K[at_K]
        self._edges = np.searchsorted(at_K, suffixes.edges).tolist()
        self._tables: dict[int, tuple[IntArray, IntArray, IntArray]] = {}

    def sources(self, place: int) -> Iterator[Source]:
        """Of a stage some options at a time, some states that they can end in, and for each of these the one behind.

        Args:
            place: How many stages between others are behind it.
        """
        slot = self._suffixes.slots[place]
        first, last = self._edges[slot], self._edges[slot + 1]
        kind_K = self._kind_K[first:last]
        # Options of one kind come one after another.
        edges = [first, *((kind_K[1:] != kind_K[:-1]).nonzero()[0] + first + 1).tolist(), last] if first < last else []
        for begin, end in pairwise(edges):
            at_J, row_K, rows = self._table(int(self._kind_K[begin]))
            step = max(1, _AT_ONCE // max(1, len(at_J)))
            for low in range(begin, end, step):
                some = slice(low, min(low + step, end))
                yield some, at_J, rows.take(row_K[some], axis=0)

    def _table(self, kind: int) -> tuple[IntArray, IntArray, IntArray]:
        """The states in which a stage of a kind can end, and for these the one behind it, in rows that options share.

        Options have a row by how much smaller they make the number of a state; axes ``J``, ``K``, and row and ``J``.
        """
        if kind not in self._tables:
            of_K, suffixes, states = np.flatnonzero(self._kind_K == kind), self._suffixes, self.states
            at_J = np.flatnonzero(suffixes.chain.ends_by_kind_N[kind, states.used_J])
            at_K, row_K = self._at_K[of_K], np.zeros_like(self._at_K)
            _, first, row_K[of_K] = np.unique(suffixes.offset_K[at_K], return_index=True, return_inverse=True)
            at_K, step = at_K[first], max(1, _AT_ONCE // max(1, len(at_J)))
            rows = [suffixes.behind(at_K[low : low + step], at_J, states) for low in range(0, len(at_K), step)]
            self._tables[kind] = at_J, row_K, rows[0] if len(rows) == 1 else np.concatenate(rows)
        return self._tables[kind]

    def extended(self, place: int, behind: FloatArray, cap: float | None, bottleneck: float) -> FloatArray:
        """Put a stage in front of all suffixes."""
        best_J = np.full(len(self.states.row_J) + 1, np.inf)
        steady_KL, reach_KL = self.options.steady_KL, self.options.reach_KL
        for some, at_J, source_KJ in self.sources(place):
            behind_KJ = behind.take(source_KJ)
            steady_KJ, reach_KJ = steady_KL[some], reach_KL[some]
            if steady_KL.shape[1] > 1:
                row_J = self.states.row_J[at_J]
                steady_KJ, reach_KJ = steady_KJ[:, row_J], reach_KJ[:, row_J]
                steady_KJ = np.where(steady_KJ <= bottleneck, steady_KJ, np.inf)
            sum_KJ = steady_KJ + behind_KJ
            if cap is not None:
                behind_KJ += reach_KJ
                np.copyto(sum_KJ, np.inf, where=behind_KJ > cap)
            best_J[at_J] = np.minimum(best_J[at_J], sum_KJ.min(axis=0))
        return best_J


def _all(each: Sequence[SlotOptions]) -> SlotOptions:
    """The options of several stages, one after another, with as many columns as those with the most."""
    width = max(options.steady_KL.shape[1] for options in each)
    names = "steady_KL", "reach_KL", "index_KL"
    return SlotOptions.joined(
        [
            replace(item, **{name: np.broadcast_to(getattr(item, name), (len(item), width)) for name in names})
            for item in each
        ]
    )
