import json
import sys
from dataclasses import replace

import pytest

from lightning_mist.cli.html_output import (
    check_drawn,
    check_target,
    comparison_json,
    inputs_of,
    memory_words,
    render_comparison,
)
from lightning_mist.estimate.device_need import Interval
from lightning_mist.explain import estimate_of
from lightning_mist.explain.baseline_plans import ComparedPlan, compare_plans
from lightning_mist.plan import OffloadRatios, StageMesh, from_json, load
from tests.cli.networks import refused, run
from tests.cli.test_plan_command import plan_arguments
from tests.explain.test_baseline_plans import plan
from tests.explain.test_fitting import planned
from tests.report.networks import predicted
from tests.report.test_html_report import parsed

GIVEN = {
    "model": "gpt3-1.3b",
    "cluster": "1x2xL4",
    "global_batch_size": 16,
    "seq_len": None,
    "json": False,
    "compare": True,
    "html": "a b.html",
}


def test_inputs_in_words():
    found = dict(inputs_of(GIVEN, predicted(2, 4)))
    assert found["global batch size"] == "16"
    assert "html" not in found
    assert "compare" not in found
    assert found["versions"].startswith("lightning-mist ")


def test_plan_writes_a_page(tmp_path, capsys):
    path = tmp_path / "report.html"
    run(*plan_arguments(html=path, out=tmp_path / "plan.json", max_stages=2), "--compare")
    assert f"report written to {path}" in capsys.readouterr().out
    text = " ".join(parsed(path.read_text(encoding="utf-8")).text)
    for words in ("tests.cli.networks:make_net on 2xL4", "Why this plan", "With less memory", "DDP", "Fits in"):
        assert words in text
    assert (
        f"lightning-mist plan --model tests.cli.networks:make_net --cluster 2xL4 --global-batch-size 8 --html {path}"
        in text
    )
    # What pictures show of units is in the plan, too.
    assert all(dict(stage.units)["bytes.forward"] for stage in load(tmp_path / "plan.json").predicted.stages)
    for words in ("1 node of L4", "stage 0", "working set that stays between units", "tail"):
        assert words in text


def test_a_page_that_cannot_be_written_is_refused_at_once(tmp_path, capsys):
    text = refused(capsys, *plan_arguments(html=tmp_path / "none" / "report.html", model="no:thing"))
    assert "there is no folder" in text


def test_a_plan_file_that_cannot_be_written_is_refused_before_anything_is_searched(tmp_path, capsys):
    check_target("plan file", str(tmp_path / "plan.json"), "plan.json")
    with pytest.raises(ValueError, match=r"is a folder: give the name of a file, such as plan.json"):
        check_target("plan file", str(tmp_path), "plan.json")
    missing = str(tmp_path / "none" / "plan.json")
    assert "there is no folder" in refused(capsys, *plan_arguments(), "--out", missing)


def test_a_tight_plan_says_how_to_leave_room():
    planner, result, _ = planned()
    estimate = estimate_of(planner.spec, planner.cluster, result.plan, None)
    stage = replace(estimate.stages[0], device_total=Interval(p50=8 * 2**30, p95=12 * 2**30))
    tight = replace(estimate, memory_limit=10 * 2**30, stages=(stage,))
    assert memory_words(tight).endswith("To be surer, plan with less: --memory-limit 8.3GiB.")


def test_a_plan_that_fits_has_nothing_to_say_but_that():
    planner, result, _ = planned(memory=10**11)
    estimate = estimate_of(planner.spec, planner.cluster, result.plan, None)
    assert estimate.verdict == "fits"
    assert memory_words(estimate) == estimate.headline()


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
    assert "pp 2, microbatch 4 x 2" in lines["this plan"]
    assert "the same plan " in lines["same"]
    for words in ("4 s", "2.000", "32", "2.9 KiB", "tp 1 to 2, cp 1 to 2, pp 2, offload gradients 0 to 100%"):
        assert words in lines["moved *"]
    assert "the same plan as moved" in lines["again *"]
    assert "does not fit: needs 3 GiB of 2 GiB per device (to know)" in lines["none"]
    assert text.splitlines()[-2:] == ["* a forecast: the runtime does not execute all of this plan yet", "to know"]
    assert "tokens/s" in text


def test_narrow_tables_lose_nothing():
    text = render_comparison(compared(), width=80)
    assert max(map(len, text.splitlines())) <= 80
    for words in ("offload", "gradients", "32", "2.9 KiB", "2.000"):
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


def test_files_that_cannot_be_drawn_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"picture 'a.bmp': write a name that ends in .png, .pdf, .svg"):
        check_drawn("picture", "a.bmp")
    with pytest.raises(ValueError, match="there is no folder"):
        check_drawn("picture", str(tmp_path / "none" / "a.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"needs matplotlib: pip install 'lightning-mist\[pictures\]'"):
        check_drawn("picture", str(tmp_path / "a.png"))
