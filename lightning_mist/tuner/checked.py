"""The dynamic program's answer, looked at once more by HiGHS."""

from dataclasses import dataclass
from time import perf_counter

from lightning_mist.tuner.inter_stage import solve_program
from lightning_mist.tuner.milp import SolverError
from lightning_mist.tuner.problem import PRECISION, Incumbent

CHECK_SECONDS = 5.0
"""The most seconds for which HiGHS checks a proven optimum."""

_REFUTED = "HiGHS has found a faster plan than the dynamic program had proven to be possible: please report this"


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
    time_limit = max(0.1, min(CHECK_SECONDS, deadline - perf_counter()))
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
