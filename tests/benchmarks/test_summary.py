"""What the first page says is what the records say."""

import re

from benchmarks import demo, summary
from benchmarks.record import RECORDS, ROOT, read_record


def test_the_summary_is_made_of_the_records_that_are_committed() -> None:
    assert list(read_record(RECORDS / "summary_amd-epyc-2-cores_202611.json").samples) == summary.samples()


def test_the_page_of_the_demo_shows_the_run_of_its_record() -> None:
    (recorded,) = read_record(RECORDS / "demo_amd-epyc-2-cores_202611.json").samples
    text = re.search(demo.SAID, (ROOT / "docs/demo.md").read_text())[0]
    stage = {"measured_bytes": recorded["measured_peak_bytes"], "predicted_bytes": recorded["predicted_peak_bytes"]}
    report = {"stages": [stage], **{name: recorded[name] for name in recorded if name.endswith("step_seconds")}}
    assert demo.sample_of(text, report, recorded["run_seconds"], recorded["processor_seconds"]) == recorded
    assert "DDP does not fit" in text
    assert recorded["measured_peak_bytes"] <= recorded["limit_bytes"] < recorded["ddp_bytes"]
    assert recorded["largest_loss_difference"] <= 1e-10
    assert demo.PICTURE.exists()
