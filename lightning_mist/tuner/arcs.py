"""The arcs of the inter-stage problem as a flow: every choice of a stage at every state, as far as it can matter.

A node is a stage and what it and those behind it hold: a number of layers and of devices of every part. A choice leads
from a node of its stage to one of the next. Of all arcs only those are kept that can be part of an answer that is not
worse than a known one. With ``f`` and ``b`` the least sums of the steady times of the stages in front of it and behind
it, ``t`` and ``d`` its own steady and boundary time and ``T`` the least pace of any answer,

    (G - 1) max(t, T) + max(f + t, t + d) + b  <=  known.

Array axes
    A  arcs
    C  lines (see :mod:`lightning_mist.tuner.lines`)
    J  states (see :mod:`lightning_mist.tuner.suffixes`)
    K  choices of a slot
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.tuner.intra_stage import EVERY_PART
from lightning_mist.tuner.problem import InterStageProblem
from lightning_mist.tuner.suffixes import Suffixes, Walk

_ROUNDING = 1 + 1e-9
"""An arc is left out if it is worse than what is known by more than rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arcs:
    """Choices at states.

    Attributes:
        stage_A: Stage.
        from_A: Node that the arc leaves; 0 is that of the first stage.
        to_A: Node that it enters; -1 behind the last stage.
        choice_A: Index of the choice in its slot.
        steady_A: Steady seconds.
        boundary_A: Boundary seconds.
    """

    stage_A: IntArray
    from_A: IntArray
    to_A: IntArray
    choice_A: IntArray
    steady_A: FloatArray
    boundary_A: FloatArray

    def __len__(self) -> int:
        """Number of arcs."""
        return len(self.stage_A)


def arcs_of(problem: InterStageProblem, known: float = np.inf) -> Arcs:
    """The arcs that an answer of at most ``known`` seconds can have.

    Args:
        problem: The problem, every slot of which has a choice.
        known: Step seconds of a known answer, possibly infinite.
    """
    if len(problem.slots) == 1:
        return _of_single(problem, known)
    suffixes = Suffixes(problem.alone())
    paces_K = suffixes.paces()
    paces_K = paces_K[paces_K * problem.num_microbatches <= known * _ROUNDING]
    if not len(paces_K):
        return _joined(problem, [])
    walk = suffixes.walk(float(paces_K[-1]))
    if not walk.values:
        return _joined(problem, [])
    return _Sweep(problem, suffixes, walk, _least_pace(suffixes, paces_K), known).arcs()


def _least_pace(suffixes: Suffixes, paces_K: FloatArray) -> float:
    """The least pace at which there is an answer; there is one at the last."""
    low, high = 0, len(paces_K) - 1
    while low < high:
        middle = (low + high) // 2
        if suffixes.walk(float(paces_K[middle])).values:
            high = middle
        else:
            low = middle + 1
    return float(paces_K[high])


def _of_single(problem: InterStageProblem, known: float) -> Arcs:
    slot = problem.slots[0]
    fits_K = (slot.layers_K == problem.num_layers) & (slot.devices_K == sum(problem.num_devices))
    fits_K &= slot.part_K == (0 if len(problem.num_devices) == 1 else EVERY_PART)
    least_K = problem.num_microbatches * slot.steady_K + np.maximum(slot.boundary_K, 0.0)
    index_K = np.flatnonzero(fits_K & (least_K <= known * _ROUNDING))
    return _joined(problem, [np.stack([np.zeros_like(index_K), index_K, np.zeros_like(index_K), index_K * 0 - 1])])


def _joined(problem: InterStageProblem, found: list[IntArray]) -> Arcs:
    """Arcs from stage, choice, and nodes, which are numbered anew."""
    stage_A, choice_A, from_A, to_A = np.concatenate([np.empty((4, 0), dtype=np.int64), *found], axis=1)
    _, number = np.unique(np.concatenate([from_A, to_A[to_A >= 0]]), return_inverse=True)
    number = number.reshape(-1)
    renumbered = np.full(len(to_A), -1, dtype=np.int64)
    renumbered[to_A >= 0] = number[len(from_A) :]
    steady_A, boundary_A = np.empty(len(stage_A)), np.empty(len(stage_A))
    for stage, slot in enumerate(problem.slots):
        inside_A = stage_A == stage
        steady_A[inside_A] = slot.steady_K[choice_A[inside_A]]
        boundary_A[inside_A] = slot.boundary_K[choice_A[inside_A]]
    return Arcs(
        stage_A=stage_A,
        from_A=number[: len(from_A)],
        to_A=renumbered,
        choice_A=choice_A,
        steady_A=steady_A,
        boundary_A=boundary_A,
    )


