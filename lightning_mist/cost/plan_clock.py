"""Step seconds of a plan by running its own lists of actions on a clock, and where these seconds go.

On a device transfers between stages run beside computation. On a CPU they are copied by the same cores, at either end:
two processes that send each other messages while they compute take longer by the seconds of every message that they
send or receive.

The optimizer's step comes when Lightning's loop comes to it, behind the loss that the last stage brings home. On a
device the host of every stage waits for that, so the last stage must have reduced its gradients; kernels of earlier
batches may still run. Where the loss scale is looked after, all ranks agree on whether gradients are finite, and on a
CPU the hosts themselves compute: there no stage goes on before all have reduced their gradients.

Lists grow with the number of microbatches, and once a pipeline is in its steady state ``P`` more microbatches over
``P`` groups of devices always take as long; so long lists are cut, and the rest follows from two of the cut lengths.
Where stages differ much it takes longer until that state; what is cut then errs by less than half a percent. On a
device lists of 1F1B and ZB-H1 are not cut unless they are very long, so that pictures show the predicted step; chunks,
of which there are several times as many, are cut in any case.

What a stage's devices do is added up; the rest of the step is split in two by running the lists once more with
transfers that take no time. By as much as the step is longer with them, transfers show; what is left is the bubble.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from lightning_mist.cost.time import TOLD, StageSeconds
from lightning_mist.hardware import AnyCluster
from lightning_mist.plan import Plan
from lightning_mist.schedule import ActionKind, StepRules
from lightning_mist.schedule.lowering import program_of
from lightning_mist.schedule.program_clock import finish, run
from lightning_mist.schedule.seconds import PlanSeconds, plan_seconds, slot_seconds

ROUNDS, LEAST = 4, 32
"""Lists are cut to so many times as many microbatches as there are groups of devices, but not to fewer than these."""

UNCUT = 1 << 14
"""Microbatches times stages up to which lists without chunks are not cut."""

CUT = 5e-3
"""Share by which what follows from shorter lists may be less than what long ones take."""

DUST = 1e-12
"""Share of a step below which a difference of sums is what rounding left."""

Terms = Mapping[str, float]
"""Seconds of one stage by term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpent:
    """Seconds of one optimizer step of a stage's devices, by what they are spent on; they add up to the step.

    Attributes:
        communication_seconds: What collectives and transfers between stages add to the step: whatever does not hide in
            computation.
        optimizer_seconds: Passes over gradients and the optimizer's step.
        overhead_seconds: The runtime's own Python, as far as devices wait for it.
    """

    compute_seconds: float
    recompute_seconds: float
    communication_seconds: float
    copies_seconds: float
    optimizer_seconds: float
    overhead_seconds: float
    bubble_seconds: float

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(seconds for _, seconds in self.terms)

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """Every term as ``(name, seconds)``, in the order above."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step of a plan, and where they go on each of its stages."""

    step_seconds: float
    spent: tuple[StageSpent, ...]


def rules_of(cluster: AnyCluster, precision: str) -> StepRules:
    """How a machine runs a step."""
    if cluster.kind != "cuda":
        return StepRules(transfers="within", update_after="all")
    return StepRules(transfers="beside", update_after="all" if precision == "16-mixed" else "last")


def terms_of(seconds: StageSeconds) -> dict[str, float]:
    """Seconds of a stage by term, of arrays with one candidate."""
    return {f"{name[:-2]}_seconds": float(getattr(seconds, name)[0]) for name in TOLD}


def clock_seconds(plan: Plan, terms: Sequence[Terms], rules: StepRules) -> float:
    """Seconds of one step of a plan, and nothing else; arguments as for :func:`step_times`."""
    return _seconds(plan, plan_seconds(plan, terms), rules)


def clock_floor(plan: Plan, terms: Sequence[Terms], rules: StepRules) -> float:
    """Seconds of one step of a plan at least, in a small part of the time that running it takes.

    A group of devices begins when the first microbatch has come through all stages in front of its first. From then on
    it computes all that it has to, and the last backward of 1F1B, with chunks or without, goes back through these
    stages; transfers move in between at least. Where lists are cut it is less by what that may err.
    """
    seconds, groups = plan_seconds(plan, terms), plan.num_groups
    count, (forward, backward) = plan.num_microbatches, (ActionKind.FORWARD, ActionKind.BACKWARD)
    first = [(stage.of(forward, is_first=True), stage.of(backward, is_first=True)) for stage in seconds.stages]
    others = [(count - 1) * (stage.forward + stage.backward) for stage in seconds.stages]
    each = [sum(edges) + middle for edges, middle in zip(first, others, strict=True)]
    least = before = behind = 0.0
    for group in range(groups):
        once = seconds.stages[group].epilogue
        last = 0.0
        if group and plan.schedule in ("1f1b", "interleaved-1f1b"):
            passed = seconds.stages[group - 1].of(backward, is_first=count == 1)
            last = seconds.gradients[group - 1] + passed + behind
        behind = max(last, once.reduce + once.step + once.gather)
        least = max(least, before + sum(each[chunk] for chunk in plan.chunks(group)) + behind)
        before += first[group][0] + (seconds.activations[group] if group + 1 < groups else 0.0)
    return least * (1 - (CUT if _is_cut(plan, rules) else DUST))


