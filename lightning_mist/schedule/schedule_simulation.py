"""Running the very lists of a schedule on a clock instead of on devices.

How transfers move, what waits for what, and when the optimizer steps is said in
:mod:`~lightning_mist.schedule.program_clock`, which does the arithmetic: here are spans, for pictures and for people.

For ``S`` stages and ``G`` microbatches that take ``t`` each, 1F1B and GPipe without transfers take ``(G - 1 + S) t``,
which is ``(G - 1) max t + sum t``, the closed form of the cost model. Stages that differ take no longer than that if
forward and backward are in one ratio on all of them; else the closed form may be too short, and only
``(G - 1) (max forward + max backward) + sum t`` is never exceeded.

Equal stages whose backward is ``I`` and ``W`` take ``G (F + I + W) + (S - 1) (F + I - W)`` under ZB-H1 if ``F = I = W``
and ``G >= S``, and less than under 1F1B whenever ``W`` takes any time. ``V`` chunks on each of ``P`` groups, of ``t``
each, take ``(G V + P - 1) t`` under interleaved 1F1B.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan
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
from lightning_mist.schedule.chrome_trace import Span
from lightning_mist.schedule.lowering import Program, lower, program_of_lists
from lightning_mist.schedule.program_clock import Epilogue, EpilogueTimes, StepRules, Times, finish, run
from lightning_mist.schedule.seconds import ActionSeconds, crossing_seconds, plan_seconds, predicted_terms, slot_seconds
from lightning_mist.schedule.validation import check

__all__ = ["ActionSeconds", "Simulation", "simulate", "simulate_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What running a schedule on a clock showed; all times are seconds since the start.

    Attributes:
        spans: Start and end of every action, group by group in the order of its list; a send or receive spans the time
            in which its transfer moves.
        busy: For each group of devices, how long it computed, reduced, stepped and gathered.
        bubble: For each group, how long it did nothing of this before the makespan.
        in_flight: For each group, ``(time, count)`` whenever its number of microbatches in flight changes. A microbatch
            counts once for every chunk it is in, until its ``B`` or ``I`` has ended.
    """

    makespan: float
    spans: tuple[tuple[Span, ...], ...]
    busy: tuple[float, ...]
    bubble: tuple[float, ...]
    in_flight: tuple[tuple[tuple[float, int], ...], ...]


def simulate(
    schedule: Schedule,
    stages: Sequence[ActionSeconds],
    *,
    activation_seconds: Sequence[float] = (),
    gradient_seconds: Sequence[float] = (),
    sent_activation_seconds: Sequence[float] = (),
    sent_gradient_seconds: Sequence[float] = (),
    rules: StepRules | None = None,
) -> Simulation:
    """Run a schedule on a clock.

    Args:
        schedule: For each group of devices its actions; computations only (a neighbour's result is there at once), or
            lowered.
        stages: How long each stage's actions take; what a group does once per batch, its first stage's say.
        activation_seconds: For each boundary between stages, how long the activations of one microbatch take to cross
            it; empty for no time.
        gradient_seconds: The same for gradients on their way back.
        sent_activation_seconds: For each boundary, how long its sender takes where transfers move within computation;
            empty for as long as its receiver, ``activation_seconds``.
        rules: How transfers move, and whom the optimizer's step waits for; by default transfers move beside
            computation, and each group steps by itself.

    Raises:
        ValueError: If a sequence has not one entry per stage or boundary, or a time is negative or not finite.
        ScheduleError: If the schedule breaks a rule.
    """
    num_stages = num_stages_of(schedule)
    boundaries = num_stages - 1
    activation_seconds = tuple(activation_seconds) or (0.0,) * boundaries
    gradient_seconds = tuple(gradient_seconds) or (0.0,) * boundaries
    sent_activation_seconds = tuple(sent_activation_seconds) or activation_seconds
    sent_gradient_seconds = tuple(sent_gradient_seconds) or gradient_seconds
    for name, given, needed in (
        ("stages", len(stages), num_stages),
        ("activation_seconds", len(activation_seconds), boundaries),
        ("gradient_seconds", len(gradient_seconds), boundaries),
        ("sent_activation_seconds", len(sent_activation_seconds), boundaries),
        ("sent_gradient_seconds", len(sent_gradient_seconds), boundaries),
    ):
        if given != needed:
            raise ValueError(f"{name} has {given} entries: a schedule of {num_stages} stages needs {needed}")
    forwards = sum(
        action.kind is ActionKind.FORWARD and action.stage == 0 for actions in schedule for action in actions
    )
    check(schedule, forwards)
    rules = rules or StepRules()
    program, crossings = program_of_lists(schedule), crossing_seconds(activation_seconds, gradient_seconds)
    sending = crossing_seconds(sent_activation_seconds, sent_gradient_seconds)
    slots = slot_seconds(stages)
    seconds = [
        _durations(actions, (slots[slot] for slot, *_ in line), crossings, sending, stage.epilogue)
        for actions, line, stage in zip(schedule, program.lines, stages, strict=False)
    ]
    times = run(program, slots, crossings, rules, sending_seconds=sending)
    epilogues = [
        Epilogue(**{_ONCE[action.kind]: takes for action, takes in zip(*each, strict=True) if action.kind in _ONCE})
        for each in zip(schedule, seconds, strict=True)
    ]
    is_tied = any(action.kind is ActionKind.REDUCE_TIED for actions in schedule for action in actions)
    end = finish(program, times, epilogues, rules, is_tied=is_tied)
    spans = tuple(
        _spans(group, *each, program, times, end) for group, each in enumerate(zip(schedule, seconds, strict=True))
    )
    return _summary(spans)


