"""Predicted against measured, as data and as a table."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table

from lightning_mist.hardware import Correction
from lightning_mist.plan import Plan, StepRates
from lightning_mist.plan.plan_tables import per_second
from lightning_mist.runtime.recording import Recorded
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.seconds import batch_seconds, plan_seconds
from lightning_mist.units import format_bytes, format_seconds

STEP, CLOSURE, FORWARD = "step", "closure", "forward"
"""What is recorded beside actions: an optimizer step, its forwards and backwards, without a schedule the forward."""

EXCHANGES = ("exchange", "results")
"""What is recorded where ranks tell each other of batches, and of losses."""

_LAST_BACKWARDS = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT})
"""The kinds of actions that complete gradients."""

_FORWARDS = frozenset({ActionKind.FORWARD, ActionKind.RECV_ACTIVATION, ActionKind.SEND_ACTIVATION})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one step of a stage. Where chunks share devices, all but the first two are with the first of them.

    Attributes:
        waiting_seconds: Waiting for other stages, and for tensors on their way from and to them.
        reduction_seconds: Reducing gradients where nothing hides it: also by how much longer the last backward takes
            than the others.
        optimizer_seconds: The optimizer's step, what comes between it and the last backward, and giving out parameters.
        exchange_seconds: Telling other ranks of batches and losses, and waiting for theirs; nothing once it is divided
            into waiting and the rest.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    waiting_seconds: float = 0.0
    reduction_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    exchange_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(astuple(self)))


NAMES = tuple(field.name for field in fields(StageTimes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a rank, or the ranks of a stage, measured: medians over steps."""

    times: StageTimes
    steps: int


def predicted_times(plan: Plan) -> tuple[StageTimes, ...]:
    """What was predicted of each stage of a plan; empty if nothing was."""
    if plan.predicted is None:
        return ()
    terms = [dict(stage.breakdown) for stage in plan.predicted.stages]
    if not all("forward_seconds" in stage for stage in terms):
        return ()
    every = plan_seconds(plan, terms).stages
    found = [StageTimes(forward_seconds=item[0], backward_seconds=item[1]) for item in batch_seconds(plan, every)]
    for group in range(plan.num_groups):
        chunks, stage = plan.chunks(group), every[group]
        once = max(terms[chunk].get("once_seconds", 0.0) for chunk in chunks)
        reduction, optimizer = stage.reduce + stage.reduce_tied, stage.step - once + stage.gather
        busy = sum(found[chunk].total for chunk in chunks) + reduction + optimizer + once
        found[group] = replace(
            found[group],
            waiting_seconds=max(0.0, plan.predicted.step_seconds - busy),
            reduction_seconds=reduction,
            optimizer_seconds=optimizer,
            other_seconds=once,
        )
    return tuple(found)


def step_times(recorded: Iterable[Recorded], first: int, *, overlaps: bool = False) -> dict[int, StageTimes]:
    """Seconds of one step of a rank, by stage; nothing if no forward was recorded: the module then steps by itself.

    Args:
        recorded: What was recorded in the step: it and its closure, and the actions or the forward inside.
        overlaps: Whether gradients are reduced beside the last backward.
    """
    sums: dict[tuple[int, str], float] = {}
    phases: dict[str, float] = {}
    backwards: dict[tuple[int, ActionKind], list[float]] = {}

    def add(stage: int, name: str, seconds: float) -> None:
        sums[stage, name] = sums.get((stage, name), 0.0) + seconds

    for item in recorded:
        if isinstance(item.action, Action):
            _add_action(item.action, item, first, add)
            if item.action.kind in _LAST_BACKWARDS:
                key = item.action.stage, item.action.kind
                backwards.setdefault(key, []).append(item.seconds - item.waited_seconds)
        elif item.action in (STEP, CLOSURE, FORWARD):
            phases[item.action] = phases.get(item.action, 0.0) + item.seconds
        elif item.action in EXCHANGES:
            add(first, "exchange_seconds", item.seconds)
        else:
            add(first, "waiting_seconds", item.waited_seconds)
    if FORWARD in phases:
        add(first, "forward_seconds", phases[FORWARD])
        add(first, "backward_seconds", phases[CLOSURE] - phases[FORWARD])
    if not sums:
        return {}
    if overlaps:
        for (stage, _), each in backwards.items():
            longer = max(0.0, each[-1] - median(each[:-1])) if len(each) > 1 else 0.0
            add(stage, "backward_seconds", -longer)
            add(first, "reduction_seconds", longer)
    add(first, "optimizer_seconds", phases[STEP] - phases[CLOSURE])
    add(first, "other_seconds", max(0.0, phases[STEP] - sum(sums.values())))
    stages = sorted({stage for stage, _ in sums})
    return {stage: StageTimes(**{name: sums.get((stage, name), 0.0) for name in NAMES}) for stage in stages}


