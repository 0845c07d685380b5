"""Measures the first steps and compares them with what was predicted.

The first optimizer step warms up and makes the optimizer's state, the second is metered for memory (on a CPU the meter
follows every operator and slows the step down), all later ones are timed. In the first of these every action is.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lightning_mist.devices import ops_of
from lightning_mist.plan import ZeroStage, step_rates
from lightning_mist.runtime.recording import ActionRecorder, meter_memory, state_tensors
from lightning_mist.strategy.planning import Decision
from lightning_mist.strategy.profile_corrections import Learner
from lightning_mist.strategy.ranks import Progress
from lightning_mist.strategy.run_report import (
    CLOSURE,
    STEP,
    Measured,
    RunReport,
    StageReport,
    StageTimes,
    over_stages,
    over_steps,
    predicted_times,
    step_times,
)
from lightning_mist.tensors import batch_signature

_METERED_STEP = 1
_FIRST_COMPARISON = 10
"""After this many timed steps predicted and measured are compared for the first time: enough for a median. Actions are
recorded until then."""

_MOST_TIMED = 1000
"""Steps whose times are kept: the last of a long run."""


class _Bytes(NamedTuple):
    peak: int
    reserved: int | None
    device: int | None


class Monitor:
    """Measures seconds and bytes of a run and compares them with what was predicted.

    Args:
        recorder: Records the actions of this rank's list; by default a new one, for forwards where there is no list.
        verbose: Whether to print tables, and not one line in the end.
    """

    def __init__(
        self,
        decision: Decision,
        *,
        device: torch.device,
        module: nn.Module,
        report_path: str | None,
        recorder: ActionRecorder | None = None,
        verbose: bool = True,
    ) -> None:
        self.decision, self.device, self.module = decision, device, module
        self.report: RunReport | None = None
        self.measured: tuple[Measured | None, ...] = ()
        self.recorder = ActionRecorder(device) if recorder is None else recorder
        self._report_path = report_path
        self._progress = Progress(enabled=dist.get_rank() == 0, verbose=verbose)
        # A group of our own: Lightning may use the default group at the same moment.
        self._group: Any = dist.new_group(backend="gloo")
        self._steps = 0
        self._seconds: deque[float] = deque(maxlen=_MOST_TIMED)
        self._bytes: _Bytes | None = None
        self._times: list[dict[int, StageTimes]] = []
        self._is_usual = True
        self._first_stage = decision.plan.stage_of(dist.get_rank())
        stage = decision.plan.stages[self._first_stage]
        self._overlaps = stage.mesh.num_peers > 1 and stage.zero_stage < ZeroStage.GRADIENTS
        basis = decision.basis
        # Where the plan was made, the run teaches of its machine.
        self._learner: Learner | None = None
        if basis is not None:
            say, kept = self._progress.say, decision.cached_at
            self._learner = Learner(basis=basis, plan=decision.plan, say=say, cached_at=kept)
        # What planning left with the allocator would count as reserved by training.
        ops_of(device).release_cached()

    def __getstate__(self) -> dict[str, Any]:
        # Trainers can be pickled after a fit, and process groups and what asks them cannot.
        return {**vars(self), "_group": None, "_learner": None}

    def saw(self, batch: Any) -> None:
        """Whether recorded steps are of batches like the one that was planned for; others teach nothing."""
        if self.recorder.is_on:
            self._is_usual = self._is_usual and batch_signature(batch) == self.decision.signature

    @contextmanager
    def step(self, optimizer: Any, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Around one optimizer step, its forward and backward included."""
        if self._steps == _METERED_STEP:
            with meter_memory(self.device, state_tensors(self.module, [optimizer])) as meter:
                yield closure
            self._bytes = _Bytes(meter.peak_bytes, meter.reserved_bytes, meter.device_bytes)
        else:
            self.recorder.is_on = self._steps > _METERED_STEP and len(self._seconds) < _FIRST_COMPARISON
            # A device is waited for in the compared steps only: waiting keeps the host from going ahead of it.
            is_compared = self.device.type == "cpu" or len(self._seconds) < _FIRST_COMPARISON
            started = perf_counter()

            def timed_closure() -> Any:
                with self.recorder.phase(CLOSURE):
                    return closure()

            with self.recorder.phase(STEP):
                yield timed_closure
            if is_compared:
                ops_of(self.device).synchronize()
            if is_compared and self._steps > _METERED_STEP:
                self._seconds.append(perf_counter() - started)
            if self.recorder.is_on:
                self._times.append(step_times(self.recorder.take(), self._first_stage, overlaps=self._overlaps))
                self.recorder.is_on = False
        self._steps += 1
        if self._steps == _METERED_STEP + 1 + _FIRST_COMPARISON:  # the same on every rank
            self._progress.details(self._compare().table())

    def finish(self) -> None:
        """Compare over all steps that were timed, on a CPU those of the whole run, and write the report."""
        if not self._seconds:
            self._progress.say("too few optimizer steps to compare predicted with measured: at least 3 are needed")
            return
        report = self._compare()
        self._progress.conclude(report.summary(), report.table())
        if self._report_path is not None and dist.get_rank() == 0:
            path = Path(self._report_path)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(report.to_json())
            except OSError as error:  # what was trained is not to be lost for it
                self._progress.tell(f"the report is not written to {path}: {error}")

    def close(self) -> None:
        """Let go of the group of processes."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _compare(self) -> RunReport:
        gathered: list[Any] = [None] * dist.get_world_size()
        mine = (list(self._seconds), self._bytes, self._is_usual, over_steps(self._times))
        dist.all_gather_object(gathered, mine, group=self._group)
        slowest = [max(step) for step in zip(*(seconds for seconds, *_ in gathered), strict=True)]
        middle = median(slowest)
        plan = self.decision.plan
        predicted = plan.predicted
        said = predicted_times(plan)
        self.measured = over_stages(plan, [times for *_, times in gathered])
        stages = tuple(
            replace(
                self._stage(index, [gathered[rank][1] for rank in stage.devices]),
                predicted_times=said[index] if said else None,
                measured_times=None if (found := self.measured[index]) is None else found.times,
            )
            for index, stage in enumerate(plan.stages)
        )
        report = RunReport(
            predicted_step_seconds=None if predicted is None else predicted.step_seconds,
            measured_step_seconds=middle,
            spread_seconds=median(abs(seconds - middle) for seconds in slowest),
            timed_steps=len(slowest),
            stages=stages,
            planning_seconds=self.decision.planning_seconds,
            predicted_rates=None if predicted is None else step_rates(plan, predicted.step_seconds),
            measured_rates=step_rates(plan, middle),
        )
        if self._learner is not None:
            if all(is_usual for *_, is_usual, _ in gathered):
                self._learner.learn(self.measured)
            report = replace(report, corrections=self._learner.basis.corrections)
        self.report = report
        return report

    def _stage(self, index: int, measured: Sequence[_Bytes]) -> StageReport:
        """One stage: what was said of its most loaded rank, and the most that any of them needed."""
        predicted, estimate = self.decision.plan.predicted, self.decision.estimate
        known = ([size for size in sizes if size is not None] for sizes in zip(*measured, strict=True))
        most = _Bytes(*(max(sizes, default=None) for sizes in known))  # type: ignore[arg-type]
        need = None if estimate is None else estimate.stages[index]
        said = None if predicted is None else predicted.stages[index].peak_bytes
        return StageReport(
            predicted_bytes=said if need is None else need.allocated.p50,
            measured_bytes=most.peak,
            predicted_reserved_bytes=None if need is None or most.reserved is None else need.reserved.p50,
            measured_reserved_bytes=most.reserved,
            predicted_device_bytes=None if need is None or most.device is None else need.device_total.p50,
            measured_device_bytes=most.device,
        )
