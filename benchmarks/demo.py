"""Runs ``make demo`` as somebody would who has just installed the package, and puts what it says into the documents.

    python -m benchmarks.demo

Writes the record, what was printed into ``docs/demo.md`` and the picture of the step into ``docs/step.svg``.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from benchmarks.record import ROOT, Sample, make_record, write_record
from lightning_mist.units import parse_bytes

SAID = re.compile(r"(<!-- demo -->\n```\n).*?(```\n<!-- end of demo -->)", re.DOTALL)
PICTURE = ROOT / "docs" / "step.svg"


def sample_of(text: str, report: dict[str, object], seconds: float, processor_seconds: float) -> Sample:
    """What a run printed and reported, as one row."""
    needs, may, plan, difference = (
        match[1]
        for pattern in (r"DDP needs ([\d.]+ \w+)", r"may use (\w+)", r"mist (.*); predicted: ", r"20 steps: (\S+)")
        if (match := re.search(pattern, text)) is not None
    )
    most = max(report["stages"], key=lambda stage: stage["measured_bytes"])
    return {
        "plan": plan,
        "ddp_bytes": parse_bytes(needs),
        "limit_bytes": parse_bytes(may),
        "predicted_peak_bytes": most["predicted_bytes"],
        "measured_peak_bytes": most["measured_bytes"],
        "predicted_step_seconds": report["predicted_step_seconds"],
        "measured_step_seconds": report["measured_step_seconds"],
        "largest_loss_difference": float(difference),
        "run_seconds": seconds,
        "processor_seconds": processor_seconds,
    }


def main() -> None:
    """Run it and write everything."""
    with tempfile.TemporaryDirectory() as folder:
        new = {
            "HOME": folder,
            "XDG_CACHE_HOME": folder,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
        ended = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "byte_gpt" / "demo.py")],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **new},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        seconds, after = perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        out = Path(folder) / "runs" / "demo"
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        notes = f"Load of the machine at the end of the run: {os.getloadavg()[0]:.1f}, with {os.cpu_count()} cores."
        record = make_record("demo", [sample_of(ended.stdout, report, seconds, spent)], notes=notes)
        shutil.copy(out / "step.svg", PICTURE)
    page = ROOT / "docs" / "demo.md"
    page.write_text(
        SAID.sub(lambda found: f"{found[1]}{ended.stdout}{found[2]}", page.read_text(encoding="utf-8")),
        encoding="utf-8",
    )
    print(ended.stdout, write_record(record), sep="\n")


if __name__ == "__main__":
    main()
