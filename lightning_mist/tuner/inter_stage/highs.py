"""The few things asked of HiGHS: variables, rows, a solution to start from, a time limit; status, bound and gap back.

Times of one problem span orders of magnitude, and solvers judge feasibility by absolute tolerances, so seconds are
divided by their scale on the way in and multiplied again on the way out. Nothing outside this module knows of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import highspy
import numpy as np

from lightning_mist.console import printed_aside
from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray

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


class Program:
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
