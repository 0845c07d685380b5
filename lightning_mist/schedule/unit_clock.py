"""How long a rank's list takes when parameters and gradients travel beside computation: its lines on two streams.

One stream computes, one moves. ``UNSHARD`` and ``REDUCE`` only start a transfer, behind those that were started before;
a unit's computation waits for its parameters, a ``REDUCE`` for the gradients that are still under way. Waiting for
other stages is not in here: see :mod:`~lightning_mist.schedule.simulate` for that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from lightning_mist.schedule.action import COMPUTATIONS, Action, ActionKind
from lightning_mist.schedule.trace import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """What running the lines of a rank on a clock showed, in seconds.

    Attributes:
        makespan: When everything ended.
        exposed: How much of it nothing was computed.
        spans: Start and end of everything that takes time, in the order of the lines.
    """

    makespan: float
    exposed: float
    spans: tuple[Span, ...]


def time_units(
    lines: Sequence[Sequence[Action]], seconds: Callable[[Action], float], *, overlaps: bool = True
) -> UnitTimes:
    """Run the lines of :func:`~lightning_mist.schedule.units.expand` on a clock.

    Args:
        lines: What each action of the rank's list consists of.
        seconds: How long a line takes. What is not computed and is not about a unit takes no time.
        overlaps: Whether transfers happen beside computation; else everything waits for them.
    """
    computing = moving = reduced = busy = 0.0
    arrival: dict[tuple[int, int | None], float] = {}
    spans: list[Span] = []
    for line in chain.from_iterable(lines):
        key = line.stage, line.unit
        if line.kind in COMPUTATIONS:
            start = max(computing, arrival.get(key, 0.0))
            computing = start + seconds(line)
            busy += seconds(line)
            spans.append(Span(line.stage, line, start, computing))
        elif line.kind is ActionKind.REDUCE_GRADIENTS:
            computing = max(computing, reduced)
        if line.kind is ActionKind.UNSHARD or (line.kind is ActionKind.REDUCE_GRADIENTS and line.unit is not None):
            start = max(computing, moving)
            moving = start + seconds(line)
            spans.append(Span(line.stage, line, start, moving))
            if line.kind is ActionKind.UNSHARD:
                arrival[key] = moving
            else:
                reduced = moving
            if not overlaps:
                computing = moving
    makespan = max(computing, moving)
    return UnitTimes(makespan=makespan, exposed=makespan - busy, spans=tuple(spans))
