import dataclasses
import json
import re
from pathlib import Path

import pytest

from benchmarks.record import RECORDS, Record, commit, hardware_name, make_record, read_record, slug, write_record

RECORD = Record(
    theme="throughput",
    hardware="8xl4",
    date="2026-01-31",
    commit="abc",
    versions={"python": "3.11"},
    command="python -m benchmarks.x",
    samples=[{"plan": "dp2", "step_seconds": 0.25, "peak_bytes": 1024}],
    plan={"schema": 1},
    notes="none",
)


def test_written_and_read_it_is_the_same(tmp_path: Path) -> None:
    path = write_record(RECORD, tmp_path / "records")
    assert path.name == "throughput_8xl4_202601.json"
    assert read_record(path) == RECORD


def test_made_here_and_now(tmp_path: Path) -> None:
    record = make_record("accuracy", [{"error": 0.1}])
    assert record.hardware == hardware_name()
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", record.commit)
    assert {"python", "torch", "lightning", "lightning-mist"} <= set(record.versions)
    assert read_record(write_record(record, tmp_path)) == record
    assert record.commit == commit()


@pytest.mark.parametrize("change", [{"theme": "Big"}, {"hardware": "a_b"}, {"hardware": ""}, {"date": "2026-13-01"}])
def test_names_must_make_a_file_name(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"small letters, digits and single dashes|does not match format"):
        dataclasses.replace(RECORD, **change)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = write_record(RECORD, tmp_path)
    content = json.loads(path.read_text())
    for change, message in (
        ({"schema": 2}, "not a record of schema 1"),
        ({"extra": 1}, r"fields \['extra'\] are missing or unknown"),
        ({"date": "2025-01-31"}, "should be named throughput_8xl4_202501.json"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(ValueError, match=message):
            read_record(path)


def test_committed_records_can_be_read() -> None:
    for path in RECORDS.glob("*.json"):
        assert read_record(path).samples


def test_slug() -> None:
    assert slug(" AMD EPYC(TM) 2 cores") == "amd-epyc-tm-2-cores"
