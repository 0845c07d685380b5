"""Memory that others measured, predicted by running their programs again without data.

    python -m benchmarks.accuracy.published_memory [--points points.json] [--plans plans.json ...] [--out DIRECTORY]

Every row of the points file is in the record: with what was predicted and by how much it is off, or with the reason why
it could not be predicted; and beside it with what the planner's own estimate of such a plan says, or what is missing.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy.published_device import OutOfDeviceMemoryError, SimulatedDevice
from benchmarks.accuracy.published_megatron import STEPS, MegatronRank, MegatronRun
from benchmarks.accuracy.published_mist import ITERATIONS, MistRank, MistStage
from benchmarks.accuracy.published_mist_model import MistDims
from benchmarks.accuracy.published_planned_memory import planned_columns
from benchmarks.accuracy.published_programs import predict_run
from benchmarks.accuracy.published_rows import (
    DATA,
    Prediction,
    Row,
    UnpredictableError,
    catalog_name,
    known,
    mist_stage,
    plan_of,
    read_plans,
    read_points,
)
from benchmarks.record import RECORDS, Sample, make_record, write_record
from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings
from lightning_mist.hardware.catalog.memory_overheads import communicator_overhead, context_overhead, workspace_bytes
from lightning_mist.hardware.describe import parse_cluster

Plans = Mapping[str, Row]


def predict_mist(row: Row, plans: Plans) -> Prediction:
    """A stage of one of Mist's plans, over the iterations of their benchmark."""
    case = plan_of(row, plans)
    dims, stage = mist_stage(row, case)
    gpu = catalog_name(row.get("gpu") or "L4-24GB")
    ranks = sum(int(each["dp"]) * int(each["tp"]) for each in case["plan"]["stages"])
    groups = [ranks] + 3 * [stage.data_parallel] + [dims.tensor_parallel]
    cluster = parse_cluster(f"1x{ranks}x{gpu}")
    outside = context_overhead(gpu).expected
    outside += sum(communicator_overhead(cluster, size).expected for size in groups if size > 1)
    assert stage.device_bytes is not None
    capacity = stage.device_bytes - outside
    try:
        device = run_mist(dims, stage, capacity, workspace_bytes(gpu))
    except OutOfDeviceMemoryError:
        device = run_mist(dims, stage, None, workspace_bytes(gpu))
        if device.peak_allocated > capacity:
            raise UnpredictableError(
                f"the program run here would need {device.peak_allocated} bytes of the device's {capacity}"
            ) from None
        return Prediction(
            allocated=device.peak_allocated, reserved=capacity, how="Mist's runtime; all that a device has is reserved"
        )
    return Prediction(allocated=device.peak_allocated, reserved=device.peak_reserved, how="Mist's runtime")


def predict_megatron(row: Row, plan: Row) -> Prediction:
    """A rank of a functional test of Megatron-LM; rows are of the last one."""
    known(row.get("rank", "last"), ("last",), "rank")
    names = {entry.name for entry in dataclasses.fields(MegatronRun)}
    run = MegatronRun(**{name: value for name, value in plan.items() if name in names})
    device = SimulatedDevice(workspaces=2 * workspace_of(row))
    with device:
        rank = MegatronRank(device, run)
        for _ in range(STEPS):
            rank.step()
        after = device.allocator.allocated
        del rank
    return Prediction(
        allocated=device.peak_allocated, reserved=device.peak_reserved, after_step=after, how="Megatron's runtime"
    )


def workspace_of(row: Row) -> int:
    """What cuBLAS keeps for a thread and stream on a row's device: it depends on the generation only."""
    gpu = str(row.get("gpu") or "").lower()
    is_recent = any(name in gpu for name in ("h100", "h200", "h20", "gh200", "b200", "b100", "b300"))
    return workspace_bytes("H100" if is_recent else "A100-80")


def run_mist(dims: MistDims, stage: MistStage, capacity: int | None, workspace: int) -> SimulatedDevice:
    """The device after the iterations of Mist's benchmark.

    Forward and backward run in threads of their own, and every thread has a cuBLAS handle with a workspace.
    """
    device = SimulatedDevice(AllocatorSettings(capacity_bytes=capacity), workspaces=2 * workspace)
    with device:
        rank = MistRank(device, dims, stage)
        for _ in range(ITERATIONS):
            rank.iterate()
        del rank
    return device


