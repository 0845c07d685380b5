"""Step seconds of a plan by running its own lists of actions on a clock, for schedules without a closed form.

Transfers are waited for where the closed form of 1F1B counts them: receiving an activation is part of a forward,
receiving a gradient part of a backward. Lists grow with the number of microbatches, and once a pipeline is in its
steady state ``P`` more microbatches over ``P`` groups of devices always take as long; so long lists are cut, and the
rest follows from two of the cut lengths. Where stages differ much it takes longer until that state; what is cut then
errs by less than half a percent.
"""

from collections.abc import Sequence

from lightning_mist.cost.stage import StageSeconds
from lightning_mist.plan import Plan
from lightning_mist.schedule import StageSeconds as ActionSeconds
from lightning_mist.schedule import generate, simulate
from lightning_mist.schedule.lower import add_transfers, add_update

ROUNDS, LEAST = 4, 32
"""Lists are cut to so many times as many microbatches as there are groups of devices, but not to fewer than these."""


def clocked_seconds(plan: Plan, stages: Sequence[StageSeconds]) -> float:
    """Seconds of one step of a plan.

    Args:
        plan: The plan.
        stages: Seconds of each of its stages, as one candidate each.
    """
    groups = plan.num_groups
    longest = max(ROUNDS * groups, LEAST)
    if plan.num_microbatches <= longest + groups:
        return _run(plan, stages, plan.num_microbatches)
    # What the shorter lists lack is a multiple of the groups.
    shorter = longest + (plan.num_microbatches - longest) % groups
    first, second = (_run(plan, stages, count) for count in (shorter, shorter + groups))
    return first + (plan.num_microbatches - shorter) // groups * (second - first)


def _run(plan: Plan, stages: Sequence[StageSeconds], num_microbatches: int) -> float:
    computations = generate(plan.num_stages, num_microbatches, plan.schedule, num_groups=plan.num_groups)
    actions = [_actions(plan, stages, index) for index in range(plan.num_stages)]
    once = actions[: plan.num_groups]
    lists = add_update(
        add_transfers(computations),
        tied=plan.num_groups > 1 and any(seconds.reduce_tied > 0 for seconds in once),
        gathers=[seconds.gather > 0 for seconds in once],
    )
    return simulate(lists, actions).makespan


def _actions(plan: Plan, stages: Sequence[StageSeconds], index: int) -> ActionSeconds:
    """Seconds of a stage's actions; what its group does once per batch is done for all chunks together."""
    stage = stages[index]
    chunks = [stages[chunk] for chunk in plan.chunks(plan.group_of(index))]

    def of(term: str) -> float:
        return float(getattr(stage, f"{term}_K")[0])

    def together(term: str) -> float:
        return sum(float(getattr(chunk, f"{term}_K")[0]) for chunk in chunks)

    beside = {name: of(f"forward_{name}") for name in ("ring", "copies", "overhead")}
    return ActionSeconds(
        forward=of("forward") + of("arrival") + of("unshard") / 2 + sum(beside.values()),
        backward=of("backward")
        + of("recompute")
        + (of("transfer") - of("arrival"))
        + of("unshard") / 2
        + of("scatter")
        + sum(of(name) - part for name, part in beside.items()),
        weight=of("weight"),
        reduce=together("reduce"),
        reduce_tied=together("tied"),
        step=together("update") + together("update_copies") + of("once"),
        gather=together("gather"),
    )
