"""Plans that fit by their estimate too.

A search leaves a share of each device's memory for the context, communicators and what the allocator keeps free; the
estimate of a plan knows how many communicators there are, and replays its allocations. Where it needs more than there
is, the plan is made again with as much less for its tensors.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_mist.cli.cluster_input import precision_notes
from lightning_mist.cli.output import say
from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import split_notes
from lightning_mist.units import format_bytes

if TYPE_CHECKING:
    from lightning_mist.estimate import MemoryEstimate
    from lightning_mist.explain import ComparedPlan
    from lightning_mist.model import ModelSpec
    from lightning_mist.plan import Plan
    from lightning_mist.tuner import Planner, TuneResult

TRIES = 3
"""How often a plan is made again, with less memory, whose estimate does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """A plan whose estimate fits, if one was found; else one whose estimate says that it does not.

    Attributes:
        notes: What to know of that, for people.
    """

    result: "TuneResult"
    asked: dict[str, Any]
    estimate: "MemoryEstimate"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan and all that is known of it."""

    planner: "Planner"
    asked: dict[str, Any]
    result: "TuneResult"
    plan: "Plan"
    memory: str
    restricted: tuple[str, ...]
    compared: "tuple[ComparedPlan, ...] | None"
    precision_note: str = ""

    @property
    def spec(self) -> "ModelSpec":
        """The network."""
        return self.planner.spec

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the plan and of its numbers, for people."""
        split = split_notes(self.plan, self.spec.module_map)
        precision = precision_notes(self.planner.cluster, self.spec.precision)
        return (*self.restricted, *split, *precision, *self.spec.notes, *self.result.notes)


def plan_that_fits(planner: "Planner", result: "TuneResult", asked: dict[str, Any]) -> Fitting:
    """A plan that fits by its estimate, if one is found in a few tries.

    Else it is the last that was made, or the first one where with less memory there is none; their estimates say so.
    """
    from lightning_mist.tuner.infeasible import UndecidedError
    from lightning_mist.tuner.space import tensor_share

    limit = asked["memory_limit"]
    first = Fitting(result=result, asked=asked, estimate=estimate_of(planner, result.plan, limit))
    found = first
    for _ in range(TRIES):
        estimate = found.estimate
        if estimate.is_likely:
            break
        has = estimate.limit_of(estimate.worst)
        over = estimate.worst.device_total.p50 - has
        before = has if found is first else found.asked["memory_limit"]
        less = int(min(before, has) - over / tensor_share(planner.cluster))
        say(f"by its estimate that plan needs {format_bytes(over)} more than there is: searching with as much less")
        again = {**asked, "memory_limit": max(1, less)}
        try:
            result = planner.tune(**again)
        except UndecidedError:
            note = "no plan was found in time that fits by its estimate, which counts more than the search does"
            return replace(first, notes=(note,))
        except InfeasibleError:
            return replace(first, notes=("no plan fits by its estimate, which counts more than the search does",))
        needed = format_bytes(first.estimate.worst.device_total.p50)
        note = (
            f"planned with {format_bytes(less)} of the {format_bytes(has)} of each device: with all of it the plan "
            f"would be one that needs {needed}, with communicators and what the allocator reserves"
        )
        found = Fitting(result=result, asked=again, estimate=estimate_of(planner, result.plan, limit), notes=(note,))
    return found


def estimate_of(planner: "Planner", found: "Plan", limit: int | None) -> "MemoryEstimate":
    """What a plan needs of every device.

    Args:
        limit: Bytes of each device that may be used; by default all that it has.
    """
    from lightning_mist.estimate import Estimator, estimate_plan

    parts = planner.cluster.parts
    estimator = Estimator(planner.spec, planner.cluster, limit or max(part.device.memory_bytes for part in parts))
    return estimate_plan(estimator, found, advise=False, replay="worst")


def memory_words(estimate: "MemoryEstimate") -> str:
    """What a plan needs of devices, and what would leave more room, in sentences."""
    text = estimate.headline()
    if estimate.verdict == "fits":
        return text
    need, has = estimate.worst.device_total, estimate.limit_of(estimate.worst)
    return f"{text} To be surer, plan with less: --memory-limit {int(10 * has / need.p95 * has / 2**30) / 10:g}GiB."