def step_times(plan: Plan, terms: Sequence[Terms], rules: StepRules, step: float | None = None) -> StepTimes:
    """Seconds of one step of a plan.

    Args:
        terms: Seconds of each of its stages by term; see :func:`terms_of`.
        step: What :func:`clock_seconds` gives, if that is known.
    """
    seconds = plan_seconds(plan, terms)
    step = _seconds(plan, seconds, rules) if step is None else step
    moves = any(seconds.crossings) or any(seconds.sent_crossings)
    still = _seconds(plan, seconds.without_transfers(), rules) if moves else step
    groups = [_spent(plan, group, terms, seconds, step, still) for group in range(plan.num_groups)]
    return StepTimes(step_seconds=step, spent=tuple(groups[plan.group_of(stage)] for stage in range(plan.num_stages)))


def _seconds(plan: Plan, seconds: PlanSeconds, rules: StepRules) -> float:
    """Seconds of one step, of long lists from two shorter ones."""
    count, groups = plan.num_microbatches, plan.num_groups
    if not _is_cut(plan, rules):
        return _run(plan, seconds, rules, count)
    longest = _longest(plan)
    # What the shorter lists lack is a multiple of the groups.
    shorter = longest + (count - longest) % groups
    first, second = (_run(plan, seconds, rules, cut) for cut in (shorter, shorter + groups))
    return first + (count - shorter) // groups * (second - first)


def _longest(plan: Plan) -> int:
    """Microbatches to which lists are cut, about."""
    return max(ROUNDS * plan.num_groups, LEAST)


def _is_cut(plan: Plan, rules: StepRules) -> bool:
    """Whether not all microbatches are run on the clock."""
    count = plan.num_microbatches
    if count <= 2 * _longest(plan) + plan.num_groups:
        return False
    is_plain = rules.transfers == "beside" and plan.schedule in ("1f1b", "zb-h1")
    return not (is_plain and count * plan.num_stages <= UNCUT)


def _run(plan: Plan, seconds: PlanSeconds, rules: StepRules, count: int) -> float:
    once = [stage.epilogue for stage in seconds.stages[: plan.num_groups]]
    is_tied = plan.num_groups > 1 and any(item.tied > 0 for item in once)
    program = program_of(plan.num_stages, count, plan.schedule, num_groups=plan.num_groups)
    slots, sending = slot_seconds(seconds.stages), seconds.sent_crossings
    times = run(program, slots, seconds.crossings, rules, sending_seconds=sending)
    return finish(program, times, once, rules, is_tied=is_tied).makespan


def _spent(
    plan: Plan, group: int, terms: Sequence[Terms], seconds: PlanSeconds, step: float, still: float
) -> StageSpent:
    """Where the seconds of a group of devices go."""
    chunks = [terms[chunk] for chunk in plan.chunks(group)]

    def per_step(*names: str) -> float:
        return plan.num_microbatches * sum(chunk.get(f"{name}_seconds", 0.0) for chunk in chunks for name in names)

    def once(*names: str) -> float:
        return sum(chunk.get(f"{name}_seconds", 0.0) for chunk in chunks for name in names)

    tied = max(stage.reduce_tied for stage in seconds.stages) if plan.num_groups > 1 else 0.0
    exchanged = per_step("exchange", "recompute_exchange")
    # The first backward adds to no gradients.
    compute = per_step("forward", "backward") - per_step("exchange") - once("accumulate")
    recompute = per_step("recompute") - per_step("recompute_exchange")
    inside = per_step("unshard", "scatter", "ring") + exchanged + once("reduce", "gather") + tied
    copies = per_step("copies") + once("update_copies")
    optimizer = once("update")
    overhead = per_step("overhead") + max(chunk.get("once_seconds", 0.0) for chunk in chunks)
    busy = compute + recompute + inside + copies + optimizer + overhead
    # Lists that were cut may have come out shorter than what is in them, by less than they err.
    bubble = max(0.0, still - busy)
    shown = step - busy - bubble
    return StageSpent(
        compute_seconds=compute,
        recompute_seconds=recompute,
        communication_seconds=inside + (shown if abs(shown) > DUST * step else 0.0),
        copies_seconds=copies,
        optimizer_seconds=optimizer,
        overhead_seconds=overhead,
        bubble_seconds=bubble,
    )
