"""1F1B and ZB-H1 on a clock without lists of actions: the same times as their programs', in a fraction of the time.

Stage ``i`` of ``P`` begins with ``w = P - 1 - i`` forwards. After them come rounds, as many as there are microbatches:
in round ``n`` it runs forward ``w + n``, as long as there is one, then backward ``n``; under ZB-H1 that is ``I``, and
``W`` follows as soon as :mod:`~lightning_mist.schedule.orders` lets it.

Within a round the last stage comes first. Its forward ``w + n`` is, one stage ahead, forward ``w' + n - 1`` of the
round before, the last one that ran there; backward ``n`` is, one stage behind, that of the same round. So what a
computation waits for is always the last thing that its neighbour sent, and of every stage and link only the last times
have to be known. A receive is posted behind the computation before the last one, as lowering does (the forward of a
gradient's microbatch has run by then, since at least one other computation lies between). A transfer starts when both
sides have posted it and the one before it on its link has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mist.plan import ScheduleName
from lightning_mist.schedule.action import ActionKind
from lightning_mist.schedule.seconds import StageSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LastTimes:
    """When the last of everything happens, in seconds since the beginning.

    Attributes:
        ends: For each group of devices the end of its last computation.
        arrivals: For each group when all that it sent has arrived; 0 if it sent nothing.
    """

    ends: tuple[float, ...]
    arrivals: tuple[float, ...]


def can_sweep(num_stages: int, num_microbatches: int, name: ScheduleName) -> bool:
    """Whether :func:`sweep` knows a schedule: with fewer microbatches than stages, stages warm up otherwise."""
    return name in ("1f1b", "zb-h1") and num_microbatches >= num_stages


def sweep(
    stages: Sequence[StageSeconds],
    activations: Sequence[float],
    gradients: Sequence[float],
    num_microbatches: int,
    name: ScheduleName,
) -> LastTimes:
    """When a pipeline's stages have run their last computation, with transfers beside computation.

    Args:
        num_microbatches: Number of microbatches, at least as many as stages.
    """
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD if name == "1f1b" else ActionKind.BACKWARD_INPUT
    lanes = _Lanes.of(len(stages), activations, gradients)
    top = num_microbatches - 1
    forwards, backwards, weights = (
        _Durations.of(stages, kind, num_microbatches) for kind in (forward, backward, ActionKind.BACKWARD_WEIGHT)
    )
    _warm_up(lanes, forwards)
    is_split, number = name == "zb-h1", 0
    # From here on no computation is that of a first microbatch, and none that of a last one up to there.
    usual = range(len(stages) if is_split else 1, num_microbatches - len(stages))
    while number < num_microbatches:
        if number in usual:
            _usual_rounds(lanes, len(usual), forwards.middle, backwards.middle, weights.middle if is_split else None)
            number = usual.stop
        else:
            _round(lanes, number, top, forwards, backwards, weights if is_split else None)
            number += 1
    if is_split:
        for stage, done in enumerate(lanes.weighted):
            lanes.ends[stage] += sum(weights.at(index)[stage] for index in range(done, num_microbatches))
    return LastTimes(
        ends=tuple(lanes.ends),
        arrivals=tuple(map(max, [*lanes.arrived[1:], 0.0], [0.0, *lanes.returned[:-1]])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Durations:
    """Seconds of one kind of computation on every stage: of the first microbatch, of others, and of the last one."""

    first: list[float]
    middle: list[float]
    last: list[float]
    top: int

    @classmethod
    def of(cls, stages: Sequence[StageSeconds], kind: ActionKind, num_microbatches: int) -> "_Durations":
        """Those of a kind of computation."""
        only = num_microbatches == 1
        return cls(
            first=[stage.of(kind, is_first=True, is_last=only) for stage in stages],
            middle=[stage.of(kind, is_first=False, is_last=False) for stage in stages],
            last=[stage.of(kind, is_first=only, is_last=True) for stage in stages],
            top=num_microbatches - 1,
        )

    def at(self, index: int) -> list[float]:
        """Those of a microbatch."""
        return self.middle if 0 < index < self.top else self.first if index == 0 else self.last


@dataclass(slots=True, kw_only=True)
class _Lanes:
    """How far every stage has come.

    Attributes:
        activations: Seconds of a transfer over the boundary in front of each stage.
        gradients: The same over the boundary behind it.
        before: End of the computation before that one.
        handed: End of its last forward.
        weighted: Microbatches whose gradients of weights have been made.
    """

    activations: list[float]
    gradients: list[float]
    ends: list[float]
    before: list[float]
    handed: list[float]
    arrived: list[float]
    returned: list[float]
    weighted: list[int]

    @classmethod
    def of(cls, places: int, activations: Sequence[float], gradients: Sequence[float]) -> "_Lanes":
        """At the beginning; the network's ends have nothing that crosses them."""
        names = ("ends", "before", "handed", "arrived", "returned")
        zeros = {name: [0.0] * places for name in names}
        return cls(activations=[0.0, *activations], gradients=[*gradients, 0.0], weighted=[0] * places, **zeros)


