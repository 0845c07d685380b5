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
ones, so that the relaxation is tight. Memory does not appear: what does not fit is not a choice. Arcs that no answer as
good as a known one can have are left out (:mod:`lightning_mist.tuner.inter_stage.arcs`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import thread_time
from typing import Any, Literal

import highspy
import numpy as np

from lightning_mist.console import printed_aside
from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.tuner.inter_stage.arcs import Arcs, arcs_of
from lightning_mist.tuner.inter_stage.problem import PRECISION, Answer, Incumbent, InterStageProblem
from lightning_mist.tuner.options import OPTIONS

Status = Literal["optimal", "infeasible", "time limit"]

TOLERANCE = 1e-9
"""Feasibility tolerance of rows and integrality, in scaled units; HiGHS's own 1e-6 would show in step times."""


class SolverError(RuntimeError):
    """HiGHS ended otherwise than with an answer, a proof that there is none, or because time was up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver says.

    Attributes:
        status: ``"optimal"`` within the solver's tolerances, ``"infeasible"``, or ``"time limit"``.
        values: Value of every variable; empty if there is no feasible point.
        objective: Objective at these values, infinite without.
        bound: Proven lower bound of the objective.
    """

    status: Status
    values: FloatArray
    objective: float
    bound: float


@dataclass(slots=True)
class _Rows:
    starts: list[int] = field(default_factory=lambda: [0])
    indices: list[IntArray] = field(default_factory=list)
    values: list[FloatArray] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)


