import dataclasses
from functools import lru_cache

import pytest

from lightning_mist.cli.html_output import check_html
from lightning_mist.cost import with_units
from lightning_mist.errors import PlanError
from lightning_mist.explain import baselines, compare_plans, explain_plan
from lightning_mist.plan import OffloadRatios, StageMesh
from lightning_mist.report.frontier import memory_frontier
from lightning_mist.report.html_report import Report, headline, render_report
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.units import format_bytes, format_seconds
from tests.report.networks import MACHINE, predicted
from tests.report.test_page import parsed
from tests.specs import cluster, spec

SEARCH = SearchSpace(offload=(), schedules=("1f1b",), max_stages=2)
ASKED = {"global_batch_size": 16, "memory_limit": 3_000_000, "search": SEARCH}


@lru_cache(maxsize=1)
def whole():
    network = spec(4, measured=True)
    planner = Planner(network, cluster(2), profile=MACHINE)
    result = planner.tune(**ASKED)
    others = baselines(planner, **ASKED)
    return Report(
        title="net <4> on 2 cpu",
        plan=with_units(planner.model, result.plan),
        result=result,
        memory_limits=(3e6,) * result.plan.num_stages,
        machine=(cluster(2), (MACHINE,)),
        explanation=explain_plan(planner, result, seconds=0.0, **ASKED),
        comparison=compare_plans(result.plan, others),
        comparison_notes=("a note on others",),
        frontier=memory_frontier(planner, result.plan, shares=(0.5, 0.9), **ASKED),
        verdict="It fits.",
        inputs=(("model", "net"),),
        notes=("a note",),
    )


def sections(text):
    found = parsed(text)
    return found, " ".join(" ".join(found.text).split())


def test_a_whole_report():
    report = whole()
    found, text = sections(render_report(report))
    for title in (
        "The plan",
        "Where it runs",
        "of a step go",
        "One step on a clock",
        "Where the memory goes",
        "Memory over one step",
        "Why this plan",
        "Beside what people would have chosen",
        "With less memory",
        "What to know of this plan, and where its numbers come from",
        "What this was made from",
        "Words",
    ):
        assert title in text
    for words in ("net <4> on 2 cpu", "It fits.", "a note", "a note on others", "this plan", "DDP"):
        assert words in text
    assert format_seconds(report.result.predicted.step_seconds) in text
    for stage in report.result.predicted.stages:
        assert format_bytes(stage.peak_bytes) in text
    assert sum(tag == "svg" for tag, _ in found.tags) == 5
    # Nothing is fetched, and identifiers of pictures do not meet.
    assert not [
        attrs
        for _, attrs in found.tags
        for name, value in attrs.items()
        if (value or "").startswith("http") and not name.startswith("xmlns")
    ]
    assert "A forecast" not in text


def test_identifiers_of_pictures_do_not_meet():
    found, _ = sections(render_report(whole()))
    names = [
        attrs["id"] for _, attrs in found.tags if attrs.get("id", "").startswith(("p", "m")) and len(attrs["id"]) > 8
    ]
    assert len(names) == len(set(names))


def test_bars_add_up_to_the_step():
    report = Report(title="t", plan=predicted(2, 4))
    found, _ = sections(render_report(report))
    inside, shares = False, []
    for tag, attrs in found.tags:
        if attrs.get("class") == "bar":
            shares.append(0.0)
            inside = True
        elif inside and tag == "i":
            shares[-1] += float(attrs["style"].split("width:")[1].split("%")[0])
        elif tag != "u":
            inside = False
    assert shares[:2] == pytest.approx([100, 100], abs=0.01)
    peaks = [stage.peak_bytes for stage in report.plan.predicted.stages]
    assert shares[2:4] == pytest.approx([100 * peak / max(peaks) for peak in peaks], abs=0.01)


def test_a_plan_alone_is_enough():
    _, text = sections(render_report(Report(title="t", plan=predicted(2, 4))))
    assert "Why this plan" not in text
    assert "With less memory" not in text
    assert "Beside what" not in text
    assert "Where it runs" not in text


def test_what_is_not_executed_yet_is_said_first():
    plan = predicted(2, 4, devices=8, offload=OffloadRatios(gradients=0.5))
    assert "A forecast" not in render_report(Report(title="t", plan=plan))
    stages = tuple(
        dataclasses.replace(
            stage,
            mesh=StageMesh(devices=stage.devices, context_parallel_degree=2, tensor_parallel_degree=2),
            microbatch_size=4 * stage.microbatch_size,
        )
        for stage in plan.stages
    )
    plan = dataclasses.replace(plan, stages=stages)
    _, text = sections(render_report(Report(title="t", plan=plan)))
    assert "this version does not execute all of this plan yet" in text
    assert "context_parallel_degree with tensor_parallel_degree" in text
    assert text.index("A forecast") < text.index("The plan")


def test_a_plan_that_does_not_say_what_memory_is_made_of_has_no_such_picture():
    plan = predicted(2, 4)
    stages = tuple(dataclasses.replace(stage, needs=()) for stage in plan.predicted.stages)
    bare = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, stages=stages))
    assert "Memory over one step" not in render_report(Report(title="t", plan=bare))
    with pytest.raises(PlanError, match="no predicted seconds"):
        render_report(Report(title="t", plan=dataclasses.replace(plan, predicted=None)))


def test_unlike_devices_are_named():
    found, text = sections(render_report(Report(title="t", plan=predicted(2, 4), device_names=("A100-40", "V100-32"))))
    assert "on" in [words.strip() for words in found.text]
    assert "V100-32" in text


def test_headlines():
    assert headline(predicted(1, 4)).startswith(
        "One stage (no pipeline) on 1 device: a step of 8 rows in 4 microbatches"
    )
    assert headline(predicted(2, 4)).startswith("2 pipeline stages on 2 devices: ")
    chunks = predicted(2, 4, schedule="interleaved-1f1b", chunks=2)
    assert headline(chunks).startswith("4 stages on 2 groups of devices, 2 in all: ")


def test_files(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    check_html(str(path))
    path.write_text(render_report(Report(title="t", plan=predicted(2, 4))))
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(ValueError, match="there is no folder"):
        check_html(str(tmp_path / "none" / "report.html"))
    with pytest.raises(ValueError, match="is a folder"):
        check_html(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"report '.*' needs matplotlib"):
        check_html(str(path))
