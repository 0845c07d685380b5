"""Does resident memory fall as predicted where optimizer state and parameters live in files?

A byte-level GPT of 85 million parameters with AdamW, all layers recomputed, in one process on a CPU: with everything in
memory, with the optimizer's state in files, and with the parameters there too; then with everything and with neither
under a limit of the kernel's (RLIMIT_DATA) that is between what the two need. Losses must be the same to the bit. What
the process has grown by is its resident memory at its most, in any step but the first, less what it had before the fit,
in which the parameters were already. Memory that is freed goes back to the kernel: glibc's MALLOC_MMAP_THRESHOLD_ is
set, which otherwise grows, and what is freed stays.

    python -m benchmarks.accuracy.state_on_disk
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.accuracy.state_on_disk_run import MOVED
from benchmarks.record import ROOT, Sample, make_record, write_record


def run(moved: str, limit: int = 0) -> dict[str, Any]:
    """One process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "benchmarks.accuracy.state_on_disk_run", "--moved", moved]
        command += ["--limit", str(limit), "--out", str(out)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not out.is_file():
            raise RuntimeError(f"{moved} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def sample_of(moved: str, limit: int, found: dict[str, Any], plain: dict[str, Any]) -> Sample:
    """One row."""
    is_done = "error" not in found
    falls = plain["grown_bytes"] - found["grown_bytes"] if is_done else None
    return {
        "in_files": moved,
        "limit_bytes": limit or None,
        "ended": "trained" if is_done else "out of memory",
        "parameters_bytes": found["parameter_bytes"],
        "predicted_device_bytes": found["predicted_bytes"],
        "predicted_files_bytes": found["predicted_host_bytes"],
        "grown_bytes": found["grown_bytes"] if is_done else None,
        "predicted_fall_bytes": plain["predicted_bytes"] - found["predicted_bytes"],
        "fall_bytes": falls,
        "step_seconds": found["step_seconds"],
        "same_losses": found["losses"] == plain["losses"] if is_done else None,
    }


def main() -> None:
    """Run every case and write the record."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    runs = {moved: run(moved) for moved in MOVED}
    plain, last = runs["nothing"], runs[[*MOVED][-1]]
    samples = [sample_of(moved, 0, found, plain) for moved, found in runs.items()]
    # Beyond what the process has when it is set: with its parameters, without its gradients.
    limit = (plain["grown_bytes"] + last["grown_bytes"]) // 2
    samples += [sample_of(moved, limit, run(moved, limit), plain) for moved in ("nothing", [*MOVED][-1])]
    for sample in samples:
        print(sample)
    notes = "The limit is on what the process maps for itself beyond what it had before the fit; files are not in it."
    print(notes, write_record(make_record("state-on-disk", samples, notes=notes)), sep="\n")


if __name__ == "__main__":
    main()