def predict(row: Row, plans: Plans) -> Prediction:
    """What a row's run is predicted to take.

    Raises:
        UnpredictableError: If the run is not known well enough.
    """
    if "ref" in row:
        plan = plan_of(row, plans)
        if plan.get("runtime") == "megatron":
            return predict_megatron(row, plan)
        if "model" in plan:
            return predict_mist(row, plans)
    if "arch" in row:
        return predict_run(row, workspace_of(row))
    raise UnpredictableError("no program that can be run again does what this row describes")


def sample_of(row: Row, predicted: Callable[[], Prediction]) -> Sample:
    """A row of the record."""
    measured = row["measured"]
    sample: Sample = {
        "id": row["id"],
        "group": group_of(row),
        "metric": row.get("metric", ""),
        "source": row.get("source", ""),
    }
    try:
        prediction = predicted()
    except UnpredictableError as error:
        return {**sample, "unpredicted": str(error)}
    except (KeyError, TypeError, ValueError) as error:
        return {**sample, "unpredicted": f"something that is needed is missing or has no sense: {error!r}"}
    sample["how"] = prediction.how
    pairs = {
        "allocated": (prediction.allocated, measured.get("peak_allocated_bytes")),
        "active": (prediction.active, measured.get("peak_active_bytes")),
        "reserved": (prediction.reserved, measured.get("reserved_bytes")),
        "after_step": (prediction.after_step, measured.get("allocated_after_step_bytes")),
    }
    for name, (value, truth) in pairs.items():
        if value is not None and (truth is not None or name == "allocated"):
            sample[f"predicted_{name}_bytes"] = value
        if value is not None and truth is not None:
            sample[f"measured_{name}_bytes"], sample[f"{name}_error"] = int(truth), value / truth - 1
    return sample


def group_of(row: Row) -> str:
    """Which runtime a row is of."""
    name = str(row["id"]).partition("-")[0]
    return name if name in ("mist", "megatron") else "trainer"


def summary(samples: Sequence[Sample]) -> str:
    """Mean and largest errors by group, and what is not predicted."""
    lines = []
    for group in sorted({str(sample["group"]) for sample in samples}):
        rows = [sample for sample in samples if sample["group"] == group]
        text = f"{group}: {len(rows)} rows, {sum('unpredicted' in row for row in rows)} not predicted"
        for name in ("allocated", "active", "reserved", "after_step", "planned_allocated"):
            errors = [abs(float(row[f"{name}_error"] or 0)) for row in rows if f"{name}_error" in row]
            if errors:
                mean = sum(errors) / len(errors)
                text += f"; {name}: mean error {mean:.3%}, largest {max(errors):.2%} ({len(errors)} rows)"
        missing = sorted({str(row["not_planned"]) for row in rows if "not_planned" in row})
        count = sum("not_planned" in row for row in rows)
        lines.append(text + (f"; {count} rows cannot be planned: {'; '.join(missing)}" if missing else ""))
        reasons = sorted({str(row["reserved_not_planned"]) for row in rows if "reserved_not_planned" in row})
        lines += [f"{group}, reserved, not planned: {reason}" for reason in reasons]
        said = [str(row["planned_verdict"]) for row in rows if "planned_verdict" in row]
        lines.append(f"{group}, of {len(said)} planned: {', '.join(f'{said.count(v)} {v}' for v in sorted({*said}))}")
    lines.append("all of these ran")
    return "\n".join(lines)


def main() -> None:
    """Predict every row, print and record it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=Path, default=DATA / "memory_points.json", help="what was measured")
    parser.add_argument(
        "--plans",
        type=Path,
        nargs="+",
        default=[],
        help="plans that rows refer to, beside those that are known already",
    )
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args()
    known = sorted(DATA.glob("*_plans.json"))
    plans = read_plans([*known, *options.plans])
    samples = []
    for row in read_points(options.points):
        samples.append(sample_of(row, lambda row=row: predict(row, plans)))  # type: ignore[misc]
        samples[-1] |= planned_columns(row, plans)
        errors = {name: f"{value:+.3%}" for name, value in samples[-1].items() if name.endswith("_error")}
        print(row["id"], samples[-1].get("unpredicted") or errors, flush=True)
    text = summary(samples)
    print(text, write_record(make_record("published-memory", samples, notes=text), options.out), sep="\n")


if __name__ == "__main__":
    main()
