"""A plan's schedule on a clock, in figures: who works and waits for how long, and what the step hangs on."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from lightning_mist.console import TextConsole
from lightning_mist.plan import Plan
from lightning_mist.plan.plan_tables import stages_named
from lightning_mist.report.timeline import LEAST_IDLE, BarKind, Lane, Timeline, timeline_of
from lightning_mist.schedule import simulate_plan
from lightning_mist.schedule.schedule_simulation import CriticalPath, critical_path
from lightning_mist.units import format_seconds

KINDS: dict[BarKind, str] = {
    "forward": "forward",
    "recompute": "recomputed forward",
    "backward": "backward",
    "input backward": "gradients of inputs",
    "weight backward": "gradients of weights",
    "collectives": "collectives",
    "copies": "host copies",
    "optimizer": "optimizer",
}
"""Kinds of work in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClock:
    """What one group of devices does of a step.

    Attributes:
        work_seconds: Seconds by kind of work, as ``(kind, seconds)``.
        waiting_seconds: The rest of the step.
        longest_wait: The longest time in one piece in which it waits.
        most_in_flight: The most microbatches at once whose forward has begun and whose backward has not ended.
    """

    stages: tuple[int, ...]
    devices: tuple[int, ...]
    work_seconds: tuple[tuple[str, float], ...]
    busy_seconds: float
    waiting_seconds: float
    longest_wait: float
    most_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A plan's schedule as it was simulated: what groups do, when, and the critical path."""

    step_seconds: float
    groups: tuple[GroupClock, ...]
    timeline: Timeline
    path: CriticalPath

    @property
    def busiest(self) -> int:
        """The group that works longest."""
        return max(range(len(self.groups)), key=lambda group: self.groups[group].busy_seconds)


def clock(plan: Plan) -> SimulatedStep:
    """Run a plan's schedule with the seconds that were predicted for it.

    Raises:
        PlanError: If nothing was predicted.
    """
    simulation = simulate_plan(plan)
    timeline = timeline_of(plan, simulation)
    groups = []
    for group, lane in enumerate(timeline.lanes):
        seconds: defaultdict[str, float] = defaultdict(float)
        for bar in lane.work:
            seconds[bar.kind] += bar.end - bar.start
        busy = sum(seconds.values())
        groups.append(
            GroupClock(
                stages=plan.chunks(group),
                devices=plan.stages[group].devices,
                work_seconds=tuple((kind, seconds[kind]) for kind in KINDS if kind in seconds),
                busy_seconds=busy,
                waiting_seconds=_seen(simulation.makespan - busy, simulation.makespan),
                longest_wait=_longest_wait(lane, simulation.makespan),
                most_in_flight=max((count for _, count in simulation.in_flight[group]), default=0),
            )
        )
    return SimulatedStep(
        step_seconds=simulation.makespan,
        groups=tuple(groups),
        timeline=timeline,
        path=critical_path(simulation),
    )


def _longest_wait(lane: Lane, step: float) -> float:
    at, longest = 0.0, 0.0
    for bar in lane.work:
        longest, at = max(longest, bar.start - at), bar.end
    return _seen(max(longest, step - at), step)


def _seen(seconds: float, step: float) -> float:
    """Seconds, or none if they are what sums of floating-point numbers leave."""
    return seconds if seconds > LEAST_IDLE * step else 0.0


def render_clock(found: SimulatedStep, *, width: int = 120, color: bool = False) -> str:
    """The figures of a schedule on a clock as text."""
    console = TextConsole(width, color=color)
    idle = f", devices wait for {found.timeline.idle_share:.1%} of it" if len(found.groups) > 1 else ""
    console.print(f"one step on a clock: {format_seconds(found.step_seconds)}{idle}", style="bold")
    console.print_table(_table(found))
    for line in path_lines(found):
        console.print(line)
    return console.text


def _table(found: SimulatedStep) -> Table:
    table = Table()
    kinds = [kind for kind in KINDS if any(kind in dict(group.work_seconds) for group in found.groups)]
    for heading in ("stage", *map(KINDS.__getitem__, kinds), "in all", "waiting", "longest wait", "most in flight"):
        table.add_column(heading, justify="right")
    for group in found.groups:
        seconds = dict(group.work_seconds)
        table.add_row(
            " and ".join(map(str, group.stages)),
            *(format_seconds(seconds[kind]) if kind in seconds else "-" for kind in kinds),
            format_seconds(group.busy_seconds),
            _told(group.waiting_seconds, found.step_seconds),
            format_seconds(group.longest_wait),
            str(group.most_in_flight),
        )
    return table


def _told(seconds: float, step: float) -> str:
    """Seconds, and what part of a step they are."""
    return f"{format_seconds(seconds)} {_share(seconds, step)}"


def _share(seconds: float, step: float) -> str:
    """Part of a step, in words that never say that something is nothing."""
    if step <= 0:
        return ""
    return "(<1%)" if 0 < seconds < 0.005 * step else f"({seconds / step:.0%})"


def path_lines(found: SimulatedStep) -> list[str]:
    """What the step hangs on, in words."""
    busiest, step, path = found.groups[found.busiest], found.step_seconds, found.path
    lines = []
    if len(found.groups) > 1:
        lines.append(f"busiest: {stages_named(busiest.stages)}, {_told(busiest.busy_seconds, step)}")
    parts = [
        (seconds, f"{stages_named(group.stages)} work{'s' * (len(group.stages) == 1)} for {_told(seconds, step)}")
        for group, seconds in zip(found.groups, path.work_seconds, strict=True)
        if seconds > 0
    ]
    others = [(path.transfer_seconds, "transfers between stages take"), (path.other_seconds, "receiving takes")]
    parts += [(seconds, f"{words} {_told(seconds, step)}") for seconds, words in others if seconds > _SEEN * step]
    ordered = [words for _, words in sorted(parts, reverse=True)]
    shown, rest = ordered[:_MOST], len(ordered) - _MOST
    more = f"; and {rest} more" if rest > 0 else ""
    lines.append(f"critical path, which the step is as long as: {'; '.join(shown)}{more}")
    lines.append(f"  {_chain(path, found.groups)}")
    return lines


_MOST = 6
"""Parts of a critical path that are told."""

_SEEN = 1e-4
"""Part of a step that is worth telling."""


def _chain(path: CriticalPath, groups: Sequence[GroupClock]) -> str:
    """Which groups the path goes through, in order, with the first and last action on each; many are cut."""
    runs: list[list[str | int]] = []
    for span in path.spans:
        if span.action.kind.value.startswith(("RECV", "SEND")):
            continue
        if runs and runs[-1][0] == span.rank:
            runs[-1][2] = str(span.action)
        else:
            runs.append([span.rank, str(span.action), str(span.action)])
    words = [str(first) if first == last else f"{first} to {last}" for _, first, last in runs]
    if len(words) > 2 * _MOST:
        words = [*words[:_MOST], f"... {len(words) - 2 * _MOST} more ...", *words[-_MOST:]]
    return ", then ".join(words) + f" ({len(path.spans)} actions)"
