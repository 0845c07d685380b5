"""Many estimates at once: every combination of some values, as a table."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from rich.table import Table
from rich.text import Text

from lightning_mist.console import TextConsole
from lightning_mist.estimate.estimate_codec import estimate_to_json
from lightning_mist.estimate.estimate_data import MemoryEstimate
from lightning_mist.units import format_bytes

_COLORS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One combination of values."""

    values: tuple[tuple[str, str], ...]
    estimate: MemoryEstimate | None = None
    error: str = ""


def parse_sweep(text: str, known: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Names and values of a text such as ``"microbatch_size=1,2,4 zero_stage=1,3"``, in its order.

    Raises:
        ValueError: If it is written otherwise, or a name is not known or comes twice.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for part in text.split():
        name, sign, values = part.partition("=")
        name = name.replace("-", "_")
        chosen = tuple(value for value in values.split(",") if value)
        if not sign or not chosen:
            raise ValueError(f"sweep {part!r}: write names and values, for example microbatch_size=1,2,4")
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"sweep {part!r}: {name!r} cannot be gone through; did you mean {near!r}?")
        if name in axes:
            raise ValueError(f"sweep {text!r}: {name} comes twice; give all its values at once")
        axes[name] = chosen
    if not axes:
        raise ValueError(f"sweep {text!r}: there is nothing to go through; write for example microbatch_size=1,2,4")
    return axes


def combinations(axes: Mapping[str, Sequence[str]]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Every combination of values, the last name's changing fastest."""
    for values in itertools.product(*axes.values()):
        yield tuple(zip(axes, values, strict=True))


def render_sweep(points: Sequence[SweepPoint], *, width: int = 120, color: bool = False) -> str:
    """The points as a table, one line each, and why some are no plans."""
    table = Table(title=_title(points), title_justify="left", title_style="bold")
    for name, _ in points[0].values:
        table.add_column(name.replace("_", " "), justify="right", overflow="fold")
    for heading in ("worst stage", "allocated", "reserved", "device total", "95 of 100"):
        table.add_column(heading, justify="right")
    table.add_column("verdict", overflow="fold")
    for point in points:
        values = [value for _, value in point.values]
        if point.estimate is None:
            table.add_row(*values, *[""] * 5, "no such plan")
            continue
        worst, verdict = point.estimate.worst, point.estimate.verdict
        sizes = (worst.allocated.p50, worst.reserved.p50, worst.device_total.p50, worst.device_total.p95)
        table.add_row(*values, str(worst.stage), *map(format_bytes, sizes), Text(verdict, style=_COLORS[verdict]))
    console = TextConsole(width, color=color)
    console.print(table)
    for error in dict.fromkeys(point.error for point in points if point.error):
        console.print(f"no such plan: {error}")
    return console.text


def sweep_to_json(points: Sequence[SweepPoint]) -> str:
    """The points as a list of objects with ``values`` and either ``estimate`` or ``error``."""

    def outcome(point: SweepPoint) -> dict[str, object]:
        if point.estimate is None:
            return {"error": point.error}
        return {"estimate": json.loads(estimate_to_json(point.estimate))}

    document = [{"values": dict(point.values), **outcome(point)} for point in points]
    return json.dumps(document, indent=1) + "\n"


def _title(points: Sequence[SweepPoint]) -> str:
    known = [point.estimate for point in points if point.estimate is not None]
    fitting = sum(estimate.verdict == "fits" for estimate in known)
    limit = f" within {format_bytes(known[0].memory_limit)} per device" if known else ""
    return f"{fitting} of {len(points)} combinations fit{limit}"
