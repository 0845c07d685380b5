"""Seconds that others measured, predicted: the runs that Mist's authors executed on L4s.

    python -m benchmarks.accuracy.published_time [--times times.json ...] [--plans plans.json ...] [--out DIRECTORY]

Every plan of the plans files that is known well enough is traced, priced and put together as for a plan of our own,
once with the catalog's L4 and once with rates from timings of single operators on such a machine
(:mod:`benchmarks.accuracy.published_l4`). Plans without a measurement are in the record too: what is said of them was
said before it was known.

The record also says how far off the predictions would be without each of their parts (:data:`WITHOUT`).

Their runtime differs from ours in the following, and what of that takes time is priced as it happened there:

* every layer has one flat parameter, cut into views in every forward (the module that is traced has, too),
* the optimizer keeps float32 copies, and looks at gradients for infinities,
* flat parameters are shared out evenly (:data:`PARTS`), so that owners reduce and give out with reduce-scatters and
  all-gathers,
* updated parameters are given out beside the forward of the next step's first microbatch, a layer ahead,
* gradients are set to zero once and always added to,
* stages wait for every exchange with a neighbour at both ends (:data:`RULES`).
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy import published_l4
from benchmarks.accuracy.published_mist_model import MistDims
from benchmarks.accuracy.published_mist_module import MistNetwork
from benchmarks.accuracy.published_rows import DATA, Row, UnpredictableError, mist_stage, read_plans
from benchmarks.record import RECORDS, Sample, make_record, write_record
from lightning_mist.cost.inputs.candidates import StageCandidates, StageSlot, slots_of
from lightning_mist.cost.inputs.regions import covered
from lightning_mist.cost.plan_clock import step_times, terms_of
from lightning_mist.cost.stage_model import StageCostModel, StageSeconds
from lightning_mist.cost.time.communication import unit_seconds
from lightning_mist.cost.time.overlap import concurrent_seconds, interference_of
from lightning_mist.errors import MistError
from lightning_mist.hardware import HardwareProfile
from lightning_mist.model import trace_model
from lightning_mist.model.spec.model_spec import ModelSpec, OptimizerSpec
from lightning_mist.plan import Checkpointing, OffloadRatios, Plan, StageMesh, StagePlan, ZeroStage
from lightning_mist.schedule import StepRules

MACHINES: Mapping[str, Callable[[int], HardwareProfile]] = {
    "measured": published_l4.measured,
    "catalog": published_l4.catalog,
}
"""Ways to describe the machine, by name: the number of devices in its node, and what comes of it."""

_HALF, _SINGLE = 2, 4
_STEP_BYTES = (
    (_HALF + _SINGLE)  # the gradient cast to float32
    + 2 * (_SINGLE + 1 + 1)  # compared with infinity and with itself, each time written as booleans and read
    + 4 * _SINGLE + 3 * _SINGLE  # Adam reads gradient, value and two moments, and writes all but the gradient
    + (_SINGLE + _HALF)  # the value cast to float16
    + _HALF  # the gradient set to zero
)  # fmt: skip
"""Bytes that one update moves per parameter (``fused_adamw_step`` and what is around it)."""

RULES = StepRules(transfers="within", update_after="own")
"""Both ends of an exchange wait for it, then for the whole device; every stage steps when its own batch is done."""

PARTS = 64
"""Equal parts of a flat parameter: eighths, which ratios of offloading are multiples of, of eight ranks each."""

OPTIMIZER = OptimizerSpec(
    name="FusedAdamW",
    state_bytes_per_parameter_byte=3 * _SINGLE / _HALF,
    step_peak_bytes_per_parameter_byte=0.0,
    step_peak_bytes_per_largest=0.0,
    step_moved_bytes_per_parameter_byte=_STEP_BYTES / _HALF,
)
"""Theirs, per byte of float16 parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One executed or executable plan.

    Attributes:
        name: Its name.
        dims: The model.
        plan: The plan.
        measured_seconds: Seconds of one step, if they are known.
    """

    name: str
    dims: MistDims
    plan: Plan
    measured_seconds: float | None = None


def run_of(name: str, case: Row, measured_seconds: float | None = None) -> Run:
    """A case of a plans file.

    Raises:
        UnpredictableError: If the model or the plan has something that is not understood.
    """
    stages, start, device = [], 0, 0
    count = len(case["plan"]["stages"])
    dims: MistDims | None = None
    for index in range(count):
        dims, stage = mist_stage({"stage": index}, case)
        if dims.tensor_parallel > 1:
            raise UnpredictableError(f"tp = {dims.tensor_parallel}: only whole layers are understood")
        devices = tuple(range(device, device + stage.data_parallel))
        stages.append(
            StagePlan(
                layers=(start, start + stage.layers),
                mesh=StageMesh(devices=devices, data_parallel_degree=stage.data_parallel),
                microbatch_size=stage.microbatch,
                zero_stage=ZeroStage(stage.zero) if stage.data_parallel > 1 else ZeroStage.NONE,
                checkpointing=Checkpointing(layers=stage.checkpointed),
                offload=OffloadRatios(
                    parameters=stage.ratios.weights,
                    gradients=stage.ratios.gradients,
                    optimizer=stage.ratios.optimizer,
                    activations=stage.ratios.activations,
                ),
            )
        )
        start, device = start + stage.layers, device + len(devices)
    assert dims is not None
    plan = Plan(
        global_batch_size=int(case["global_batch"]),
        num_microbatches=int(case["plan"]["grad_accumulation_steps"]),
        stages=tuple(stages),
    )
    return Run(name=name, dims=dims, plan=plan, measured_seconds=measured_seconds)


@cache
def traced(dims: MistDims, *, single_row: bool) -> ModelSpec:
    """What the model costs on a CUDA device, in half precision.

    Args:
        dims: The model.
        single_row: Whether it is for microbatches of one row.
    """
    with torch.device("meta"):
        module = MistNetwork(dims, rows=1 if single_row else 2)
    tokens = torch.zeros(2, dims.length, dtype=torch.long)
    spec = trace_model(module, (tokens, tokens.clone()), precision="16-true", device_kind="cuda")
    return _cut(replace(spec, optimizer=OPTIMIZER))


def _cut(spec: ModelSpec) -> ModelSpec:
    """Every flat parameter as equal parts, for theirs are shared out and moved to the host in parts, ours whole."""
    uses = {use.name: use for use in spec.module_map.parameters}
    numbers = range(PARTS)
    return replace(
        spec,
        parameters=tuple(
            replace(item, name=f"{item.name}.{number}", numel=item.numel // PARTS, bytes=item.bytes // PARTS)
            for item in spec.parameters
            for number in numbers
        ),
        module_map=replace(
            spec.module_map,
            parameters=tuple(
                replace(uses[item.name], name=f"{item.name}.{number}", shape=(item.numel // PARTS,))
                for item in spec.parameters
                for number in numbers
            ),
        ),
    )


def as_executed(profile: HardwareProfile) -> HardwareProfile:
    """A machine on which what owners send one after another travels as evenly shared collectives."""
    evenly = {"broadcast": "all_gather", "reduce": "reduce_scatter"}
    kept = [cost for cost in profile.collectives if cost.operation not in evenly]
    shared = [
        replace(cost, operation=name) for cost in kept for name, instead in evenly.items() if cost.operation == instead
    ]
    return replace(profile, collectives=(*kept, *shared))


def predicted_seconds(run: Run, profile: HardwareProfile) -> tuple[float, tuple[StageSeconds, ...]]:
    """Seconds of one step, and of its stages by term.

    Args:
        run: What was executed.
        profile: The machine.
    """
    devices = run.plan.world_size
    spec = traced(run.dims, single_row=run.plan.stages[0].microbatch_size == 1)
    model = StageCostModel(spec, as_executed(profile), published_l4.cluster(devices))
    stages = tuple(_executed(model, slot, stage) for slot, stage in slots_of(run.plan))
    return _step_seconds(run.plan, stages), stages


def _step_seconds(plan: Plan, stages: Sequence[StageSeconds]) -> float:
    """Seconds of one step by their rules.

    Neighbours exchange an activation and a gradient in one call, both at once: each takes half of the time of both.
    """
    halved = [
        {name: value / 2 if name in ("arrival_seconds", "return_seconds") else value for name, value in term.items()}
        for term in map(terms_of, stages)
    ]
    return step_times(plan, halved, RULES).step_seconds


def _executed(model: StageCostModel, slot: StageSlot, stage: StageCandidates) -> StageSeconds:
    """Seconds of a stage whose parameters are given out beside the first forward, a layer ahead."""
    seconds = replace(model.seconds(slot, stage), accumulate_K=np.zeros(1))
    degree = slot.data_parallel_degree
    if degree == 1:
        return seconds
    low, high = covered(model.spec, stage.start_K, stage.end_K)
    inside = slice(int(low[0]), int(high[0]))
    forward = model.region_seconds(slot.rows).forward_R[inside]
    given = unit_seconds(model.profile, model.memory(slot).holdings.table, degree, 1)[0][inside]
    interference = interference_of(model.profile, model.cluster)
    assert interference is not None
    none = np.zeros(1)
    both = concurrent_seconds(forward[:-1], given[1:], none, none, interference, False)
    return replace(seconds, gather_K=np.array([given[0] + (both - forward[:-1]).sum()]))


def _without_update(run: Run, profile: HardwareProfile) -> float:
    stages = predicted_seconds(run, profile)[1]
    return _step_seconds(run.plan, [replace(stage, update_K=np.zeros(1)) for stage in stages])


def _without_transfers(run: Run, profile: HardwareProfile) -> float:
    free = [
        replace(cost, latency_seconds=0.0, bytes_per_second=1e18) if cost.operation == "send_recv" else cost
        for cost in profile.collectives
    ]
    return predicted_seconds(run, replace(profile, collectives=tuple(free)))[0]


def _without_sharing(run: Run, profile: HardwareProfile) -> float:
    stages = predicted_seconds(run, profile)[1]
    return _step_seconds(run.plan, [replace(stage, reduce_K=np.zeros(1), gather_K=np.zeros(1)) for stage in stages])


def _without_limit(run: Run, profile: HardwareProfile) -> float:
    return predicted_seconds(run, published_l4.measured(run.plan.world_size, is_sustained=False))[0]


WITHOUT: Mapping[str, Callable[[Run, HardwareProfile], float]] = {
    "the optimizer's arithmetic": _without_update,
    "transfers between stages": _without_transfers,
    "collectives of data-parallel ranks": _without_sharing,
    "the limit of power": _without_limit,
}
"""Parts of a prediction from operator timings, by name: the seconds of a step that leaves one out."""


def sample_of(run: Run, machine: str) -> Sample:
    """A run's row of the record."""
    sample: Sample = {"id": run.name, "machine": machine, "measured_seconds": run.measured_seconds}
    try:
        seconds, stages = predicted_seconds(run, MACHINES[machine](run.plan.world_size))
    except (MistError, UnpredictableError) as error:
        return {**sample, "unpredicted": str(error)}
    sample |= {"predicted_seconds": seconds}
    if run.measured_seconds is not None:
        sample |= {"error": seconds / run.measured_seconds - 1}
    steady = [float(stage.steady_K[0]) for stage in stages]
    sample |= {"slowest_stage": steady.index(max(steady)), "slowest_stage_seconds": max(steady)}
    return sample


