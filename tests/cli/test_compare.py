import json
from dataclasses import replace

from lightning_mist.cli.compare import comparison_json, render_comparison
from lightning_mist.explain.baseline_plans import ComparedPlan, compare_plans
from lightning_mist.plan import OffloadRatios, StageMesh, from_json
from tests.explain.test_baseline_plans import plan


def moved():
    made = plan(4.0, tokens=16)
    both = StageMesh(devices=(1, 2, 3, 4), context_parallel_degree=2, tensor_parallel_degree=2)
    first = replace(made.stages[0], mesh=both, offload=OffloadRatios(gradients=1.0))
    return replace(made, stages=(first, made.stages[1]))


def compared():
    others = [
        ComparedPlan(name="same", plan=plan(2.0, tokens=16)),
        ComparedPlan(name="moved", plan=moved()),
        ComparedPlan(name="again", plan=moved()),
        ComparedPlan(name="none", plan=None, reason="does not fit: needs 3 GiB of 2 GiB per device", note="to know"),
    ]
    return compare_plans(plan(2.0, tokens=16), others)


def test_table():
    text = render_comparison(compared(), ["to know"])
    lines = {line.strip("│").split("│")[0].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "1.000" in lines["this plan"]
    assert "2 stages; 2 microbatches of 4 rows" in lines["this plan"]
    assert "the same plan " in lines["same"]
    for words in ("4 s", "2.000", "32", "2.9 KiB", "1 with tensor 2 x context 2"):
        assert words in lines["moved *"]
    assert "the same plan as moved" in lines["again *"]
    assert "does not fit: needs 3 GiB of 2 GiB per device (to know)" in lines["none"]
    assert text.splitlines()[-2:] == ["* a forecast: the runtime does not execute all of this plan yet", "to know"]
    assert "tokens/s" in text


def test_narrow_tables_lose_nothing():
    text = render_comparison(compared(), width=80)
    assert max(map(len, text.splitlines())) <= 80
    for words in ("host:", "gradients", "32", "2.9 KiB", "2.000"):
        assert words in text


def test_rows_per_second_where_there_are_no_tokens():
    text = render_comparison(compare_plans(plan(2.0), []))
    assert "rows/s" in text
    assert "a forecast" not in text


def test_json():
    found = json.loads(json.dumps(comparison_json(compared())))
    assert [item["name"] for item in found] == ["this plan", "same", "moved", "again", "none"]
    assert from_json(json.dumps(found[2]["plan"])) == moved()
    assert found[2]["ratio"] == 2.0
    assert found[2]["not_executed"] == ["context_parallel_degree with tensor_parallel_degree"]
    assert (found[4]["plan"], found[4]["reason"]) == (None, "does not fit: needs 3 GiB of 2 GiB per device")