class _Sweep:
    """From the first stage to the last, the arcs that can matter; the least sums behind them are known."""

    def __init__(
        self, problem: InterStageProblem, suffixes: Suffixes, walk: Walk, least_pace: float, known: float
    ) -> None:
        self.problem, self.suffixes, self.walk = problem, suffixes, walk
        self.least_pace, self.known = least_pace, known * _ROUNDING

    def arcs(self) -> Arcs:
        """All arcs, stage by stage."""
        count, nowhere = len(self.problem.slots), len(self.walk.states.row_J)
        head = self.suffixes.heads[count]
        behind_K = self.suffixes.behind_head(head, self.walk.states)
        sums_K = self.walk.sums[count - 2][behind_K]
        kept_K = self._matter(np.zeros(len(head)), head.steady_K, head.reach_K, sums_K)
        found = [self._rows(0, head.index_K[kept_K], 0 * behind_K[kept_K], self._node(1, behind_K[kept_K]))]
        front_J = np.full(nowhere + 1, np.inf)
        np.minimum.at(front_J, behind_K[kept_K], head.steady_K[kept_K])
        for stage in range(1, count - 1):
            rows, front_J = self._middle(stage, front_J)
            found.append(rows)
        last = self.suffixes.last
        place_K = self.suffixes.last_places(self.walk.states)
        kept_K = self._matter(front_J[place_K], last.steady_K, last.reach_K, np.zeros(len(last)))
        node_K = self._node(count - 1, place_K[kept_K])
        found.append(self._rows(count - 1, last.index_K[kept_K], node_K, np.full(len(node_K), -1)))
        return _joined(self.problem, found)

    def _middle(self, stage: int, front_J: FloatArray) -> tuple[IntArray, FloatArray]:
        behind = len(self.problem.slots) - 1 - stage
        states, sums_J = self.walk.states, self.walk.sums[behind - 1]
        next_J, found = np.full_like(front_J, np.inf), [np.empty((4, 0), dtype=np.int64)]
        lines = self.suffixes.middle[behind - 1]
        lines = lines.take(lines.least_C <= self.walk.pace)
        for some, source_CJ in self.suffixes.sources(lines, states, {}):
            column = slice(None) if some.steady_CR.shape[1] == 1 else states.row_J
            steady_CJ, reach_CJ = some.steady_CR[:, column], some.reach_CR[:, column]
            kept_CJ = self._matter(front_J[:-1], steady_CJ, reach_CJ, sums_J[source_CJ])
            line, place = np.nonzero(kept_CJ)
            steady_CJ = np.broadcast_to(steady_CJ, kept_CJ.shape)
            to = source_CJ[line, place]
            np.minimum.at(next_J, to, front_J[place] + steady_CJ[line, place])
            index_CJ = np.broadcast_to(some.index_CR[:, column], kept_CJ.shape)
            nodes = self._node(stage, place), self._node(stage + 1, to)
            found.append(self._rows(stage, index_CJ[line, place], *nodes))
        return np.concatenate(found, axis=1), next_J

    def _matter(self, front: FloatArray, steady: FloatArray, reach: FloatArray, behind: FloatArray) -> BoolArray:
        """Whether an arc can be part of an answer that takes no longer than is known."""
        slowest = (self.problem.num_microbatches - 1) * np.clip(steady, self.least_pace, self.walk.pace)
        least = slowest + np.maximum(front + steady, reach) + behind
        kept: BoolArray = (steady <= self.walk.pace) & np.isfinite(front + behind) & (least <= self.known)
        return kept

    def _node(self, stage: int, place: IntArray) -> IntArray:
        node: IntArray = 1 + stage * (len(self.walk.states.row_J) + 1) + place
        return node

    @staticmethod
    def _rows(stage: int, choice: IntArray, source: IntArray, target: IntArray) -> IntArray:
        return np.stack([np.full(len(choice), stage), choice, source, target]).astype(np.int64)
