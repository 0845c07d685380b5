"""What a step's seconds hang on: the chain of actions, each of which starts when the one before it ends."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_mist.schedule.action import INPUT_BACKWARDS, RECEIVES, SENDS, Action, ActionKind
from lightning_mist.schedule.chrome_trace import Span
from lightning_mist.schedule.schedule_simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The chain of actions that a step's seconds hang on: if any of them were shorter, so would the step be.

    Attributes:
        spans: The actions, in order: those of devices, and between them the transfers that were waited for.
        work_seconds: For each group of devices, seconds of the chain in which it works.
        transfer_seconds: Seconds of the chain in which something is on its way between groups.
        other_seconds: The rest: receiving where that takes the cores that compute, and rounding.
    """

    spans: tuple[Span, ...]
    work_seconds: tuple[float, ...]
    transfer_seconds: float
    other_seconds: float


def critical_path(simulation: Simulation) -> CriticalPath:
    """The chain of actions that the end of a step hangs on.

    It is followed from the last action back: to whatever ended last of what it had to wait for, which is what its
    devices did before, the message that it consumes, and for an optimizer's step also what other groups do before
    theirs.
    """
    graph = _Graph(simulation)
    at: Span | None = max((span for lane in graph.lanes for span in lane), key=lambda span: span.end)
    chain: list[Span] = []
    while at is not None:
        chain.append(at)
        at = graph.waited_for(at)
    chain.reverse()
    work: defaultdict[int, float] = defaultdict(float)
    moving = 0.0
    for span in chain:
        if _is_transfer(span.action):
            moving += span.end - span.start
        else:
            work[span.rank] += span.end - span.start
    return CriticalPath(
        spans=tuple(chain),
        work_seconds=tuple(work[group] for group in range(len(graph.lanes))),
        transfer_seconds=moving,
        other_seconds=max(0.0, simulation.makespan - moving - sum(work.values())),
    )


_LEAST = 1e-9
"""Part of a step by which sums of floating-point numbers may differ."""

_SHARED = frozenset({ActionKind.REDUCE_GRADIENTS, ActionKind.REDUCE_TIED})


def _is_transfer(action: Action) -> bool:
    return action.kind in SENDS or action.kind in RECEIVES


class _Graph:
    """What every action of a step may have waited for."""

    def __init__(self, simulation: Simulation) -> None:
        self.lanes = [[span for span in line if not _is_transfer(span.action)] for line in simulation.spans]
        self._slack = _LEAST * simulation.makespan
        self._found = {span.action: span for line in simulation.spans for span in line}
        self._before = {span.action: lane[at - 1] for lane in self.lanes for at, span in enumerate(lane) if at}
        self._ends = [[span.end for span in lane] for lane in self.lanes]
        self._queued: dict[Action, Span] = {}
        groups = len(self.lanes)
        for line in simulation.spans:
            last: dict[int, Span] = {}
            for span in line:
                if span.action.kind in RECEIVES:
                    source = _source(span.action) % groups
                    if source in last:
                        self._queued[span.action] = last[source]
                    last[source] = span

    def waited_for(self, span: Span) -> Span | None:
        """Of what an action may have waited for, what ended last; None if there is nothing."""
        found = [other for other in self._candidates(span) if other.end <= span.start + self._slack]
        return max(found, key=lambda other: (other.end, not _is_transfer(other.action)), default=None)

    def _candidates(self, span: Span) -> Iterator[Span]:
        action = span.action
        if action.kind in RECEIVES:
            yield from self._around_transfer(span)
            return
        if action in self._before:
            yield self._before[action]
        if action.kind is ActionKind.FORWARD or action.kind in INPUT_BACKWARDS:
            forward = action.kind is ActionKind.FORWARD
            kind = ActionKind.RECV_ACTIVATION if forward else ActionKind.RECV_GRADIENT
            message = Action(action.stage, kind, action.microbatch)
            if message in self._found:
                yield self._found[message]
        elif action.kind in (ActionKind.REDUCE_TIED, ActionKind.OPTIMIZER_STEP):
            yield from (other for lane in self.lanes for other in lane if other.action.kind in _SHARED)

    def _around_transfer(self, span: Span) -> Iterator[Span]:
        """Its result was made, the one before it on its link had arrived, and its receiver had come to post it."""
        action = span.action
        forward = action.kind is ActionKind.RECV_ACTIVATION
        for kind in (ActionKind.FORWARD,) if forward else (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
            made = Action(_source(action), kind, action.microbatch)
            if made in self._found:
                yield self._found[made]
        if action in self._queued:
            yield self._queued[action]
        at = bisect_right(self._ends[span.rank], span.start + self._slack)
        if at:
            yield self.lanes[span.rank][at - 1]


def _source(receive: Action) -> int:
    """The stage that a receive comes from."""
    return receive.stage - 1 if receive.kind is ActionKind.RECV_ACTIVATION else receive.stage + 1
