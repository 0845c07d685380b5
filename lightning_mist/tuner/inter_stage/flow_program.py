"""The inter-stage problem as a mixed-integer program: the cheapest flow of one unit through the states of a pipeline.

Sets
    i = 0 .. S-1  stages
    v             nodes: a stage with what it and those behind it hold, layers and devices of every part
    a             arcs: a choice of stage i(a) at a node, with steady time t[a] and boundary time d[a]; each leads to
                  what the stages behind hold, from the whole network and all devices to nothing
    k = 1 .. K    some of the steady times that arcs have, p[1] < .. < p[K], above the least bottleneck time p[0]

Variables
    x[a] in {0, 1}        the pipeline has arc a
    W[k] in [0, 1]        some stage takes p[k] or more
    T >= 0                steady time of the slowest stage
    D >= 0                boundary time that no earlier stage hides

Minimise  (G - 1) T + sum_a t[a] x[a] + D

subject to
    one flow           sum_{a from v} x[a] - sum_{a to v} x[a] = 1 at the first node, 0 elsewhere      for every v
    slowest            T >= sum_{a: i(a) = i} t[a] x[a]                                               for every i
    bottlenecks        W[k] >= sum_{a: i(a) = i, t[a] >= p[k]} x[a]                                   for every i and k
                       T >= p[0] + sum_k (p[k] - p[k-1]) W[k]
    exposed            D >= sum_{a: i(a) = i} d[a] x[a] - sum_{a: i(a) < i} t[a] x[a]                 for every i

Layers, devices and places need no constraints: they are what nodes are. Without T and D the flow has whole solutions by
itself. "Bottlenecks" follows from the rest for whole x; it keeps solutions in parts from mixing slow stages with fast
ones, so that the relaxation is tight. Memory does not appear: what does not fit is not a choice.

Of all arcs only those are kept that can be part of an answer that is not worse than a known one (:func:`matching`).
With ``f`` and ``b`` the least sums of the steady times of the stages in front of one and behind it, ``t`` and ``d`` its
own steady and boundary time and ``T`` the least bottleneck time of any answer,

    (G - 1) max(t, T) + max(f + t, t + d) + b  <=  known.

Array axes
    K  arcs, choices of a slot, or options (see :mod:`lightning_mist.tuner.inter_stage.problem`)
    J  states (see :mod:`lightning_mist.tuner.inter_stage.suffix_dp`)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import thread_time
from typing import Any, NamedTuple, TypeAlias

import highspy
import numpy as np

from lightning_mist.console import printed_aside
from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.tuner.inter_stage.problem import PRECISION, Answer, EndOptions, Incumbent, InterStageProblem
from lightning_mist.tuner.inter_stage.suffix_dp import PassedOptions, Suffixes, SuffixWalk
from lightning_mist.tuner.options import OPTIONS

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
    passed = PassedOptions(suffixes, np.flatnonzero(suffixes.options.least_K <= walk.bottleneck), states)
    options = passed.options
    front_J = np.full(len(states.row_J) + 1, np.inf)
    for behind in range(len(walk.sums), 0, -1):
        sums_J, next_J = walk.sums[behind - 1], np.full_like(front_J, np.inf)
        if (front_J < np.inf).any():
            for some, at_J, source_KJ in passed.sources(behind - 1):
                column = slice(None) if options.steady_KL.shape[1] == 1 else states.row_J[at_J]
                steady_KJ, reach_KJ = options.steady_KL[some, column], options.reach_KL[some, column]
                kept_KJ = matters(front_J[at_J], steady_KJ, reach_KJ, sums_J[source_KJ])
                option, place = np.nonzero(kept_KJ)
                from_K, to_K = at_J[place], source_KJ[option, place]
                np.minimum.at(next_J, to_K, front_J[from_K] + np.broadcast_to(steady_KJ, kept_KJ.shape)[option, place])
                yield Matching(
                    behind=behind,
                    is_head=False,
                    from_K=from_K,
                    to_K=to_K,
                    choice_K=np.broadcast_to(options.index_KL[some, column], kept_KJ.shape)[option, place],
                    seams_K=suffixes.chain.seams(
                        options.part_K[some][option], states.used_J[to_K], states.used_J[from_K]
                    ),
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


TOLERANCE = 1e-9
"""Feasibility tolerance of rows and integrality, in scaled units; HiGHS's own 1e-6 would show in step times."""


