"""Who did what when, as a Chrome trace that Perfetto and ``chrome://tracing`` open.

Format: the JSON object form of the Trace Event Format (Google, "Trace Event Format", complete events ``"ph": "X"``,
metadata events ``"ph": "M"`` and counter events ``"ph": "C"``); its times are microseconds.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_mist.schedule.action import Action, ActionKind

_MICROSECONDS = 1e6

_LANES = ("compute", "receive", "send")

_LANE_OF_KIND: Mapping[ActionKind, int] = {
    ActionKind.RECV_ACTIVATION: 1,
    ActionKind.RECV_GRADIENT: 1,
    ActionKind.SEND_ACTIVATION: 2,
    ActionKind.SEND_GRADIENT: 2,
}


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank with its start and end in seconds. Simulated runs use the device group's index as rank."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Level:
    """Amounts of one rank from a time on, drawn on top of each other under one name until the next of this name."""

    rank: int
    name: str
    time: float
    amounts: tuple[tuple[str, float], ...]


def to_chrome_trace(
    spans: Iterable[Span], *, names: Mapping[int, str] | None = None, levels: Iterable[Level] = ()
) -> str:
    """A trace as JSON text: one process per rank, with a lane each for computing, receiving and sending.

    Args:
        spans: What happened, in any order, simulated or measured.
        names: What to call each rank; ``"rank 3"`` where it says nothing.
        levels: What to draw beside, such as bytes by term.
    """
    spans = sorted(spans, key=lambda span: (span.rank, span.start, span.end))
    events: list[dict[str, object]] = []
    for rank in sorted({span.rank for span in spans}):
        name = (names or {}).get(rank, f"rank {rank}")
        events.append(_metadata(rank, 0, "process_name", name=name))
        events.append(_metadata(rank, 0, "process_sort_index", sort_index=rank))
        events += [_metadata(rank, lane, "thread_name", name=text) for lane, text in enumerate(_LANES)]
    events += [_event(span) for span in spans]
    for level in levels:
        at = {"ts": level.time * _MICROSECONDS, "pid": level.rank}
        events.append({"name": level.name, "ph": "C", **at, "args": dict(level.amounts)})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False) + "\n"


def _metadata(rank: int, lane: int, kind: str, **arguments: object) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": arguments}


def _event(span: Span) -> dict[str, object]:
    action = span.action
    return {
        "name": str(action),
        "cat": action.kind.name.lower(),
        "ph": "X",
        "ts": span.start * _MICROSECONDS,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "pid": span.rank,
        "tid": _LANE_OF_KIND.get(action.kind, 0),
        "args": {"stage": action.stage, "microbatch": action.microbatch}
        | ({} if action.unit is None else {"unit": action.unit}),
    }
