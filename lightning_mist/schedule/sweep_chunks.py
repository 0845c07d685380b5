"""Interleaved 1F1B on a clock without lists of actions, as :mod:`~lightning_mist.schedule.sweep` does it for others.

``P`` groups of devices have ``V`` chunks each. Group ``i`` runs forwards number 0, 1, 2.. and backwards likewise
(:mod:`~lightning_mist.schedule.orders`): first ``w`` forwards, then in round ``n`` forward ``w + n``, as long as
there is one, and backward ``n``. Forward ``k`` waits for forward ``k`` of the group in front, which ran there two
rounds before, since that one warms up with two forwards more; on the first group, but for the first chunk, for forward
``k - P`` of the last one. Backward ``k`` waits for backward ``k`` of the group behind; on the last group, but for the
last chunk, for backward ``k - P`` of the first one. So if the last group is ``P - 1`` rounds ahead of the first, each
of the others one round behind the next, no round waits for one that has not been run. Warm-up is rounds without
backwards.

With at least three groups what one sends another is either activations or gradients and consumed in the order in which
it is sent, so that receives are posted behind the computation before the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_mist.schedule.action import ActionKind
from lightning_mist.schedule.seconds import StageSeconds
from lightning_mist.schedule.sweep import LastTimes

ALONE = -1.0
"""Seconds of moving what a computation waits for, if it waits for nothing."""


def can_sweep_chunks(num_groups: int, num_microbatches: int) -> bool:
    """Whether :func:`sweep_chunks` knows a pipeline.

    With two groups gradients travel among activations, and with fewer microbatches than two for each group these warm
    up otherwise.
    """
    return num_groups > 2 and num_microbatches % num_groups == 0 and num_microbatches >= 2 * num_groups


def sweep_chunks(
    stages: Sequence[StageSeconds],
    activations: Sequence[float],
    gradients: Sequence[float],
    num_microbatches: int,
    num_groups: int,
) -> LastTimes:
    """When groups of devices end their last computation under interleaved 1F1B, with transfers beside computation."""
    lanes = _lanes(stages, activations, gradients, num_microbatches, num_groups)
    total, last = num_microbatches * len(stages) // num_groups, num_groups - 1
    ahead = [last - group - lane.warm_up for group, lane in enumerate(lanes)]
    for tick in range(min(ahead), total + last):
        for group, lane in enumerate(lanes):
            number = tick - last + group
            if -lane.warm_up <= number < total:
                lane.round(number, total)
    return LastTimes(
        ends=tuple(lane.end for lane in lanes),
        arrivals=tuple(
            max(lanes[(group + 1) % num_groups].arrived, lanes[group - 1].returned) for group in range(num_groups)
        ),
    )


@dataclass(slots=True, kw_only=True)
class _Lane:
    """How far a group of devices has come.

    Attributes:
        warm_up: Forwards before its first backward.
        moved: Seconds of moving what each forward waits for.
        brought: What each backward waits for.
        handed: When that has been sent which each forward waits for.
        sent: What each backward waits for.
        before: End of the computation before that one.
    """

    warm_up: int
    forwards: list[float]
    backwards: list[float]
    moved: list[float]
    brought: list[float]
    handed: list[float]
    sent: list[float]
    forward_ends: list[float] = field(default_factory=list)
    backward_ends: list[float] = field(default_factory=list)
    end: float = 0.0
    before: float = 0.0
    arrived: float = 0.0
    returned: float = 0.0

    def round(self, number: int, total: int) -> None:
        """One forward and one backward, if there are any."""
        end, before, index = self.end, self.before, self.warm_up + number
        if index < total:
            start, moved = end, self.moved[index]
            # Calls of max would take longer than all the rest.
            if moved >= 0.0:
                ready, other = self.arrived, self.handed[index]
                ready = other if other > ready else ready
                self.arrived = ready = (before if before > ready else ready) + moved
                start = ready if ready > end else end
            before, end = end, start + self.forwards[index]
            self.forward_ends.append(end)
        if number >= 0:
            start, brought = end, self.brought[number]
            if brought >= 0.0:
                ready, other = self.returned, self.sent[number]
                ready = other if other > ready else ready
                self.returned = ready = (before if before > ready else ready) + brought
                start = ready if ready > end else end
            before, end = end, start + self.backwards[number]
            self.backward_ends.append(end)
        self.end, self.before = end, before


def _lanes(
    stages: Sequence[StageSeconds],
    activations: Sequence[float],
    gradients: Sequence[float],
    num_microbatches: int,
    num_groups: int,
) -> list[_Lane]:
    """The groups at the beginning."""
    chunks, last = len(stages) // num_groups, num_groups - 1
    forward_ends: list[list[float]] = [[] for _ in range(num_groups)]
    backward_ends: list[list[float]] = [[] for _ in range(num_groups)]
    # What goes from the last group to the first and back belongs to the round of microbatches in the chunk before.
    forward_ends[last], backward_ends[0] = [0.0] * num_groups, [0.0] * num_groups
    lanes = []
    for group in range(num_groups):
        own = range(group, len(stages), num_groups)
        forwards, backwards = own, own[::-1]
        lanes.append(
            _Lane(
                warm_up=2 * (last - group) + (chunks - 1) * num_groups,
                forwards=_seconds([stages[at] for at in forwards], ActionKind.FORWARD, num_microbatches, num_groups),
                backwards=_seconds([stages[at] for at in backwards], ActionKind.BACKWARD, num_microbatches, num_groups),
                moved=_each([activations[at - 1] if at else ALONE for at in forwards], num_microbatches, num_groups),
                brought=_each(
                    [gradients[at] if at + 1 < len(stages) else ALONE for at in backwards],
                    num_microbatches,
                    num_groups,
                ),
                handed=forward_ends[group - 1],
                sent=backward_ends[(group + 1) % num_groups],
                forward_ends=forward_ends[group],
                backward_ends=backward_ends[group],
            )
        )
    return lanes


def _each(values: Sequence[float], num_microbatches: int, num_groups: int) -> list[float]:
    """A value of every computation of a group, from those of its chunks in the order in which it takes them up."""
    return [value for value in values for _ in range(num_groups)] * (num_microbatches // num_groups)


def _seconds(stages: Sequence[StageSeconds], kind: ActionKind, num_microbatches: int, num_groups: int) -> list[float]:
    """Seconds of every computation of a kind of a group, from its chunks in the order in which it takes them up."""
    found = _each([stage.of(kind, is_first=False, is_last=False) for stage in stages], num_microbatches, num_groups)
    for chunk, stage in enumerate(stages):
        first = chunk * num_groups
        found[first] = stage.of(kind, is_first=True, is_last=False)
        found[first - len(stages) * num_groups + num_groups - 1] = stage.of(kind, is_first=False, is_last=True)
    return found
