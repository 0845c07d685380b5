"""A picture of a schedule: one lane for each group of devices, time from left to right."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lightning_mist.report.figures import (
    LEFT,
    RIGHT,
    SHADE,
    WIDTH,
    panels,
    save,
    step_figure,
    styled,
    time_unit,
    write_legend,
    write_title,
)
from lightning_mist.report.timeline import (
    CHANNELS,
    LEAST_IDLE,
    Bar,
    BarKind,
    Lane,
    Timeline,
    Window,
    merged,
    windows_of,
)
from lightning_mist.units import format_seconds

# Okabe and Ito, 2008: told apart by colour-blind readers too.
COLORS: dict[BarKind, str] = {
    "forward": "#56b4e9",
    "recompute": "#f0e442",
    "backward": "#0072b2",
    "input backward": "#0072b2",
    "weight backward": "#009e73",
    "collectives": "#cc79a7",
    "copies": "#882255",
    "optimizer": "#e69f00",
    "network": "#cc79a7",
    "from host": "#882255",
    "to host": "#d55e00",
    "send": "#999999",
}

WORDS: dict[BarKind, str] = {
    "forward": "forward",
    "recompute": "recomputed forward",
    "backward": "backward",
    "input backward": "backward, gradients of inputs",
    "weight backward": "backward, gradients of weights",
    "collectives": "collectives waited for",
    "copies": "host copies waited for",
    "optimizer": "optimizer",
    "network": "collectives",
    "from host": "copies from host",
    "to host": "copies to host",
    "send": "transfers to other stages",
}

_BESIDE = frozenset({*CHANNELS, "send"})
_DARK = frozenset({"backward", "input backward", "weight backward"})
_NUMBERED = frozenset({"forward", "backward", "input backward", "weight backward"})
MOST_SHAPES = 24
"""Lanes whose bars are shapes in SVG; those of more are pixels, which take less room there."""

_THIN = 1.25
"""Room of a thin lane beneath a group's work, where that takes five."""

_SHORT: dict[BarKind, str] = {"network": "collectives", "send": "sends"}
"""What thin lanes are called that are called otherwise in the legend."""

_LABELLED = 0.07
"""Inches of a thin lane that has room for its name."""

_GAP = 5e-4
"""Share of a picture's width between bars of a thin lane below which they are drawn as one."""

_DIGIT = 0.068
"""Inches of a digit of the smallest text."""


def draw_timeline(timeline: Timeline, path: str) -> None:
    """Draw a step to a file."""
    with styled("timeline"):
        save(timeline_figure(timeline), path)


def timeline_figure(timeline: Timeline) -> Any:
    """The picture of a step, as a figure of matplotlib.

    Many microbatches do not fit: then the first and the last of the step are shown.
    """
    windows, count = windows_of(timeline), len(timeline.lanes)
    lane = min(0.5 + 0.12 * len(_thin(timeline)), max(0.16, 7.0 / count))
    figure = step_figure(lane * count, bottom=0.85)
    axes = panels(figure, 1, windows, timeline.step_seconds)[0]
    inches = (WIDTH - LEFT - RIGHT) * (0.95 if len(windows) > 1 else 1.0)
    scale = inches / sum(end - start for start, end in windows)
    for axis, window in zip(axes, windows, strict=True):
        _draw_lanes(axis, timeline, window, scale, lane)
    _label_lanes(axes[0], timeline, lane)
    _title(figure, timeline, windows)
    _legend(figure, timeline, () if _names_thin(timeline, lane) else timeline.channels)
    return figure


def _thin(timeline: Timeline) -> tuple[BarKind, ...]:
    """What has a thin lane beneath each group's work, from above."""
    sends: tuple[BarKind, ...] = ("send",) if any(lane.sends for lane in timeline.lanes) else ()
    return (*timeline.channels, *sends)


def _places(timeline: Timeline) -> dict[BarKind | None, tuple[float, float]]:
    """Where the work and each thin lane of a group are, from its bottom: where it begins and how high it is."""
    thin = _thin(timeline)
    unit = 0.84 / (5 + _THIN * len(thin))
    found: dict[BarKind | None, tuple[float, float]] = {None: (0.9 - 5 * unit, 5 * unit)}
    return found | {kind: (0.9 - unit * (5 + _THIN * (index + 1)), unit) for index, kind in enumerate(thin)}


