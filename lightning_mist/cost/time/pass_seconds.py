"""Seconds of passes of many stages at once: rows of :mod:`lightning_mist.schedule.stage_program`, added up.

A row's loads start together and take what the channels' model says (:mod:`lightning_mist.cost.time.overlap`); a pass
takes what its rows take one after another. So it is a list of (row, how many units in a row have one like it),

    seconds = sum_j count[j, line] * seconds[question, row[j, line]]

where the list depends on the layers of a stage alone (its *line*), and what a row takes on its loads (its *question*).

In front of the first unit and behind the last nothing is computed to hide behind: what stands there in the table takes
its own seconds, but for an update, beside which the next unit's state comes.

Array axes
    K  candidates
    A  lines: distinct stages, by the layers that they have and recompute
    J  places in their lists of rows
    I  distinct rows of all lists
    Q  questions
    U  rows of questions, as far as they occur
    H  channels
    R  units
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray, StageRegions, distinct_codes, runs_between
from lightning_mist.cost.time.offload_loads import BEFORE, BEHIND, Loads
from lightning_mist.cost.time.overlap import beyond_computing, concurrent_seconds
from lightning_mist.hardware import Interference
from lightning_mist.schedule import ActionKind
from lightning_mist.schedule.stage_program import TABLES, Channel, Load, When


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLists:
    """Lists of rows of stages, and what tells rows apart beside their loads.

    Attributes:
        line_K: The list of each candidate.
        row_JA: Rows of lists, in the order of forward.
        count_JA: How many units in a row have one like it; 0 where a list has come to its end.
        unit_I: A unit that each row is about.
        inside_I: By how far another unit is behind that one, whether the stage has it.
        again_I: The same, whether it is recomputed.
    """

    line_K: IntArray
    row_JA: IntArray
    count_JA: FloatArray
    unit_I: IntArray
    inside_I: dict[int, BoolArray]
    again_I: dict[int, BoolArray]

    @classmethod
    def of(cls, loads: Loads, regions: StageRegions) -> "RowLists":
        """The lists of stages."""
        like_R, changes = _alike(loads)
        width = len(like_R) + 1
        code_K = (regions.low_K * width + regions.high_K) * width
        code_K += np.clip(regions.middle_K, regions.low_K, regions.high_K)
        code_A, line_K = distinct_codes(code_K, width**3)
        low_A, high_A, middle_A = code_A // width**2, code_A // width % width, code_A % width
        first_A = np.maximum(low_A, 1)
        # Rows are alike between places where units change, or what lies around them.
        near = [low_A + 1, high_A - 2, high_A - 1, first_A, first_A + 1, middle_A, middle_A + 1]
        unit_JA, count_JA = runs_between(low_A, high_A, near, changes.tolist())
        flags = (
            unit_JA > low_A,
            unit_JA < high_A - 1,
            unit_JA < high_A - 2,
            (unit_JA >= first_A) & (unit_JA < middle_A),
            (unit_JA > first_A) & (unit_JA <= middle_A),
        )
        bit_F = 1 << np.arange(len(flags))
        code_JA = like_R[unit_JA] << len(flags)
        for bit, flag_JA in zip(bit_F, flags, strict=True):
            code_JA += bit * flag_JA
        code_I, row_X = distinct_codes(code_JA.reshape(-1), len(like_R) << len(flags))
        below_I, above_I, second_I, again_I, again_below_I = (code_I & bit_F[:, None]) > 0
        return cls(
            line_K=line_K,
            row_JA=row_X.reshape(code_JA.shape),
            count_JA=count_JA.astype(np.float64),
            unit_I=code_I >> len(flags),
            inside_I={-1: below_I, 0: np.ones_like(below_I), 1: above_I, 2: second_I},
            again_I={-1: again_below_I, 0: again_I},
        )


def _alike(loads: Loads) -> tuple[IntArray, IntArray]:
    """Of each unit one with the same loads and neighbours, and the units that are not like the one before."""
    seconds_WQR = loads.seconds_WQR
    run_R = np.concatenate([[0], np.cumsum((seconds_WQR[:, :, 1:] != seconds_WQR[:, :, :-1]).any(axis=(0, 1)))])
    # Of units that are like the one before nothing has to be compared with others.
    columns_X = np.ascontiguousarray(np.moveaxis(seconds_WQR[:, :, np.flatnonzero(np.diff(run_R, prepend=-1))], 2, 0))
    known: dict[bytes, int] = {}
    kind_R = np.array([known.setdefault(column.tobytes(), len(known)) for column in columns_X])[run_R].tolist()
    seen: dict[tuple[int, ...], int] = {}
    units = range(len(kind_R) - BEFORE - BEHIND)
    like_R = np.array([seen.setdefault(tuple(kind_R[unit : unit + BEFORE + BEHIND + 1]), unit) for unit in units])
    return like_R, np.flatnonzero(np.diff(like_R)) + 1


class Passes:
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
        self.loads, self.question_K, self.regions = loads, question_K, regions
        self.interference, self.across_nodes = interference, across_nodes
        lists = self.lists = RowLists.of(loads, regions)
        # Which rows of which questions every candidate has, and which of all occur.
        rows = len(lists.unit_I)
        place_JK = self.question_K * rows + lists.row_JA[:, lists.line_K]
        self._place_U, self._which_JK = distinct_codes(place_JK.reshape(-1), rows * len(loads))
        self._which_JK, self._count_JK = self._which_JK.reshape(place_JK.shape), lists.count_JA[:, lists.line_K]
        any_W = np.atleast_1d(np.any(loads.seconds_WQR, axis=(1, 2)))
        self._there = {name for name, place in loads.places.items() if any_W[place]}

    def seconds(self, kind: ActionKind, *, copies: bool, edge: bool = False, away: bool = False) -> FloatArray:
        """Seconds of one pass.

        Args:
            copies: With copies, or as if there were none.
            edge: The first or last of a batch, or another.
            away: Whether its two outermost units are not there yet, but are given out in it.
        """
        load_HU, waited_U = self.rows(kind, copies=copies, edge=edge, away=away)
        second_U = self._together(load_HU, copies=copies) + waited_U
        total_K: FloatArray = np.einsum("jk,jk->k", self._count_JK, second_U.take(self._which_JK))
        front, behind = self.ends(kind, copies=copies, edge=edge, away=away)
        if Channel.COMPUTE in front:
            total_K += self._together(self.first_update(front.pop(Channel.COMPUTE), copies=copies), copies=copies)
        for value_K in (*front.values(), *behind.values()):
            total_K += value_K
        return total_K

    def rows(self, kind: ActionKind, *, copies: bool, edge: bool, away: bool) -> tuple[FloatArray, FloatArray]:
        """What every row of a pass has to do; axes ``H`` and ``U``; and for what computing waits before it.

        Args:
            away: Whether its two outermost units are not there yet, but are given out in it.
        """
        lists, step = self.lists, _step(kind)
        question_U, row_U = self._place_U // len(lists.unit_I), self._place_U % len(lists.unit_I)
        place_U = question_U * self.loads.width + lists.unit_I[row_U] + BEFORE
        load_HU, waited_U = np.zeros((len(Channel), len(place_U))), np.zeros(len(place_U))
        for load, offset in self._loads(kind, copies=copies, edge=edge):
            unit = step * offset
            there_I = lists.inside_I[unit]
            if _stays(load, away=away):
                there_I = there_I & lists.inside_I[-step]
            if load.counts < 0:  # nobody waits for what leaves behind the last computation
                there_I = there_I & lists.inside_I[step]
            if load.name == "again":
                there_I = lists.again_I[0]
            value_U = self._at(load.name, place_U + unit, lists.again_I.get(unit, there_I)[row_U]) * there_I[row_U]
            if load.is_waited:
                now_U = value_U * self.loads.waits_Q[question_U]
                value_U, waited_U = value_U - now_U, waited_U + now_U
            load_HU[load.channel] += value_U
        return load_HU, waited_U

    def ends(
        self, kind: ActionKind, *, copies: bool, edge: bool, away: bool
    ) -> tuple[dict[Channel, FloatArray], dict[Channel, FloatArray]]:
        """What stands in front of the first unit of a pass, and behind its last, by what it keeps busy; axis ``K``."""
        front, behind = dict[Channel, FloatArray](), dict[Channel, FloatArray]()
        first_K, last_K = (self.regions.low_K, self.regions.last_K)[:: _step(kind)]
        for load, offset in self._loads(kind, copies=copies, edge=edge):
            if offset != 0 and not (offset > 0 and _stays(load, away=away)):
                found, unit_K = (front, first_K) if offset > 0 else (behind, last_K)
                found[load.channel] = found.get(load.channel, 0.0) + self.of_unit(load.name, unit_K)
        if kind is ActionKind.UPDATE:
            # The next batch begins with the parameters of the first two units, of which the second one's may hide.
            low_K, next_K = first_K, np.minimum(first_K + 1, last_K)
            second_K = self.of_unit("parameters_in", next_K) * (next_K > low_K)
            second_K = np.maximum(second_K - self.of_unit("forward", low_K), 0.0)
            behind[Channel.TO_DEVICE] = self.of_unit("parameters_in", low_K) + second_K
        return front, behind

    def first_update(self, update_K: FloatArray, *, copies: bool) -> FloatArray:
        """The update of the first unit of all, beside which comes what the second one needs; axes ``H`` and ``K``."""
        load_HK = np.zeros((len(Channel), len(update_K)))
        load_HK[Channel.COMPUTE] = update_K
        if copies:
            is_there_K = self.regions.last_K > self.regions.low_K
            load_HK[Channel.TO_DEVICE] = self.of_unit("state_in", self.regions.low_K + 1) * is_there_K
        return load_HK

    def of_unit(self, name: str, unit_K: IntArray) -> FloatArray:
        """One load of a unit of every candidate; where that is the last layer what it keeps without what it sends."""
        again_K = (unit_K >= self.regions.first_K) & (unit_K < self.regions.middle_K)
        last = "last_" * name.startswith("kept")
        return self._at(last + name, self.question_K * self.loads.width + unit_K + BEFORE, again_K)

    def _together(self, load_HX: FloatArray, *, copies: bool) -> FloatArray:
        """Seconds of loads that start together."""
        compute_X, network_X, down_X, up_X = load_HX
        if copies:
            return concurrent_seconds(compute_X, network_X, down_X, up_X, self.interference, self.across_nodes)
        both_X: FloatArray = compute_X + beyond_computing(compute_X, network_X, self.interference, self.across_nodes)
        return both_X

    def _loads(self, kind: ActionKind, *, copies: bool, edge: bool) -> Iterator[tuple[Load, int]]:
        """What units have to do in a pass, and beside which, counted in the order of the pass."""
        for entry in TABLES[kind]:
            for load in entry.loads:
                is_now = load.when is not (When.MIDDLE if edge else When.EDGE)
                if is_now and (copies or load.channel < Channel.TO_DEVICE) and self._is_any(load.name):
                    yield load, entry.offset - load.counts

    def _is_any(self, name: str) -> bool:
        return not self._there.isdisjoint({name, name.replace("kept", "saved"), name.replace("kept", "checkpoint")})

    def _at(self, name: str, place_X: IntArray, again_X: BoolArray) -> FloatArray:
        """One load at flat places of questions and units; of what is kept that of a layer that is recomputed or not."""
        if "kept" not in name:
            return self.loads[name].reshape(-1).take(place_X)
        saved_X, checkpoint_X = (
            self._at(name.replace("kept", kind), place_X, again_X) for kind in ("saved", "checkpoint")
        )
        return np.where(again_X, checkpoint_X, saved_X)


def _step(kind: ActionKind) -> int:
    """How far behind a unit the next one of a pass is, in the order of forward."""
    return -1 if kind is ActionKind.BACKWARD else 1


def _stays(load: Load, *, away: bool) -> bool:
    """Whether the two outermost units of a pass are there without it."""
    return load.is_resident or (load.name == "unshard" and not away)
