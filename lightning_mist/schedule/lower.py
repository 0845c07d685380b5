"""From forwards and backwards to everything a stage does: pure passes over lists of actions.

Sends and receives only *post* a transfer. Sends are never waited for while the list runs; ``F`` and ``B`` wait for what
they consume. A receive is posted one computation early, so that the transfer happens while the stage computes: right
before the previous ``F`` or ``B``. The one limit is that the gradient of a microbatch is not received before its own
forward has run, which is what knows the shape of that gradient.
"""

from collections.abc import Sequence
from itertools import chain

from lightning_mist.plan import Plan, ZeroStage
from lightning_mist.schedule.action import Action, ActionKind, Schedule
from lightning_mist.schedule.generate import generate


def lower(plan: Plan, *, tied: bool) -> Schedule:
    """Everything that each stage of a plan does for one batch, in order.

    Args:
        plan: The plan.
        tied: Whether any parameter is held by more than one stage.

    Returns:
        One tuple of actions per stage: transfers around computations, then ``REDUCE``, ``REDUCE_TIED`` (if ``tied``
        and there is more than one stage), ``STEP`` and, on stages under ZeRO-1 or ZeRO-2 with more than
        one data-parallel rank, ``GATHER``.
    """
    computations = generate(plan.num_stages, plan.num_microbatches, plan.schedule)
    gathers = [
        ZeroStage.NONE < stage.zero_stage < ZeroStage.PARAMETERS and stage.data_parallel_degree > 1
        for stage in plan.stages
    ]
    return add_update(add_transfers(computations), tied=tied and plan.num_stages > 1, gathers=gathers)


def add_transfers(schedule: Schedule) -> Schedule:
    """Insert ``RECV_F``, ``SEND_F``, ``RECV_B`` and ``SEND_B`` around the computations of every stage."""
    last = len(schedule) - 1
    return tuple(_with_sends(_with_receives(actions, last), last) for actions in schedule)


def add_update(schedule: Schedule, *, tied: bool, gathers: Sequence[bool]) -> Schedule:
    """Append what happens after the last backward.

    Args:
        schedule: Lists that end with a backward or its send.
        tied: Whether to sum gradients of parameters that several stages hold.
        gathers: For each stage, whether updated parameters must be distributed after the step.
    """
    kinds = [ActionKind.REDUCE_GRADIENTS, *[ActionKind.REDUCE_TIED] * tied, ActionKind.OPTIMIZER_STEP]
    return tuple(
        actions + tuple(Action(stage, kind) for kind in [*kinds, *[ActionKind.GATHER_PARAMETERS] * gathers[stage]])
        for stage, actions in enumerate(schedule)
    )


def _with_receives(actions: tuple[Action, ...], last: int) -> tuple[Action, ...]:
    """Put each receive before the computation that precedes its consumer, but never a gradient's before its forward."""
    before: list[list[Action]] = [[] for _ in actions]
    for position, action in enumerate(actions):
        stage, microbatch = action.stage, action.microbatch
        earlier = max(position - 1, 0)
        if action.kind is ActionKind.FORWARD and stage > 0:
            before[earlier].append(Action(stage, ActionKind.RECV_ACTIVATION, microbatch))
        if action.kind is ActionKind.BACKWARD and stage < last:
            own_forward = actions[earlier] == Action(stage, ActionKind.FORWARD, microbatch)
            before[position if own_forward else earlier].append(Action(stage, ActionKind.RECV_GRADIENT, microbatch))
    return tuple(chain.from_iterable([*before[position], action] for position, action in enumerate(actions)))


def _with_sends(actions: tuple[Action, ...], last: int) -> tuple[Action, ...]:
    """Put each send right after the computation that made its tensors."""
    result: list[Action] = []
    for action in actions:
        result.append(action)
        if action.kind is ActionKind.FORWARD and action.stage < last:
            result.append(Action(action.stage, ActionKind.SEND_ACTIVATION, action.microbatch))
        if action.kind is ActionKind.BACKWARD and action.stage > 0:
            result.append(Action(action.stage, ActionKind.SEND_GRADIENT, action.microbatch))
    return tuple(result)
