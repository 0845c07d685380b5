"""What pictures have in common: how they look, where they go, and panels that leave out the middle of a step."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from html import escape
from io import StringIO
from typing import Any

from lightning_mist.report.timeline import Timeline, Window, left_out

INK = "#1a1a1b"
"""Text and lines."""

SHADE = "#e8e8e9"
"""Where nothing happens."""

PAPER = "#fefeff"
"""What is behind text that stands on a picture."""

_IN_PAGE = {INK: "currentColor", SHADE: "var(--shade, #e8e8e9)", PAPER: "var(--paper, #ffffff)"}
"""Colours that a page chooses: they differ on light and dark screens."""

_RC: dict[str, Any] = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "hatch.linewidth": 0.5,
}


def styled(name: str, *, is_text: bool = False) -> AbstractContextManager[None]:
    """How pictures look, within a ``with``.

    Args:
        name: Name of the picture: identifiers in SVG files follow from it, so that equal pictures are equal files.
        is_text: Whether text in SVG stays text, which follows the font of the page around it.
    """
    from matplotlib import rc_context

    settings: Any = {**_RC, "svg.hashsalt": name, "svg.fonttype": "none" if is_text else "path"}
    return rc_context(settings)


def save(figure: Any, path: str) -> None:
    """Write a picture to a file; its name says the kind."""
    metadata = {"Date": None} if path.lower().endswith(".svg") else None
    figure.savefig(path, dpi=150, facecolor="white", metadata=metadata)


def inline_svg(figure: Any, name: str, description: str) -> str:
    """A picture as part of a page: as wide as there is room, in the page's font and its colours.

    Args:
        name: Its name, which begins all its identifiers, so that they do not meet those of others in the page.
        description: What it shows, for readers that cannot see it.
    """
    text = StringIO()
    figure.savefig(text, format="svg", dpi=150, transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    head, _, body = svg.partition(">")
    view = head[head.index('viewBox="') :].split('"')[1]
    for color, ours in _IN_PAGE.items():
        body = body.replace(color, ours)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = body[: body.index("<metadata>")] + body[body.index("</metadata>") + len("</metadata>") :]
    label = escape(description, quote=True)
    return (
        f'<svg class="picture" role="img" aria-label="{label}" viewBox="{view}" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">{body}'
    )


WIDTH, LEFT, RIGHT, TOP = 11.0, 1.15, 0.2, 0.62
"""Inches of a picture of a step, and of what lies around its panels."""


def step_figure(panels_height: float, bottom: float, **spacing: float) -> Any:
    """An empty picture of a step: panels of a height, room for a title above them and so much for a legend below."""
    from matplotlib.figure import Figure

    height = TOP + bottom + panels_height
    figure = Figure(figsize=(WIDTH, height))
    figure.subplots_adjust(
        left=LEFT / WIDTH, right=1 - RIGHT / WIDTH, bottom=bottom / height, top=1 - TOP / height, **spacing
    )
    return figure


def write_title(figure: Any, head: str, timeline: Timeline, windows: Sequence[Window], *details: str) -> None:
    """A title over a picture of a step, and in a smaller line its schedule, details, and what is left out of it."""
    count, height = timeline.num_microbatches, figure.get_figheight()
    said = [f"{timeline.schedule}, {count} microbatch{'es' * (count > 1)}", *details]
    said.append(left_out(windows, timeline.microbatch_seconds))
    figure.text(LEFT / WIDTH, 1 - 0.22 / height, head, fontsize=11, fontweight="bold", va="center")
    figure.text(LEFT / WIDTH, 1 - 0.44 / height, "; ".join(filter(None, said)), fontsize=8.5, va="center")


def write_legend(figure: Any, handles: Sequence[Any], columns: int) -> None:
    """A legend below the panels of a picture of a step."""
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(LEFT / WIDTH - 0.005, 0.0),
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.4,
        labelcolor=INK,
    )


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for an axis of so many seconds, and how many of it a second has."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return unit, factor
    return "ns", 1e9


def panels(figure: Any, rows: int, windows: Sequence[Window], step_seconds: float) -> Any:
    """Axes for several rows of one step, side by side for each part that is shown of it; in the unit of the step."""
    spans = [end - start for start, end in windows]
    axes = figure.subplots(
        rows,
        len(windows),
        squeeze=False,
        sharey="row",
        gridspec_kw={"width_ratios": spans, "wspace": 0.05 if len(windows) > 1 else 0},
    )
    unit, factor = time_unit(step_seconds)
    for row in range(rows):
        for column, (start, end) in enumerate(windows):
            axis = axes[row, column]
            axis.set_xlim(start * factor, end * factor)
            axis.patch.set_visible(False)  # else a panel hides what is written across its edge
            axis.spines[["top", "right"]].set_visible(False)
            axis.xaxis.set_major_locator(_ticks(len(windows)))
            if column:
                axis.spines["left"].set_linestyle((0, (1, 2)))
                axis.tick_params(axis="y", length=0)
            if column < len(windows) - 1:
                axis.spines["right"].set(visible=True, linestyle=(0, (1, 2)))
            if row < rows - 1:
                axis.tick_params(axis="x", labelbottom=False)
    axes[-1, 0].set_xlabel(f"time ({unit})", loc="left", labelpad=2)
    return axes


def _ticks(parts: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=10 if parts == 1 else 6 - parts, steps=[1, 2, 2.5, 5, 10])
