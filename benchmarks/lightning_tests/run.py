"""Lightning's own tests, as they are and with this project's strategy in place of Lightning's.

``python -m benchmarks.lightning_tests.run CHECKOUT`` with the path of a checkout of Lightning's repository at the tag
of the installed version; ``docs/lightning-tests.md`` says what else it takes. Every test runs twice, and the record
says which end otherwise; those are run once more with Lightning's DDP on one device. A list is run again from where it
was if it was ended (``--work``).
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lightning_tests.lists import LISTS, REASONS, WITHOUT
from benchmarks.record import ROOT, Sample, make_record, write_record

AS_DDP = "Lightning's DDP on one device ends so too: it refuses what is not for distributed training, or is not needed"

Outcomes = dict[str, tuple[str, str]]
"""How each test ended, and the message of one that failed."""


def read(path: Path) -> Outcomes:
    """What a run has written: of each test the worst of its phases."""
    found: Outcomes = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        name, when, outcome, message = ast.literal_eval(line)
        if outcome == "failed" and when != "call":
            outcome = f"error at {when}"
        if outcome != "passed" or name not in found:
            found[name] = (outcome, message)
    return found


def run(checkout: Path, tests: Sequence[str], swap: str, results: Path, *, timeout_seconds: int) -> Outcomes:
    """Run tests with strategies swapped in; those that are in the file of results already are not run again."""
    tests_folder = checkout / "tests"
    if not tests:
        return {}
    environment = {
        **os.environ,
        "SWAP": swap,
        "SWAP_RESULTS": str(results),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tests_folder), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.lightning_tests.swap", "-q", "--timeout"]
    command += [str(timeout_seconds), "-p", "no:cacheprovider", *tests]
    for name in WITHOUT:
        command += ["--ignore", name]
    subprocess.run(command, cwd=tests_folder, env=environment, check=False)
    return read(results)


def reason_of(name: str, message: str) -> str:
    """Why a test ends otherwise, where that is known."""
    found = (why for pattern, why in REASONS if re.search(pattern, f"{name} {message}"))
    return next(found, f"not known: {' '.join(message.split())[:200]}")


def others(stock: Outcomes, swapped: Outcomes) -> list[str]:
    """Tests that end otherwise, as pytest is asked for them in their folder."""
    names = [name for name in sorted(stock.keys() & swapped.keys()) if stock[name][0] != swapped[name][0]]
    return [name.removeprefix("tests/") for name in names]


def compared(stock: Outcomes, swapped: Outcomes, ddp: Outcomes) -> tuple[list[Sample], dict[str, list[str]]]:
    """A row for each file, and for each reason the tests that end otherwise for it.

    Args:
        stock: How tests ended.
        swapped: How they ended with this project's strategy.
        ddp: How those that ended otherwise ended with Lightning's DDP on one device.
    """
    rows: dict[str, Counter[str]] = {}
    reasons: dict[str, list[str]] = {}
    for name in sorted(stock.keys() & swapped.keys()):
        row = rows.setdefault(name.partition("::")[0].partition("tests_pytorch/")[2], Counter())
        row["tests"] += 1
        outcome = swapped[name][0]
        if stock[name][0] == outcome:
            row[f"{outcome} as stock"] += 1
        elif name in ddp and ddp[name][0] == outcome:
            row["as under DDP"] += 1
            reasons.setdefault(AS_DDP, []).append(name.partition("::")[2])
        else:
            row["other"] += 1
            reasons.setdefault(reason_of(name, swapped[name][1]), []).append(name.partition("::")[2])
    columns = ("tests", "passed as stock", "skipped as stock", "failed as stock", "as under DDP", "other")
    return [{"file": name, **{column: row[column] for column in columns}} for name, row in rows.items()], reasons


def main(arguments: Sequence[str] | None = None) -> int:
    """Run lists of tests and write their records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of Lightning's repository")
    parser.add_argument("--lists", nargs="+", choices=list(LISTS), default=list(LISTS))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lightning-tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    parser.add_argument("--no-record", action="store_true", help="only print")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.lists:
        found = {
            swap: run(
                options.checkout.resolve(),
                LISTS[name],
                swap,
                options.work / f"{name}-{swap}.txt",
                timeout_seconds=options.timeout,
            )
            for swap in ("stock", name)
        }
        found["ddp"] = run(
            options.checkout.resolve(),
            others(found["stock"], found[name]),
            "ddp",
            options.work / f"{name}-ddp.txt",
            timeout_seconds=options.timeout,
        )
        rows, reasons = compared(found["stock"], found[name], found["ddp"])
        total = sum(int(str(row["tests"])) for row in rows)
        notes = [f"{total} tests, of which {sum(map(len, reasons.values()))} end otherwise."]
        notes += [f"{why} ({len(tests)}: {', '.join(tests)})." for why, tests in reasons.items()]
        print("\n".join([name, *notes]))
        if not options.no_record:
            write_record(make_record(f"lightning-tests-{name}", rows, notes=" ".join(notes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
