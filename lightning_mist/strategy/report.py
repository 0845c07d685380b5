"""Predicted against measured, as data and as a table."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from lightning_mist.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage: its peak memory in bytes on its most loaded device.

    Attributes:
        predicted_bytes: What the cost model said, if it made the plan.
        measured_bytes: The largest peak of its ranks, in the metered step.
    """

    predicted_bytes: int | None
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run was predicted to need and what it needed.

    Attributes:
        predicted_step_seconds: Seconds of one optimizer step as predicted, if a cost model made the plan.
        measured_step_seconds: Median over the timed steps of the slowest rank.
        spread_seconds: Median absolute deviation of those steps.
        timed_steps: Number of timed steps.
        stages: Memory of every stage.
        planning_seconds: From the first batch to the finished plan, profiling included.
    """

    predicted_step_seconds: float | None
    measured_step_seconds: float
    spread_seconds: float
    timed_steps: int
    stages: tuple[StageReport, ...]
    planning_seconds: float

    def to_json(self) -> str:
        """The report as JSON; seconds and bytes."""
        return json.dumps(asdict(self), indent=1)

    def table(self) -> Table:
        """The report as a table for people."""
        table = Table(title="Predicted against measured", title_justify="left")
        for name, justify in (("", "left"), ("predicted", "right"), ("measured", "right"), ("difference", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        table.add_row(
            f"step time (median of {self.timed_steps})",
            _text(self.predicted_step_seconds, format_seconds),
            f"{format_seconds(self.measured_step_seconds)} ± {format_seconds(self.spread_seconds)}",
            _difference(self.predicted_step_seconds, self.measured_step_seconds),
        )
        for index, stage in enumerate(self.stages):
            table.add_row(
                f"peak memory, stage {index}",
                _text(stage.predicted_bytes, format_bytes),
                format_bytes(stage.measured_bytes),
                _difference(stage.predicted_bytes, stage.measured_bytes),
            )
        return table


def _text(value: float | None, formatter: Any) -> str:
    return "not predicted" if value is None else str(formatter(value))


def _difference(predicted: float | None, measured: float) -> str:
    if predicted is None or measured == 0:
        return ""
    return f"{(predicted - measured) / measured:+.1%}"