class SolverError(RuntimeError):
    """HiGHS ended otherwise than with an answer, a proof that there is none, or because time was up."""


class Solution(NamedTuple):
    """What the solver says.

    Attributes:
        taken: Whether each arc is part of the pipeline; empty if there is no feasible point.
        bound: Proven lower bound of the objective in seconds, infinite if there is proven to be no feasible point.
    """

    taken: BoolArray
    bound: float


_Row: TypeAlias = tuple[IntArray, FloatArray, float, float]
"""Variables of a constraint, their coefficients, and the lower and upper limit of the sum."""


class FlowProgram:
    """The program of some arcs: variables are ``x``, ``T``, ``D``, then ``W``; seconds are in units of the largest."""

    def __init__(self, arcs: Arcs, num_microbatches: int) -> None:
        self.scale = max(1e-12, float(arcs.steady_K.max()), float(arcs.boundary_K.max()))
        self.arcs = replace(arcs, steady_K=arcs.steady_K / self.scale, boundary_K=arcs.boundary_K / self.scale)
        self.bottlenecks = _bottlenecks(self.arcs)
        self._slowest, self._exposed = len(arcs), len(arcs) + 1
        self._shares = len(arcs) + 2 + np.arange(len(self.bottlenecks) - 1)
        self._costs = np.concatenate([self.arcs.steady_K, [num_microbatches - 1, 1], np.zeros(len(self._shares))])
        stages = [self.arcs.stage_K == stage for stage in range(int(arcs.stage_K.max()) + 1)]
        self._stages = [np.flatnonzero(at_K) for at_K in stages]

    def solve(self, *, time_limit: float, path: tuple[int, ...] = ()) -> Solution:
        """Minimise.

        Args:
            time_limit: Seconds after which the best point so far is taken.
            path: The arcs of a feasible point to begin with, if one is known.

        Raises:
            SolverError: If HiGHS ends in any other way.
        """
        with printed_aside():  # HiGHS 1.16 prints its name and licence before it can be told not to
            solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (
            ("output_flag", False),
            ("time_limit", float(time_limit)),
            ("mip_rel_gap", 0.0),
            ("mip_abs_gap", 0.0),
            ("mip_feasibility_tolerance", TOLERANCE),
            ("primal_feasibility_tolerance", TOLERANCE),
        ):
            solver.setOptionValue(option, value)
        solver.passModel(self._model())
        if path:
            point = highspy.HighsSolution()
            point.col_value = list(self._point(path))
            solver.setSolution(point)
        solver.run()
        return self._read(solver)

    def _point(self, path: tuple[int, ...]) -> FloatArray:
        """The values of all variables where the pipeline has these arcs."""
        found, at = np.zeros(len(self._costs)), list(path)
        steady, boundary = self.arcs.steady_K[at], self.arcs.boundary_K[at]
        found[at] = 1.0
        found[self._slowest] = steady.max()
        # Boundary time of stages that the steady times in front of them do not hide.
        found[self._exposed] = max(0.0, float((boundary - np.cumsum(steady) + steady).max()))
        found[self._shares] = self.bottlenecks[1:] <= steady.max()
        return found

    def _model(self) -> highspy.HighsLp:
        rows = [*self._one_flow(), *self._slowest_stage(), *self._paces(), *self._not_hidden()]
        indices, values, lower, upper = zip(*rows, strict=True)
        num_arcs, num_variables = len(self.arcs), len(self._costs)
        most = np.ones(num_variables)
        most[[self._slowest, self._exposed]] = highspy.kHighsInf
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = num_variables, len(rows)
        model.col_cost_, model.col_lower_, model.col_upper_ = self._costs, np.zeros(num_variables), most
        model.row_lower_, model.row_upper_ = np.array(lower), np.minimum(upper, highspy.kHighsInf)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *map(len, indices)], dtype=np.int32)
        model.a_matrix_.index_ = np.concatenate(indices).astype(np.int32)
        model.a_matrix_.value_ = np.concatenate(values)
        integer, continuous = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        model.integrality_ = [integer] * num_arcs + [continuous] * (num_variables - num_arcs)
        return model

    def _one_flow(self) -> Iterator[_Row]:
        """One unit leaves the first node; what enters any other leaves it."""
        inner = np.flatnonzero(self.arcs.to_K >= 0)
        node = np.concatenate([self.arcs.from_K, self.arcs.to_K[inner]])
        sign = np.concatenate([np.ones(len(self.arcs)), -np.ones(len(inner))])
        variable = np.concatenate([np.arange(len(self.arcs)), inner])
        order = np.argsort(node, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(node[order])) + 1):
            amount = 1.0 if node[part[0]] == 0 else 0.0
            yield variable[part], sign[part], amount, amount

    def _slowest_stage(self) -> Iterator[_Row]:
        """T is at least the steady time of every stage."""
        for at in self._stages:
            yield np.append(at, self._slowest), np.append(-self.arcs.steady_K[at], 1.0), 0.0, np.inf

    def _paces(self) -> Iterator[_Row]:
        """T is at least every steady time that some stage reaches."""
        for at in self._stages:
            steady = self.arcs.steady_K[at]
            for share, bottleneck in zip(self._shares, self.bottlenecks[1:], strict=True):
                slow = at[steady >= bottleneck]
                if len(slow):
                    yield np.append(slow, share), np.append(-np.ones(len(slow)), 1.0), 0.0, np.inf
        # A variable without cost that is always 1 would do for p[0]; the flow out of the first node is.
        first = np.flatnonzero(self.arcs.from_K == 0)
        steps = np.concatenate([np.full(len(first), -self.bottlenecks[0]), -np.diff(self.bottlenecks), [1.0]])
        yield np.concatenate([first, self._shares, [self._slowest]]), steps, 0.0, np.inf

    def _not_hidden(self) -> Iterator[_Row]:
        """D is at least what of a stage's boundary time exceeds the steady times of the stages before it."""
        for stage, at in enumerate(self._stages):
            before = np.concatenate([np.empty(0, dtype=np.int64), *self._stages[:stage]])
            coefficients = np.concatenate([self.arcs.steady_K[before], -self.arcs.boundary_K[at], [1.0]])
            yield np.concatenate([before, at, [self._exposed]]), coefficients, 0.0, np.inf

    def _read(self, solver: Any) -> Solution:
        statuses = highspy.HighsModelStatus
        status, info = solver.getModelStatus(), solver.getInfo()
        if status == statuses.kInfeasible:
            return Solution(np.empty(0, dtype=bool), np.inf)
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        stopped = status in (statuses.kTimeLimit, statuses.kSolutionLimit, statuses.kInterrupt)
        if not stopped and not (status == statuses.kOptimal and found):
            raise SolverError(f"HiGHS ended with {solver.modelStatusToString(status)} on a program it should solve")
        values = np.array(solver.getSolution().col_value) if found else np.empty(0)
        return Solution(values[: len(self.arcs)] > 0.5, info.mip_dual_bound * self.scale)


