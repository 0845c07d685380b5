"""What every group of devices does when, as bars in lanes: the data of a picture of the schedule."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan
from lightning_mist.plan.plan_tables import ranges
from lightning_mist.schedule import ActionKind, Simulation, Span, simulate_plan
from lightning_mist.schedule.action import SENDS, Action
from lightning_mist.schedule.lowering import are_again
from lightning_mist.units import format_seconds

BarKind = Literal[
    "forward",
    "backward",
    "input backward",
    "weight backward",
    "recompute",
    "collectives",
    "copies",
    "optimizer",
    "network",
    "from host",
    "to host",
    "send",
]
"""What a bar stands for: ``"collectives"`` are those of ZeRO and of shared sequences that computation waits for, and
averaging gradients; ``"copies"`` those between device and host that it waits for. Beside computation, hidden or not,
``"network"`` is all of these collectives, ``"from host"`` and ``"to host"`` are all copies, and ``"send"`` is on its
way to a neighbouring stage."""

Window = tuple[float, float]
"""A part of a step, from one second to another."""

CHANNELS: tuple[BarKind, ...] = ("network", "from host", "to host")
"""What devices do beside computing, but for sending; in the order in which rows of units tell it."""

_COMPUTE: dict[ActionKind, BarKind] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "input backward",
    ActionKind.BACKWARD_WEIGHT: "weight backward",
    ActionKind.REDUCE_GRADIENTS: "collectives",
    ActionKind.REDUCE_TIED: "collectives",
    ActionKind.OPTIMIZER_STEP: "optimizer",
    ActionKind.GATHER_PARAMETERS: "collectives",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval of one lane.

    Attributes:
        chunk: Which of the stages of its devices it is of, counted from 0.
    """

    kind: BarKind
    start: float
    end: float
    chunk: int = 0
    microbatch: int | None = None


class Pass(NamedTuple):
    """What channels do beside a part of a lane's work: rows of units (``channels.PASS``), and when the work is done.

    What is told as one may be in several places, such as an update and the first forward. They are together as long as
    the rows, but for what the clock adds to all units alike, so that rows are stretched to them.
    """

    rows: tuple[float, ...]
    pieces: tuple[Window, ...]

    def bars(self) -> Iterator[Bar]:
        """When each channel is busy."""
        intervals, seconds = _intervals(self.rows)
        stretch = sum(end - start for start, end in self.pieces) / seconds
        passed = 0.0
        for start, end in self.pieces:
            for kind, first, last in intervals:
                begin, stop = max(first * stretch - passed, 0.0), min(last * stretch - passed, end - start)
                if stop > begin:
                    yield Bar(kind, start + begin, start + stop)
            passed += end - start


@lru_cache(maxsize=256)
def _intervals(rows: tuple[float, ...]) -> tuple[tuple[tuple[BarKind, float, float], ...], float]:
    """When each channel is busy in a pass, and how long that takes."""
    found: list[tuple[BarKind, float, float]] = []
    at = 0.0
    for index in range(0, len(rows), 6):
        count, seconds, *busy, waited = rows[index : index + 6]
        for _ in range(int(count)):
            found += [(kind, at, at + end) for kind, end in zip(CHANNELS, busy, strict=True) if end]
            at += seconds
            found += [("from host", at - waited, at)] * (waited > 0)
    return tuple(found), at


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A group of devices.

    Attributes:
        work: What its devices do, in order; they wait where there is nothing.
        sends: What is on its way from them to other groups.
        passes: What their other channels do meanwhile, as far as the prediction says it.
    """

    label: str
    devices: str
    work: tuple[Bar, ...]
    sends: tuple[Bar, ...]
    passes: tuple[Pass, ...] = ()

    def channels(self, window: Window) -> list[Bar]:
        """What their other channels do in a part of the step, hidden or not."""
        near = (item for item in self.passes if any(_meets(piece, window) for piece in item.pieces))
        return [bar for item in near for bar in item.bars() if _meets((bar.start, bar.end), window)]

    @property
    def busy_seconds(self) -> float:
        """How long the devices do anything."""
        return sum(bar.end - bar.start for bar in self.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One optimizer step of a plan: what every group of devices does when."""

    lanes: tuple[Lane, ...]
    step_seconds: float
    num_microbatches: int
    schedule: str

    @property
    def channels(self) -> tuple[BarKind, ...]:
        """The channels that any group uses beside computing and sending."""
        rows = {item.rows for lane in self.lanes for item in lane.passes}
        used = {kind for item in rows for kind, _, _ in _intervals(item)[0]}
        return tuple(kind for kind in CHANNELS if kind in used)

    @property
    def microbatch_seconds(self) -> float:
        """About how long after one microbatch the next one follows."""
        return self.step_seconds / (self.num_microbatches + len(self.lanes) - 1)

    @property
    def idle_share(self) -> float:
        """Part of the step, on average over groups of devices, in which these do nothing."""
        if self.step_seconds <= 0:
            return 0.0
        return 1 - sum(lane.busy_seconds for lane in self.lanes) / (self.step_seconds * len(self.lanes))