def _draw_lanes(axis: Any, timeline: Timeline, window: Window, scale: float, height: float) -> None:
    """One part of the step: what takes time in colour on grey, with the numbers of microbatches where there is room."""
    _, factor = time_unit(timeline.step_seconds)
    places, is_dense = _places(timeline), len(timeline.lanes) > MOST_SHAPES
    chunks = 1 + max(bar.chunk for lane in timeline.lanes for bar in lane.work)
    whole = (window[0] * factor, (window[1] - window[0]) * factor)
    for index, lane in enumerate(timeline.lanes):
        base = len(timeline.lanes) - 1 - index
        beside = [*lane.channels(window), *lane.sends]
        for kind, (bottom, room) in places.items():
            place = base + bottom, room
            axis.broken_barh([whole], place, facecolors=SHADE, linewidth=0)
            if kind is None:
                _draw_bars(axis, [bar for bar in lane.work if _is_in(bar, window)], place, factor, chunks, is_dense)
                if height >= 0.16:
                    _number(axis, lane, window, base + bottom + room / 2, scale, factor, height * room / 0.66)
            else:
                times = [(bar.start, bar.end) for bar in beside if bar.kind == kind and _is_in(bar, window)]
                found = merged(times, timeline.step_seconds, _GAP * whole[1] / factor)
                _draw_bars(axis, [Bar(kind, *time) for time in found], place, factor, 1, is_dense)
    axis.set_ylim(0, len(timeline.lanes))


def _is_in(bar: Bar, window: Window) -> bool:
    return bar.end > window[0] and bar.start < window[1]


def _draw_bars(
    axis: Any, bars: Sequence[Bar], place: tuple[float, float], factor: float, chunks: int, is_dense: bool
) -> None:
    """Bars of one lane, all of a colour at once."""
    by_color: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for bar in bars:
        extent = bar.start * factor, (bar.end - bar.start) * factor
        by_color[_shade(COLORS[bar.kind], bar.chunk, chunks)].append(extent)
    for color, extents in by_color.items():
        # What happens beside takes so little time, or room, that an edge would hide it.
        edge = color if bars[0].kind in _BESIDE else "white"
        axis.broken_barh(extents, place, facecolors=color, edgecolor=edge, linewidth=0.25, rasterized=is_dense)


def _shade(color: str, chunk: int, chunks: int) -> str:
    if chunks == 1:
        return color
    share = 0.45 * chunk / (chunks - 1)
    parts = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _number(axis: Any, lane: Lane, window: Window, middle: float, scale: float, factor: float, height: float) -> None:
    """Write the number of every microbatch into its bar, if there is room."""
    size = min(8.0, 72 * height * 0.5)
    numbered = [bar for bar in lane.work if bar.kind in _NUMBERED and _is_in(bar, window)]
    digits = max((len(str(bar.microbatch)) for bar in numbered), default=0)
    for bar in numbered:
        start, end = max(bar.start, window[0]), min(bar.end, window[1])
        text = str(bar.microbatch)
        if (end - start) * scale >= _DIGIT * size / 8 * (digits + 0.6):
            axis.text(
                (start + end) / 2 * factor,
                middle,
                text,
                ha="center",
                va="center",
                fontsize=size,
                color="white" if bar.kind in _DARK and not bar.chunk else "black",
                clip_on=True,
            )


def _label_lanes(axis: Any, timeline: Timeline, height: float) -> None:
    count = len(timeline.lanes)
    labels = [
        f"{lane.label}\nrank{'s' * (not lane.devices.isdecimal())} {lane.devices}" if height >= 0.4 else lane.label
        for lane in timeline.lanes
    ]
    size = 8 if height >= 0.2 else 6
    places = _places(timeline)
    middle = places[None][0] + places[None][1] / 2
    axis.set_yticks([count - 1 - index + middle for index in range(count)], list(map(_short, labels)))
    axis.tick_params(axis="y", length=0, labelsize=size)
    if _names_thin(timeline, height):
        thin = [(bottom + room / 2, kind) for kind, (bottom, room) in places.items() if kind]
        ticks = [(index + at, _SHORT.get(kind, kind)) for index in range(count) for at, kind in thin]
        axis.set_yticks([at for at, _ in ticks], [text for _, text in ticks], minor=True)
        axis.tick_params(axis="y", which="minor", length=0, labelsize=6)


def _names_thin(timeline: Timeline, height: float) -> bool:
    """Whether thin lanes have room for their names."""
    return all(room * height >= _LABELLED for _, room in _places(timeline).values())


def _short(text: str) -> str:
    return "\n".join(line if len(line) <= 20 else line[:17] + "..." for line in text.splitlines())


def _title(figure: Any, timeline: Timeline, windows: Sequence[Window]) -> None:
    idle = f"devices wait for {timeline.idle_share:.1%} of it"
    head = f"one step: {format_seconds(timeline.step_seconds)}, "
    head += idle if len(timeline.lanes) > 1 else "one stage, no pipeline"
    is_shaded = any(bar.chunk for lane in timeline.lanes for bar in lane.work)
    write_title(figure, head, timeline, windows, "lighter: later stages of the same devices" * is_shaded)


def _legend(figure: Any, timeline: Timeline, channels: Sequence[BarKind]) -> None:
    from matplotlib.patches import Patch

    present = {bar.kind for lane in timeline.lanes for bar in (*lane.work, *lane.sends)} | {*channels}
    entries = [Patch(facecolor=COLORS[kind], label=WORDS[kind]) for kind in COLORS if kind in present]
    if timeline.idle_share > LEAST_IDLE:
        entries.append(Patch(facecolor=SHADE, label="waiting"))
    write_legend(figure, entries, len(entries) if len(entries) <= 6 else -(-len(entries) // 2))
