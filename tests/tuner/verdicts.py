"""The planner's answer beside what trying everything finds; for tests only."""

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.errors import InfeasibleError
from tests.tuner.whole_space import Best, by_trying_everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the planner's answer compares.

    Attributes:
        wanted: What trying everything finds.
        seconds: The planner's least seconds by the closed form; infinite if it found no plan.
        bound: What it says that no plan goes below.
        status: Its status, or ``"infeasible"``.
        message: What it says where there is no plan.
    """

    wanted: Best
    seconds: float
    bound: float
    status: str
    message: str = ""

    @property
    def difference(self):
        """Relative difference of the seconds; infinite if only one of the two found a plan."""
        if self.seconds == self.wanted.seconds:
            return 0.0
        return abs(self.seconds / self.wanted.seconds - 1) if np.isfinite(self.wanted.seconds) else np.inf


def asked_before(instance):
    """A planner that has been asked with other memory and another batch."""
    planner = instance.planner()
    for other in (replace(instance, memory_limit=2 * instance.memory_limit), replace(instance, rows=2 * instance.rows)):
        with suppress(InfeasibleError):
            other.tune(planner)
    return planner


def verdict_of(instance, planner=None, wanted=None):
    """Ask the planner, and try everything.

    Args:
        instance: The question.
        planner: The planner to ask; by default a new one.
        wanted: What trying everything finds, if it is known.
    """
    wanted = wanted or by_trying_everything(instance)
    try:
        found = instance.tune(planner)
    except InfeasibleError as error:
        return Verdict(wanted=wanted, seconds=np.inf, bound=np.inf, status="infeasible", message=str(error))
    return Verdict(wanted=wanted, seconds=found.bound / (1 - found.gap), bound=found.bound, status=found.status)
