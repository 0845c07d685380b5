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

A *program* is the same list by numbers, for clocks that ask for it often; both place transfers by one function.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from lightning_mist.plan import Plan, ScheduleName, ZeroStage
from lightning_mist.schedule.action import (
    COMPUTATIONS,
    INPUT_BACKWARDS,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    num_stages_of,
    receive_of,
)
from lightning_mist.schedule.orders import Order, generate, generate_orders


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
    orders = [tuple((item.stage, item.kind, item.microbatch or 0) for item in actions) for actions in schedule]
    microbatches = 1 + max((microbatch for order in orders for *_, microbatch in order), default=0)
    links = _Links(orders, num_stages_of(schedule), microbatches)
    result = []
    for group, (order, actions) in enumerate(zip(orders, schedule, strict=True)):
        placed: list[list[tuple[int, Action]]] = [[] for _ in actions]
        for position, needed, link, number in _lowered_receives(links, group, order):
            placed[position].append((needed, _received(*links.order[link][number])))
        line: list[Action] = []
        for receives, action in zip(placed, actions, strict=True):
            line += [*(receive for _, receive in sorted(receives, key=lambda item: item[0])), action]
            if links.parts[action.stage][action.kind].sent >= 0:
                is_forward = action.kind is ActionKind.FORWARD
                kind = ActionKind.SEND_ACTIVATION if is_forward else ActionKind.SEND_GRADIENT
                line.append(Action(action.stage, kind, action.microbatch))
        result.append(tuple(line))
    return tuple(result)


def _received(crossing: int, microbatch: int) -> Action:
    """The receive of what crosses a boundary."""
    boundary, is_gradient = divmod(crossing, 2)
    kind = ActionKind.RECV_GRADIENT if is_gradient else ActionKind.RECV_ACTIVATION
    return Action(boundary + 1 - is_gradient, kind, microbatch)


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


# Lists of actions as numbers, for a clock that runs through hundreds of thousands of them.
#
# What one group of devices sends another, over whatever boundary and in either direction, goes over one *link*, in
# the order in which it is sent. A *crossing* is a boundary in one direction: ``2 b`` for activations from stage ``b``
# to the next, ``2 b + 1`` for their gradients on the way back.


KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)
"""Computations by their number."""

PLACES = 4
"""Of computations: of the first microbatch or of another, that follow another of their stage's, or do not."""

_NUMBER = {kind: number for number, kind in enumerate(KINDS)}

Step = tuple[int, int, int, tuple[int, ...]]
"""A computation: its slot (see :func:`slot_of`), the link that it waits for or -1, which message of that link, and what
is posted behind it: twice the number of a link for room to receive, one more for a message that is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What groups of devices do for one batch up to the last backward.

    Attributes:
        first: For each group what it posts before the first of them.
        links: For each link the crossing of each of its messages, in the order in which they are sent.
        senders: For each link the group that sends.
        has_transfers: Whether messages have to be received; else a neighbour's result is there at once.
    """

    num_stages: int
    lines: tuple[tuple[Step, ...], ...]
    first: tuple[tuple[int, ...], ...]
    links: tuple[tuple[int, ...], ...]
    senders: tuple[int, ...]
    has_transfers: bool


def slot_of(stage: int, kind: ActionKind, *, is_first: bool, is_again: bool) -> int:
    """Number of all computations that take equally long.

    Args:
        is_first: Whether it is of the first microbatch.
        is_again: As :func:`are_again` has it.
    """
    return (stage * len(KINDS) + _NUMBER[kind]) * PLACES + is_first + 2 * is_again


def are_again(order: Iterable[tuple[int, ActionKind]]) -> Iterator[bool]:
    """Whether each computation of a group begins where the one before did not end.

    A backward begins with the units with which a forward of its stage has ended, and the other way round. Behind
    anything else these are not there any more. Gradients of weights alone need no parameters.
    """
    before = None
    for stage, kind in order:
        if kind is ActionKind.BACKWARD_WEIGHT:
            yield False
            continue
        is_forward = kind is ActionKind.FORWARD
        yield before not in (None, (stage, not is_forward))
        before = stage, is_forward