_REFUTED = "HiGHS has found a faster plan than the dynamic program had proven to be possible: please report this"


def solve_program(problem: InterStageProblem, *, time_limit: float, incumbent: Answer | None = None) -> Answer:
    """The best answer according to HiGHS, with the bound that it has proven.

    Args:
        time_limit: Seconds after which the best answer so far is taken.
        incumbent: An answer to begin with. What cannot belong to one as good is left out.

    Returns:
        The best answer and a bound. If time is up, or if more arcs than :data:`OPTIONS` says could belong to something
        better, that is the incumbent or something better, with a bound that may be far below; without a feasible
        answer the choice is empty.

    Raises:
        SolverError: If the solver ends with neither an answer nor a proof for another reason than time.
    """
    none = Answer(chosen=(), objective=np.inf, bound=np.inf)
    if any(not len(slot) for slot in problem.slots):
        return none
    known = incumbent.objective if incumbent is not None and incumbent.chosen else np.inf
    arcs = arcs_of(problem, known)
    if not len(arcs):
        # With a known answer there are its own arcs: that none are left has proven nothing.
        return none if incumbent is None or np.isinf(known) else _unproven(incumbent)
    if incumbent is not None and incumbent.chosen and len(arcs) > OPTIONS.check_arcs:
        return _unproven(incumbent)
    program = FlowProgram(arcs, problem.num_microbatches)
    path = _path(arcs, incumbent.chosen) if incumbent is not None else ()
    solution = program.solve(time_limit=time_limit, path=path)
    if not len(solution.taken):
        if incumbent is None or np.isinf(known):
            return replace(none, bound=solution.bound)
        # A program that has a known answer and that the solver calls infeasible has proven nothing either.
        return _unproven(incumbent, solution.bound if solution.bound < np.inf else -np.inf)
    taken = np.flatnonzero(solution.taken)
    order = taken[np.argsort(arcs.stage_K[taken])]
    chosen = tuple(int(index) for index in arcs.choice_K[order])
    objective = problem.objective(chosen)
    if incumbent is not None and incumbent.chosen and incumbent.objective <= objective:
        chosen, objective = incumbent.chosen, incumbent.objective
    return Answer(chosen=chosen, objective=objective, bound=min(solution.bound, objective))


