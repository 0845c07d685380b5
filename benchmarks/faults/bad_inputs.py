"""Thousands of inputs that must be refused, for every command: whether each is, in one line, and how soon.

An input is refused well if the command ends with status 2, says what is wrong in one line (beside the lines that tell
what it does, which begin with ``mist:``), shows no traceback, and imports nothing that the input merely mentions. The
command's own entry is called in this process, which spares the seconds of starting one; some inputs are tried as
processes of their own, too.
"""

import argparse
import contextlib
import importlib
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from types import FrameType

from benchmarks.faults.bad_input_cases import TRAP, Case, every_case
from benchmarks.record import ROOT, Sample, make_record, write_record
from lightning_mist.cli import main as command

MOST_SECONDS = 60
"""What is not refused by then counts as not refused."""

WELL = "refused"


class _Late(BaseException):
    """An input that took too long."""


def _ring(number: int, frame: FrameType | None) -> None:
    raise _Late


def called(arguments: Sequence[str]) -> tuple[int | None, str]:
    """The command's status (None where it goes on too long) and what it wrote to standard error, called here."""
    before = signal.signal(signal.SIGALRM, _ring)
    said = io.StringIO()
    signal.alarm(MOST_SECONDS)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            command(list(arguments))
        return 0, said.getvalue()
    except SystemExit as end:
        return (end.code if isinstance(end.code, int) else 1), said.getvalue()
    except _Late:
        return None, said.getvalue()
    except BaseException:  # it would have ended the process with a traceback
        return 1, said.getvalue() + traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def started(arguments: Sequence[str], folder: Path) -> tuple[int | None, str]:
    """The same of a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
    line = [sys.executable, "-m", "lightning_mist.cli", *arguments]
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=MOST_SECONDS, cwd=folder, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stderr


def verdict(status: int | None, said: str, folder: Path) -> str:
    """``"refused"``, or what is wrong with how an input ended."""
    sprung = folder / "sprung"
    if sprung.exists():
        sprung.unlink()
        return "imported what was only mentioned"
    lines = [line for line in said.splitlines() if not line.startswith("mist: ")]
    if status is None:
        return "too slow"
    if "Traceback" in said:
        return "traceback"
    if status != 2:
        return f"status {status}"
    return WELL if len(lines) == 1 else f"{len(lines)} lines"


@contextlib.contextmanager
def trapped(folder: Path) -> Iterator[None]:
    """Inside, a module can be imported that tells of it, and the current directory is the folder."""
    (folder / f"{TRAP}.py").write_text(
        f"from pathlib import Path\nPath({str(folder / 'sprung')!r}).touch()\n\ndef make():\n    return 3\n",
        encoding="utf-8",
    )
    before = Path.cwd()
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))


def main(arguments: Iterable[str] | None = None) -> int:
    """Try all inputs and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=40, help="how many are tried as processes of their own, too")
    parser.add_argument("--share", type=int, default=1, help="only every so many-th input")
    parser.add_argument("--family", help="only these")
    parser.add_argument("--dry", action="store_true", help="write no record")
    options = parser.parse_args(None if arguments is None else list(arguments))
    for name in ("torch", "transformers"):  # once, and not in every process that looks at a network
        importlib.import_module(name)
    found: list[Sample] = []
    with tempfile.TemporaryDirectory() as temporary, trapped(Path(temporary)):
        folder = Path(temporary)
        cases = every_case(folder, options.seed)[:: options.share]
        cases = [case for case in cases if options.family in (None, case.family)]
        chosen = random.Random(options.seed).sample(cases, min(options.processes, len(cases)))
        runs = [(case, "called") for case in cases] + [(case, "started") for case in chosen]
        for case, how in runs:
            began = perf_counter()
            status, said = called(case.arguments) if how == "called" else started(case.arguments, folder)
            text = verdict(status, said, folder)
            found.append(
                {"family": case.family, "how": how, "verdict": text, "refusal_seconds": perf_counter() - began}
            )
            if text != WELL:
                shown = [word if len(word) < 200 else word[:200] + "..." for word in case.arguments]
                print(f"{text} ({how}, {case.family}): {shown}\n{_tail(said)}\n{_content(case)}", flush=True)
    samples = summary(found)
    bad = sum(sample["verdict"] != WELL for sample in found)
    print(f"{len(found) - bad} of {len(found)} inputs are refused in one line")
    if not options.dry:
        notes = (
            "Inputs by what is wrong with them. Refused: with status 2, one line, no traceback, and without importing "
            "what they name. Seconds of the median and of the slowest, called in one process, or with the start of "
            f"a process. Seed {options.seed}."
        )
        print(f"wrote {write_record(make_record('bad-inputs', samples, notes=notes))}")
    return int(bad > 0)


def _tail(said: str) -> str:
    return "\n".join(line[:300] for line in said.splitlines()[-4:])


def _content(case: Case) -> str:
    """The beginning of a file that a case is about."""
    paths = [Path(word.rpartition("=")[2]) for word in case.arguments]
    return "".join(path.read_text(errors="replace")[:200] for path in paths if len(str(path)) < 200 and path.is_file())


def summary(found: Sequence[Sample]) -> list[Sample]:
    """One row per family, and one for those that were processes."""
    rows: dict[str, list[Sample]] = defaultdict(list)
    for sample in found:
        name = str(sample["family"]) if sample["how"] == "called" else "any of these, as a process of its own"
        rows[name].append(sample)
    samples: list[Sample] = []
    for name, members in rows.items():
        seconds = [float(str(member["refusal_seconds"])) for member in members]
        samples.append(
            {
                "what_is_wrong": name,
                "inputs": len(members),
                "refused": sum(member["verdict"] == WELL for member in members),
                "median_seconds": median(seconds),
                "slowest_seconds": max(seconds),
            }
        )
    return samples


if __name__ == "__main__":
    sys.exit(main())
