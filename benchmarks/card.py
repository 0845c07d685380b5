"""What one card shows: the tests that need one, and short runs by plans of every kind against DDP.

Everything that is tried is in the record, with what came of it: figures, or the error that it ended with. Ranks that
share a card talk through gloo: NCCL refuses two on one.

    python -m benchmarks.card
    python -m benchmarks.card --devices 2    # where there are two, NCCL between them
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.launch import run_module
from benchmarks.plans import data_parallel, step_time_plans
from benchmarks.record import ROOT, Sample, make_record, write_record
from benchmarks.workload import add_size_arguments, size_arguments
from lightning_mist.plan import Plan, save

NO_CARD = "no CUDA device was found: nothing was run and nothing is recorded"


def plans_for(devices: int, layers: int, rows: int) -> dict[str, Plan]:
    """Plans for so many cards, by name; one or two."""
    if devices == 2:
        return step_time_plans(layers, rows)
    return {
        "plain": data_parallel(layers, 1, rows),
        "G=4": data_parallel(layers, 1, rows, microbatches=4),
        "half recomputed": data_parallel(layers, 1, rows, checkpointed=layers // 2),
        "all recomputed G=4": data_parallel(layers, 1, rows, microbatches=4, checkpointed=layers),
    }


def tested(arguments: Sequence[str]) -> list[Sample]:
    """What became of each test that needs a card."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "--all", "-m", "gpu", "-q", f"--junitxml={report}", *arguments]
        subprocess.run(command, cwd=ROOT, check=False)
        if not report.is_file():
            return [{"what": "tests", "error": "pytest wrote no report"}]
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return [_case(case) for case in cases]


def _case(case: ElementTree.Element) -> Sample:
    sample: Sample = {"what": "test", "name": f"{case.get('classname')}::{case.get('name')}"}
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            sample["error"] = f"{kind}: {(found.get('message') or '')[:300]}"
    return sample


def trained(devices: int, options: argparse.Namespace, plans: dict[str, Plan]) -> list[Sample]:
    """Runs by each plan, after one by DDP."""
    common = ["--steps", str(options.steps), *size_arguments(options)]
    samples: list[Sample] = []
    losses: list[float] | None = None
    with tempfile.TemporaryDirectory() as directory:
        for name, plan in {"ddp": None, **plans}.items():
            arguments = ["--strategy", "ddp"]
            if plan is not None:
                path = Path(directory) / "plan.json"
                save(plan, path)
                arguments = ["--strategy", "mist", "--plan", str(path)]
            sample: Sample = {"what": "run", "name": name, "devices": devices}
            try:
                run = run_module("benchmarks.workload", [*arguments, *common], processes=devices, timeout_seconds=150)
            except RuntimeError as error:
                samples.append({**sample, "error": str(error)[-600:]})
                print(samples[-1], flush=True)
                continue
            losses = run["losses"] if losses is None else losses
            sample["step_seconds"] = statistics.median(run["step_seconds"])
            sample["largest_loss_difference"] = max(abs(a - b) for a, b in zip(losses, run["losses"], strict=True))
            for number, stage in enumerate((run["report"] or {}).get("stages", ())):
                for figure in ("predicted_bytes", "measured_bytes", "measured_reserved_bytes", "measured_device_bytes"):
                    sample[f"stage_{number}_{figure}"] = stage.get(figure)
            samples.append(sample)
            print(sample, flush=True)
    return samples


def main() -> None:
    """Run the tests and the plans, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, choices=(1, 2), default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-tests", action="store_true", help="runs by plans only")
    parser.add_argument("--no-runs", action="store_true", help="tests only")
    parser.add_argument("--pytest", nargs="*", default=[], help="further arguments for pytest")
    add_size_arguments(parser)
    options = parser.parse_args()
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not there:
        sys.exit(NO_CARD)
    if options.devices > there:
        sys.exit(f"{options.devices} cards were asked for and {there} found: leave out --devices")
    samples = [] if options.no_tests else tested(options.pytest)
    if not options.no_runs:
        samples += trained(options.devices, options, plans_for(options.devices, options.layers, options.batch_size))
    wrong = [sample for sample in samples if "error" in sample]
    notes = f"{len(samples)} things were tried, {len(wrong)} ended in an error or were skipped."
    if options.devices == 1:
        notes += " Plans with more than one rank ran in one process only: there was one card."
    print(notes, write_record(make_record("card", samples, notes=notes)), sep="\n")


if __name__ == "__main__":
    main()
