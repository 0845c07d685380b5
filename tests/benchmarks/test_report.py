from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.record import write_record
from benchmarks.report import fill, heading, main, read_records, show, table
from tests.benchmarks.test_record import RECORD

TABLE = """\
| plan | step | peak |
| :-- | --: | --: |
| dp2 | 250 ms | 1.0 KiB |

8xl4, 2026-01-31, commit abc, python 3.11: `python -m benchmarks.x`.

none
"""


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("step_seconds", 0.25, "250 ms"),
        ("peak_bytes", 2048, "2.0 KiB"),
        ("bytes_per_second", 2e9, "2 GB/s"),
        ("flops_per_second", 3e12, "3 TFLOP/s"),
        ("time_error", -0.034, "-3.4%"),
        ("spread", 0.5, "50.0%"),
        ("ratio", 1.23456, "1.235"),
        ("microbatches", 8, "8"),
        ("plan", "dp2", "dp2"),
        ("fits", True, "True"),
        ("peak_bytes", None, ""),
    ],
)
def test_values_are_shown_in_their_unit(name: str, value: object, text: str) -> None:
    assert show(name, value) == text


def test_headings_leave_the_unit_to_the_values() -> None:
    assert heading("measured_step_seconds") == "measured step"
    assert heading("bytes_per_second") == "bytes"


def test_table() -> None:
    assert table(RECORD) == TABLE


def test_documents_are_filled_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, document = tmp_path / "records", tmp_path / "README.md"
    write_record(RECORD, records)
    mark = "<!-- record: throughput_8xl4_202601 -->\n"
    document.write_text(f"Before\n{mark}old\n<!-- end of record -->\nAfter\n")
    arguments = [str(document), "--records", str(records)]
    assert main([*arguments, "--check"]) == 1
    assert "old" in document.read_text()
    assert main(arguments) == 0
    assert document.read_text() == f"Before\n{mark}{TABLE}<!-- end of record -->\nAfter\n"
    assert main([*arguments, "--check"]) == 0
    assert capsys.readouterr().out == f"out of date: {document}\nupdated: {document}\n"


def test_without_documents_all_tables_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(RECORD, tmp_path)
    assert main(["--records", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"## throughput_8xl4_202601\n\n{TABLE}\n"


def test_unknown_record_is_said() -> None:
    with pytest.raises(ValueError, match="no record 'x': there are none"):
        fill("<!-- record: x -->\n<!-- end of record -->", {})


def test_committed_records_make_tables() -> None:
    for record in read_records().values():
        assert table(record).count("|") > 6


def test_a_mark_chooses_samples_and_columns() -> None:
    samples = ({"kind": "own", "machine": "a", "error": 0.051, "x": 1}, {"kind": "other", "machine": "b", "error": 0.2})
    records = {"both": replace(RECORD, samples=samples)}
    mark = "<!-- record: both, kind=own, columns machine error -->\n"
    filled = fill(f"{mark}<!-- end of record -->", records)
    assert filled.startswith(f"{mark}| machine | error |\n| :-- | --: |\n| a | 5.1% |\n\n8xl4")
    assert fill(filled, records) == filled
    assert "| x |" in fill("<!-- record: both, kind=own -->\n<!-- end of record -->", records)
    for wrong in ("kind=none", "kind=own, columns machine size"):
        with pytest.raises(ValueError, match="no samples with kind"):
            fill(f"<!-- record: both, {wrong} -->\n<!-- end of record -->", records)
