"""Which sends are known to have arrived, and when: their buffers may be freed without asking the other side.

A send is never waited for while a list runs. But when a computation's wait for another group of devices is over, that
group had come to the send that answered it; and whatever it had consumed before that send had arrived. Under 1F1B, for
example, the activation of microbatch ``g`` tells a stage which of its gradients the stage before has taken.
"""

from collections import defaultdict

from lightning_mist.schedule.action import SENDS, Action, Schedule, receive_of
from lightning_mist.schedule.lowering import consumers


def arrived_sends(schedule: Schedule) -> tuple[dict[Action, tuple[Action, ...]], ...]:
    """For each group of devices, which of its sends each of its computations finds arrived.

    Args:
        schedule: Lowered lists that pass the check.

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
