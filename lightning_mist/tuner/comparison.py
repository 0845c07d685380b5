"""A plan beside what people would have chosen: figures for whoever shows them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_mist.cost import step_seconds
from lightning_mist.plan import Plan, step_rates
from lightning_mist.plan.settings import settings_of
from lightning_mist.tuner.baselines import Baseline
from lightning_mist.tuner.planner import LEAST_GAIN
from lightning_mist.tuner.result import LEAST_SHARE

OURS = "this plan"
"""What the plan itself is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """One line of a comparison.

    Attributes:
        name: What it is.
        plan: The plan with its prediction; None if none fits.
        settings: The plan in words; empty without one.
        reason: Why there is no plan; empty with one.
        note: What to know of the search for it.
        step_seconds: Seconds of one step on the clock.
        ratio: How many times as long as the plan that all are compared with.
        rows_per_second: Rows (samples) over all devices.
        tokens_per_second: Tokens over all devices, where rows are sequences of tokens.
        peak_bytes: Peak memory of the most loaded device.
    """

    name: str
    plan: Plan | None
    settings: str = ""
    reason: str = ""
    note: str = ""
    step_seconds: float | None = None
    ratio: float | None = None
    rows_per_second: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None


def compare_plans(ours: Plan, others: Iterable[Baseline]) -> tuple[ComparedPlan, ...]:
    """A plan and others, in seconds, rates and bytes; the plan comes first, the others in their order.

    Args:
        ours: The plan, with its prediction.
        others: What it is compared with.

    Raises:
        ValueError: If the plan has no prediction, or takes no time by it.
    """
    if ours.predicted is None or ours.predicted.step_seconds <= 0:
        raise ValueError("plan.predicted = None or 0 s: only plans whose seconds are predicted can be compared")
    seconds = ours.predicted.step_seconds
    return tuple(_compared(item, seconds) for item in (Baseline(name=OURS, plan=ours), *others))


def faster_notes(ours: Plan, items: Sequence[ComparedPlan]) -> tuple[str, ...]:
    """Why some of a comparison are faster than the plan itself, for people; nothing if none is.

    The search proves its plan by the closed form of the step, and prefers 1F1B to what gains little.

    Args:
        ours: The plan.
        items: The comparison.
    """
    notes, known = [], set[Plan]()
    for item in items:
        if item.plan is None or item.ratio is None or item.ratio > 1 - LEAST_SHARE:
            continue
        if item.plan in known:
            continue  # Of plans that several come to the first is enough.
        known.add(item.plan)
        if item.plan.schedule not in ("1f1b", "gpipe"):
            why = f"a plan under {item.plan.schedule} is chosen where it gains {LEAST_GAIN:.0%}"
        elif _closed_form(item.plan) < _closed_form(ours) * (1 - LEAST_SHARE):
            offloads = any(stage.offload.any for stage in item.plan.stages)
            why = f"it {'offloads, and ' if offloads else ''}lies outside what was searched"
        else:
            why = "by the closed form of the step, which the search minimises, it is not faster"
        notes.append(f"{item.name} takes {1 - item.ratio:.1%} less on the clock: {why}")
    return tuple(notes)


def _closed_form(plan: Plan) -> float:
    """Step seconds of a plan's stages under 1F1B, by the form that the search minimises."""
    assert plan.predicted is not None
    stages = plan.predicted.stages
    steady, boundary = [item.steady_seconds for item in stages], [item.boundary_seconds for item in stages]
    return step_seconds(steady, boundary, plan.num_microbatches)


def _compared(item: Baseline, seconds: float) -> ComparedPlan:
    plan = item.plan
    if plan is None or plan.predicted is None:
        return ComparedPlan(name=item.name, plan=None, reason=item.reason, note=item.note)
    found = plan.predicted.step_seconds
    rates = step_rates(plan, found)
    return ComparedPlan(
        name=item.name,
        plan=plan,
        settings=settings_of(plan),
        note=item.note,
        step_seconds=found,
        ratio=found / seconds,
        rows_per_second=None if rates is None else rates.rows_per_second,
        tokens_per_second=None if rates is None else rates.tokens_per_second,
        peak_bytes=max(stage.peak_bytes for stage in plan.predicted.stages),
    )