def timeline_of(plan: Plan, simulation: Simulation | None = None) -> Timeline:
    """The timeline of a plan's step by its prediction.

    Raises:
        PlanError: If nothing was predicted, or no time.
    """
    simulation = simulation or simulate_plan(plan)
    if simulation.makespan <= 0:
        raise PlanError(
            "predicted.step_seconds = 0: nothing takes time, so there is nothing to draw; plan again with "
            "`lightning-mist plan`"
        )
    terms = [dict(stage.breakdown) for stage in plan.prediction.stages]
    return Timeline(
        lanes=tuple(_lane(plan, group, spans, terms) for group, spans in enumerate(simulation.spans)),
        step_seconds=simulation.makespan,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule,
    )


def _lane(plan: Plan, group: int, spans: Sequence[Span], terms: Sequence[dict[str, float]]) -> Lane:
    chunks, shown = plan.chunks(group), [span for span in spans if span.action.kind in _COMPUTE]
    again = are_again((span.action.stage, span.action.kind) for span in shown)
    return Lane(
        label=f"stage{'s' * (len(chunks) > 1)} {', '.join(map(str, chunks))}",
        devices=ranges(plan.stages[group].devices),
        work=tuple(bar for item in zip(shown, again, strict=True) for bar in _bars(plan, *item, terms)),
        sends=tuple(
            Bar("send", span.start, span.end, span.action.stage // plan.num_groups, span.action.microbatch)
            for span in spans
            if span.action.kind in SENDS and span.end > span.start
        ),
        passes=tuple(item for item in _passes(plan, group, spans) if item.rows),
    )


def _passes(plan: Plan, group: int, spans: Sequence[Span]) -> Iterator[Pass]:
    """Rows of units beside the work of a group, and when that is done."""
    chunks = plan.chunks(group)
    known = {chunk: dict(plan.prediction.stages[chunk].units) for chunk in chunks}
    if not any(known.values()):
        return

    def rows(name: str, *of: int) -> tuple[float, ...]:
        return tuple(value for chunk in of for value in known[chunk].get(f"channels.{name}", ()))

    at = {(span.action.kind, span.action.stage, span.action.microbatch): (span.start, span.end) for span in spans}
    once = {span.action.kind: (span.start, span.end) for span in spans if span.action.microbatch is None}
    last = plan.num_microbatches - 1
    first, final = rows("first forward", *chunks), rows("last backward", *chunks)
    backward = ActionKind.BACKWARD_INPUT if plan.schedule == "zb-h1" else ActionKind.BACKWARD
    for (kind, stage, microbatch), piece in at.items():
        if kind is ActionKind.FORWARD and not (first and microbatch == 0):
            yield Pass(rows("forward", stage), (piece,))
        elif kind is backward and not (final and microbatch == last):
            yield Pass(rows("backward", stage), (piece,))
    # Of an update that the runtime takes in the next first forward the clock counts a part behind the last backward.
    step = [once[kind] for kind in (ActionKind.OPTIMIZER_STEP, ActionKind.GATHER_PARAMETERS) if kind in once]
    yield Pass(first, (*step, *(at[ActionKind.FORWARD, chunk, 0] for chunk in chunks)))
    ends = tuple(at[backward, chunk, last] for chunk in reversed(chunks))
    reduce = once.get(ActionKind.REDUCE_GRADIENTS, (ends[-1][1],) * 2)
    yield Pass(rows("last backward", *reversed(chunks)), (*ends, reduce))
    yield Pass(rows("update", group), tuple(step[:1]))
    hidden = rows("reduce", *chunks)
    alone = [once[kind] for kind in (ActionKind.REDUCE_TIED, ActionKind.GATHER_PARAMETERS) if kind in once]
    alone = [piece for piece in alone if not (first and piece in step)]
    if not final:
        alone.append((max(ends[-1][0], reduce[0] - sum(hidden)), reduce[1]))
    for start, end in alone:
        yield Pass((1.0, end - start, end - start, 0.0, 0.0, 0.0) if end > start else (), ((start, end),))


def _bars(plan: Plan, span: Span, is_again: bool, terms: Sequence[dict[str, float]]) -> Iterator[Bar]:
    """An action in its parts: what is recomputed comes first, what computation waits for last."""
    action = span.action
    chunk, microbatch = action.stage // plan.num_groups, action.microbatch
    at, kind = span.start, _COMPUTE[action.kind]
    before, behind = _parts(action, is_again, terms[action.stage], span.end - span.start)
    compute = span.end - span.start - sum(seconds for _, seconds in (*before, *behind))
    for part, seconds in (*before, (kind, compute), *behind):
        if seconds > 0:
            yield Bar(part, at, min(at + seconds, span.end), chunk, microbatch)
            at += seconds


_Parts = list[tuple[BarKind, float]]


def _parts(action: Action, is_again: bool, terms: dict[str, float], seconds: float) -> tuple[_Parts, _Parts]:
    """What an action has before and behind what it is named for, as ``(kind, seconds)``; never more than it takes."""

    def of(*names: str) -> float:
        return sum(terms.get(f"{name}_seconds", 0.0) for name in names)

    kind, is_first = action.kind, action.microbatch == 0
    before: _Parts = []
    behind: _Parts = []
    if kind is ActionKind.FORWARD:
        more = of("begin") if is_first else is_again * of("forward_again")
        deferred = is_first * of("deferred")
        copied = min(deferred, of("update_copies"))
        before = [("optimizer", deferred - copied)]
        behind = [
            ("collectives", of("forward_unshard", "forward_ring") + more),
            ("copies", of("forward_copies") + copied),
        ]
    elif kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        before = [("recompute", of("recompute"))]
        behind = [
            (
                "collectives",
                of("backward_unshard", "scatter", "ring") - of("forward_ring") + is_again * of("backward_again"),
            ),
            ("copies", of("copies") - of("forward_copies")),
        ]
    elif kind is ActionKind.OPTIMIZER_STEP:
        behind = [("copies", max(0.0, of("update_copies") - of("deferred")))]
    total = sum(value for _, value in (*before, *behind))
    if total > seconds > 0:
        before, behind = ([(name, value * seconds / total) for name, value in part] for part in (before, behind))
    return before, behind


LEAST_IDLE = 1e-6
"""Less of a step in which devices wait is what sums of floating-point numbers leave."""

AROUND = 4
"""Microbatches that are shown beyond the filling, or the draining, of the pipeline."""

WHOLE = 0.7
"""If the parts to show make up so much of a step, it is shown whole."""


def windows_of(timeline: Timeline, points: Iterable[float] = ()) -> tuple[Window, ...]:
    """What to show of a step: all of it, or of many microbatches the first, the last, and those around some points."""
    groups, step = len(timeline.lanes), timeline.step_seconds
    width = (groups + AROUND) * timeline.microbatch_seconds
    epilogue = step - max(bar.end for lane in timeline.lanes for bar in lane.work if bar.microbatch is not None)
    wanted = [(0.0, width), (step - width - epilogue, step)]
    found = merged([*wanted, *((point - width / 4, point + width / 4) for point in points)], step)
    if sum(end - start for start, end in found) >= WHOLE * step:
        return ((0.0, step),)
    return found


def _meets(piece: Window, window: Window) -> bool:
    return piece[1] > window[0] and piece[0] < window[1]


def merged(windows: Iterable[Window], step: float, gap: float = 0.0) -> tuple[Window, ...]:
    """Windows in order, those that touch, or nearly, as one, within the step."""
    result: list[Window] = []
    for start, end in sorted((max(0.0, start), min(end, step)) for start, end in windows):
        if result and start - result[-1][1] <= gap:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return tuple(result)


def left_out(windows: Sequence[Window], each: float) -> str:
    """What is not shown of a step, in words; nothing if it is shown whole.

    Args:
        each: Seconds in which one microbatch follows another.
    """
    hidden = [end[0] - start[1] for start, end in pairwise(windows)]
    if not hidden:
        return ""
    times = " and ".join(format_seconds(seconds) for seconds in hidden)
    return f"left out: {times} between, about {sum(hidden) / each:.0f} microbatches like those beside"
