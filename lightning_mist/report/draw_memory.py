"""Bytes of every stage over one step as a picture, by term."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_mist.cost.inputs import FloatArray
from lightning_mist.errors import ScheduleError
from lightning_mist.estimate import COLORS, MemoryCurve, memory_curves
from lightning_mist.plan import Plan
from lightning_mist.report.figures import (
    INK,
    PAPER,
    panels,
    save,
    step_figure,
    styled,
    time_unit,
    write_legend,
    write_title,
)
from lightning_mist.report.timeline import Timeline, Window, timeline_of, windows_of
from lightning_mist.schedule import Action, ActionKind, Simulation, simulate_plan
from lightning_mist.units import format_bytes

MOST_GROUPS = 6
"""Groups of devices in one picture: the one that needs most, the first, the last, and some between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPicture:
    """Bytes of a plan's devices over one step.

    Attributes:
        limits: Bytes that tensors of each device may take, for each stage; empty if that is not known.
    """

    timeline: Timeline
    curves: tuple[MemoryCurve, ...]
    limits: tuple[float, ...] = ()

    def limit(self, curve: MemoryCurve) -> float | None:
        """Bytes that tensors may take on each device of a group."""
        return self.limits[curve.group] if self.limits else None

    @property
    def worst(self) -> MemoryCurve:
        """The curve with the highest peak, the first of several."""
        return max(self.curves, key=lambda curve: curve.peak_bytes)

    @property
    def shown(self) -> tuple[MemoryCurve, ...]:
        """The curves to show, :data:`MOST_GROUPS` at most, in their order."""
        count = len(self.curves)
        between = [round(at) for at in np.linspace(0, count - 1, MOST_GROUPS)]
        wanted = dict.fromkeys([self.worst.group, 0, count - 1, *between])
        return tuple(self.curves[group] for group in sorted(list(wanted)[:MOST_GROUPS]))


def memory_picture(plan: Plan, limits: Sequence[float] = (), simulation: Simulation | None = None) -> MemoryPicture:
    """Bytes over a plan's step by its prediction.

    Raises:
        PlanError: If nothing was predicted, or not what memory is made of.
    """
    simulation = simulation or simulate_plan(plan)
    return MemoryPicture(
        timeline=timeline_of(plan, simulation),
        curves=memory_curves(plan, simulation),
        limits=tuple(limits),
    )


def moments(curves: Sequence[MemoryCurve]) -> tuple[float, ...]:
    """Seconds at which curves have their peaks."""
    return tuple(float(curve.times_E[curve.peak_index]) for curve in curves)


WORDS = {
    "parameter_bytes": "parameters",
    "buffer_bytes": "buffers of the module",
    "optimizer_bytes": "optimizer state",
    "batch_bytes": "batch",
    "gradient_bytes": "gradients",
    "activation_bytes": "activations in flight",
    "transfer_bytes": "sent and received",
    "offload_bytes": "buffers of host copies",
    "there_bytes": "working set that stays between units",
    "working_bytes": "working set",
}

MOST_SHAPES = 60
"""Pieces of a part of a step that are shapes in SVG; more are pixels, which take less room there."""

MOST_NAMED = 40
"""Names of units that there is room for on an axis."""

_OF_UNITS = ("there_bytes", "working_bytes")
"""What changes from unit to unit, from below."""

LEAST_SHARE = 2e-3
"""Terms that never reach this share of the highest peak are too thin to be seen and are left out."""

_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def draw_memory(picture: MemoryPicture, path: str) -> None:
    """Draw the bytes over a step to a file."""
    with styled("memory"):
        save(memory_figure(picture), path)


