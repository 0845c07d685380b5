"""What users do, with the versions that are installed: ``python -m benchmarks.versions.run oldest`` or ``newest``.

``make test-oldest`` and ``make test-newest`` make the environments. Runs the README's commands and its Python; the
demo, its model under DDP and under plans of every kind, and checkpoints of one resumed by the other
(:mod:`benchmarks.versions.fits`); and the tests of rooms that lean on libraries most. Writes
``records/versions_*.json``, with the seconds of each and the versions; the other environment's rows stay, and those of
parts that were not asked for. The exit status is 1 if anything fails.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from benchmarks.launch import run_module
from benchmarks.record import RECORDS, ROOT, Sample, make_record, read_record, write_record

PACKAGES = ("torch", "lightning", "numpy", "scipy", "highspy", "sympy", "jsonargparse", "rich", "PyYAML")
TESTED = ("plan", "schedule", "cli", "strategy")
PARTS = ("README", "demo", "fits", "tests")
GOOD = ("ended well", "as DDP")


def ran(command: str, folder: Path, *, seconds: float) -> tuple[str, float, str]:
    """What became of a command of the shell, its seconds, and what it printed on standard output."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {seconds:.0f} s", seconds, ""
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-4000:], flush=True)
    outcome = f"ended with {done.returncode}" if done.returncode else "ended well"
    return outcome, time.perf_counter() - start, done.stdout


def of_readme(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Its commands, in order, each also with JSON where there is such an answer; and its Python."""
    commands = re.findall(r"^lightning-mist .*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    other = commands[0].replace("plan.json", "other.json").replace("128", "64", 1)
    for command in (other, *commands):
        outcome, seconds, _ = ran(command, folder, seconds=600.0)
        yield " ".join(command.split()[:3]), outcome, seconds
    outcome, seconds, printed = ran(f"{commands[0]} --json", folder, seconds=600.0)
    if outcome in GOOD:
        try:
            json.loads(printed)
        except ValueError as error:
            outcome = f"no JSON: {error}"
    yield "lightning-mist plan --json", outcome, seconds
    outcome, seconds, _ = ran(f"python -m tests.shown_python {ROOT / 'README.md'}", folder, seconds=600.0)
    yield "Python of the README", outcome, seconds


def of_demo(folder: Path) -> Iterator[tuple[str, str, float]]:
    """The example that anybody can start, for five steps, by the strategy and by DDP."""
    script = ROOT / "examples" / "byte_gpt" / "train.py"
    for strategy in ("ddp", "mist"):
        options = f"--strategy {strategy} --accelerator cpu --devices 2 --max-steps 5 --out {folder / strategy}"
        outcome, seconds, _ = ran(f"python {script} {options}", folder, seconds=600.0)
        yield f"examples/byte_gpt, {strategy}", outcome, seconds


def of_fits(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Every fit, and what goes on from what."""
    found = run_module("benchmarks.versions.fits", [str(folder)], processes=2, timeout_seconds=1200.0)
    for name, result in found.items():
        yield f"five steps, {name}", result["outcome"], result["seconds"]


def of_tests(folder: Path) -> Iterator[tuple[str, str, float]]:
    """The first tier of some rooms; what libraries warn of is theirs, and changes with their versions."""
    for room in TESTED:
        command = f"python -m pytest tests/{room} -q -n 2 --dist loadfile -o filterwarnings=default -p no:cacheprovider"
        outcome, seconds, printed = ran(command, ROOT, seconds=2400.0)
        counts = re.findall(r"\d+ (?:passed|failed|errors?)", printed[-300:])
        yield f"tests/{room}: {', '.join(counts)}", outcome, seconds


def record(environment: str, parts: Iterable[str], rows: Iterable[Sample]) -> Path:
    """Write what was found; rows of other environments and parts stay."""
    written = {name: version(name) for name in PACKAGES}
    rows = [{"environment": environment, "part": "versions", "python": platform.python_version(), **written}, *rows]
    made = make_record("versions", rows)
    path = RECORDS / made.file_name
    before = read_record(path).samples if path.exists() else []
    others = [row for row in before if row["environment"] != environment or row["part"] not in ("versions", *parts)]
    order = ("versions", *PARTS)
    samples = sorted([*others, *rows], key=lambda row: (order.index(str(row["part"])), str(row["environment"])))
    return write_record(replace(made, samples=samples, command="make test-oldest test-newest"), path.parent)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the parts, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=["oldest", "newest"])
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="some of it")
    given = parser.parse_args(None if arguments is None else list(arguments))
    works = {"README": of_readme, "demo": of_demo, "fits": of_fits, "tests": of_tests}
    rows: list[Sample] = []
    for part in given.parts:
        with tempfile.TemporaryDirectory() as folder:
            for what, outcome, seconds in works[part](Path(folder)):
                row = {"environment": given.environment, "part": part, "what": what, "outcome": outcome}
                rows.append({**row, "run_seconds": seconds})
                print(f"{what}: {outcome}, {seconds:.1f} s", flush=True)
    failing = [row for row in rows if row["outcome"] not in GOOD]
    print(record(given.environment, given.parts, rows))
    print(f"{len(rows) - len(failing)} of {len(rows)} work with {given.environment} versions")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
