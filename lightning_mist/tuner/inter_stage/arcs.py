"""The arcs of the inter-stage problem as a flow: every choice of a stage at every state, as far as it can matter.

A node is a stage and what it and those behind it hold: numbers of layers and of devices. A choice leads from a node of
its stage to one of the next. Of all arcs only those are kept that can be part of an answer that is not worse than a
known one. With ``f`` and ``b`` the least sums of the steady times of the stages in front of it and behind
it, ``t`` and ``d`` its own steady and boundary time and ``T`` the least bottleneck time of any answer,

    (G - 1) max(t, T) + max(f + t, t + d) + b  <=  known.

Array axes
    K  arcs, choices of a slot, or options (see :mod:`lightning_mist.tuner.inter_stage.slot_options`)
    J  states (see :mod:`lightning_mist.tuner.inter_stage.suffix_dp`)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.tuner.inter_stage.problem import InterStageProblem
from lightning_mist.tuner.inter_stage.slot_options import EndOptions
from lightning_mist.tuner.inter_stage.suffix_dp import Suffixes, SuffixWalk

_ROUNDING = 1 + 1e-9
"""An arc is left out if it is worse than what is known by more than rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arcs:
    """Choices at states.

    Attributes:
        from_K: Node that the arc leaves; 0 is that of the first stage.
        to_K: Node that it enters; -1 behind the last stage.
        choice_K: Index of the choice in its slot.
        steady_K: Steady seconds.
        boundary_K: Boundary seconds.
    """

    stage_K: IntArray
    from_K: IntArray
    to_K: IntArray
    choice_K: IntArray
    steady_K: FloatArray
    boundary_K: FloatArray

    def __len__(self) -> int:
        """Number of arcs."""
        return len(self.stage_K)


def arcs_of(problem: InterStageProblem, known: float = np.inf) -> Arcs:
    """The arcs that an answer of at most ``known`` seconds can have.

    Args:
        problem: The problem, every slot of which has a choice.
        known: Step seconds of a known answer, possibly infinite.
    """
    if len(problem.slots) == 1:
        return _of_single(problem, known)
    suffixes = Suffixes(problem.alone())
    bottlenecks_K = suffixes.bottlenecks()
    bottlenecks_K = bottlenecks_K[bottlenecks_K * problem.num_microbatches <= known * _ROUNDING]
    first = suffixes.first_walk(bottlenecks_K)
    if first is None:
        return _joined(problem, [])
    walk = suffixes.walk(float(bottlenecks_K[-1]))
    count, states = len(problem.slots), len(walk.states.row_J) + 1
    found = []
    for item in matching(suffixes, walk, problem.num_microbatches, first.bottleneck, known):
        stage = count - 1 - item.behind
        from_K = np.where(stage > 0, 1 + stage * states + item.from_K, 0)
        to_K = np.where(item.to_K < 0, -1, 1 + (stage + 1) * states + item.to_K)
        found.append(np.stack([np.full(len(from_K), stage), item.choice_K, from_K, to_K]))
    return _joined(problem, _leading_on(found, count))


def _leading_on(found: list[IntArray], num_stages: int) -> list[IntArray]:
    """Of arcs from stage, choice, and nodes those that lead to the end: each is bounded by itself."""
    arc_4K = np.concatenate([np.empty((4, 0), dtype=np.int64), *found], axis=1)
    stage_K, _, from_K, to_K = arc_4K
    kept_K = to_K < 0
    for stage in range(num_stages - 2, -1, -1):
        behind_K = from_K[kept_K & (stage_K == stage + 1)]
        kept_K |= (stage_K == stage) & np.isin(to_K, behind_K)
    return [arc_4K[:, kept_K]]


def _of_single(problem: InterStageProblem, known: float) -> Arcs:
    slot = problem.slots[0]
    least_K = problem.num_microbatches * slot.steady_K + np.maximum(slot.boundary_K, 0.0)
    index_K = np.flatnonzero(problem.uses_all() & (least_K <= known * _ROUNDING))
    return _joined(problem, [np.stack([np.zeros_like(index_K), index_K, np.zeros_like(index_K), index_K * 0 - 1])])