def memory_figure(picture: MemoryPicture) -> Any:
    """The picture of the bytes over a step, as a figure of matplotlib."""
    shown = picture.shown
    windows = windows_of(picture.timeline, moments(shown))
    row = 2.4 if len(shown) == 1 else 1.7 if len(shown) <= 4 else 1.3
    figure = step_figure(row * len(shown), bottom=1.05, hspace=0.12)
    axes = panels(figure, len(shown), windows, picture.timeline.step_seconds)
    highest = max(picture.worst.peak_bytes, *picture.limits, 0.0)
    unit, scale = _unit_of(highest)
    terms = _present(picture)
    for line, curve in zip(axes, shown, strict=True):
        for axis, window in zip(line, windows, strict=True):
            _draw(axis, curve, terms, window, scale, picture)
            axis.set_ylim(0, highest / scale * 1.16)
        line[0].set_ylabel(f"{picture.timeline.lanes[curve.group].label}\n{unit}", fontsize=8)
        _mark(line, curve, curve.peak_index, windows, scale, picture)
    _title(figure, picture, shown, windows)
    write_legend(figure, axes[0, 0].get_legend_handles_labels()[0], columns=4)
    return figure


def unit_figure(picture: MemoryPicture) -> Any | None:
    """One forward and one backward of the group that needs most, unit by unit; None where units are not known."""
    curve = picture.worst
    pair = curve.pair()
    if pair is None:
        return None
    windows = [curve.time_of(index) for index in pair]
    figure = step_figure(2.4, bottom=1.05)
    (line,) = panels(figure, 1, windows, picture.timeline.step_seconds)
    highest = max(pair, key=curve.bytes_of)
    unit, scale = _unit_of(curve.bytes_of(highest))
    _, factor = time_unit(picture.timeline.step_seconds)
    terms = _present(replace(picture, curves=(curve,)))
    least = sum(end - start for start, end in windows) / MOST_NAMED
    for axis, window, index in zip(line, windows, pair, strict=True):
        _draw(axis, curve, terms, window, scale, replace(picture, limits=()))
        pieces = curve.within(*window)
        ends_E = _closed(pieces.times_E, window[1])
        named = [(float(ends_E[at] + ends_E[at + 1]) / 2, name) for at, name in enumerate(pieces.names) if name]
        shown: list[tuple[float, str]] = []
        for time, name in (named[0], named[-1], *named[1:-1]):
            if all(abs(time - other) >= least for other, _ in shown):
                shown.append((time, name))
        axis.set_xticks([time * factor for time, _ in shown], [name for _, name in shown], fontsize=7)
        axis.set_xlabel(say_piece(curve.names[index]), loc="left", labelpad=2)
        axis.set_ylim(0, curve.bytes_of(highest) / scale * 1.16)
    line[0].set_ylabel(unit)
    _mark(line, curve, highest, windows, scale, picture)
    head = f"memory within a microbatch: {picture.timeline.lanes[curve.group].label}, by head, layers and tail"
    write_title(figure, head, picture.timeline, windows[:1])
    write_legend(figure, line[0].get_legend_handles_labels()[0], columns=4)
    return figure


def _present(picture: MemoryPicture) -> list[str]:
    """Terms that are high enough to be seen, in the order of the legend."""
    least = LEAST_SHARE * picture.worst.peak_bytes
    highest: dict[str, float] = {}
    for curve in picture.curves:
        for name, values_E in curve.terms:
            highest[name] = max(highest.get(name, 0.0), float(values_E.max()))
    highest["there_bytes"] = highest["working_bytes"] * any(any(curve.units.values()) for curve in picture.curves)
    return [name for name in COLORS if highest.get(name, 0.0) > least]


def _unit_of(nbytes: float) -> tuple[str, float]:
    """The unit for an axis of so many bytes, and how many it has."""
    return next((item for item in _UNITS if nbytes >= item[1]), _UNITS[-1])


def _closed(values_E: FloatArray, end: float | None = None) -> FloatArray:
    """Steps with the end of the last one."""
    return np.append(values_E, values_E[-1] if end is None else end)


