"""Plans that fit by their estimate, at the confidence that its verdict states.

A search leaves a share of each device's memory for the context, communicators and what the allocator keeps free; the
estimate of a plan knows how many communicators there are, and replays its allocations. Where a plan does not fit in 95
of 100 cases, it is made again with less for its tensors; what it would gain to take the risk is said beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_mist.errors import InfeasibleError
from lightning_mist.estimate import Estimator, MemoryEstimate, estimate_plan
from lightning_mist.hardware import AnyCluster, MixedCluster
from lightning_mist.model import ModelSpec
from lightning_mist.plan import Plan
from lightning_mist.plan.plan_tables import counted
from lightning_mist.tuner import Planner, TuneResult
from lightning_mist.tuner.infeasible import UndecidedError
from lightning_mist.tuner.space import tensor_share
from lightning_mist.units import format_seconds

TRIES = 3
"""How often a plan is made again, with less memory, whose estimate does not fit. One is mostly enough."""

WORTH_PAYING = 0.1
"""Share of a step's seconds that a plan may take longer to be surer to fit, of those of which none does."""

WORTH_TELLING = 1e-3
"""Share of a step's seconds from which on it is said what more risk would gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """A plan whose estimate fits, if one was found, else one whose estimate says that it does not; notes tell of it."""

    result: TuneResult
    asked: dict[str, Any]
    estimate: MemoryEstimate
    notes: tuple[str, ...] = ()


def plan_that_fits(planner: Planner, result: TuneResult, asked: dict[str, Any], say: Callable[[str], None]) -> Fitting:
    """A plan that fits in 95 of 100 cases by its estimate, if one is found in a few tries.

    However much longer that takes: a note says what a faster one risks. If none is found it is that which is most
    likely to fit of those that were made and take little longer (:data:`WORTH_PAYING`); its estimate says so, and a
    note what the surest would take. ``asked`` is what the planner was asked for the result.
    """
    limit, note = asked["memory_limit"], ""

    def looked_at(result: TuneResult, asked: dict[str, Any]) -> Fitting:
        estimate = estimate_of(planner.spec, planner.cluster, result.plan, limit)
        return Fitting(result=result, asked=asked, estimate=estimate)

    made = [looked_at(result, asked)]
    while made[-1].estimate.device_verdict != "fits" and len(made) <= TRIES:
        asker, again = _with_less(planner, made[-1])
        say(f"that plan does not fit in {_in_100(made[-1].estimate)} of 100 cases: searching with less memory")
        try:
            result = asker.tune(**again)
        except UndecidedError:
            note = "no plan was found in time that fits in 95 of 100 cases by its estimate"
            break
        except InfeasibleError:
            note = "no plan fits in 95 of 100 cases by its estimate"
            break
        made.append(looked_at(result, again))
    likely = [item for item in made if item.estimate.is_likely] or made
    fastest, surest = min(likely, key=_seconds), min(likely, key=lambda item: _risk(item.estimate))
    most = _seconds(fastest) * (1 + WORTH_PAYING)
    fits = [item for item in made if item.estimate.device_verdict == "fits"]
    best = min(fits or [item for item in likely if _seconds(item) <= most], key=lambda item: _risk(item.estimate))
    notes = [note] if note else []
    notes += [
        _beside(best, other)
        for other in (fastest, surest)
        if other is not best and abs(_seconds(other) / _seconds(best) - 1) >= WORTH_TELLING
    ]
    return replace(best, notes=tuple(notes))


def _with_less(planner: Planner, made: Fitting) -> tuple[Planner, dict[str, Any]]:
    """Whom to ask what for a plan that needs as much less as one had too much.

    Of unlike devices those have less on which it did not fit: one limit for all would leave the larger ones idle.
    """
    worst, cluster = made.estimate.worst, planner.cluster
    needed = made.result.predicted.stages[worst.stage].peak_bytes / tensor_share(cluster)
    fitting = needed * made.estimate.limit_of(worst) / worst.device_total.p95

    def less(before: int) -> int:
        return max(1, int(min(before - 1, fitting)))

    if isinstance(cluster, MixedCluster):
        tight = {cluster.part_of(device) for device in made.result.plan.stages[worst.stage].devices}
        each = [part.device.memory_bytes for part in cluster.parts]
        return planner.with_memory([less(most) if at in tight else most for at, most in enumerate(each)]), made.asked
    before = made.asked["memory_limit"] or cluster.parts[0].device.memory_bytes
    return planner, {**made.asked, "memory_limit": less(before)}


def _risk(estimate: MemoryEstimate) -> float:
    """The share of cases in which a plan does not fit."""
    return max(stage.device_total.risk(estimate.limit_of(stage)) for stage in estimate.stages)


def _in_100(estimate: MemoryEstimate) -> str:
    return f"{max(1.0, 100 * _risk(estimate)):.0f}"


def _seconds(made: Fitting) -> float:
    return made.result.predicted.step_seconds


def _beside(best: Fitting, other: Fitting) -> str:
    """What another plan takes, and how likely it does not fit."""
    stages, change = counted(other.result.plan.num_groups, "stage"), _seconds(other) / _seconds(best) - 1
    more = f"{-change:.1%} less" if change < 0 else f"{change:.1%} more"
    return (
        f"with a risk of {_in_100(other.estimate)} in 100 not to fit, {stages} would take "
        f"{format_seconds(_seconds(other))} ({more})"
    )


def estimate_of(spec: ModelSpec, cluster: AnyCluster, found: Plan, limit: int | None) -> MemoryEstimate:
    """What a plan needs of every device, of which so many bytes may be used, or all; the largest stage is replayed."""
    estimator = Estimator(spec, cluster, limit or max(part.device.memory_bytes for part in cluster.parts))
    return estimate_plan(estimator, found, advise=False, replay="worst")
