"""Records: what was measured, on what, with which versions, by which command.

A record is ``records/<theme>_<hardware>_<yyyymm>.json``. Its samples are flat: names with their unit as the last word
(``_seconds``, ``_bytes``, ``_per_second``), values as measured and not rounded.
"""

import dataclasses
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
SCHEMA = 1

Value = str | int | float | bool | None
Sample = dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One benchmark's results.

    Attributes:
        theme: What was measured, for example ``"throughput"``.
        hardware: Where, in words for a file name, for example ``"8xl4"``.
        date: Day in ISO 8601.
        commit: The repository's commit; ends in ``+changes`` if tracked files differed from it.
        versions: Of Python and the packages that matter.
        command: What to type to measure again.
        samples: What was measured.
        plan: The plan that was run, as in its file, if it was one.
        notes: What a reader must know.
    """

    theme: str
    hardware: str
    date: str
    commit: str
    versions: Mapping[str, str]
    command: str
    samples: Sequence[Sample]
    plan: Mapping[str, Any] | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        """Check what the file's name is made of."""
        for name in (self.theme, self.hardware):
            if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
                raise ValueError(f"{name!r}: a theme or hardware is small letters, digits and single dashes")
        datetime.strptime(self.date, "%Y-%m-%d")

    @property
    def file_name(self) -> str:
        """Name of the record's file."""
        return f"{self.theme}_{self.hardware}_{self.date[:4]}{self.date[5:7]}.json"


def make_record(
    theme: str, samples: Sequence[Sample], *, plan: Mapping[str, Any] | None = None, notes: str = ""
) -> Record:
    """A record of a measurement just made by the running program."""
    return Record(
        theme=theme,
        hardware=hardware_name(),
        date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
        commit=commit(),
        versions=versions(),
        command=" ".join(["python", "-m", module_name(), *sys.argv[1:]]),
        samples=list(samples),
        plan=plan,
        notes=notes,
    )


def write_record(record: Record, directory: Path = RECORDS) -> Path:
    """Write a record; one of the same theme, hardware and month is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / record.file_name
    path.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(record)}, indent=1) + "\n", encoding="utf-8")
    return path


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        ValueError: If the file is not a record of this schema, or its name is not what its content says.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path} is not a record of schema {SCHEMA}")
    names = {field.name for field in dataclasses.fields(Record)}
    if set(content) != names:
        raise ValueError(f"{path}: fields {sorted(set(content) ^ names)} are missing or unknown")
    record = Record(**content)
    if path.name != record.file_name:
        raise ValueError(f"{path} should be named {record.file_name}")
    return record


def module_name() -> str:
    """The module that was started with ``python -m``."""
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).name


def commit() -> str:
    """The repository's commit, with a mark if tracked files differ from it."""
    head, changed = (
        subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    return f"{head}+changes" if changed else head


def versions() -> dict[str, str]:
    """Versions of Python and the packages that matter."""
    packages = ("lightning-mist", "torch", "lightning", "sympy", "highspy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def hardware_name() -> str:
    """This machine in words for a file name: number and kind of its GPUs, or processor and cores."""
    # Processes that search for a plan do without it, as the command's does.
    import torch

    if torch.cuda.is_available():
        return slug(f"{torch.cuda.device_count()}x{torch.cuda.get_device_name(0).removeprefix('NVIDIA ')}")
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    models = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
    return slug(f"{models[0] if models else platform.machine()} {len(models) or 1} cores")


def slug(text: str) -> str:
    """Small letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
