"""Running the very lists of a schedule on a clock instead of on devices.

A group of devices has one lane of computation and runs its list in order. Sends and receives are posted and take no
time of it. A transfer starts when both sides have posted it and the one before it from the same group to the same other
has ended; the two directions between groups do not disturb each other. ``F``, ``B`` and ``I`` wait for what they
consume. ``REDUCE_TIED`` starts on all groups at once, when the last has come to it.

For ``S`` stages and ``G`` microbatches that take ``t`` each, 1F1B and GPipe without transfers take ``(G - 1 + S) t``,
which is ``(G - 1) max t + sum t``, the closed form of the cost model. Stages that differ take no longer than that if
forward and backward are in one ratio on all of them; else the closed form may be too short, and only
``(G - 1) (max forward + max backward) + sum t`` is never exceeded.

Equal stages whose backward is ``I`` and ``W`` take ``G (F + I + W) + (S - 1) (F + I - W)`` under ZB-H1 if ``F = I = W``
and ``G >= S``, and less than under 1F1B whenever ``W`` takes any time. ``V`` chunks on each of ``P`` groups, of ``t``
each, take ``(G V + P - 1) t`` under interleaved 1F1B.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan
from lightning_mist.schedule.action import (
    INPUT_BACKWARDS,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    num_stages_of,
    receive_of,
)
from lightning_mist.schedule.check import Rules, check
from lightning_mist.schedule.lower import lower
from lightning_mist.schedule.trace import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """How long the actions of one stage take, in seconds.

    Attributes:
        forward: Forward of one microbatch.
        backward: Backward of one microbatch, recomputation included.
        weight: The part of the backward that makes gradients of weights, ``W`` where the two are apart; ``I`` is the
            rest.
        first_forward: Forward of the first microbatch, if it takes another time.
        last_backward: Backward of the last microbatch, if it takes another time.
        reduce: ``REDUCE``, averaging gradients over data-parallel ranks.
        reduce_tied: ``REDUCE_TIED``; the longest of all stages counts.
        step: ``STEP``, the optimizer.
        gather: ``GATHER``, distributing updated parameters.
    """

    forward: float
    backward: float
    weight: float = 0.0
    first_forward: float | None = None
    last_backward: float | None = None
    reduce: float = 0.0
    reduce_tied: float = 0.0
    step: float = 0.0
    gather: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What running a schedule on a clock showed; all times are seconds since the start.

    Attributes:
        makespan: When the last action of any stage ended.
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
    stages: Sequence[StageSeconds],
    *,
    activation_seconds: Sequence[float] = (),
    gradient_seconds: Sequence[float] = (),
) -> Simulation:
    """Run a schedule on a clock.

    Args:
        schedule: For each group of devices its actions; computations only (a neighbour's result is there at once), or
            lowered.
        stages: How long each stage's actions take; what a group does once per batch, its first stage's say.
        activation_seconds: For each boundary between stages, how long the activations of one microbatch take to cross
            it; empty for no time.
        gradient_seconds: The same for gradients on their way back.

    Raises:
        ValueError: If a sequence has not one entry per stage or boundary, or a time is negative or not finite.
        ScheduleError: If the schedule breaks a rule.
    """
    num_stages = num_stages_of(schedule)
    boundaries = num_stages - 1
    activation_seconds = tuple(activation_seconds) or (0.0,) * boundaries
    gradient_seconds = tuple(gradient_seconds) or (0.0,) * boundaries
    for name, given, needed in (
        ("stages", len(stages), num_stages),
        ("activation_seconds", len(activation_seconds), boundaries),
        ("gradient_seconds", len(gradient_seconds), boundaries),
    ):
        if given != needed:
            raise ValueError(f"{name} has {given} entries: a schedule of {num_stages} stages needs {needed}")
    forwards = sum(
        action.kind is ActionKind.FORWARD and action.stage == 0 for actions in schedule for action in actions
    )
    check(schedule, forwards)
    run = _Run(schedule, stages, activation_seconds, gradient_seconds)
    run.finish()
    return _summary(schedule, run.spans)


def simulate_plan(plan: Plan) -> Simulation:
    """Run a plan's own schedule with the seconds that were predicted for it.

    Terms of a stage's prediction become its actions: ``reduce_seconds``, ``tied_seconds``, ``update_seconds`` and
    ``gather_seconds``; without them ``STEP`` takes the stage's boundary time. What a stage waits for on its receives,
    ``transfer_seconds``, is the time of its links: on the first and last stage of the one it receives from, on others
    half of it each. ``W`` takes ``weight_seconds``; if the prediction has no such term as long as the forward, but at
    most half of the backward: each of the two gradients of a matrix product takes as long as the product (Qi et al.,
    2023, table 1). Here transfers may hide behind computation, so that the makespan may be below the predicted step.

    Raises:
        PlanError: If nothing was predicted.
    """
    if plan.predicted is None:
        raise PlanError(
            "the plan has no predicted seconds: a simulation needs those of every stage; give a plan that "
            "`lightning-mist plan` or a fit wrote"
        )
    terms = [dict(stage.breakdown) for stage in plan.predicted.stages]
    once = []
    for predicted, term in zip(plan.predicted.stages, terms, strict=True):
        known = [term.get(f"{name}_seconds", 0.0) for name in ("reduce", "tied", "update", "gather")]
        once.append(known if any(known) else [0.0, 0.0, predicted.boundary_seconds, 0.0])
    stages = []
    for index, (predicted, term) in enumerate(zip(plan.predicted.stages, terms, strict=True)):
        # What a group of devices does once per batch it does for all its chunks.
        known = [
            sum(values) for values in zip(*(once[chunk] for chunk in plan.chunks(plan.group_of(index))), strict=True)
        ]
        stages.append(
            StageSeconds(
                forward=predicted.forward_seconds,
                backward=predicted.backward_seconds,
                weight=term.get("weight_seconds", min(predicted.forward_seconds, predicted.backward_seconds / 2)),
                reduce=known[0],
                reduce_tied=known[1],
                step=known[2],
                gather=known[3],
            )
        )
    waits = [term.get("transfer_seconds", 0.0) for term in terms]
    shares = [wait / 2 if 0 < stage < len(waits) - 1 else wait for stage, wait in enumerate(waits)]
    schedule = lower(plan, tied=any(stage.reduce_tied > 0 for stage in stages))
    return simulate(schedule, stages, activation_seconds=shares[1:], gradient_seconds=shares[:-1])


class _Run:
    """The clock of every group of devices and every transfer that is under way."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageSeconds],
        activation_seconds: tuple[float, ...],
        gradient_seconds: tuple[float, ...],
    ) -> None:
        self.spans: dict[Action, Span] = {}
        self._schedule = schedule
        self._durations = _durations(schedule, stages, activation_seconds, gradient_seconds)
        self._clock = [0.0] * len(schedule)
        self._posted: dict[Action, float] = {}
        self._rules = Rules(schedule)
        # Transfers from one group to another happen in the order in which they are sent.
        groups = range(len(schedule))
        self._links = [
            deque(a for a in actions if a.kind in SENDS and receive_of(a).stage % len(schedule) == target)
            for actions in schedule
            for target in groups
        ]
        self._link_free = [0.0] * len(self._links)

    def finish(self) -> None:
        """Advance every group as far as it gets until all lists are done; the check says that this ends."""
        position = [0] * len(self._schedule)
        while any(position[stage] < len(actions) for stage, actions in enumerate(self._schedule)):
            for stage, actions in enumerate(self._schedule):
                while position[stage] < len(actions) and self._advance(actions[position[stage]]):
                    position[stage] += 1

    def _advance(self, action: Action) -> bool:
        """Do an action if everything it waits for has a known end."""
        group = action.stage % len(self._schedule)
        if action.kind in SENDS or action.kind in RECEIVES:
            self._posted[action] = self._clock[group]
            self._move_transfers()
            return True
        if action.kind is ActionKind.REDUCE_TIED:
            self._posted[action] = self._clock[group]
            together = [Action(other, action.kind) for other in range(len(self._schedule))]
            if any(other not in self._posted for other in together):
                return False
            start = max(self._posted[other] for other in together)
            seconds = max(self._durations[other] for other in together)
            return self._record(action, start, seconds)
        needed = self._rules.waits_for(action)
        if any(other not in self.spans for other in needed):
            return False
        start = max([self._clock[group], *(self.spans[other].end for other in needed)])
        return self._record(action, start, self._durations[action])

    def _record(self, action: Action, start: float, seconds: float) -> bool:
        group = action.stage % len(self._schedule)
        self.spans[action] = Span(group, action, start, start + seconds)
        self._clock[group] = start + seconds
        return True

    def _move_transfers(self) -> None:
        for link, queue in enumerate(self._links):
            while queue and queue[0] in self._posted:
                send = queue[0]
                receive = receive_of(send)
                if receive not in self._posted:
                    break
                start = max(self._posted[send], self._posted[receive], self._link_free[link])
                end = self._link_free[link] = start + self._durations[send]
                for end_of_link in (send, receive):
                    group = end_of_link.stage % len(self._schedule)
                    self.spans[end_of_link] = Span(group, end_of_link, start, end)
                queue.popleft()