def lacking(runs: Sequence[Run]) -> list[Sample]:
    """How far off the measured runs would be without each part of their predictions."""
    measured = [run for run in runs if run.measured_seconds is not None]
    samples: list[Sample] = []
    for name, seconds_of in WITHOUT.items():
        for run in measured:
            assert run.measured_seconds is not None
            seconds = seconds_of(run, published_l4.measured(run.plan.world_size))
            samples.append(
                {
                    "id": run.name,
                    "machine": "measured",
                    "without": name,
                    "predicted_seconds": seconds,
                    "error": seconds / run.measured_seconds - 1,
                }
            )
    return samples


def summary(samples: Sequence[Sample]) -> str:
    """Mean and worst error of either machine, and mean errors without each part."""
    lines = []
    for machine in MACHINES:
        scored = [item for item in samples if item.get("machine") == machine and _is_scored(item, None)]
        if scored:
            errors = {str(item["id"]): float(item["error"]) for item in scored}  # type: ignore[arg-type]
            worst = max(errors, key=lambda name: abs(errors[name]))
            lines.append(
                f"{machine}: mean error {mean(map(abs, errors.values())):.2%} of {len(errors)} runs, worst "
                f"{errors[worst]:+.2%} ({worst}), bias {mean(errors.values()):+.2%}"
            )
    for name in WITHOUT:
        errors_of = [float(item["error"]) for item in samples if _is_scored(item, name)]  # type: ignore[arg-type]
        if errors_of:
            lines.append(
                f"measured without {name}: mean error {mean(map(abs, errors_of)):.2%}, bias {mean(errors_of):+.2%}"
            )
    return "\n".join(lines)