def _unproven(incumbent: Answer, bound: float = -np.inf) -> Answer:
    """A known answer with what the solver has proven, if anything."""
    return replace(incumbent, bound=min(bound, incumbent.objective))


def _bottlenecks(arcs: Arcs) -> FloatArray:
    """The least bottleneck time and some of the steady times above it."""
    # Some stage takes at least the largest of the stages' least times.
    least = max(float(arcs.steady_K[arcs.stage_K == stage].min()) for stage in range(int(arcs.stage_K.max()) + 1))
    above = np.unique(arcs.steady_K[arcs.steady_K > least])
    if len(above) > OPTIONS.check_paces:
        above = above[np.unique(np.linspace(0, len(above) - 1, OPTIONS.check_paces).round().astype(np.int64))]
    return np.concatenate([[least], above])


def _path(arcs: Arcs, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """The arcs of an answer; none if it has one that was left out because another choice is as good."""
    node, path = 0, []
    for stage, choice in enumerate(chosen):
        fits = np.flatnonzero((arcs.stage_K == stage) & (arcs.choice_K == choice) & (arcs.from_K == node))
        if not len(fits):
            return ()
        path.append(int(fits[0]))
        node = int(arcs.to_K[fits[0]])
    return tuple(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What HiGHS says of an answer that the dynamic program has found.

    Attributes:
        found: The answer, or the better one that HiGHS has found.
        certified: Whether it has proven that there is none better.
        refutes: Whether its answer is better than what the dynamic program had proven to be possible.
        failure: Why HiGHS has no answer, if it ended without one before its time.
    """

    found: Incumbent
    certified: bool
    refutes: bool
    failure: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of it."""
        failed = (f"not checked by HiGHS: {self.failure}",) if self.failure else ()
        return (_REFUTED,) if self.refutes else failed


def check(found: Incumbent, deadline: float) -> Checked:
    """Let HiGHS look for something better."""
    time_limit = max(0.1, min(OPTIONS.check_seconds, deadline - thread_time()))
    try:
        answer = solve_program(found.problem, time_limit=time_limit, incumbent=found.answer)
    except SolverError as error:
        return Checked(found=found, certified=False, refutes=False, failure=str(error))
    is_better = answer.objective < found.answer.objective
    return Checked(
        found=Incumbent(problem=found.problem, answer=answer) if is_better else found,
        certified=answer.is_proven,
        refutes=answer.objective < found.answer.bound * (1 - PRECISION),
    )
