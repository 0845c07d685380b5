"""Lists of actions as numbers, for a clock that runs through hundreds of thousands of them.

What one group of devices sends another, over whatever boundary and in either direction, goes over one *link*, in the
order in which it is sent. A *crossing* is a boundary in one direction: ``2 b`` for activations from stage ``b`` to the
next, ``2 b + 1`` for their gradients on the way back.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_mist.plan import ScheduleName
from lightning_mist.schedule.action import (
    COMPUTATIONS,
    INPUT_BACKWARDS,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    num_stages_of,
)
from lightning_mist.schedule.lowering import posting_positions
from lightning_mist.schedule.orders import Order, generate_orders

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
        received = _lowered_receives(links, group, order) if places is None else _given_receives(links, places[group])
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


def _lowered_receives(links: _Links, group: int, order: Order) -> list[tuple[int, int]]:
    """Position and link of the receives of a group as lowering places them."""
    consumer: dict[int, dict[int, int]] = {}
    forward: dict[int, dict[int, int]] = {}
    for position, (stage, kind, microbatch) in enumerate(order):
        if kind is ActionKind.FORWARD:
            forward.setdefault(stage, {})[microbatch] = position
        needed = links.parts[stage][kind].needed
        if needed >= 0:
            consumer.setdefault(needed, {})[microbatch] = position
    found = []
    for (_, receiver), link in links.numbers.items():
        if receiver != group:
            continue
        messages = links.order[link]
        used = [consumer[crossing][index] for crossing, index in messages]
        # The gradient of a microbatch comes back to the stage before the boundary, behind its own forward there.
        earliest = [forward[crossing // 2][index] + 1 if crossing % 2 else 0 for crossing, index in messages]
        found += [(position, link) for position in posting_positions(used, earliest)]
    return found