@lru_cache(maxsize=16)
def program_of(
    num_stages: int, num_microbatches: int, name: ScheduleName = "1f1b", *, num_groups: int | None = None
) -> Program:
    """The program of a schedule with its transfers, as :func:`~lightning_mist.schedule.lowering.lower` places them."""
    orders = generate_orders(num_stages, num_microbatches, name, num_groups=num_groups)
    return _build(orders, num_stages, num_microbatches, None)


def program_of_lists(schedule: Schedule) -> Program:
    """The program of lists of actions.

    Args:
        schedule: Lists that pass :func:`~lightning_mist.schedule.validation.check`; computations only, or lowered.
    """
    orders, places = [], []
    for actions in schedule:
        order: list[tuple[int, ActionKind, int]] = []
        posted: list[tuple[int, Action]] = []
        for action in actions:
            if action.kind in COMPUTATIONS:
                assert action.microbatch is not None
                order.append((action.stage, action.kind, action.microbatch))
            elif action.kind in RECEIVES:
                posted.append((len(order), action))
        orders.append(tuple(order))
        places.append(posted)
    moves = any(action.kind in SENDS for actions in schedule for action in actions)
    counts = [sum(kind is ActionKind.FORWARD and stage == 0 for stage, kind, _ in order) for order in orders]
    program = _build(tuple(orders), num_stages_of(schedule), counts[0], places)
    return program if moves else replace(program, has_transfers=False)


@dataclass(frozen=True, slots=True)
class _Part:
    """What all computations of a kind on a stage have in common.

    Attributes:
        slot: The first of their slots.
        needed: The crossing of what they wait for; -1 if they wait for nothing.
        sent: The crossing of what they send; -1 if they send nothing.
    """

    slot: int
    needed: int
    sent: int


def _parts(num_stages: int) -> list[dict[ActionKind, _Part]]:
    """What is common to each kind of computation, for each stage."""
    last = num_stages - 1
    found = []
    for stage in range(num_stages):
        input_of = 2 * stage - 2 if stage > 0 else -1
        gradient_of = 2 * stage + 1 if stage < last else -1
        handed, returned = (2 * stage if stage < last else -1), (2 * stage - 1 if stage > 0 else -1)
        ends = {ActionKind.FORWARD: (input_of, handed), ActionKind.BACKWARD_WEIGHT: (-1, -1)}
        ends |= dict.fromkeys(INPUT_BACKWARDS, (gradient_of, returned))
        slots = {kind: slot_of(stage, kind, is_first=False, is_again=False) for kind in KINDS}
        found.append({kind: _Part(slots[kind], *ends[kind]) for kind in KINDS})
    return found


class _Links:
    """Numbers of links and of the messages on them."""

    def __init__(self, orders: Sequence[Order], num_stages: int, num_microbatches: int) -> None:
        self.groups, self.parts = len(orders), _parts(num_stages)
        self.numbers: dict[tuple[int, int], int] = {}
        self.crossings: list[list[int]] = []
        # Which message of its link carries a microbatch over a crossing, and the messages of every link.
        self.place = [[-1] * num_microbatches for _ in range(2 * num_stages - 2)]
        self.order: list[list[tuple[int, int]]] = []
        link_of: dict[int, int] = {}
        for order in orders:
            for stage, kind, microbatch in order:
                crossing = self.parts[stage][kind].sent
                if crossing < 0:
                    continue
                if crossing not in link_of:
                    link_of[crossing] = self._of(crossing)
                link = link_of[crossing]
                self.place[crossing][microbatch] = len(self.crossings[link])
                self.crossings[link].append(crossing)
                self.order[link].append((crossing, microbatch))
        self.link = [link_of.get(crossing, -1) for crossing in range(2 * num_stages - 2)]

    def _of(self, crossing: int) -> int:
        """The link between the groups that send and receive on a crossing."""
        before, after = crossing // 2 % self.groups, (crossing // 2 + 1) % self.groups
        ends = (after, before) if crossing % 2 else (before, after)
        if ends not in self.numbers:
            self.numbers[ends] = len(self.crossings)
            self.crossings.append([])
            self.order.append([])
        return self.numbers[ends]


