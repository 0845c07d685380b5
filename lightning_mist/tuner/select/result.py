"""What a search found, and how to say why."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_mist.plan import Plan, Predicted
from lightning_mist.tuner.inter_stage import PRECISION
from lightning_mist.units import format_bytes, format_seconds

Status = Literal["optimal", "explored", "time limit"]

CERTIFIED = (
    "HiGHS certifies that no plan with as many stages and microbatches as the best by the closed form is faster by it "
    "than that one"
)
"""What is said if HiGHS has proven its part."""

UNCERTIFIED = "HiGHS has not certified it"
"""What is said if it has not."""

CLOSED_FORM_AND_CLOCK = (
    "the closed form is the formula of a step's seconds that the search minimises; the clock runs a plan's schedule "
    "action by action, and predicted steps are the clock's"
)
"""What the two kinds of seconds are."""

LEAST_SHARE = 5e-4
"""A share of the seconds that shows in figures with one decimal of a percent."""


def status_of(gap: float) -> Status:
    """What a search has proven that may have left out faster plans by a share of their seconds."""
    return "optimal" if gap <= 10 * PRECISION else "time limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan of another kind than the chosen one.

    Attributes:
        name: What distinguishes it, for example ``"2 stages"``.
    """

    name: str
    plan: Plan

    @property
    def predicted(self) -> Predicted:
        """Its predicted seconds and bytes."""
        assert self.plan.predicted is not None
        return self.plan.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneStats:
    """How the search went.

    Attributes:
        seconds: Seconds that the whole search computed.
        candidates: Stage candidates whose seconds and bytes were looked at.
        pipelines: Pairs of stage and microbatch counts in the search space.
        solved: Pairs that had to be solved.
    """

    seconds: float
    candidates: int
    pipelines: int
    solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The best plan and why.

    Attributes:
        status: ``"optimal"`` if no plan of the search space under the schedule of the exact search (1F1B or GPipe) is
            faster by the closed form of the cost model than the best that was found, of the plans that were run on the
            clock (all near the best by the closed form, :mod:`lightning_mist.tuner.search.near_optimal`) none is faster
            there than the chosen one, or by so little that they cannot be told apart, and is not as simple
            (:mod:`lightning_mist.tuner.select.simplest_plan`); and no other schedule gains on them. ``"explored"`` if
            another schedule gained: it is the fastest that was tried. ``"time limit"`` if time was up before a proof.
        bound: No plan under the schedule of the exact search takes fewer seconds by the closed form, as the dynamic
            program has proven for all numbers of stages and of microbatches.
        gap: How far the best plan by the closed form may be above the bound, as a share of its seconds. About seconds
            on the clock, which ``predicted`` has, nothing is proven; nor has the chosen plan to be the best by the
            form.
        closed_form_seconds: The plan's seconds by the closed form; under another schedule those of the plan under the
            schedule of the exact search that it competed with.
        predicted: Predicted seconds and bytes of the plan.
        alternatives: The best plans of other numbers of stages, fastest first: of those that take at most 5 %
            longer by the closed form than the best of all, with state in host memory at most 1.5 %, and the best
            single stage where it takes at most a quarter longer. The fastest half dozen are kept, and that one.
        notes: What was ruled out and why, and where numbers come from, for people.
        certified: Whether HiGHS has proven the same once more of the best plan's numbers of stages and of microbatches:
            that none with these is faster by more than a billionth. Its program leaves out stages that by the least
            sums of steady times in front of them and behind them cannot belong to such a plan.
        is_late: Whether time was up before all was looked at.
    """

    plan: Plan
    status: Status
    bound: float
    gap: float
    closed_form_seconds: float
    predicted: Predicted
    alternatives: tuple[Alternative, ...]
    stats: TuneStats
    notes: tuple[str, ...]
    certified: bool = False
    is_late: bool = False

    @property
    def is_proven(self) -> bool:
        """Whether the search has shown that there is none better of what it looks at."""
        return self.status in ("optimal", "explored") and self.gap <= 10 * PRECISION

    @property
    def proof(self) -> tuple[str, ...]:
        """How sure it is that the plan is the best: lines for people."""
        # The clock may have chosen another plan than the best by the closed form, which is what is proven of.
        behind = 1 - self.bound / self.closed_form_seconds if self.closed_form_seconds > 0 else 0.0
        least = min((item.predicted.step_seconds for item in self.alternatives), default=np.inf)
        clock = "more" if least >= self.predicted.step_seconds else "none so much that it could be told"
        proof = {
            "optimal": "no plan of the search space is faster by the closed form of the cost model"
            if behind < LEAST_SHARE
            else f"by the closed form of the cost model another plan takes {behind:.1%} less, on the clock {clock}",
            "explored": f"{self.plan.schedule} gains on the pipelines that it was tried on; others may gain more"
            if self.bound > 0
            else "it is the fastest that was tried; of others nothing is proven",
            "time limit": f"time was up; by the closed form a plan could be faster by at most {behind:.1%}",
        }[self.status]
        looked = f"chosen among {self.stats.candidates:,} stage candidates in {self.stats.pipelines:,} pipelines"
        return f"{looked}: {proof}", CERTIFIED if self.certified else UNCERTIFIED

    @property
    def compared(self) -> tuple[str, ...]:
        """The plans of other kinds beside the chosen one: lines for people."""
        return tuple(_compare(item, self.predicted.step_seconds) for item in self.alternatives)

    def explain(self) -> tuple[str, ...]:
        """Why this plan: lines for people."""
        return (*self.proof, *self.compared, *self.notes)


def _compare(item: Alternative, seconds: float) -> str:
    slower = item.predicted.step_seconds / seconds - 1
    peak = max(stage.peak_bytes for stage in item.predicted.stages)
    return (
        f"{item.name} instead: {format_seconds(item.predicted.step_seconds)} per step ({slower:+.1%}), "
        f"peak {format_bytes(peak)}"
    )