def _joined(problem: InterStageProblem, found: list[IntArray]) -> Arcs:
    """Arcs from stage, choice, and nodes, which are numbered anew."""
    stage_K, choice_K, from_K, to_K = np.concatenate([np.empty((4, 0), dtype=np.int64), *found], axis=1)
    _, number = np.unique(np.concatenate([from_K, to_K[to_K >= 0]]), return_inverse=True)
    number = number.reshape(-1)
    renumbered = np.full(len(to_K), -1, dtype=np.int64)
    renumbered[to_K >= 0] = number[len(from_K) :]
    steady_K, boundary_K = np.empty(len(stage_K)), np.empty(len(stage_K))
    for stage, slot in enumerate(problem.slots):
        inside_K = stage_K == stage
        steady_K[inside_K] = slot.steady_K[choice_K[inside_K]]
        boundary_K[inside_K] = slot.boundary_K[choice_K[inside_K]]
    return Arcs(
        stage_K=stage_K,
        from_K=number[: len(from_K)],
        to_K=renumbered,
        choice_K=choice_K,
        steady_K=steady_K,
        boundary_K=boundary_K,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Choices of a stage at states that can matter.

    Attributes:
        is_head: Whether it is a first stage.
        from_K: The state that holds it and what is behind it; 0 of first stages.
        to_K: The state behind it; -1 if there is none.
        choice_K: Index of the choice in its slot.
        seams_K: Which of the stages next to it lie in others, as of choices.
    """

    behind: int
    is_head: bool
    from_K: IntArray
    to_K: IntArray
    choice_K: IntArray
    seams_K: IntArray


def matching(
    suffixes: Suffixes, walk: SuffixWalk, num_microbatches: int, least_bottleneck: float, known: float
) -> Iterator[Matching]:
    """All choices at states that an answer of at most ``known`` seconds can have, from first stages to last ones.

    Args:
        walk: A pass at the most steady seconds of a stage.
        least_bottleneck: Steady seconds that the slowest stage of any answer takes at least.
        known: Step seconds.
    """

    def matters(
        front: FloatArray | float, steady: FloatArray, reach: FloatArray, sums: FloatArray | float
    ) -> BoolArray:
        slowest = (num_microbatches - 1) * np.clip(steady, least_bottleneck, walk.bottleneck)
        least = slowest + np.maximum(front + steady, reach) + sums
        return (steady <= walk.bottleneck) & np.isfinite(front + sums) & (least <= known * _ROUNDING)

    states = walk.states
    front_J = np.full(len(states.row_J) + 1, np.inf)
    for behind in range(len(walk.sums), 0, -1):
        sums_J, next_J = walk.sums[behind - 1], np.full_like(front_J, np.inf)
        if (front_J < np.inf).any():
            options = suffixes.middle[behind - 1]
            options = options.take(options.least_K <= walk.bottleneck)
            for some, at_J, source_KJ in suffixes.sources(options, states, {}):
                column = slice(None) if some.steady_KL.shape[1] == 1 else states.row_J[at_J]
                steady_KJ, reach_KJ = some.steady_KL[:, column], some.reach_KL[:, column]
                kept_KJ = matters(front_J[at_J], steady_KJ, reach_KJ, sums_J[source_KJ])
                option, place = np.nonzero(kept_KJ)
                from_K, to_K = at_J[place], source_KJ[option, place]
                np.minimum.at(next_J, to_K, front_J[from_K] + np.broadcast_to(steady_KJ, kept_KJ.shape)[option, place])
                yield Matching(
                    behind=behind,
                    is_head=False,
                    from_K=from_K,
                    to_K=to_K,
                    choice_K=np.broadcast_to(some.index_KL[:, column], kept_KJ.shape)[option, place],
                    seams_K=suffixes.chain.seams(some.part_K[option], states.used_J[to_K], states.used_J[from_K]),
                )
        if behind + 1 in suffixes.heads:
            head = suffixes.heads[behind + 1]
            behind_K = suffixes.behind_head(head, states)
            kept_K = matters(0.0, head.steady_K, head.reach_K, sums_J[behind_K])
            np.minimum.at(next_J, behind_K[kept_K], head.steady_K[kept_K])
            yield _of_end(suffixes, head.take(kept_K), behind, 0 * behind_K[kept_K], behind_K[kept_K])
        front_J = next_J
    last, place_K = suffixes.last, suffixes.last_places(states)
    kept_K = matters(front_J[place_K], last.steady_K, last.reach_K, 0.0)
    yield _of_end(suffixes, last.take(kept_K), 0, place_K[kept_K], np.full(int(kept_K.sum()), -1))


def _of_end(suffixes: Suffixes, ends: EndOptions, behind: int, from_K: IntArray, to_K: IntArray) -> Matching:
    chain = suffixes.chain
    units_K = ends.devices_K // chain.unit_by_part[ends.part_K]
    end_K = np.full_like(units_K, chain.size - 1) if behind else units_K
    return Matching(
        behind=behind,
        is_head=behind > 0,
        from_K=from_K,
        to_K=to_K,
        choice_K=ends.index_K,
        seams_K=chain.seams(ends.part_K, end_K - units_K, end_K),
    )
