"""Records as Markdown tables.

``python -m benchmarks.report`` prints all of them. ``python -m benchmarks.report README.md docs/x.md`` replaces the
text between these marks in the files named, and with ``--check`` only says whether it would::

    <!-- record: throughput_amd-epyc-2-cores_202611 -->
    <!-- end of record -->

Of a record with samples of several kinds a mark may choose samples by a value and name the columns to show::

    <!-- record: interference_amd-epyc-2-cores_202611, kind=own, columns machine error -->
"""

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from benchmarks.record import RECORDS, Record, Value, read_record
from lightning_mist.units import format_bytes, format_rate, format_seconds

MARKED = re.compile(
    r"(<!-- record: ([a-z0-9_-]+)(?:, (\w+)=([^,\n]+))?(?:, columns ([\w ]+))? -->\n).*?(<!-- end of record -->)",
    re.DOTALL,
)


def show(name: str, value: Value) -> str:
    """A value as text, in the unit that its name ends with."""
    if value is None:
        return ""
    if isinstance(value, (str, bool)):
        return str(value)
    if name == "error":  # a mean of absolute errors, without a sign
        return f"{value:.1%}"
    for ending, text in (
        ("flops_per_second", lambda v: format_rate(v, "FLOP/s")),
        ("bytes_per_second", lambda v: format_rate(v, "B/s")),
        ("_seconds", format_seconds),
        ("_bytes", format_bytes),
        ("_error", lambda v: f"{v:+.1%}"),
        ("spread", lambda v: f"{v:.1%}"),
    ):
        if name.endswith(ending):
            return str(text(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def heading(name: str) -> str:
    """A column's name for people: without the unit, which the values have."""
    for ending in ("_per_second", "_seconds", "_bytes"):
        name = name.removesuffix(ending)
    return name.replace("_", " ")


def table(record: Record) -> str:
    """The samples of a record as a table, and what they were measured with below it."""
    names = list(dict.fromkeys(name for sample in record.samples for name in sample))
    numeric = {name: any(isinstance(sample.get(name), (int, float)) for sample in record.samples) for name in names}
    lines = [
        "| " + " | ".join(heading(name) for name in names) + " |",
        "| " + " | ".join("--:" if numeric[name] else ":--" for name in names) + " |",
    ]
    for sample in record.samples:
        lines.append("| " + " | ".join(show(name, sample.get(name)) for name in names) + " |")
    packages = ", ".join(f"{name} {number}" for name, number in record.versions.items())
    lines += ["", f"{record.hardware}, {record.date}, commit {record.commit[:12]}, {packages}: `{record.command}`."]
    if record.notes:
        lines += ["", record.notes]
    return "\n".join(lines) + "\n"


def chosen(record: Record, name: str | None, value: str | None, columns: str | None) -> Record:
    """A record with some of its samples and columns only.

    Raises:
        ValueError: If no sample has the value, or none a column.
    """
    samples = [sample for sample in record.samples if name is None or str(sample.get(name)) == value]
    wanted = list(dict.fromkeys(key for sample in samples for key in sample)) if columns is None else columns.split()
    missing = [key for key in wanted if not any(key in sample for sample in samples)]
    if not samples or missing:
        raise ValueError(f"no samples with {name} = {value} that have {', '.join(missing) or 'anything'}")
    parts = [{key: sample[key] for key in wanted if key in sample} for sample in samples]
    return replace(record, samples=tuple(parts))


def fill(text: str, records: dict[str, Record]) -> str:
    """A document with the tables between its marks made new.

    Raises:
        ValueError: If a mark names a record, samples or columns that are not there.
    """

    def replaced(match: re.Match[str]) -> str:
        if match[2] not in records:
            raise ValueError(f"no record {match[2]!r}: there are {', '.join(sorted(records)) or 'none'}")
        return f"{match[1]}{table(chosen(records[match[2]], *match.group(3, 4, 5)))}{match[6]}"

    return MARKED.sub(replaced, text)


def read_records(directory: Path = RECORDS) -> dict[str, Record]:
    """All records by name."""
    return {path.stem: read_record(path) for path in sorted(directory.glob("*.json"))}


def main(arguments: Iterable[str] | None = None) -> int:
    """Print the tables, or bring documents up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args(None if arguments is None else list(arguments))
    records = read_records(options.records)
    if not options.documents:
        print("\n".join(f"## {name}\n\n{table(record)}" for name, record in records.items()))
        return 0
    stale = []
    for document in options.documents:
        before = document.read_text(encoding="utf-8")
        after = fill(before, records)
        if after != before:
            stale.append(str(document))
            if not options.check:
                document.write_text(after, encoding="utf-8")
    if stale:
        print(f"{'out of date' if options.check else 'updated'}: {', '.join(stale)}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
