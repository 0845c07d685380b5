import json
from dataclasses import replace

import pytest

from lightning_mist.estimate.estimate_data import estimate_to_json
from lightning_mist.estimate.estimate_table import SweepPoint, combinations, parse_sweep, render_sweep, sweep_to_json
from tests.estimate.test_estimate_data import ESTIMATE

KNOWN = ("microbatch_size", "zero_stage")
POINTS = (
    SweepPoint(values=(("zero_stage", "0"),), estimate=replace(ESTIMATE, memory_limit=2**30)),
    SweepPoint(values=(("zero_stage", "3"),), estimate=replace(ESTIMATE, memory_limit=5 * 2**30)),
    SweepPoint(values=(("zero_stage", "7"),), error="zero_stage = 7: ZeRO has stages 0 to 3"),
    SweepPoint(values=(("zero_stage", "8"),), error="zero_stage = 7: ZeRO has stages 0 to 3"),
)


def test_every_combination():
    axes = parse_sweep("microbatch-size=1,2  zero_stage=3,0", KNOWN)
    assert list(combinations(axes)) == [
        (("microbatch_size", "1"), ("zero_stage", "3")),
        (("microbatch_size", "1"), ("zero_stage", "0")),
        (("microbatch_size", "2"), ("zero_stage", "3")),
        (("microbatch_size", "2"), ("zero_stage", "0")),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is nothing to go through"),
        ("zero_stage", "sweep 'zero_stage': write names and values, for example microbatch_size=1,2,4"),
        ("zero_stage=", "write names and values"),
        ("zeros=1", "'zeros' cannot be gone through; did you mean 'zero_stage'"),
        ("zero_stage=1 zero_stage=2", "zero_stage comes twice"),
    ],
)
def test_what_is_no_sweep_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_sweep(text, KNOWN)


def test_a_table_of_verdicts():
    text = render_sweep(POINTS)
    assert text.startswith("0 of 4 combinations fit within 1.0 GiB per device")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert [(row[0], row[-1]) for row in rows] == [
        ("0", "does not fit"),
        ("3", "tight"),
        ("7", "no such plan"),
        ("8", "no such plan"),
    ]
    assert text.count("zero_stage = 7: ZeRO has stages 0 to 3") == 1


def test_as_json():
    document = json.loads(sweep_to_json(POINTS))
    assert [item["values"]["zero_stage"] for item in document] == ["0", "3", "7", "8"]
    assert document[1]["estimate"] == json.loads(estimate_to_json(POINTS[1].estimate))
    assert "ZeRO has stages" in document[2]["error"]
