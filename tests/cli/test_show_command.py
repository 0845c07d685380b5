import json
import subprocess
import sys
from dataclasses import replace

import pytest

from lightning_mist.plan import Predicted, PredictedStage, from_json, save
from tests.cli.networks import refused, run
from tests.plans import plan_of
from tests.report.networks import predicted
from tests.report.test_html_report import parsed

PLAN = plan_of(8, 4, {"devices": [1]}, {"devices": [0]})

STAGE = PredictedStage(
    steady_seconds=0.3, boundary_seconds=0.1, forward_seconds=0.1, backward_seconds=0.2, peak_bytes=2**30
)

PREDICTED = replace(PLAN, predicted=Predicted(step_seconds=1.6, stages=(STAGE, STAGE)))


@pytest.fixture
def files(tmp_path):
    paths = tmp_path / "bare.json", tmp_path / "predicted.json"
    save(PLAN, paths[0])
    save(PREDICTED, paths[1])
    return paths


def test_show(files, capsys):
    run("show", files[1])
    assert capsys.readouterr().out.startswith("2 stages on 2 devices, 1f1b: 8 rows in 4 microbatches\n")


def test_show_as_json(files, tmp_path, capsys):
    run("show", files[1], "--json", "--timeline", tmp_path / "trace.json")
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert from_json(json.dumps(found["plan"])) == PREDICTED
    assert found["rates"]["rows_per_second"] == 5.0
    assert "changes" not in found
    assert "simulated step" in shown.err
    run("show", files[0], "--json", "--against", files[1])
    found = json.loads(capsys.readouterr().out)
    assert found["rates"] is None
    assert len(found["changes"]) > 0


def test_show_against_another(files, tmp_path, capsys):
    save(replace(PLAN, schedule="gpipe"), tmp_path / "other.json")
    run("show", files[0], "--against", tmp_path / "other.json")
    assert capsys.readouterr().out.endswith("other.json:\nschedule: 1f1b -> gpipe\n")
    run("show", files[0], "--against", files[0])
    assert "the plans are equal" in capsys.readouterr().out


def test_show_writes_a_trace(files, tmp_path, capsys):
    run("show", files[1], "--timeline", tmp_path / "trace.json")
    assert "simulated step: 1.6 s, the idlest stage idles for" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"0F3", "1B0", "0STEP"} <= {event["name"] for event in events}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "stage 0 (ranks 1)",
        "stage 1 (ranks 0)",
    }


def test_show_refuses_in_one_line(files, tmp_path, capsys):
    assert refused(capsys, "show", tmp_path / "none.json").startswith("lightning-mist show: error: plan file '")
    (tmp_path / "bad.json").write_text('{"schema": 1, "stages": [], "stage": 1}')
    assert "this key is not known; did you mean 'stages'?" in refused(capsys, "show", tmp_path / "bad.json")
    text = refused(capsys, "show", files[0], "--timeline", tmp_path / "trace.json")
    assert "the plan has no predicted seconds" in text
    assert text.count("\n") == 1
    assert "No such file or directory" in refused(
        capsys, "show", files[1], "--timeline", tmp_path / "none" / "trace.json"
    )


def test_installed_command_needs_neither_torch_nor_lightning_to_show(files):
    program = (
        "import sys, lightning_mist.cli as cli; cli.main(sys.argv[1:]); "
        "assert not {'torch', 'lightning', 'sympy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "show", str(files[0])], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 stages on 2 devices")


def test_show_draws_pictures(tmp_path, capsys):
    save(predicted(2, 4), tmp_path / "plan.json")
    timeline, memory = tmp_path / "timeline.png", tmp_path / "memory.svg"
    run("show", tmp_path / "plan.json", "--timeline", timeline, "--memory", memory, "--memory-limit", "4MiB")
    assert timeline.read_bytes().startswith(b"\x89PNG")
    assert memory.read_bytes().startswith(b"<?xml")
    shown = capsys.readouterr().out
    assert f"timeline written to {timeline}" in shown
    assert f"per device; memory written to {memory}" in shown


def test_pictures_are_refused_before_anything_is_shown(files, tmp_path, capsys):
    assert "write a name that ends in .png" in refused(capsys, "show", files[1], "--timeline", tmp_path / "a.gif")
    assert "there is no folder" in refused(capsys, "show", files[1], "--memory", tmp_path / "none" / "a.png")
    assert "give --memory memory.png too" in refused(capsys, "show", files[1], "--memory-limit", "4GiB")
    assert "made of" in refused(capsys, "show", files[1], "--memory", tmp_path / "a.png")


def test_show_writes_a_page(tmp_path, capsys):
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    save(predicted(2, 4), plan)
    run("show", plan, "--html", page, "--memory-limit", "1GiB")
    assert capsys.readouterr().out.endswith(f"report written to {page}\n")
    text = " ".join(parsed(page.read_text(encoding="utf-8")).text)
    for words in ("plan.json", "One step on a clock", "of 1.0 GiB for tensors", "Words"):
        assert words in text


def test_a_page_needs_a_prediction_and_a_folder(files, tmp_path, capsys):
    assert "no predicted seconds" in refused(capsys, "show", files[0], "--html", tmp_path / "page.html")
    assert "there is no folder" in refused(capsys, "show", files[1], "--html", tmp_path / "none" / "page.html")