class FlowProgram:
    """A mixed-integer linear program to be minimised.

    Args:
        scale: Typical size of the continuous variables and of the objective, such as the largest time in seconds.

    Raises:
        ValueError: If the scale is not positive and finite.
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not 0.0 < scale < np.inf:
            raise ValueError(f"scale = {scale}: a scale is positive and finite")
        self.scale = scale
        self._costs: list[FloatArray] = []
        self._binary: list[bool] = []
        self._upper: list[float] = []
        self._rows = _Rows()

    @property
    def num_variables(self) -> int:
        """Number of variables so far."""
        return len(self._binary)

    def add_binaries(self, costs: Sequence[float] | FloatArray) -> IntArray:
        """Variables in {0, 1} with these objective coefficients; returns their indices."""
        return self._add(np.asarray(costs, dtype=np.float64) / self.scale, binary=True, upper=1.0)

    def add_shares(self, number: int) -> IntArray:
        """Variables from 0 to 1 that cost nothing themselves; returns their indices."""
        return self._add(np.zeros(number), binary=False, upper=1.0)

    def add_seconds(self, costs: Sequence[float] | FloatArray) -> IntArray:
        """Variables of at least 0 that are measured in units of the scale; returns their indices."""
        return self._add(np.asarray(costs, dtype=np.float64), binary=False, upper=np.inf)

    def _add(self, costs: FloatArray, *, binary: bool, upper: float) -> IntArray:
        first = self.num_variables
        self._costs.append(costs)
        self._binary += [binary] * len(costs)
        self._upper += [upper] * len(costs)
        return np.arange(first, first + len(costs))

    def add_row(
        self,
        plain: IntArray,
        coefficients: FloatArray,
        *,
        lower: float = -np.inf,
        upper: float = np.inf,
        seconds: Sequence[tuple[int, float]] = (),
    ) -> None:
        """A constraint ``lower <= sum of coefficients x plain + sum of factors x seconds <= upper``.

        Args:
            plain: Indices of variables without a unit: binary ones and shares.
            coefficients: Their coefficients; in a row with ``seconds`` these are times and are scaled.
            lower: Lower limit (0 or infinite in a row with ``seconds``).
            upper: Upper limit (0 or infinite in a row with ``seconds``).
            seconds: Index and factor of variables in seconds.
        """
        factor = 1.0 / self.scale if seconds else 1.0
        indices = np.concatenate([plain, np.array([index for index, _ in seconds], dtype=np.int64)])
        values = np.concatenate([coefficients * factor, np.array([value for _, value in seconds])])
        self._rows.indices.append(indices)
        self._rows.values.append(values)
        self._rows.starts.append(self._rows.starts[-1] + len(indices))
        self._rows.lower.append(lower)
        self._rows.upper.append(upper)

    def solve(self, *, time_limit: float, start: FloatArray | None = None) -> Solution:
        """Minimise.

        Args:
            time_limit: Seconds after which the best point so far is taken.
            start: A feasible point to begin with: every variable's value, times in seconds.

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
        if start is not None:
            point = highspy.HighsSolution()
            point.col_value = list(np.where(self._plain(), start, start / self.scale))
            solver.setSolution(point)
        solver.run()
        return self._read(solver)

    def _plain(self) -> BoolArray:
        """Which variables are without a unit."""
        return np.isfinite(self._upper)

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = self.num_variables, len(self._rows.lower)
        model.col_cost_ = np.concatenate(self._costs)
        model.col_lower_ = np.zeros(self.num_variables)
        model.col_upper_ = np.minimum(self._upper, highspy.kHighsInf)
        model.row_lower_ = np.maximum(self._rows.lower, -highspy.kHighsInf)
        model.row_upper_ = np.minimum(self._rows.upper, highspy.kHighsInf)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._rows.starts, dtype=np.int32)
        model.a_matrix_.index_ = np.concatenate(self._rows.indices).astype(np.int32)
        model.a_matrix_.value_ = np.concatenate(self._rows.values)
        integer, continuous = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        model.integrality_ = [integer if is_binary else continuous for is_binary in self._binary]
        return model

    def _read(self, solver: Any) -> Solution:
        statuses = highspy.HighsModelStatus
        status, info = solver.getModelStatus(), solver.getInfo()
        if status == statuses.kInfeasible:
            return Solution(status="infeasible", values=np.empty(0), objective=np.inf, bound=np.inf)
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        stopped = status in (statuses.kTimeLimit, statuses.kSolutionLimit, statuses.kInterrupt)
        if not stopped and not (status == statuses.kOptimal and found):
            raise SolverError(f"HiGHS ended with {solver.modelStatusToString(status)} on a program it should solve")
        bound = info.mip_dual_bound * self.scale
        if not found:
            return Solution(status="time limit", values=np.empty(0), objective=np.inf, bound=bound)
        values = np.array(solver.getSolution().col_value)
        values = np.where(self._plain(), np.where(self._binary, np.round(values), values), values * self.scale)
        return Solution(
            status="time limit" if stopped else "optimal",
            values=values,
            objective=info.objective_function_value * self.scale,
            bound=bound,
        )


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
        return none if incumbent is None or np.isinf(known) else _unproven(problem, incumbent)
    if incumbent is not None and incumbent.chosen and len(arcs) > OPTIONS.check_arcs:
        return _unproven(problem, incumbent)
    program = FlowProgram(scale=max(1e-12, float(arcs.steady_A.max()), float(arcs.boundary_A.max())))
    x = program.add_binaries(arcs.steady_A)
    slowest, exposed = (int(index) for index in program.add_seconds([problem.num_microbatches - 1.0, 1.0]))
    add_one_flow(program, arcs, x)
    add_slowest(program, arcs, x, slowest)
    bottlenecks = _bottlenecks(arcs)
    shares = add_bottlenecks(program, arcs, x, slowest, bottlenecks)
    add_exposed(program, arcs, x, exposed)
    start = None
    path = _path(arcs, incumbent.chosen) if incumbent is not None else ()
    if path:
        start = np.zeros(program.num_variables)
        start[x[list(path)]] = 1.0
        start[slowest] = arcs.steady_A[list(path)].max()
        start[exposed] = _exposed(arcs.steady_A[list(path)], arcs.boundary_A[list(path)])
        start[shares] = bottlenecks[1:] <= start[slowest]
    solution = program.solve(time_limit=time_limit, start=start)
    if not len(solution.values):
        if incumbent is None or np.isinf(known):
            return replace(none, bound=max(solution.bound, problem.lower_bound()))
        # A program that has a known answer and that the solver calls infeasible has proven nothing either.
        bound = -np.inf if solution.status == "infeasible" else solution.bound
        return _unproven(problem, incumbent, bound)
    taken = np.flatnonzero(solution.values[x] > 0.5)
    order = taken[np.argsort(arcs.stage_A[taken])]
    chosen = tuple(int(index) for index in arcs.choice_A[order])
    objective = problem.objective(chosen)
    if incumbent is not None and incumbent.chosen and incumbent.objective <= objective:
        chosen, objective = incumbent.chosen, incumbent.objective
    bound = min(max(solution.bound, problem.lower_bound()), objective)
    return Answer(chosen=chosen, objective=objective, bound=bound)


