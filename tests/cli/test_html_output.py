import pytest

from lightning_mist.cli.html_output import check_target, command_of, inputs_of
from lightning_mist.plan import SearchSpace, load
from tests.cli.networks import refused, run
from tests.cli.test_plan_command import plan_arguments
from tests.report.networks import predicted
from tests.report.test_page import parsed

GIVEN = {
    "model": "gpt3-1.3b",
    "cluster": "1x2xL4",
    "global_batch_size": 16,
    "seq_len": None,
    "json": False,
    "compare": True,
    "html": "a b.html",
    "options": SearchSpace(max_stages=2, zero_stages=(0, 1), checkpointing=False),
}


def test_the_command_can_be_given_again():
    assert command_of(GIVEN) == (
        "lightning-mist plan --model gpt3-1.3b --cluster 1x2xL4 --global-batch-size 16 --compare --html 'a b.html' "
        "--max-stages 2 --zero-stages '[0,1]' --checkpointing false"
    )


def test_what_is_said_as_by_default_is_left_out():
    options = SearchSpace(zero_stages=[0, 1, 2, 3], schedules=["1f1b"])
    assert command_of({**GIVEN, "compare": False, "html": None, "options": options}) == (
        "lightning-mist plan --model gpt3-1.3b --cluster 1x2xL4 --global-batch-size 16 --schedules '[1f1b]'"
    )


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
    # What pictures show of units is in the plan, too.
    assert all(dict(stage.units)["bytes.forward"] for stage in load(tmp_path / "plan.json").predicted.stages)
    for words in ("1 node of L4", "stage 0", "its part that stays between units", "tail"):
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
