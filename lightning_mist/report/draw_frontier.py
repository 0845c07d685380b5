"""A picture of what memory buys: seconds of the best plan against the memory limit."""

from typing import Any

from lightning_mist.report.figures import INK, PAPER, SHADE, time_unit
from lightning_mist.report.frontier import Frontier, FrontierPoint
from lightning_mist.units import format_seconds

_GIB = 2.0**30


def frontier_figure(frontier: Frontier) -> Any:
    """The picture of a frontier, as a figure of matplotlib."""
    from matplotlib.figure import Figure

    found = [point for point in frontier.points if point.seconds is not None]
    unit, factor = time_unit(max((_seconds(point) for point in found), default=1.0))
    figure = Figure(figsize=(9.0, 3.2))
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.16, top=0.92)
    axis = figure.subplots()
    limits, heights = [point.memory_limit / _GIB for point in found], [_seconds(point) * factor for point in found]
    axis.step(limits, heights, where="post", color="#0072b2", linewidth=1.6)
    axis.plot(limits[:-1], heights[:-1], "o", color="#0072b2", markersize=5)
    axis.plot(limits[-1:], heights[-1:], "D", color="#d55e00", markersize=8, zorder=5)
    for index, (point, limit, height) in enumerate(zip(found, limits, heights, strict=True)):
        is_chosen = point is found[-1]
        if not is_chosen and index and point.plan == found[index - 1].plan:
            continue
        axis.annotate(
            f"{format_seconds(_seconds(point))}\n{'this plan' if is_chosen else _stages(point)}",
            (limit, height),
            xytext=(3, 7),
            textcoords="offset points",
            ha="left",
            fontsize=8,
            fontweight="bold" if is_chosen else "normal",
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.6, "alpha": 0.8},
        )
    missing = [point.memory_limit / _GIB for point in frontier.points if point.plan is None]
    left = min([*limits, *missing]) - 0.04 * max([*limits, *missing])
    if missing:
        axis.axvspan(left, max(missing), color=SHADE, linewidth=0)
        axis.text(
            (left + max(missing)) / 2,
            0.5,
            "no plan fits",
            transform=axis.get_xaxis_transform(),
            ha="center",
            va="center",
            rotation=90,
            fontsize=8.5,
            color=INK,
        )
    axis.set_xlim(left, max([*limits, *missing]) * 1.1)
    axis.set_ylim(0, max(heights, default=1.0) * 1.25)
    axis.set_xlabel("memory limit of each device (GiB)")
    axis.set_ylabel(f"one step ({unit})")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _seconds(point: FrontierPoint) -> float:
    assert point.seconds is not None
    return point.seconds


def _stages(point: FrontierPoint) -> str:
    assert point.plan is not None
    count = point.plan.num_stages
    return f"{count} stage{'s' * (count > 1)}"