def _unproven(problem: InterStageProblem, incumbent: Answer, bound: float = -np.inf) -> Answer:
    """A known answer with what is known without the solver, or with what it says if that is more."""
    return replace(incumbent, bound=min(max(bound, problem.lower_bound()), incumbent.objective))


def _bottlenecks(arcs: Arcs) -> FloatArray:
    """The least bottleneck time and some of the steady times above it."""
    # Some stage takes at least the largest of the stages' least times.
    least = max(float(arcs.steady_A[arcs.stage_A == stage].min()) for stage in range(int(arcs.stage_A.max()) + 1))
    above = np.unique(arcs.steady_A[arcs.steady_A > least])
    if len(above) > OPTIONS.check_paces:
        above = above[np.unique(np.linspace(0, len(above) - 1, OPTIONS.check_paces).round().astype(np.int64))]
    return np.concatenate([[least], above])


def _path(arcs: Arcs, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """The arcs of an answer; none if it has one that was left out because another choice is as good."""
    node, path = 0, []
    for stage, choice in enumerate(chosen):
        fits = np.flatnonzero((arcs.stage_A == stage) & (arcs.choice_A == choice) & (arcs.from_A == node))
        if not len(fits):
            return ()
        path.append(int(fits[0]))
        node = int(arcs.to_A[fits[0]])
    return tuple(path)


def _exposed(steady: FloatArray, boundary: FloatArray) -> float:
    """Boundary time of stages that the steady times in front of them do not hide."""
    return max(0.0, float((boundary - np.cumsum(steady) + steady).max()))


def add_one_flow(program: FlowProgram, arcs: Arcs, x: IntArray) -> None:
    """One unit leaves the first node; what enters any other leaves it."""
    inner = arcs.to_A >= 0
    node = np.concatenate([arcs.from_A, arcs.to_A[inner]])
    sign = np.concatenate([np.ones(len(arcs)), -np.ones(int(inner.sum()))])
    variable = np.concatenate([x, x[inner]])
    order = np.argsort(node, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(node[order])) + 1):
        amount = 1.0 if node[part[0]] == 0 else 0.0
        program.add_row(variable[part], sign[part], lower=amount, upper=amount)


def add_slowest(program: FlowProgram, arcs: Arcs, x: IntArray, slowest: int) -> None:
    """T is at least the steady time of every stage."""
    for stage in range(int(arcs.stage_A.max()) + 1):
        at = arcs.stage_A == stage
        program.add_row(x[at], -arcs.steady_A[at], lower=0.0, seconds=[(slowest, 1.0)])


def add_bottlenecks(program: FlowProgram, arcs: Arcs, x: IntArray, slowest: int, bottlenecks: FloatArray) -> IntArray:
    """T is at least every steady time that some stage reaches; returns the variables W."""
    shares = program.add_shares(len(bottlenecks) - 1)
    for stage in range(int(arcs.stage_A.max()) + 1):
        at = arcs.stage_A == stage
        variables, steady = x[at], arcs.steady_A[at]
        for share, bottleneck in zip(shares, bottlenecks[1:], strict=True):
            slow = variables[steady >= bottleneck]
            if len(slow):
                program.add_row(np.append(slow, share), np.append(-np.ones(len(slow)), 1.0), lower=0.0)
    # A variable without cost that is always 1 would do for p[0]; the flow out of the first node is.
    first = x[arcs.from_A == 0]
    steps = np.concatenate([np.full(len(first), -bottlenecks[0]), -np.diff(bottlenecks)])
    program.add_row(np.concatenate([first, shares]), steps, lower=0.0, seconds=[(slowest, 1.0)])
    return shares


def add_exposed(program: FlowProgram, arcs: Arcs, x: IntArray, exposed: int) -> None:
    """D is at least what of a stage's boundary time exceeds the steady times of the stages before it."""
    for stage in range(int(arcs.stage_A.max()) + 1):
        at, before = arcs.stage_A == stage, arcs.stage_A < stage
        coefficients = np.concatenate([arcs.steady_A[before], -arcs.boundary_A[at]])
        program.add_row(np.concatenate([x[before], x[at]]), coefficients, lower=0.0, seconds=[(exposed, 1.0)])


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
