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

from dataclasses import dataclass, replace
from time import thread_time

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.tuner.inter_stage.arcs import Arcs, arcs_of
from lightning_mist.tuner.inter_stage.highs import Program, SolverError
from lightning_mist.tuner.inter_stage.problem import PRECISION, Answer, Incumbent, InterStageProblem

PACES = 64
"""The most steady times for which there are constraints of the family "bottlenecks"."""


MOST_ARCS = 60_000
"""The most arcs for which a program is made if there is an incumbent: with more, HiGHS only reads it in seconds."""


CHECK_SECONDS = 5.0
"""The most seconds for which HiGHS checks a proven optimum."""

_REFUTED = "HiGHS has found a faster plan than the dynamic program had proven to be possible: please report this"


def solve_program(problem: InterStageProblem, *, time_limit: float, incumbent: Answer | None = None) -> Answer:
    """The best answer according to HiGHS, with the bound that it has proven.

    Args:
        time_limit: Seconds after which the best answer so far is taken.
        incumbent: An answer to begin with. What cannot belong to one as good is left out.

    Returns:
        The best answer and a bound. If time is up, or if more than :data:`MOST_ARCS` arcs could belong to something
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
    if incumbent is not None and incumbent.chosen and len(arcs) > MOST_ARCS:
        return _unproven(problem, incumbent)
    program = Program(scale=max(1e-12, float(arcs.steady_A.max()), float(arcs.boundary_A.max())))
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
    if len(above) > PACES:
        above = above[np.unique(np.linspace(0, len(above) - 1, PACES).round().astype(np.int64))]
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


def add_one_flow(program: Program, arcs: Arcs, x: IntArray) -> None:
    """One unit leaves the first node; what enters any other leaves it."""
    inner = arcs.to_A >= 0
    node = np.concatenate([arcs.from_A, arcs.to_A[inner]])
    sign = np.concatenate([np.ones(len(arcs)), -np.ones(int(inner.sum()))])
    variable = np.concatenate([x, x[inner]])
    order = np.argsort(node, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(node[order])) + 1):
        amount = 1.0 if node[part[0]] == 0 else 0.0
        program.add_row(variable[part], sign[part], lower=amount, upper=amount)


def add_slowest(program: Program, arcs: Arcs, x: IntArray, slowest: int) -> None:
    """T is at least the steady time of every stage."""
    for stage in range(int(arcs.stage_A.max()) + 1):
        at = arcs.stage_A == stage
        program.add_row(x[at], -arcs.steady_A[at], lower=0.0, seconds=[(slowest, 1.0)])


def add_bottlenecks(program: Program, arcs: Arcs, x: IntArray, slowest: int, bottlenecks: FloatArray) -> IntArray:
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


def add_exposed(program: Program, arcs: Arcs, x: IntArray, exposed: int) -> None:
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
    time_limit = max(0.1, min(CHECK_SECONDS, deadline - thread_time()))
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