def _warm_up(lanes: _Lanes, forwards: _Durations) -> None:
    """The forwards before the first round, of one stage after the other."""
    last = len(lanes.ends) - 1
    sent = [0.0] * last
    for stage in range(last):
        end = before = arrived = 0.0
        for index in range(last - stage):
            if stage:
                arrived = max(sent[index], before, arrived) + lanes.activations[stage]
            before, end = end, max(end, arrived) + forwards.at(index)[stage]
            sent[index] = end
        lanes.ends[stage], lanes.before[stage] = end, before
        lanes.handed[stage], lanes.arrived[stage] = end, arrived


def _round(
    lanes: _Lanes, number: int, top: int, forwards: _Durations, backwards: _Durations, weights: _Durations | None
) -> None:
    """One round of every stage, the last one first."""
    ends, handed, arrived, returned = lanes.ends, lanes.handed, lanes.arrived, lanes.returned
    activations, gradients = lanes.activations, lanes.gradients
    last, usual, backward = len(ends) - 1, forwards.middle, backwards.at(number)
    sent = 0.0
    for stage in range(last, -1, -1):
        end, before = ends[stage], lanes.before[stage]
        index = last - stage + number
        if index <= top:
            start = end
            if stage:
                arrived[stage] = max(handed[stage - 1], before, arrived[stage]) + activations[stage]
                start = max(end, arrived[stage])
            before = end
            handed[stage] = end = start + (usual[stage] if 0 < index < top else forwards.at(index)[stage])
        start = end
        if stage < last:
            returned[stage] = max(sent, before, returned[stage]) + gradients[stage]
            start = max(end, returned[stage])
        before = end
        sent = end = start + backward[stage]
        if weights is not None and (number >= stage or number > top - (last - stage)):
            before = end
            end += weights.at(lanes.weighted[stage])[stage]
            lanes.weighted[stage] += 1
        ends[stage], lanes.before[stage] = end, before


def _usual_rounds(
    lanes: _Lanes, count: int, forwards: list[float], backwards: list[float], weights: list[float] | None
) -> None:
    """Rounds in which all computations take as long as usual: :func:`_round` many times, in half the time."""
    ends, befores, handed, arrived, returned = lanes.ends, lanes.before, lanes.handed, lanes.arrived, lanes.returned
    activations, gradients, last = lanes.activations, lanes.gradients, len(lanes.ends) - 1
    order = range(last, -1, -1)
    for _ in range(count):
        sent = 0.0
        for stage in order:
            start = before = ends[stage]
            if stage:
                ready, other, prior = arrived[stage], handed[stage - 1], befores[stage]
                # Calls of max would take twice as long as all the rest.
                ready = other if other > ready else ready
                arrived[stage] = ready = (prior if prior > ready else ready) + activations[stage]
                start = ready if ready > before else before
            handed[stage] = end = start + forwards[stage]
            if stage < last:
                ready = returned[stage]
                ready = sent if sent > ready else ready
                returned[stage] = ready = (before if before > ready else ready) + gradients[stage]
                start = ready if ready > end else end
            else:
                start = end
            sent = start + backwards[stage]
            if weights is None:
                befores[stage], ends[stage] = end, sent
            else:
                befores[stage], ends[stage] = sent, sent + weights[stage]
                lanes.weighted[stage] += 1
