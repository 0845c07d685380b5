"""What memory buys: the best plan found anew under less and less of it, as data, sentences and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import thread_time
from typing import Any

from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import Plan, SearchSpace
from lightning_mist.plan.plan_tables import counted
from lightning_mist.report.figures import INK, PAPER, SHADE, time_unit
from lightning_mist.tuner import Planner
from lightning_mist.tuner.infeasible import UndecidedError
from lightning_mist.tuner.select import LEAST_SHARE
from lightning_mist.tuner.space import tensor_share
from lightning_mist.units import format_bytes, format_seconds

SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Parts of the memory limit that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The best plan under one limit.

    Attributes:
        share: Part of the chosen plan's limit.
        plan: The plan with its prediction; None if none fits.
        proven: Whether the search for it has shown that there is none better.
    """

    share: float
    memory_limit: float
    plan: Plan | None
    proven: bool = True

    @property
    def seconds(self) -> float | None:
        """Seconds of the plan's step."""
        return None if self.plan is None else self.plan.prediction.step_seconds

    @property
    def peak_bytes(self) -> int | None:
        """Bytes of the plan's most loaded device."""
        return None if self.plan is None else self.plan.prediction.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The best plans under several limits.

    Attributes:
        points: By limit, ascending; the last is the chosen plan under its own.
        left_out: Limits that were not tried for want of time.
    """

    points: tuple[FrontierPoint, ...]
    left_out: tuple[float, ...] = ()


def memory_frontier(
    planner: Planner,
    chosen: Plan,
    *,
    global_batch_size: int,
    memory_limit: int | None = None,
    host_memory_limit: int | None = None,
    search: SearchSpace | None = None,
    shares: Sequence[float] = SHARES,
    seconds: float = 5.0,
) -> Frontier:
    """Plan again under parts of a memory limit.

    Args:
        memory_limit: Bytes of each device that the plan may use; by default the memory of the device that has most.
        shares: Parts of the limit, below 1.
        seconds: The most seconds in all; a search is over then with the best that it has found.
    """
    most = max(part.device.memory_bytes for part in planner.cluster.parts)
    whole = most if memory_limit is None else memory_limit
    began, points, left_out, asked = thread_time(), [], [], search or SearchSpace()
    last = FrontierPoint(share=1.0, memory_limit=whole, plan=chosen)
    for share in sorted(shares, reverse=True):
        limit = int(share * whole)
        if last.peak_bytes is None or last.peak_bytes <= limit * tensor_share(planner.cluster):
            # What fits now too is still the best; what does not fit in more does not fit in less.
            points.append(replace(last, share=share, memory_limit=limit))
            continue
        left = seconds - (thread_time() - began)
        if left <= 0:
            left_out.append(share)
            continue
        plan, proven = None, True
        try:
            found = planner.tune(
                global_batch_size=global_batch_size,
                memory_limit=limit,
                host_memory_limit=host_memory_limit,
                search=replace(asked, solver_seconds=min(asked.solver_seconds, left)),
            )
            plan, proven = found.plan, found.is_proven
        except UndecidedError:
            left_out.append(share)
            continue
        except InfeasibleError:
            pass
        last = FrontierPoint(share=share, memory_limit=limit, plan=plan, proven=proven)
        points.append(last)
    points.reverse()
    points.append(FrontierPoint(share=1.0, memory_limit=whole, plan=chosen))
    return Frontier(points=tuple(points), left_out=tuple(left_out))


def frontier_lines(frontier: Frontier) -> tuple[str, ...]:
    """What a frontier says, in sentences."""
    chosen, lines = frontier.points[-1].seconds, []
    missing = [point for point in frontier.points if point.plan is None]
    if missing:
        less = " or less" if len(missing) > 1 else ""
        lines.append(f"{_limit(missing[-1])}{less}: no plan fits")
    for point in frontier.points[:-1]:
        if point.seconds is None or point.peak_bytes is None or chosen is None:
            continue
        slower = point.seconds / chosen - 1
        words = "as fast as this plan" if abs(slower) < LEAST_SHARE else f"{slower:+.1%}"
        peak, step = format_bytes(point.peak_bytes), format_seconds(point.seconds)
        unsure = "" if point.proven else ", the best that was found"
        lines.append(f"{_limit(point)}: {step} per step ({words}), tensors peak at {peak}{unsure}")
    if frontier.left_out:
        shares = ", ".join(f"{share:.0%}" for share in frontier.left_out)
        lines.append(f"not tried for want of time, of which --explain-seconds gives more: {shares}")
    return tuple(lines)


def _limit(point: FrontierPoint) -> str:
    return f"{format_bytes(point.memory_limit)} per device ({point.share:.0%} of the limit)"


_GIB = 2.0**30


def frontier_figure(frontier: Frontier) -> Any:
    """The picture of a frontier, as a figure of matplotlib."""
    from matplotlib.figure import Figure

    found = [
        (point.memory_limit / _GIB, point.plan, point.plan.prediction.step_seconds)
        for point in frontier.points
        if point.plan is not None
    ]
    unit, factor = time_unit(max((seconds for *_, seconds in found), default=1.0))
    figure = Figure(figsize=(9.0, 3.2))
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.16, top=0.92)
    axis = figure.subplots()
    limits, heights = [limit for limit, *_ in found], [seconds * factor for *_, seconds in found]
    axis.step(limits, heights, where="post", color="#0072b2", linewidth=1.6)
    axis.plot(limits[:-1], heights[:-1], "o", color="#0072b2", markersize=5)
    axis.plot(limits[-1:], heights[-1:], "D", color="#d55e00", markersize=8, zorder=5)
    for index, (limit, plan, seconds) in enumerate(found):
        is_chosen = index == len(found) - 1
        if not is_chosen and index and plan == found[index - 1][1]:
            continue
        axis.annotate(
            f"{format_seconds(seconds)}\n{'this plan' if is_chosen else counted(plan.num_stages, 'stage')}",
            (limit, seconds * factor),
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
