"""Running a program on a clock: when everything starts, and how long one step takes.

A group of devices has one lane of computation and runs its list in order. Transfers move *beside* computation, as
between devices: sends and receives are posted and take no time of the lane; a transfer starts when both sides have
posted it and the one before it on its link has ended. Or they move *within* it, as between processes that copy with the
cores that they compute with: a send occupies the lane of its sender for as long as sending takes, and whatever is
consumed that of its receiver for as long as receiving takes, which is another time where a stage has more ranks than
its neighbour. A receiver that waits for the message anyway receives it meanwhile, but has it no sooner than it is sent.

What comes after the last backward of a group: ``REDUCE``; ``REDUCE_TIED``, which starts on all groups at once;
``STEP``, which starts when everything that the group sent has arrived and, depending on the rules, when others have
come as far; ``GATHER``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_mist.errors import ScheduleError
from lightning_mist.plan import Transfers, UpdateAfter
from lightning_mist.schedule.lowering import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """What the machine and the runtime make of a step.

    Attributes:
        transfers: Whether transfers move beside computation or within it.
        update_after: Whom an optimizer's step waits for. The runtime brings losses home before, which are there when
            the last stage has reduced its gradients (``"last"``); where its host computes too, or gradients are looked
            at as a whole, nobody goes on before all have (``"all"``).
    """

    transfers: Transfers = "beside"
    update_after: UpdateAfter = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """Seconds of what a group does once per batch: ``REDUCE``, ``REDUCE_TIED``, ``STEP``, ``GATHER``."""

    reduce: float = 0.0
    tied: float = 0.0
    step: float = 0.0
    gather: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When the computations and transfers of a program happen, in seconds since its start.

    Attributes:
        starts: For each group the starts of its computations.
        ends: For each group the end of the last, with what is sent behind it.
        departures: For each link the starts of its transfers.
    """

    starts: tuple[list[float], ...]
    ends: tuple[float, ...]
    departures: tuple[list[float], ...]
    arrivals: tuple[list[float], ...]


@dataclass(slots=True)
class _Link:
    """What has been posted on a link, and what has moved; ``sending`` is what transfers take of the sender's lane."""

    seconds: list[float]
    sending: list[float]
    sent: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    departures: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    def move(self) -> None:
        """Let the next transfer move, if both sides have posted it."""
        number = len(self.arrivals)
        if number < len(self.sent) and number < len(self.ready):
            start = max(self.sent[number], self.ready[number])
            if number and self.arrivals[-1] > start:
                start = self.arrivals[-1]
            self.departures.append(start)
            self.arrivals.append(start + self.seconds[number])


def run(
    program: Program,
    slot_seconds: Sequence[float],
    crossing_seconds: Sequence[float],
    rules: StepRules,
    *,
    sending_seconds: Sequence[float] | None = None,
) -> Times:
    """Run a program up to the last backward of every group.

    Args:
        crossing_seconds: How long one message of every crossing takes, or its receiver where transfers move within
            computation.
        sending_seconds: How long its sender takes there; as long as the receiver if ``None``.

    Raises:
        ScheduleError: If groups wait for each other for ever.
    """
    sending = crossing_seconds if sending_seconds is None else sending_seconds
    links = [
        _Link([crossing_seconds[crossing] for crossing in crossings], [sending[crossing] for crossing in crossings])
        for crossings in program.links
    ]
    advance = _advance_within if rules.transfers == "within" and program.has_transfers else _advance_beside
    if not program.has_transfers:
        for link in links:
            # A neighbour's result is there at once.
            link.seconds, link.ready = [0.0] * len(link.seconds), [0.0] * len(link.seconds)
    lanes = [_Lane(line) for line in program.lines]
    if advance is _advance_beside and program.has_transfers:
        for posts in program.first:
            for code in posts:
                links[code >> 1].ready.append(0.0)
    waiting = lanes
    while waiting:
        advanced = [advance(lane, links, slot_seconds) for lane in waiting]
        if not any(advanced):
            raise ScheduleError("the groups of devices wait for each other for ever: check the schedule first")
        waiting = [lane for lane in waiting if lane.position < len(lane.line)]
    return Times(
        starts=tuple(lane.starts for lane in lanes),
        ends=tuple(lane.clock for lane in lanes),
        departures=tuple(link.departures for link in links),
        arrivals=tuple(link.arrivals for link in links),
    )