MOST_COMPUTATIONS = 4_000_000
"""Forwards and backwards of a step that a clock is run on: a pipeline of 512 stages and 2,048 microbatches has half."""


def simulate_plan(plan: Plan) -> Simulation:
    """Run a plan's own schedule with the seconds that were predicted for it, by the rules of its prediction.

    What a prediction has no terms for is made up as :func:`~lightning_mist.schedule.seconds.predicted_terms` says. The
    makespan is the predicted step, unless the prediction is of a version that did not run the schedule on a clock; of
    lists so long that predicting cut them it is within half a percent.

    Raises:
        PlanError: If nothing was predicted, or its lists are longer than a clock goes through in minutes.
    """
    count = 2 * plan.num_microbatches * plan.num_stages
    if count > MOST_COMPUTATIONS:
        raise PlanError(
            f"{plan.num_microbatches:,} microbatches on {plan.num_stages} stages: of {count:,} forwards and backwards "
            f"no clock is run, at most of {MOST_COMPUTATIONS:,}; look at a plan of fewer and larger microbatches"
        )
    seconds = plan_seconds(plan, predicted_terms(plan))
    assert plan.predicted is not None
    return simulate(
        lower(plan, tied=any(stage.reduce_tied > 0 for stage in seconds.stages)),
        seconds.stages,
        activation_seconds=seconds.activations,
        gradient_seconds=seconds.gradients,
        sent_activation_seconds=seconds.sent_activations,
        sent_gradient_seconds=seconds.sent_gradients,
        rules=StepRules(transfers=plan.predicted.transfers, update_after=plan.predicted.update_after),
    )


_ONCE = {
    ActionKind.REDUCE_GRADIENTS: "reduce",
    ActionKind.REDUCE_TIED: "tied",
    ActionKind.OPTIMIZER_STEP: "step",
    ActionKind.GATHER_PARAMETERS: "gather",
}
"""What happens once per batch, by its names in :class:`~lightning_mist.schedule.program_clock.Epilogue`."""


def _durations(
    actions: Sequence[Action],
    slots: Iterable[float],
    receiving: Sequence[float],
    sending: Sequence[float],
    once: Epilogue,
) -> list[float]:
    """Seconds of every action of a group; refuses those that are no times.

    Args:
        slots: Seconds of its computations, in order.
        receiving: Seconds of one message of every crossing; and those of sending it.
    """
    computing, found = iter(slots), list[float]()
    for action in actions:
        if action.kind in COMPUTATIONS:
            duration = next(computing)
        elif action.kind in _ONCE:
            duration = getattr(once, _ONCE[action.kind])
        else:
            duration = (sending if action.kind in SENDS else receiving)[_crossing(action)]
        if not 0.0 <= duration < float("inf"):
            raise ValueError(f"{action} takes {duration} seconds: times are finite and not negative")
        found.append(duration)
    return found


def _crossing(action: Action) -> int:
    """The crossing of a send or receive."""
    before = {
        ActionKind.SEND_ACTIVATION: 2 * action.stage,
        ActionKind.RECV_ACTIVATION: 2 * action.stage - 2,
        ActionKind.SEND_GRADIENT: 2 * action.stage - 1,
        ActionKind.RECV_GRADIENT: 2 * action.stage + 1,
    }
    return before[action.kind]


def _spans(
    group: int, actions: Sequence[Action], seconds: Sequence[float], program: Program, times: Times, end: EpilogueTimes
) -> tuple[Span, ...]:
    """Start and end of every action of a group."""
    starts = iter(times.starts[group])
    passed = [0] * len(program.links), [0] * len(program.links)
    link_of = {crossing: link for link, crossings in enumerate(program.links) for crossing in crossings}
    once = {"reduce": end.reduce[group], "tied": end.tied, "step": end.step[group], "gather": end.gather[group]}
    result = []
    for action, takes in zip(actions, seconds, strict=True):
        if action.kind in SENDS or action.kind in RECEIVES:
            count, link = passed[action.kind in SENDS], link_of[_crossing(action)]
            number, count[link] = count[link], count[link] + 1
            result.append(Span(group, action, times.departures[link][number], times.arrivals[link][number]))
            continue
        start = next(starts) if action.kind in COMPUTATIONS else once[_ONCE[action.kind]]
        # All groups sum tied gradients for as long as the one that takes longest.
        lasts = end.tied_seconds if action.kind is ActionKind.REDUCE_TIED else takes
        result.append(Span(group, action, start, start + lasts))
    return tuple(result)


def _summary(spans: tuple[tuple[Span, ...], ...]) -> Simulation:
    makespan = max(span.end for line in spans for span in line)
    busy: list[float] = []
    in_flight: list[tuple[tuple[float, int], ...]] = []
    for line in spans:
        own = [span for span in line if span.action.kind not in SENDS | RECEIVES]
        busy.append(sum(span.end - span.start for span in own))
        count, counts = 0, []
        for span in own:
            if span.action.kind is ActionKind.FORWARD:
                count += 1
                counts.append((span.start, count))
            elif span.action.kind in INPUT_BACKWARDS:
                count -= 1
                counts.append((span.end, count))
        in_flight.append(tuple(counts))
    return Simulation(
        makespan=makespan,
        spans=spans,
        busy=tuple(busy),
        bubble=tuple(makespan - seconds for seconds in busy),
        in_flight=tuple(in_flight),
    )


# What a step's seconds hang on: the chain of actions, each of which starts when the one before it ends.


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