def _durations(
    schedule: Schedule,
    stages: Sequence[StageSeconds],
    activation_seconds: tuple[float, ...],
    gradient_seconds: tuple[float, ...],
) -> dict[Action, float]:
    """Seconds of every action that takes time; a transfer's belong to its send."""
    last = max((a.microbatch for actions in schedule for a in actions if a.microbatch is not None), default=0)
    result: dict[Action, float] = {}
    for action in (action for actions in schedule for action in actions):
        result[action] = _seconds_of(action, stages[action.stage], last, activation_seconds, gradient_seconds)
    for action, duration in result.items():
        if not 0.0 <= duration < float("inf"):
            raise ValueError(f"{action} takes {duration} seconds: times are finite and not negative")
    return result


def _seconds_of(
    action: Action,
    seconds: StageSeconds,
    last: int,
    activation_seconds: tuple[float, ...],
    gradient_seconds: tuple[float, ...],
) -> float:
    first_forward = seconds.forward if seconds.first_forward is None else seconds.first_forward
    last_backward = seconds.backward if seconds.last_backward is None else seconds.last_backward
    backward = last_backward if action.microbatch == last else seconds.backward
    return {
        ActionKind.FORWARD: first_forward if action.microbatch == 0 else seconds.forward,
        ActionKind.BACKWARD: backward,
        ActionKind.BACKWARD_INPUT: backward - seconds.weight,
        ActionKind.BACKWARD_WEIGHT: seconds.weight,
        ActionKind.REDUCE_GRADIENTS: seconds.reduce,
        ActionKind.REDUCE_TIED: seconds.reduce_tied,
        ActionKind.OPTIMIZER_STEP: seconds.step,
        ActionKind.GATHER_PARAMETERS: seconds.gather,
        ActionKind.SEND_ACTIVATION: (*activation_seconds, 0.0)[action.stage],
        ActionKind.SEND_GRADIENT: (0.0, *gradient_seconds)[action.stage],
        ActionKind.RECV_ACTIVATION: 0.0,
        ActionKind.RECV_GRADIENT: 0.0,
    }[action.kind]


def _summary(schedule: Schedule, spans: dict[Action, Span]) -> Simulation:
    makespan = max(span.end for span in spans.values())
    busy: list[float] = []
    in_flight: list[tuple[tuple[float, int], ...]] = []
    for actions in schedule:
        own = [spans[action] for action in actions if action.kind not in SENDS | RECEIVES]
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
        spans=tuple(tuple(spans[action] for action in actions) for actions in schedule),
        busy=tuple(busy),
        bubble=tuple(makespan - seconds for seconds in busy),
        in_flight=tuple(in_flight),
    )