class _Lane:
    """How far a group of devices has come."""

    __slots__ = ("clock", "line", "position", "starts")

    def __init__(self, line: tuple[tuple[int, int, int, tuple[int, ...]], ...]) -> None:
        self.line, self.position, self.clock = line, 0, 0.0
        self.starts: list[float] = []


def _advance_beside(lane: _Lane, links: Sequence[_Link], slot_seconds: Sequence[float]) -> bool:
    """Run a group until it waits for what has not been sent; whether it got on at all."""
    line, starts, clock, begin = lane.line, lane.starts, lane.clock, lane.position
    position = begin
    for slot, waits, number, posts in line[begin:] if begin else line:
        if waits >= 0:
            arrivals = links[waits].arrivals
            if number >= len(arrivals):
                break
            clock = max(clock, arrivals[number])
        starts.append(clock)
        clock += slot_seconds[slot]
        for code in posts:
            link = links[code >> 1]
            (link.sent if code & 1 else link.ready).append(clock)
            if len(link.arrivals) < len(link.sent):
                link.move()
        position += 1
    lane.position, lane.clock = position, clock
    return position > begin


def _advance_within(lane: _Lane, links: Sequence[_Link], slot_seconds: Sequence[float]) -> bool:
    """Run a group as :func:`_advance_beside` does, with transfers that use the lanes of both sides."""
    line, starts, clock, begin = lane.line, lane.starts, lane.clock, lane.position
    position = begin
    for slot, waits, number, posts in line[begin:] if begin else line:
        if waits >= 0:
            source = links[waits]
            if number >= len(source.arrivals):
                break
            clock = max(max(clock, source.departures[number]) + source.seconds[number], source.arrivals[number])
        starts.append(clock)
        clock += slot_seconds[slot]
        for code in posts:
            if code & 1:
                link = links[code >> 1]
                link.departures.append(clock)
                clock += link.sending[len(link.arrivals)]
                link.arrivals.append(clock)
        position += 1
    lane.position, lane.clock = position, clock
    return position > begin


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueTimes:
    """When what groups do once per batch starts; each ends when its seconds are over."""

    reduce: tuple[float, ...]
    tied: float
    tied_seconds: float
    step: tuple[float, ...]
    gather: tuple[float, ...]
    makespan: float


def finish(
    program: Program, times: Times, epilogues: Sequence[Epilogue], rules: StepRules, *, is_tied: bool
) -> EpilogueTimes:
    """What comes after the last backward.

    Args:
        is_tied: Whether groups sum gradients of parameters that several of them hold.
    """
    # What was sent last over a link arrives last; buffers of what a group sent must live until then.
    arrived = [0.0] * len(epilogues)
    for sender, arrivals in zip(program.senders, times.arrivals, strict=True):
        arrived[sender] = max(arrived[sender], arrivals[-1])
    reduced = [end + item.reduce for end, item in zip(times.ends, epilogues, strict=True)]
    tied_seconds = max(item.tied for item in epilogues)
    tied = max(reduced)
    ready = [tied + tied_seconds] * len(reduced) if is_tied else reduced
    ready = [max(item, end) for item, end in zip(ready, arrived, strict=True)]
    first = {"own": 0.0, "last": ready[-1], "all": max(ready)}[rules.update_after]
    step = [max(first, own) for own in ready]
    gather = [start + item.step for start, item in zip(step, epilogues, strict=True)]
    return EpilogueTimes(
        reduce=tuple(times.ends),
        tied=tied,
        tied_seconds=tied_seconds,
        step=tuple(step),
        gather=tuple(gather),
        makespan=max(start + item.gather for start, item in zip(gather, epilogues, strict=True)),
    )