def _draw(
    axis: Any, curve: MemoryCurve, terms: Sequence[str], window: Window, scale: float, picture: MemoryPicture
) -> None:
    """One part of the step of one group of devices."""
    _, factor = time_unit(picture.timeline.step_seconds)
    pieces, values = curve.within(*window), dict(curve.terms)
    steady = [name for name in terms if name not in _OF_UNITS]
    # What does not change from unit to unit is drawn as it is: unit by unit all of it would make a large picture.
    first_E = np.unique(pieces.index_E, return_index=True)[1]
    if steady:
        axis.stackplot(
            _closed(pieces.times_E[first_E], window[1]) * factor,
            [_closed(values[name][pieces.index_E[first_E]]) / scale for name in steady],
            labels=[WORDS[name] for name in steady],
            colors=[COLORS[name] for name in steady],
            step="post",
            linewidth=0,
            rasterized=len(first_E) > MOST_SHAPES,
        )
    low_E = below_E = sum((values[name][pieces.index_E] for name in steady), np.zeros(len(pieces.index_E)))
    for name, above_E in zip(_OF_UNITS, (pieces.there_E, pieces.most_E), strict=True):
        if name in terms:
            axis.fill_between(
                _closed(pieces.times_E, window[1]) * factor,
                _closed(low_E) / scale,
                _closed(below_E + above_E) / scale,
                color=COLORS[name],
                label=WORDS[name],
                step="post",
                linewidth=0,
                rasterized=len(low_E) > MOST_SHAPES,
            )
            low_E = below_E + above_E
    limit = picture.limit(curve)
    if limit is not None:
        axis.axhline(limit / scale, color="#d55e00", linewidth=1.4, label="limit for tensors")


def _mark(
    line: Any, curve: MemoryCurve, index: int, windows: Sequence[Window], scale: float, picture: MemoryPicture
) -> None:
    """Say how high the highest point of a piece is, and where."""
    _, factor = time_unit(picture.timeline.step_seconds)
    unit, begin, end = highest_of(curve, index)
    what = "peak" if index == curve.peak_index else "most"
    column = max(index for index, (start, _) in enumerate(windows) if start <= begin)
    start, stop = windows[column]
    middle, height = min((begin + end) / 2, stop), curve.bytes_of(index) / scale
    share = (middle - start) / (stop - start)
    line[column].plot(middle * factor, height, marker="v", color=INK, markersize=5, clip_on=False)
    line[column].annotate(
        f"{what} {format_bytes(curve.bytes_of(index))}: {say_piece(curve.names[index])}{unit}",
        (middle * factor, height),
        xytext=(0, 5),
        textcoords="offset points",
        ha="left" if share < 0.25 else "right" if share > 0.75 else "center",
        fontsize=8,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
    )


def highest_of(curve: MemoryCurve, index: int) -> tuple[str, float, float]:
    """Which unit of a piece has most, as further words, and from when to when."""
    begin, end = curve.time_of(index)
    pieces = curve.within(begin, end)
    most = int(pieces.most_E.argmax())
    unit, ends_E = pieces.names[most], _closed(pieces.times_E, end)
    words = f", {'layer ' * unit.isdecimal()}{unit}" if unit else ""
    return words, float(ends_E[most]), float(ends_E[most + 1])


def say_piece(name: str) -> str:
    """What runs in a piece of a memory curve, in words."""
    try:
        action = Action.parse(name)
    except ScheduleError:
        return name
    words = {
        ActionKind.FORWARD: "forward",
        ActionKind.BACKWARD: "backward",
        ActionKind.BACKWARD_INPUT: "gradients of inputs",
        ActionKind.BACKWARD_WEIGHT: "gradients of weights",
    }
    return f"{words[action.kind]} of microbatch {action.microbatch}"


def _title(figure: Any, picture: MemoryPicture, shown: Sequence[MemoryCurve], windows: Sequence[Window]) -> None:
    worst, limit, lanes = picture.worst, picture.limit(picture.worst), picture.timeline.lanes
    head = f"memory over one step: {lanes[worst.group].label} needs most, {format_bytes(worst.peak_bytes)} per device"
    if limit is not None:
        head += f" of {format_bytes(limit)}"
    hidden = f"{len(shown)} of {len(lanes)} groups of devices are shown" if len(shown) < len(lanes) else ""
    write_title(figure, head, picture.timeline, windows, hidden)
