"""Seconds of passes of many stages at once: rows of :mod:`lightning_mist.schedule.stage_program`, added up.

A row's loads start together and take what the channels' model says (:mod:`lightning_mist.cost.time.overlap`); a pass
takes what its rows take one after another. So it is a list of (row, how many units in a row have one like it),

    seconds = sum_j count[j, line] * seconds[question, row[j, line]]

where the list depends on the layers of a stage alone (its *line*), and what a row takes on its loads (its *question*).
Where questions are few the rows of all units are timed once and kept with their sums (:class:`RowSums`): units that
follow each other and lie alike in their stages take a difference of two sums, be they alike or not.

In front of the first unit and behind the last nothing is computed to hide behind: what stands there in the table takes
its own seconds, but for an update, beside which the next unit's state comes.

Array axes
    K  candidates
    J  lines: distinct stages, by the layers that they have and recompute; or questions; or their rows that occur; or
       candidates that share gradients, or parameters; or first regions of stages, as far as they differ
    R  units, or places in lists of rows
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost.inputs import (
    FloatArray,
    IntArray,
    StageRegions,
    StageSlot,
    distinct_codes,
    prefix_sums,
    runs_between,
)
from lightning_mist.cost.time.offload_loads import BEFORE, BEHIND, Loads, unit_question
from lightning_mist.cost.time.overlap import beyond_computing, concurrent_seconds
from lightning_mist.hardware import Interference
from lightning_mist.plan import ZeroStage
from lightning_mist.schedule import ActionKind
from lightning_mist.schedule.stage_program import TABLES, Channel, Load, When

BELOW, ABOVE, AGAIN = 1, 2, 4
BETWEEN = BELOW | ABOVE
_INSIDE, _AGAIN = {-1: BELOW, 0: 0, 1: ABOVE, 2: 8}, {0: AGAIN, -1: 16}
"""How rows lie in their stages, as bits: whether these have the unit so far behind, and whether it is recomputed."""

_LIES = 32


@dataclass(frozen=True, slots=True)
class PassKind:
    """One pass of a stage.

    Attributes:
        copies: With copies, or as if there were none.
        edge: The first or last of a batch, or another.
        away: Whether its two outermost units are not there yet, but are given out in it.
    """

    kind: ActionKind
    copies: bool = False
    edge: bool = False
    away: bool = False

    @property
    def step(self) -> int:
        """How far behind a unit the next one is, in the order of forward."""
        return -1 if self.kind is ActionKind.BACKWARD else 1

    def loads(self, has: Callable[[str], bool]) -> Iterator[tuple[Load, int]]:
        """What units have to do of what there is, and beside which, counted in the order of the pass."""
        for entry in TABLES[self.kind]:
            for load in entry.loads:
                is_now = load.when is not (When.MIDDLE if self.edge else When.EDGE)
                if is_now and (self.copies or load.channel < Channel.TO_DEVICE) and has(load.name):
                    yield load, entry.offset - load.counts

    def stays(self, load: Load) -> bool:
        """Whether the two outermost units are there without it."""
        return load.is_resident or (load.name == "unshard" and not self.away)

    def around(self, load: Load, offset: int) -> tuple[int, ...]:
        """How far behind a row's unit others have to be in the stage, so that it has a load; 0 is its own."""
        # Nobody waits for what leaves behind the last computation.
        return self.step * offset, -self.step * self.stays(load), self.step * (load.counts < 0)

    def beside(self, name: str, regions: StageRegions) -> StageRegions:
        """The units of each stage whose load counts beside computation."""
        ((load, offset),) = self.loads(name.__eq__)
        own, *others = self.around(load, offset)
        low_K = regions.low_K + own - min(own, *others)
        return replace(regions, low_K=low_K, high_K=np.maximum(low_K, regions.high_K + own - max(own, *others)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLists:
    """Lists of rows of stages, and what tells rows apart beside their loads.

    Attributes:
        line_K: The list of each candidate.
        row_RJ: Rows of lists, in the order of forward.
        count_RJ: How many units in a row have one like it; 0 where a list has come to its end.
        unit_of_row: A unit that each row is about.
        bits_of_row: How it lies in its stage.
    """

    line_K: IntArray
    row_RJ: IntArray
    count_RJ: FloatArray
    unit_of_row: IntArray
    bits_of_row: IntArray

    @classmethod
    def of(cls, loads: Loads, regions: StageRegions) -> "RowLists":
        """The lists of stages."""
        like_R, changes = _alike(loads)
        width = len(like_R) + 1
        code_K = (regions.low_K * width + regions.high_K) * width
        code_K += np.clip(regions.middle_K, regions.low_K, regions.high_K)
        code_J, line_K = distinct_codes(code_K, width**3)
        low_J, high_J, middle_J = code_J // width**2, code_J // width % width, code_J % width
        first_J = np.maximum(low_J, 1)
        # Rows are alike between places where units change, or what lies around them.
        near = [low_J + 1, high_J - 2, high_J - 1, first_J, first_J + 1, middle_J, middle_J + 1]
        unit_RJ, count_RJ = runs_between(low_J, high_J, near, changes.tolist())
        bits_RJ = BELOW * (unit_RJ > low_J) + ABOVE * (unit_RJ < high_J - 1) + _INSIDE[2] * (unit_RJ < high_J - 2)
        for behind, bit in _AGAIN.items():
            bits_RJ += bit * ((unit_RJ + behind >= first_J) & (unit_RJ + behind < middle_J))
        codes, rows = distinct_codes((like_R[unit_RJ] * _LIES + bits_RJ).reshape(-1), len(like_R) * _LIES)
        return cls(
            line_K=line_K,
            row_RJ=rows.reshape(unit_RJ.shape),
            count_RJ=count_RJ.astype(np.float64),
            unit_of_row=codes // _LIES,
            bits_of_row=codes % _LIES,
        )


def _alike(loads: Loads) -> tuple[IntArray, IntArray]:
    """Of each unit one with the same loads and neighbours, and the units that are not like the one before."""
    seconds_by_name_JR = loads.seconds_by_name_JR
    run_R = np.concatenate(
        [[0], np.cumsum((seconds_by_name_JR[:, :, 1:] != seconds_by_name_JR[:, :, :-1]).any(axis=(0, 1)))]
    )
    # Of units that are like the one before nothing has to be compared with others.
    columns = np.ascontiguousarray(
        np.moveaxis(seconds_by_name_JR[:, :, np.flatnonzero(np.diff(run_R, prepend=-1))], 2, 0)
    )
    known: dict[bytes, int] = {}
    kind_R = np.array([known.setdefault(column.tobytes(), len(known)) for column in columns])[run_R].tolist()
    seen: dict[tuple[int, ...], int] = {}
    units = range(len(kind_R) - BEFORE - BEHIND)
    like_R = np.array([seen.setdefault(tuple(kind_R[unit : unit + BEFORE + BEHIND + 1]), unit) for unit in units])
    return like_R, np.flatnonzero(np.diff(like_R)) + 1


def row_loads(
    loads: Loads, one: PassKind, question_J: IntArray, unit_J: IntArray, bits_J: IntArray
) -> tuple[FloatArray, FloatArray]:
    """What rows of a pass have to do; axes channel and ``J``; and for what computing waits before each.

    Args:
        bits_J: How they lie in their stages.
    """
    place_J = question_J * loads.width + unit_J + BEFORE
    loads_J, waited_J = np.zeros((len(Channel), len(place_J))), np.zeros(len(place_J))
    for load, offset in one.loads(loads.has):
        unit = one.step * offset
        bits = AGAIN * (load.name == "again")
        for behind in one.around(load, offset):
            bits |= _INSIDE[behind]
        value_J = loads.at(load.name, place_J + unit, (bits_J & _AGAIN.get(unit, 0)) > 0) * ((bits_J & bits) == bits)
        if load.is_waited:
            now_J = value_J * loads.waits_J[question_J]
            value_J, waited_J = value_J - now_J, waited_J + now_J
        loads_J[load.channel] += value_J
    return loads_J, waited_J


class _Stages:
    """Candidates, and which row of some loads each has."""

    def __init__(self, loads: Loads, question_K: IntArray, regions: StageRegions) -> None:
        self.loads, self.question_K, self.regions = loads, question_K, regions

    def ends(self, one: PassKind) -> tuple[dict[Channel, FloatArray], dict[Channel, FloatArray]]:
        """What stands in front of the first unit of a pass, and behind its last, by what it keeps busy; axis ``K``."""
        front, behind = dict[Channel, FloatArray](), dict[Channel, FloatArray]()
        low_K, high_K = self.regions.low_K, self.regions.last_K
        first_K, last_K = (low_K, high_K)[:: one.step]
        for load, offset in one.loads(self.loads.has):
            if offset != 0 and not (offset > 0 and one.stays(load)):
                found, unit_K = (front, first_K) if offset > 0 else (behind, last_K)
                found[load.channel] = found.get(load.channel, 0.0) + self.of_unit(load.name, unit_K)
        if one.kind is ActionKind.UPDATE:
            # The next batch begins with the parameters of the first two units, of which the second one's may hide.
            next_K = np.minimum(low_K + 1, high_K)
            second_K = self.of_unit("parameters_in", next_K) * (next_K > low_K)
            second_K = np.maximum(second_K - self.of_unit("forward", low_K), 0.0)
            behind[Channel.TO_DEVICE] = self.of_unit("parameters_in", low_K) + second_K
        return front, behind

    def of_unit(self, name: str, unit_K: IntArray) -> FloatArray:
        """One load of a unit of every candidate; where that is the last layer what it keeps without what it sends."""
        last = "last_" * name.startswith("kept")
        place_K = self.question_K * self.loads.width + unit_K + BEFORE
        return self.loads.at(last + name, place_K, self.regions.is_recomputed(unit_K))


class Passes(_Stages):
    """Seconds of passes through the units of candidates.

    Args:
        question_K: Row of the loads that each candidate has.
        interference: How channels slow each other down; ``None`` where they take turns.
        across_nodes: Whether ranks that share gradients or parameters are in several nodes.
    """

    def __init__(
        self,
        loads: Loads,
        question_K: IntArray,
        regions: StageRegions,
        interference: Interference | None,
        across_nodes: bool,
    ) -> None:
        super().__init__(loads, question_K, regions)
        self.interference, self.across_nodes = interference, across_nodes
        lists = self.lists = RowLists.of(loads, regions)
        # Which rows of which questions every candidate has, and which of all occur.
        rows = len(lists.unit_of_row)
        place_RK = self.question_K * rows + lists.row_RJ[:, lists.line_K]
        self._place_J, self._which_RK = distinct_codes(place_RK.reshape(-1), rows * len(loads))
        self._which_RK, self._count_RK = self._which_RK.reshape(place_RK.shape), lists.count_RJ[:, lists.line_K]

    def seconds(self, one: PassKind) -> FloatArray:
        """Seconds of one pass."""
        return self.with_input(one)[0]

    def with_input(self, one: PassKind) -> tuple[FloatArray, FloatArray]:
        """Seconds of one pass, and of a forward those from where its input has to be there.

        Its first unit waits for that, and whatever its row has beside it is issued before.
        """
        loads_J, waited_J = self.rows(one)
        second_J = self._together(one, loads_J) + waited_J
        total_K: FloatArray = np.einsum("jk,jk->k", self._count_RK, second_J.take(self._which_RK))
        behind_K = total_K - second_J.take(self._which_RK[0]) + self.of_unit("forward", self.regions.low_K)
        front, behind = self.ends(one)
        if Channel.COMPUTE in front:
            total_K += self._together(one, self.first_update(one, front.pop(Channel.COMPUTE)))
        for value_K in (*front.values(), *behind.values()):
            total_K += value_K
        return total_K, behind_K + sum(behind.values())

    def rows(self, one: PassKind) -> tuple[FloatArray, FloatArray]:
        """As :func:`row_loads`, of all rows that occur."""
        question_J, row_J = np.divmod(self._place_J, len(self.lists.unit_of_row))
        return row_loads(self.loads, one, question_J, self.lists.unit_of_row[row_J], self.lists.bits_of_row[row_J])

    def first_update(self, one: PassKind, update_K: FloatArray) -> FloatArray:
        """The update of the first unit of all, beside which comes what the second one needs; axes channel and ``K``."""
        loads_K = np.zeros((len(Channel), len(update_K)))
        loads_K[Channel.COMPUTE] = update_K
        if one.copies:
            is_there_K = self.regions.last_K > self.regions.low_K
            loads_K[Channel.TO_DEVICE] = self.of_unit("state_in", self.regions.low_K + 1) * is_there_K
        return loads_K

    def _together(self, one: PassKind, loads_K: FloatArray) -> FloatArray:
        """Seconds of loads that start together."""
        compute_K, network_K, down_K, up_K = loads_K
        if one.copies:
            return concurrent_seconds(compute_K, network_K, down_K, up_K, self.interference, self.across_nodes)
        both_K: FloatArray = compute_K + beyond_computing(compute_K, network_K, self.interference, self.across_nodes)
        return both_K


class RowSums:
    """What rows without copies take beyond computing, where questions are few; keeps their sums.

    Arguments as for :class:`Passes`.
    """

    def __init__(self, loads: Loads, interference: Interference | None, across_nodes: bool) -> None:
        self.loads, self.interference, self.across_nodes = loads, interference, across_nodes
        self._kept: dict[PassKind, FloatArray] = {}

    def of(self, one: PassKind) -> FloatArray:
        """Sums over units below each, of its two loads and beyond computing; axes: which, ``J``, how it lies, ``R``."""
        if one not in self._kept:
            shape = len(self.loads), 2 * AGAIN, self.loads.width - BEFORE - BEHIND
            question_J, bits_J, unit_J = np.indices(shape).reshape(3, -1)
            (compute_J, network_J, *_), _ = row_loads(self.loads, one, question_J, unit_J, bits_J)
            found_by_kind = np.stack([compute_J, network_J, self.beyond(compute_J, network_J)])
            self._kept[one] = prefix_sums(found_by_kind.reshape(3, *shape))
        return self._kept[one]

    def beyond(self, compute_K: FloatArray, network_K: FloatArray) -> FloatArray:
        """What communication takes beyond the computation beside it."""
        return beyond_computing(compute_K, network_K, self.interference, self.across_nodes)


class SummedPasses(_Stages):
    """What passes without copies take beyond computing, by sums of rows."""

    def __init__(self, sums: RowSums, question_K: IntArray, regions: StageRegions) -> None:
        super().__init__(sums.loads, question_K, regions)
        self.sums_of, low_K, last_K = sums, regions.low_K, regions.last_K
        inner_K, outer_K = low_K + 1, np.maximum(last_K, low_K + 1)
        again_K = [np.clip(unit_K, inner_K, outer_K) for unit_K in (regions.first_K, regions.middle_K)]
        mark_RK = np.stack([low_K, inner_K, *again_K, outer_K, last_K + 1])
        bits_RK = np.full((len(mark_RK) - 1, len(low_K)), BETWEEN)
        bits_RK[2] |= AGAIN
        bits_RK[0], bits_RK[-1] = self._bits(low_K), self._bits(last_K)
        place_RK = (question_K * 2 * AGAIN + bits_RK) * (sums.loads.width - BEFORE - BEHIND + 1)
        self._begin_RK, self._end_RK = place_RK + mark_RK[:-1], place_RK + mark_RK[1:]

    def sums(self, one: PassKind) -> FloatArray:
        """Seconds of a pass: of computing, of communicating, and of both beyond computing, each with axis ``K``."""
        sums = self.sums_of.of(one).reshape(3, -1)
        totals_K: FloatArray = (sums[:, self._end_RK] - sums[:, self._begin_RK]).sum(axis=1)
        totals_K[1:] += sum(value_K for found in self.ends(one) for value_K in found.values())
        return totals_K

    def beyond(self, one: PassKind) -> FloatArray:
        """Seconds of a pass beyond computing."""
        sums = self.sums_of.of(one)[2]
        total_K: FloatArray = (sums.take(self._end_RK) - sums.take(self._begin_RK)).sum(axis=0)
        return total_K + sum(value_K for found in self.ends(one) for value_K in found.values())

    def restarted(self, kind: ActionKind, here_K: FloatArray, away_K: FloatArray) -> FloatArray:
        """What a pass takes more that follows one like it: the two outermost units are given out once more.

        The first of them is beside the last row of the pass before.

        Args:
            here_K: Seconds of a pass beyond computing that finds them, and ``away_K`` of one that does not.
        """
        one = PassKind(kind)
        first_K, last_K = (self.regions.low_K, self.regions.last_K)[:: one.step]
        loads_K, _ = row_loads(self.loads, one, self.question_K, last_K, self._bits(last_K))
        compute_K, alone_K = loads_K[Channel.COMPUTE], loads_K[Channel.NETWORK]
        unshard_K = self.of_unit("unshard", first_K)
        beside_K = self.sums_of.beyond(compute_K, alone_K + unshard_K) - self.sums_of.beyond(compute_K, alone_K)
        return away_K - here_K - unshard_K + beside_K

    def _bits(self, unit_K: IntArray) -> IntArray:
        """How the rows of a unit of each stage lie."""
        bits_K: IntArray = BELOW * (unit_K > self.regions.low_K) + ABOVE * (unit_K < self.regions.last_K)
        return bits_K + AGAIN * self.regions.is_recomputed(unit_K)


# Seconds that ZeRO-2 and ZeRO-3 add to every microbatch: reducing gradients and unsharding parameters, unit by unit.
#
# They are what passes take beyond computing, row by row, with nothing copied. A batch begins with no unit there, and
# where a forward follows a forward, or a backward a backward, the two outermost units are unsharded once more. What
# happens so often per batch is spread over its microbatches.
#
# A gradient is reduced with the first unit of its stage that uses the parameter, which is the last in backward.


_KINDS = ActionKind.FORWARD, ActionKind.BACKWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Communication of units beside computation, among the ranks of stages that have the same rows and degrees.

    Attributes:
        unshard_R: Seconds of giving out each unit's parameters.
        reduce_JR: Seconds of reducing its gradients.
        row_R: Row of them for a stage that begins with each unit.
        sums: Rows of units, of the questions of :func:`~lightning_mist.cost.time.offload_loads.unit_loads`.
    """

    unshard_R: FloatArray
    reduce_JR: FloatArray
    row_R: IntArray
    is_one_unit: bool
    sums: RowSums

    def passes(self, zero_stage_K: IntArray, regions: StageRegions) -> SummedPasses:
        """Passes of stages without copies."""
        question_K = unit_question(zero_stage_K, self.row_R[regions.low_K], len(self.reduce_JR))
        return SummedPasses(self.sums, question_K, regions)

    def between(self, *, is_unsharded: bool) -> FloatArray:
        """What each unit between others adds to a microbatch at least, if it is not recomputed, and if it is."""
        rows = len(self.reduce_JR)
        asked = slice((1 + is_unsharded) * rows, (2 + is_unsharded) * rows)
        forward_sums, backward_sums = (self.sums.of(PassKind(kind))[2, asked] for kind in _KINDS)
        least_by_kind_R: FloatArray = np.diff(forward_sums + backward_sums)[:, [BETWEEN, BETWEEN | AGAIN]].min(axis=0)
        return least_by_kind_R


UNSHARDED = ("forward_unshard_K", "backward_unshard_K", "begin_K", "forward_again_K", "backward_again_K")
"""What unsharding adds to a forward that follows a backward of its stage, and to a backward that follows a forward;
beyond that to the first forward of a batch, and to other forwards and backwards that follow no such pass."""


def shared_seconds(
    beside: Beside, slot: StageSlot, regions: StageRegions, zero_stage_K: IntArray
) -> dict[str, FloatArray]:
    """What unsharding (ZeRO-3) and reducing (from ZeRO-2 on) add beyond computation, by term of a stage's seconds."""
    terms = {name: np.zeros(len(regions)) for name in (*UNSHARDED, "scatter_K")}
    takes_turns, count = slot.schedule == "interleaved-1f1b", slot.num_microbatches

    def asked(zero_stage: ZeroStage) -> tuple[IntArray, SummedPasses]:
        at_J = np.flatnonzero(zero_stage_K >= zero_stage)
        return at_J, beside.passes(np.full(len(at_J), zero_stage), regions.take(at_J))

    at_J, passes = asked(ZeroStage.GRADIENTS)
    terms["scatter_K"][at_J] = passes.beyond(PassKind(ActionKind.BACKWARD))
    at_J, passes = asked(ZeroStage.PARAMETERS)
    if beside.is_one_unit and not takes_turns:
        # Nothing ever takes its place.
        terms["begin_K"][at_J] = passes.regions.sums(beside.unshard_R)
    else:
        low_J, last_J = passes.regions.low_K, passes.regions.last_K
        # One or two units never leave, but where chunks of other layers come between.
        is_many_J = last_J - low_J >= (1 if takes_turns else 2)
        alone_J = beside.unshard_R[low_J] * ((last_J == low_J) & takes_turns)
        for kind, name in zip(_KINDS, ("forward", "backward"), strict=True):
            here_J, away_J = (passes.beyond(PassKind(kind, away=away)) for away in (False, True))
            terms[f"{name}_unshard_K"][at_J] = here_J
            terms[f"{name}_again_K"][at_J] = np.where(is_many_J, passes.restarted(kind, here_J, away_J), alone_J)
            if kind is ActionKind.FORWARD:
                terms["begin_K"][at_J] = away_J - here_J
        terms["backward_unshard_K"][at_J] -= terms["scatter_K"][at_J]
    (forwards, backwards), adds = restarts(slot), count > 1 and slot.schedule not in ("gpipe", "interleaved-1f1b")
    forward_K, backward_K, begin_K, forward_again_K, backward_again_K = (terms[name] for name in UNSHARDED)
    once_K = begin_K + forwards * forward_again_K + backwards * backward_again_K
    mean = {"unshard_K": forward_K + backward_K + once_K / count}
    return terms | mean | {"again_K": adds * (forward_again_K + backward_again_K) / count}


def restarts(slot: StageSlot) -> tuple[int, int]:
    """How many forwards of a batch follow one of their own stage, and how many backwards do.

    Chunks of a group of devices take turns, by and large: all but the first count there, which is never too few.
    """
    others = slot.num_microbatches - 1
    if slot.schedule == "interleaved-1f1b":
        return others, slot.num_microbatches
    ahead = others if slot.schedule == "gpipe" else min(slot.stages_behind, others)
    return ahead, ahead
