"""From forwards and backwards to everything a group of devices does: pure passes over lists of actions.

Sends and receives only *post* a transfer. Sends are never waited for while the list runs; ``F``, ``B`` and ``I`` wait
for what they consume. A receive is posted one computation early, so that the transfer happens while the devices
compute: right before the computation ahead of its consumer. Two things limit this. The gradient of a microbatch is not
received before its own forward has run, which is what knows the shape of that gradient. And transports deliver what
one group of devices sends another in the order in which it was sent, so receives from one group are posted in that
order, earlier if need be: with chunks on two groups, activations and gradients travel in the same direction.

Buffers of sends are freed without asking the other side. When a computation's wait for another group of devices is
over, that group had come to the send that answered it; and whatever it had consumed before that send had arrived. Under
1F1B, for example, the activation of microbatch ``g`` tells a stage which of its gradients the stage before has taken.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from lightning_mist.plan import Plan, ZeroStage
from lightning_mist.schedule.action import (
    INPUT_BACKWARDS,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    num_stages_of,
    receive_of,
)
from lightning_mist.schedule.orders import generate


def lower(plan: Plan, *, tied: bool) -> Schedule:
    """Everything that each group of devices of a plan does for one batch, in order.

    Returns:
        One tuple of actions per group: transfers around computations, then ``REDUCE``, ``REDUCE_TIED`` (if ``tied``
        and there is more than one group), ``STEP`` and, on groups under ZeRO-1 or ZeRO-2 where more than one rank has
        the same parameters, ``GATHER``.
    """
    computations = generate(plan.num_stages, plan.num_microbatches, plan.schedule, num_groups=plan.num_groups)
    gathers = [
        # Ranks that share the sequence of a row have the same parameters too, and share out what ZeRO shards.
        ZeroStage.NONE < stage.zero_stage < ZeroStage.PARAMETERS and stage.mesh.num_peers > 1
        for stage in plan.stages[: plan.num_groups]
    ]
    return add_update(add_transfers(computations), tied=tied and plan.num_groups > 1, gathers=gathers)


def lower_forwards(plan: Plan) -> Schedule:
    """What each group of devices does for one batch that is only evaluated: the forwards of :func:`lower`, in order."""
    computations = generate(plan.num_stages, plan.num_microbatches, plan.schedule, num_groups=plan.num_groups)
    forwards = (tuple(action for action in line if action.kind is ActionKind.FORWARD) for line in computations)
    return add_transfers(tuple(forwards))


def add_transfers(schedule: Schedule) -> Schedule:
    """Insert ``RECV_F``, ``SEND_F``, ``RECV_B`` and ``SEND_B`` around the computations of every group."""
    last = num_stages_of(schedule) - 1
    sends = tuple(tuple(_sends_behind(action, last) for action in actions) for actions in schedule)
    result, arriving = [], _arriving(sends)
    for group, actions in enumerate(schedule):
        receives = _receives_before(actions, arriving[group])
        line: list[Action] = []
        for position, action in enumerate(actions):
            line += [*receives[position], action, *sends[group][position]]
        result.append(tuple(line))
    return tuple(result)


def add_update(schedule: Schedule, *, tied: bool, gathers: Sequence[bool]) -> Schedule:
    """Append what happens after the last backward.

    Args:
        gathers: For each group, whether updated parameters must be distributed after the step.
    """
    kinds = [ActionKind.REDUCE_GRADIENTS, *[ActionKind.REDUCE_TIED] * tied, ActionKind.OPTIMIZER_STEP]
    return tuple(
        actions + tuple(Action(group, kind) for kind in [*kinds, *[ActionKind.GATHER_PARAMETERS] * gathers[group]])
        for group, actions in enumerate(schedule)
    )


def consumers(actions: Sequence[Action]) -> dict[Action, int]:
    """For each receive that a list needs if it is not of the first or last stage, the position of what waits for it."""
    found: dict[Action, int] = {}
    for position, action in enumerate(actions):
        if action.kind is ActionKind.FORWARD:
            found[Action(action.stage, ActionKind.RECV_ACTIVATION, action.microbatch)] = position
        elif action.kind in INPUT_BACKWARDS:
            found[Action(action.stage, ActionKind.RECV_GRADIENT, action.microbatch)] = position
    return found


def posting_positions(used: Sequence[int], earliest: Sequence[int]) -> list[int]:
    """Before which computation of a group to post each receive from one other group.

    Args:
        used: Position of the computation that waits for it, for each receive in the order of their sends.
    """
    # No receive is posted after one whose message was sent later, and none before its own forward has run.
    wanted = [max(position - 1, first) for position, first in zip(used, earliest, strict=True)]
    ahead = [*accumulate(reversed(wanted), min)][::-1]
    ready = accumulate(earliest, max)
    return [min(max(position, first), last) for position, first, last in zip(ahead, ready, used, strict=True)]


def _sends_behind(action: Action, last: int) -> tuple[Action, ...]:
    """What is sent right after a computation."""
    if action.kind is ActionKind.FORWARD and action.stage < last:
        return (Action(action.stage, ActionKind.SEND_ACTIVATION, action.microbatch),)
    if action.kind in INPUT_BACKWARDS and action.stage > 0:
        return (Action(action.stage, ActionKind.SEND_GRADIENT, action.microbatch),)
    return ()


def _arriving(sends: tuple[tuple[tuple[Action, ...], ...], ...]) -> list[list[list[Action]]]:
    """For each group, what it receives from each other group in the order in which that is sent."""
    result: list[dict[int, list[Action]]] = [{} for _ in sends]
    for source, posted in enumerate(sends):
        for receive in (receive_of(send) for after in posted for send in after):
            result[receive.stage % len(sends)].setdefault(source, []).append(receive)
    return [list(found.values()) for found in result]


def _receives_before(actions: Sequence[Action], arriving: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """The receives to post before each computation of a group."""
    consumer = consumers(actions)
    forwards = {action: position for position, action in enumerate(actions) if action.kind is ActionKind.FORWARD}
    placed: list[list[tuple[int, Action]]] = [[] for _ in actions]
    for received in arriving:
        order = [receive for receive in received if receive in consumer]
        earliest = [
            forwards.get(Action(receive.stage, ActionKind.FORWARD, receive.microbatch), -1) + 1
            if receive.kind is ActionKind.RECV_GRADIENT
            else 0
            for receive in order
        ]
        used = [consumer[receive] for receive in order]
        needed = accumulate(used, max)
        for receive, position, key in zip(order, posting_positions(used, earliest), needed, strict=True):
            placed[position].append((key, receive))
    return [[receive for _, receive in sorted(line, key=lambda item: item[0])] for line in placed]


def arrived_sends(schedule: Schedule) -> tuple[dict[Action, tuple[Action, ...]], ...]:
    """For each group of devices, which of its sends each of its computations finds arrived.

    Returns:
        Per group a dictionary from ``F``, ``B`` or ``I`` to the sends that have arrived once its wait is over and that
        no computation before it finds. Sends of which nothing tells are in none.
    """
    answered = {
        receive_of(action): (group, position)
        for group, actions in enumerate(schedule)
        for position, action in enumerate(actions)
        if action.kind in SENDS
    }
    taken = [consumers(actions) for actions in schedule]
    return tuple(_of_group(schedule, group, taken, answered) for group in range(len(schedule)))


def _of_group(
    schedule: Schedule, group: int, taken: list[dict[Action, int]], answered: dict[Action, tuple[int, int]]
) -> dict[Action, tuple[Action, ...]]:
    waits = {position: receive for receive, position in taken[group].items()}
    under_way: defaultdict[int, list[Action]] = defaultdict(list)
    result: dict[Action, tuple[Action, ...]] = {}
    for position, action in enumerate(schedule[group]):
        if action.kind in SENDS:
            under_way[receive_of(action).stage % len(schedule)].append(action)
        if (receive := waits.get(position)) is None or receive not in answered:
            continue
        source, reached = answered[receive]
        arrived = tuple(send for send in under_way[source] if taken[source][receive_of(send)] < reached)
        if arrived:
            under_way[source] = [send for send in under_way[source] if send not in arrived]
            result[action] = arrived
    return result


def complete_gradients(
    actions: Sequence[Action], parameters: Callable[[int], Iterable[str]]
) -> dict[int, frozenset[str]]:
    """For each position in a rank's list, the parameters whose gradients are complete when its action has run.

    That is after the last backward, or part of one, of the last of the rank's stages that uses them.

    Args:
        parameters: Gives the names of those that a stage trains with.
    """
    last: dict[str, int] = {}
    for position, action in enumerate(actions):
        if action.kind in INPUT_BACKWARDS or action.kind is ActionKind.BACKWARD_WEIGHT:
            last.update(dict.fromkeys(parameters(action.stage), position))
    result: defaultdict[int, set[str]] = defaultdict(set)
    for name, position in last.items():
        result[position].add(name)
    return {position: frozenset(names) for position, names in result.items()}