def _is_scored(sample: Sample, without: str | None) -> bool:
    return "error" in sample and sample.get("without") == without


def read_runs(plans: Iterable[Path], times: Iterable[Path]) -> list[Run | Sample]:
    """All runs of plans files, with their seconds from times files or the plans files themselves.

    What is not understood is a sample that says so.
    """
    seconds: dict[str, float] = {}
    for path in times:
        content = json.loads(path.read_text(encoding="utf-8"))
        seconds |= {point["ref"]: float(point["iteration_seconds"]) for point in content["points"]}
    found: list[Run | Sample] = []
    for name, case in read_plans(plans).items():
        measured: Any = (case.get("measured") or {}).get("iteration_s")
        try:
            found.append(run_of(name, case, seconds.get(name, measured)))
        except (MistError, UnpredictableError, KeyError) as error:
            found.append({"id": name, "unpredicted": f"{type(error).__name__}: {error}"})
    return found


def _line(sample: Sample) -> str:
    if "unpredicted" in sample:
        return f"{sample['id']} {sample['machine']}: {sample['unpredicted']}"
    error = f" {sample['error']:+.2%}" if "error" in sample else ""
    return f"{sample['id']} {sample['machine']}: {sample['predicted_seconds']:.4f} s{error}"


def main() -> None:
    """Predict every run and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=Path, nargs="*", default=[DATA / "mist_plans.json"], help="plans files")
    parser.add_argument("--times", type=Path, nargs="*", default=[DATA / "mist_times.json"], help="measured seconds")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args()
    found = read_runs(options.plans, options.times)
    runs = [item for item in found if isinstance(item, Run)]
    samples = [item for item in found if not isinstance(item, Run)]
    for run in runs:
        for machine in MACHINES:
            samples.append(sample_of(run, machine))
            print(_line(samples[-1]), flush=True)
    samples += lacking(runs)
    text = summary(samples)
    print(text, write_record(make_record("published-time", samples, notes=text), options.out), sep="\n")


if __name__ == "__main__":
    main()
