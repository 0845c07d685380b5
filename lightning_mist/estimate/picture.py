"""A picture of the bytes that devices hold over one step, by term, with what may be used.

The horizontal axis is the order of a rank's own actions, not a clock: each computation has the same width wherever it
stands, so that peaks can be told apart, and what allocates nothing has none.

Array axes
    E  events of one step, in order
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.errors import ScheduleError
from lightning_mist.estimate.estimate_data import WORDS, MemoryEstimate, StageEstimate
from lightning_mist.estimate.replay import Replay
from lightning_mist.schedule import Action, ActionKind

MOST_STAGES = 4
"""Stages in one picture: the one that needs most, the first, the last, and those after the first."""

LEAST_SHARE = 1e-3
"""Terms that never reach this share of the peak are too thin to be seen and are left out."""

_WIDTHS = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.BACKWARD_INPUT: 1.0,
    ActionKind.BACKWARD_WEIGHT: 1.0,
    ActionKind.OPTIMIZER_STEP: 1.0,
}
_OTHER_WIDTH = 0.15

# Okabe and Ito, 2008, and two dark ones: told apart by colour-blind readers too.
COLORS = {
    "parameter_bytes": "#0072b2",
    "buffer_bytes": "#003f63",
    "optimizer_bytes": "#56b4e9",
    "offload_bytes": "#882255",
    "batch_bytes": "#999999",
    "gradient_bytes": "#e69f00",
    "activation_bytes": "#009e73",
    "transfer_bytes": "#f0e442",
    "there_bytes": "#8ed6bf",
    "working_bytes": "#cc79a7",
}
"""Of terms of memory; ``there_bytes`` is what stays of the working set between units. What stays long is first."""

_OUTSIDE = "#bbbbbb"
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTimeline:
    """The bytes of one device over one step.

    Attributes:
        terms: Bytes by term after every event, as ``(name, bytes)``.
        computations: Where each forward, backward and optimizer step begins and ends, as ``(text, begin, end)``.
    """

    stage: int
    places_E: FloatArray
    terms: tuple[tuple[str, IntArray], ...]
    computations: tuple[tuple[str, float, float], ...]

    @property
    def total_E(self) -> IntArray:
        """Bytes of all terms."""
        total_E: IntArray = np.sum([values_E for _, values_E in self.terms], axis=0, dtype=np.int64)
        return total_E


def timeline_of(replay: Replay, stage: int) -> MemoryTimeline:
    """The last step of a replay, placed by its actions."""
    terms = replay.live_by_term()
    count = len(terms[0][1])
    marks = [mark for mark in replay.marks if mark.event >= replay.begin]
    ends = [*(mark.event for mark in marks[1:]), replay.begin + count]
    places_E, at, computations = np.zeros(count), 0.0, []
    for mark, end in zip(marks, ends, strict=True):
        first, last = mark.event - replay.begin, end - replay.begin
        if first == last:
            continue
        width, name = _width(mark.action)
        places_E[first:last] = at + width * (np.arange(last - first) + 1) / (last - first)
        if name:
            computations.append((name, at, at + width))
        at += width
    return MemoryTimeline(stage=stage, places_E=places_E, terms=terms, computations=tuple(computations))


def _width(text: str) -> tuple[float, str]:
    """How wide an action is drawn, and its name if it computes."""
    try:
        action = Action.parse(text)
    except ScheduleError:
        return _OTHER_WIDTH, ""
    if action.kind not in _WIDTHS:
        return _OTHER_WIDTH, ""
    microbatch = "" if action.microbatch is None else str(action.microbatch)
    return _WIDTHS[action.kind], "step" if action.kind is ActionKind.OPTIMIZER_STEP else action.kind.value + microbatch


def draw_memory(estimate: MemoryEstimate, timelines: Sequence[MemoryTimeline], path: str) -> None:
    """Draw the bytes of devices over one step."""
    from matplotlib.figure import Figure

    shown = _shown(estimate, timelines)
    figure = Figure(figsize=(11, 1.6 + 2.6 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), 1, squeeze=False, sharey=True)[:, 0].tolist()
    top = max(
        estimate.memory_limit / _GIB * 1.05,
        *(estimate.stages[line.stage].device_total.p95 / _GIB * 1.08 for line in shown),
    )
    for axis, line in zip(axes, shown, strict=True):
        _draw(axis, estimate, line)
        axis.set_ylim(0, top)
    _legend(figure, axes)
    figure.suptitle(f"{estimate.subject()}\n{estimate.headline()}", fontsize=10, wrap=True)
    figure.savefig(path, dpi=150)


def _shown(estimate: MemoryEstimate, timelines: Sequence[MemoryTimeline]) -> list[MemoryTimeline]:
    """The stages that are drawn, in their order."""
    groups = estimate.plan.num_groups
    wanted = dict.fromkeys([estimate.worst.stage % groups, 0, groups - 1, *range(groups)])
    return [timelines[group] for group in sorted(list(wanted)[:MOST_STAGES])]


def _draw(axis: Any, estimate: MemoryEstimate, line: MemoryTimeline) -> None:
    stage = estimate.stages[line.stage]
    outside = stage.term("context_bytes") + stage.term("communicator_bytes")
    least = LEAST_SHARE * int(line.total_E.max())
    present = [(name, values_E) for name, values_E in line.terms if values_E.max(initial=0) > least]
    bands = [("outside", np.full(len(line.places_E), outside)), *present] if outside else present
    axis.stackplot(
        line.places_E,
        [values_E / _GIB for _, values_E in bands],
        labels=[WORDS.get(name, "context and communicators") for name, _ in bands],
        colors=[COLORS.get(name, _OUTSIDE) for name, _ in bands],
        step="post",
        linewidth=0,
    )
    axis.axhline(estimate.memory_limit / _GIB, color="#d55e00", linewidth=1.6, label="may be used")
    if stage.device_total != stage.allocated:
        total = stage.device_total
        for size, style, words in ((total.p50, "--", "predicted"), (total.p95, ":", "95 of 100")):
            axis.axhline(size / _GIB, color="black", linewidth=1, linestyle=style, label=f"device total, {words}")
    _mark_peak(axis, line, outside)
    _mark_computations(axis, estimate, stage, line)


def _mark_peak(axis: Any, line: MemoryTimeline, outside: int) -> None:
    at = int(line.total_E.argmax())
    height = float(line.total_E[at] + outside) / _GIB
    axis.plot(line.places_E[at], height, marker="v", color="black", markersize=6, clip_on=False)
    axis.annotate(
        f"{height:.1f} GiB",
        (line.places_E[at], height),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
    )


def _mark_computations(axis: Any, estimate: MemoryEstimate, stage: StageEstimate, line: MemoryTimeline) -> None:
    axis.set_xlim(0, line.places_E[-1])
    middles = [(begin + end) / 2 for _, begin, end in line.computations]
    every = -(-len(middles) // 40)
    axis.set_xticks(middles[::every], [name for name, _, _ in line.computations][::every], fontsize=7)
    axis.tick_params(axis="x", length=0)
    for _, begin, _ in line.computations:
        axis.axvline(begin, color="white", linewidth=0.4, alpha=0.6)
    indices = ", ".join(map(str, estimate.plan.chunks(stage.stage)))
    axis.set_ylabel(f"stage {indices}\nGiB", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """One legend for all stages, every entry once."""
    entries: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            entries.setdefault(label, handle)
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