def _add_action(action: Action, item: Recorded, first: int, add: Callable[[int, str, float], None]) -> None:
    if action.kind is ActionKind.REDUCE_GRADIENTS:
        # The ranks of a stage come to it together: waiting for each other is the reduction.
        add(first, "reduction_seconds", item.seconds)
        return
    add(first, "waiting_seconds", item.waited_seconds)
    name = "forward_seconds" if action.kind in _FORWARDS else "backward_seconds"
    if action.kind is ActionKind.REDUCE_TIED:
        name = "reduction_seconds"
    elif action.microbatch is None:
        name = "optimizer_seconds"
    add(action.stage, name, item.seconds - item.waited_seconds)


def over_steps(steps: Sequence[Mapping[int, StageTimes]]) -> dict[int, Measured]:
    """What a rank measured of each of its stages, from each of its steps."""
    # Without a schedule a user's own ``optimizer_step`` may step now in one way, now in another.
    steps = [step for step in steps if step]
    stages = steps[0] if steps else {}
    return {
        stage: Measured(times=_combined([step[stage] for step in steps], median), steps=len(steps)) for stage in stages
    }


def over_stages(plan: Plan, ranks: Sequence[Mapping[int, Measured]]) -> tuple[Measured | None, ...]:
    """What each stage measured on average, from what each rank measured of its stages; None of stages without any.

    The exchange of batches and losses is divided into waiting and the rest: the group that comes to it last waits for
    nobody, so what it takes there every group takes, and the rest is waiting.
    """
    found: list[Measured | None] = []
    for index, stage in enumerate(plan.stages):
        own = [ranks[rank][index] for rank in stage.devices if index in ranks[rank]]
        times = _combined([rank.times for rank in own], lambda values: sum(values) / len(values)) if own else None
        found.append(None if times is None else Measured(times=times, steps=min(rank.steps for rank in own)))
    firsts = [item for item in found[: plan.num_groups] if item is not None]
    least = min((item.times.exchange_seconds for item in firsts), default=0.0)
    for index, item in enumerate(found[: plan.num_groups]):
        if item is not None:
            divided = replace(
                item.times,
                exchange_seconds=0.0,
                waiting_seconds=item.times.waiting_seconds + item.times.exchange_seconds - least,
                other_seconds=item.times.other_seconds + least,
            )
            found[index] = replace(item, times=divided)
    return tuple(found)


def _combined(every: Sequence[StageTimes], combine: Callable[[Sequence[float]], float]) -> StageTimes:
    """One for several, entry by entry."""
    return StageTimes(**{name: combine([getattr(times, name) for times in every]) for name in NAMES})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage: its peak memory in bytes on its most loaded device, and its seconds, as predicted and as measured.

    Attributes:
        measured_bytes: What tensors took: the largest peak of its ranks, in the metered step.
        measured_reserved_bytes: The most that the caching allocator held; None on a CPU.
        measured_device_bytes: What was in use by the end of the metered step, by all programs; None on a CPU.
        measured_times: Where the seconds of the first timed steps went, as medians over steps and means over the
            stage's ranks; None if the module steps by itself.
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
        columns = (Column(name.removesuffix("_seconds"), justify="right") for name in shown)
        table = Table("stage", *columns, title="Where the seconds of a step go", title_justify="left")
        for word, times in rows:
            table.add_row(word, *(format_seconds(getattr(times, name)) for name in shown))
        return table

    def _table(self) -> Table:
        columns = (Column(name, justify="right") for name in ("predicted", "measured", "difference"))
        table = Table("", *columns, title="Predicted against measured", title_justify="left")
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