def _build(
    orders: Sequence[Order],
    num_stages: int,
    num_microbatches: int,
    places: Sequence[Sequence[tuple[int, Action]]] | None,
) -> Program:
    """The program of orders of computations, with receives at given places, or where lowering puts them."""
    links = _Links(orders, num_stages, num_microbatches)
    lines, first = [], []
    for group, order in enumerate(orders):
        posts: list[tuple[int, ...]] = [()] * (len(order) + 1)
        if places is None:
            received = [(position, link) for position, _, link, _ in _lowered_receives(links, group, order)]
        else:
            received = _given_receives(links, places[group])
        for position, link in received:
            posts[position] += (2 * link,)
        lines.append(_line(links, order, posts))
        first.append(posts[0])
    return Program(
        num_stages=num_stages,
        lines=tuple(lines),
        first=tuple(first),
        links=tuple(map(tuple, links.crossings)),
        senders=tuple(sender for sender, _ in links.numbers),
        has_transfers=True,
    )


def _line(links: _Links, order: Order, posts: Sequence[tuple[int, ...]]) -> tuple[Step, ...]:
    """The computations of a group, each with what is posted behind it."""
    line: list[Step] = []
    again = are_again((stage, kind) for stage, kind, _ in order)
    for (stage, kind, microbatch), posted, is_again in zip(order, posts[1:], again, strict=True):
        part = links.parts[stage][kind]
        behind = posted if part.sent < 0 else (2 * links.link[part.sent] + 1, *posted)
        slot, needed = part.slot + (microbatch == 0) + 2 * is_again, part.needed
        if needed < 0:
            line.append((slot, -1, 0, behind))
        else:
            line.append((slot, links.link[needed], links.place[needed][microbatch], behind))
    return tuple(line)


def _given_receives(links: _Links, places: Sequence[tuple[int, Action]]) -> list[tuple[int, int]]:
    """Position and link of receives that are in a list."""
    found = []
    for position, action in places:
        is_gradient = action.kind is ActionKind.RECV_GRADIENT
        found.append((position, links.link[2 * action.stage + 1 if is_gradient else 2 * action.stage - 2]))
    return found


def _lowered_receives(links: _Links, group: int, order: Order) -> Iterator[tuple[int, int, int, int]]:
    """The receives of a group as lowering places them.

    Yields:
        Before which of its computations, up to which of them it is needed, its link, and which message of that.
    """
    consumer: dict[int, dict[int, int]] = {}
    forward: dict[int, dict[int, int]] = {}
    for position, (stage, kind, microbatch) in enumerate(order):
        if kind is ActionKind.FORWARD:
            forward.setdefault(stage, {})[microbatch] = position
        needed = links.parts[stage][kind].needed
        if needed >= 0:
            consumer.setdefault(needed, {})[microbatch] = position
    for (_, receiver), link in links.numbers.items():
        if receiver != group:
            continue
        messages = links.order[link]
        used = [consumer[crossing][index] for crossing, index in messages]
        # The gradient of a microbatch comes back to the stage before the boundary, behind its own forward there.
        earliest = [forward[crossing // 2][index] + 1 if crossing % 2 else 0 for crossing, index in messages]
        placed = zip(posting_positions(used, earliest), accumulate(used, max), strict=True)
        yield from ((position, needed, link, number) for number, (position, needed) in enumerate(placed))
