"""A plan beside what people would have chosen: figures for whoever shows them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_mist.cost import step_seconds
from lightning_mist.explain.baseline_plans import Baseline
from lightning_mist.plan import Plan, step_rates
from lightning_mist.plan.plan_text import settings_of
from lightning_mist.tuner.inter_stage import PRECISION
from lightning_mist.tuner.select import ALIKE, LEAST_SHARE, Alternative, Status, TuneResult, status_of

OURS = "this plan"
"""What the plan itself is called."""

EXACT = ("1f1b", "gpipe")
"""Schedules for which the search is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """One line of a comparison.

    Attributes:
        ratio: How many times as long as the plan that all are compared with.
        outside: What the plan has that the search for the first one does not look at.
        stack: Whose kernels it is priced with, if not with those of the first one.
        precision: What it computes in, if that is another precision than the first one's.
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
    outside: tuple[str, ...] = ()
    stack: str = ""
    precision: str = ""

    def noted(self, text: str) -> str:
        """What is said of it, with its note."""
        notes = [note for note in (self.precision and f"in {self.precision}", self.note) if note]
        return f"{text} ({', '.join(notes)})" if notes else text


def compare_plans(
    ours: Plan, others: Iterable[Baseline], *, outside: Callable[[Plan], tuple[str, ...]] | None = None
) -> tuple[ComparedPlan, ...]:
    """A plan and others, in seconds, rates and bytes; the plan comes first, the others in their order.

    Args:
        outside: Says of a plan what the search did not look at (:func:`~lightning_mist.explain.membership.outside`); by
            default all others count as such that it did not.

    Raises:
        ValueError: If the plan has no prediction, or takes no time by it.
    """
    if ours.predicted is None or ours.predicted.step_seconds <= 0:
        raise ValueError("plan.predicted = None or 0 s: only plans whose seconds are predicted can be compared")
    seconds = ours.predicted.step_seconds
    lines = [_compared(item, seconds) for item in (Baseline(name=OURS, plan=ours), *others)]
    unknown = ("settings of which it is not known whether they were searched",)
    asked = outside or (lambda plan: unknown)
    return (lines[0], *(line if line.plan is None else _placed(line, asked(line.plan)) for line in lines[1:]))


def _placed(line: ComparedPlan, outside: tuple[str, ...]) -> ComparedPlan:
    """A plan with what the search does not look at; one in another precision or stack never takes the first's place."""
    kernels = (f"the kernels of another stack ({line.stack})",) if line.stack else ()
    precision = (line.precision,) if line.precision else ()
    return replace(line, outside=(*kernels, *outside, *precision))


def faster_plan(items: Sequence[ComparedPlan]) -> ComparedPlan | None:
    """The fastest of a comparison that the search could have chosen and that gains on the clock; None if none does.

    Args:
        items: The comparison, the plan itself first.
    """
    ours = items[0].plan
    assert ours is not None
    gaining = [item for item in items[1:] if _is_to_run(item)]
    return min(gaining, key=lambda item: item.ratio or 1.0, default=None)


def _is_to_run(item: ComparedPlan) -> bool:
    """Whether a plan is one of those searched, and gains what can be told apart."""
    if item.plan is None or item.ratio is None or item.outside:
        return False
    return item.ratio <= 1 - ALIKE


def with_faster(result: TuneResult, item: ComparedPlan) -> TuneResult:
    """A result whose plan is one of a comparison, which is faster on the clock than what the search chose."""
    plan = item.plan
    assert plan is not None
    assert plan.predicted is not None
    assert item.ratio is not None
    is_exact = plan.schedule in EXACT
    note = (
        f"the plan is that of {item.name}, which takes {1 - item.ratio:.1%} less on the clock than what the search had "
        "chosen among the few best by the closed form"
    )
    exact: Status = status_of(result.gap)
    if is_exact and closed_form_of(plan) < result.bound * (1 - PRECISION):
        # The search knows no copies of a pipeline: it counts the batches of as few as its stages could form.
        exact = "explored"
        result = replace(result, bound=0.0, gap=1.0, certified=False)
        note += "; with the batches of its own copies it takes less by that form too than what the search had proven"
    return replace(
        result,
        plan=plan,
        predicted=plan.predicted,
        status=exact if is_exact else "explored",
        closed_form_seconds=closed_form_of(plan) if is_exact else result.closed_form_seconds,
        alternatives=(Alternative(name="what the search had chosen", plan=result.plan), *result.alternatives),
        notes=(note, *result.notes),
    )


def faster_notes(ours: Plan, items: Sequence[ComparedPlan]) -> tuple[str, ...]:
    """Why some of a comparison are faster than the plan itself, for people; nothing if none is.

    The search proves its plan by the closed form of the step, and prefers 1F1B to what gains little.
    """
    notes, known = [], set[Plan]()
    for item in items:
        if item.plan is None or item.ratio is None or item.ratio > 1 - ALIKE:
            continue
        if item.plan in known:
            continue  # Of plans that several come to the first is enough.
        known.add(item.plan)
        notes.append(f"{item.name} takes {1 - item.ratio:.1%} less on the clock: {_why_faster(ours, item)}")
        if _is_to_run(item):
            notes.append(
                f"run the plan of {item.name} instead: it is predicted to be {1 - item.ratio:.1%} faster on the clock"
            )
    return tuple(notes)


def _why_faster(ours: Plan, item: ComparedPlan) -> str:
    assert item.plan is not None
    if item.outside:
        return f"it lies outside what was searched, with {item.outside[0]}"
    if item.plan.schedule not in EXACT:
        return f"{item.plan.schedule} is tried on some pipelines only, and chosen where it gains {ALIKE:.0%}"
    if closed_form_of(item.plan) < closed_form_of(ours) * (1 - LEAST_SHARE):
        return "the search ended before it had looked at everything, or another schedule was chosen"
    return "by the closed form of the step, which the search minimises, it is not faster"


def closed_form_of(plan: Plan) -> float:
    """Step seconds of a plan under 1F1B, by the form that the search minimises; chunks as if they were in one piece."""
    assert plan.predicted is not None
    stages = plan.predicted.stages
    groups = [[stages[chunk] for chunk in plan.chunks(group)] for group in range(plan.num_groups)]
    steady = [sum(item.steady_seconds for item in group) for group in groups]
    boundary = [sum(item.boundary_seconds for item in group) for group in groups]
    return step_seconds(steady, boundary, plan.num_microbatches)


def _compared(item: Baseline, seconds: float) -> ComparedPlan:
    plan = item.plan
    if plan is None or plan.predicted is None:
        return ComparedPlan(name=item.name, plan=None, reason=item.reason, note=item.note, precision=item.precision)
    found = plan.predicted.step_seconds
    rates = step_rates(plan, found)
    return ComparedPlan(
        name=item.name,
        plan=plan,
        settings=settings_of(plan),
        note=item.note,
        stack=item.stack,
        precision=item.precision,
        step_seconds=found,
        ratio=found / seconds,
        rows_per_second=None if rates is None else rates.rows_per_second,
        tokens_per_second=None if rates is None else rates.tokens_per_second,
        peak_bytes=max(stage.peak_bytes for stage in plan.predicted.stages),
    )
