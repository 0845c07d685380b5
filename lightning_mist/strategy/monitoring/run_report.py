"""Predicted against measured, as data and as a table."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from lightning_mist.hardware import Correction
from lightning_mist.plan import StepRates
from lightning_mist.plan.plan_tables import per_second
from lightning_mist.strategy.monitoring.stage_times import NAMES, StageTimes
from lightning_mist.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage: its peak memory in bytes on its most loaded device, and its seconds.

    Attributes:
        predicted_bytes: What tensors were predicted to take, if anything was.
        measured_bytes: The largest peak of its ranks, in the metered step.
        predicted_reserved_bytes: What the caching allocator was predicted to hold; None on a CPU.
        measured_reserved_bytes: The most that it held; None on a CPU.
        predicted_device_bytes: What the device was predicted to have in use in all; None on a CPU.
        measured_device_bytes: What it had in use by the end of the metered step, by all programs; None on a CPU.
        predicted_times: Where the seconds of a step were predicted to go, if they were.
        measured_times: Where they went in the first timed steps, as medians over steps and means over the stage's
            ranks; None if the module steps by itself.
    """

    predicted_bytes: int | None
    measured_bytes: int
    predicted_reserved_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    predicted_device_bytes: int | None = None
    measured_device_bytes: int | None = None
    predicted_times: StageTimes | None = None
    measured_times: StageTimes | None = None

    def rows(self) -> tuple[tuple[str, int | None, int], ...]:
        """What was measured: in words, predicted, measured."""
        found = (
            ("peak memory", self.predicted_bytes, self.measured_bytes),
            ("reserved", self.predicted_reserved_bytes, self.measured_reserved_bytes),
            ("device total", self.predicted_device_bytes, self.measured_device_bytes),
        )
        return tuple((name, predicted, measured) for name, predicted, measured in found if measured is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run was predicted to need and what it needed.

    Attributes:
        predicted_step_seconds: Seconds of one optimizer step as predicted, if a cost model made the plan.
        measured_step_seconds: Median over the timed steps of the slowest rank.
        spread_seconds: Median absolute deviation of those steps.
        planning_seconds: From the first batch to the finished plan, profiling included.
        predicted_rates: Rows and tokens per second, model FLOPs utilisation and distance from the roofline by the
            predicted step, if there is one.
        measured_rates: The same by the measured step; of a plan without a prediction only rows per second.
        corrections: On rank 0, by what later predictions for this machine are multiplied, this run having taught it.
    """

    predicted_step_seconds: float | None
    measured_step_seconds: float
    spread_seconds: float
    timed_steps: int
    stages: tuple[StageReport, ...]
    planning_seconds: float
    predicted_rates: StepRates | None = None
    measured_rates: StepRates | None = None
    corrections: tuple[Correction, ...] = ()

    def to_json(self) -> str:
        """The report as JSON; seconds and bytes."""
        return json.dumps(asdict(self), indent=1)

    def table(self) -> RenderableType:
        """The report as tables for people."""
        times = self._times_table()
        return self._table() if times is None else Group(self._table(), times)

    def summary(self) -> str:
        """The report in a line: the step and the stage that needed most."""
        step = f"a step took {format_seconds(self.measured_step_seconds)}"
        step += _beside(self.predicted_step_seconds, self.measured_step_seconds, format_seconds)
        most = max(self.stages, key=lambda stage: stage.measured_bytes)
        peak = f"tensors took up to {format_bytes(most.measured_bytes)} of a device"
        return f"{step}; {peak}{_beside(most.predicted_bytes, most.measured_bytes, format_bytes)}"

    def _times_table(self) -> Table | None:
        """Where the seconds of a step went, stage by stage; None if that was not measured."""
        rows = [
            (f"{index} {word}", times)
            for index, stage in enumerate(self.stages)
            for word, times in (("predicted", stage.predicted_times), ("measured", stage.measured_times))
            if stage.measured_times is not None and times is not None
        ]
        if not rows:
            return None
        shown = [name for name in NAMES if any(getattr(times, name) > 0 for _, times in rows)]
        table = Table(title="Where the seconds of a step go", title_justify="left")
        table.add_column("stage")
        for name in shown:
            table.add_column(name.removesuffix("_seconds"), justify="right")
        for word, times in rows:
            table.add_row(word, *(format_seconds(getattr(times, name)) for name in shown))
        return table

    def _table(self) -> Table:
        table = Table(title="Predicted against measured", title_justify="left")
        for name, justify in (("", "left"), ("predicted", "right"), ("measured", "right"), ("difference", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        table.add_row(
            f"step time (median of {self.timed_steps})",
            _text(self.predicted_step_seconds, format_seconds),
            f"{format_seconds(self.measured_step_seconds)} ± {format_seconds(self.spread_seconds)}",
            _difference(self.predicted_step_seconds, self.measured_step_seconds),
        )
        for name, attribute, formatter in _RATES:
            measured_rate = getattr(self.measured_rates, attribute, None)
            predicted_rate = getattr(self.predicted_rates, attribute, None)
            if measured_rate is not None:
                table.add_row(*_row(name, predicted_rate, measured_rate, formatter))
        for index, stage in enumerate(self.stages):
            for name, predicted, measured in stage.rows():
                table.add_row(*_row(f"{name}, stage {index}", predicted, measured, format_bytes))
        for item in self.corrections:
            table.add_row(f"{item.term}, later plans", "", f"x {item.factor:.2f}", "")
        return table


_RATES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("rows/s", "rows_per_second", per_second),
    ("tokens/s", "tokens_per_second", per_second),
    ("model FLOPs utilisation", "utilisation", "{:.1%}".format),
    ("times the roofline", "roofline_ratio", per_second),
)
"""Rows of the table: in words, which of the rates, its text."""


def _row(name: str, predicted: float | None, measured: float, formatter: Callable[[Any], str]) -> tuple[str, ...]:
    return name, _text(predicted, formatter), formatter(measured), _difference(predicted, measured)


def _text(value: float | None, formatter: Any) -> str:
    return "not predicted" if value is None else str(formatter(value))


def _beside(predicted: float | None, measured: float, formatter: Callable[[Any], str]) -> str:
    return "" if predicted is None else f" (predicted {formatter(predicted)}, {_difference(predicted, measured)})"


def _difference(predicted: float | None, measured: float) -> str:
    if predicted is None or measured == 0:
        return ""
    return f"{(predicted - measured) / measured:+.1%}"
