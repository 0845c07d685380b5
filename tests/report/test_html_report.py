import dataclasses
from dataclasses import replace
from functools import lru_cache
from html.parser import HTMLParser

import pytest

from lightning_mist.cli.html_output import check_drawn
from lightning_mist.cost import with_units
from lightning_mist.errors import PlanError
from lightning_mist.estimate.device_need import Interval
from lightning_mist.explain import ComparedPlan, baselines, compare_plans, estimate_of, explain_plan
from lightning_mist.plan import OffloadRatios, StageMesh
from lightning_mist.plan.plan_text import recipe_of
from lightning_mist.report import html_report
from lightning_mist.report.frontier import memory_frontier
from lightning_mist.report.html_report import (
    HATCHED,
    Report,
    comparison_bars,
    comparison_table,
    headline,
    memory_section,
    render_report,
    seconds_section,
)
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.units import format_bytes, format_seconds
from tests.report.networks import MACHINE, predicted
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
        estimate=estimate_of(planner.spec, planner.cluster, result.plan, 3_000_000),
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
    for words in ("net <4> on 2 cpu", "per device", "a note", "a note on others", "this plan", "DDP"):
        assert words in text
    assert format_seconds(report.result.predicted.step_seconds) in text
    for stage in report.result.predicted.stages:
        assert format_bytes(stage.peak_bytes) in text
    assert sum(tag == "svg" for tag, _ in found.tags) == 4
    # Nothing is fetched, and identifiers of pictures do not meet.
    assert not [
        attrs
        for _, attrs in found.tags
        for name, value in attrs.items()
        if (value or "").startswith("http") and not name.startswith("xmlns")
    ]
    assert "A forecast" not in text


@pytest.mark.parametrize(("most", "verdict"), [(2_500_000, "fits"), (8 * 2**30, "tight")])
def test_a_plan_has_one_number_of_memory_and_one_verdict(most, verdict):
    report = whole()
    estimate = report.estimate
    need = Interval(p50=2_345_678, p95=most)
    stages = tuple(replace(stage, device_total=need, allocated=need, least=0) for stage in estimate.stages)
    estimate = replace(estimate, stages=stages, memory_limit=2**30)
    assert estimate.verdict == verdict
    _, text = sections(render_report(replace(report, estimate=estimate)))
    peak = format_bytes(max(stage.peak_bytes for stage in report.plan.predicted.stages))
    assert f"{peak} peak memory of the fullest device of 2.9 MiB for tensors: {verdict}" in text
    assert f"{verdict.capitalize()} in 1.0 GiB per device" in text
    assert f"{peak} of 2.9 MiB" in text
    assert format_bytes(need.p50) not in text


class Widths(HTMLParser):
    """Finds what may be wider than a screen, and whether that scrolls by itself."""

    def __init__(self):
        super().__init__()
        self.boxes, self.found = [], []

    def handle_starttag(self, tag, attrs):
        if tag in ("table", "svg"):
            self.found.append("wide" in self.boxes)
        if tag == "div":
            self.boxes.append(dict(attrs).get("class"))

    def handle_endtag(self, tag):
        if tag == "div":
            self.boxes.pop()


def test_a_page_scrolls_downwards_only():
    text = render_report(whole())
    widths = Widths()
    widths.feed(text)
    assert len(widths.found) == 8
    assert all(widths.found)
    style = " ".join(html_report.STYLE.split())
    assert ".wide { overflow-x: auto; }" in style
    # Bars with a label and a text beside them have three lines on a narrow screen, and nodes stand below each other.
    narrow = style[style.index("@media (max-width: 40rem)") :]
    assert ".bars { display: block; }" in narrow
    assert ".nodes { display: flex; flex-wrap: wrap;" in style
    assert "white-space: nowrap" not in style.replace("td { white-space: nowrap; }", "")


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
    check_drawn("report", str(path))
    path.write_text(render_report(Report(title="t", plan=predicted(2, 4))))
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(ValueError, match="there is no folder"):
        check_drawn("report", str(tmp_path / "none" / "report.html"))
    with pytest.raises(ValueError, match="is a folder"):
        check_drawn("report", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"report '.*' needs matplotlib"):
        check_drawn("report", str(path))


def test_sections_name_every_group():
    plan = predicted(2, 4, schedule="interleaved-1f1b", chunks=2)
    for text in (seconds_section(plan), memory_section(plan), memory_section(plan, (1e7,) * 4)):
        assert parsed(text).text.count("stages 0 and 2") == 2


def test_limits_are_marked():
    plan = predicted(2, 4)
    assert "<u style" not in memory_section(plan)
    assert memory_section(plan, (1e7, 2e7)).count("<u style") == 2
    assert "of 19.1 MiB" in memory_section(plan, (1e7, 2e7))


def test_what_does_not_fit_says_why():
    ours = ComparedPlan(
        name="this plan",
        plan=predicted(2, 4),
        note="the best found",
        ratio=1.0,
    )
    text = comparison_table([ours, ComparedPlan(name="DDP", plan=None, reason="none divides")])
    assert "none divides" in text
    assert "does not fit" not in text
    assert f"{recipe_of(ours.plan)} (the best found)" in text
    assert "rows/s" in text
    assert "tokens/s" not in text


def test_rivals_are_bars_as_long_as_their_steps():
    fast, slow = predicted(2, 4), predicted(2, 8)
    step = {plan: plan.predicted.step_seconds for plan in (fast, slow)}
    lines = [
        ComparedPlan(name=name, plan=plan, ratio=step[plan] / step[fast])
        for name, plan in (("this plan", fast), ("FSDP", slow))
    ]
    why = "does not fit: " + "so it is " * 10
    legend, bars = comparison_bars([*lines, ComparedPlan(name="DDP", plan=None, reason=why)])
    widths = [
        sum(float(part.split("%")[0]) for part in bar.split("width:")[1:]) for bar in bars.split('class="bar"')[1:]
    ]
    longest = max(step.values())
    assert widths == pytest.approx([100 * step[fast] / longest, 100 * step[slow] / longest, 100], abs=0.05)
    assert "bubble" in legend
    shown = " ".join(parsed(bars).text)
    for words in ("this plan", "FSDP", format_seconds(step[slow]), "DDP", "does not fit: so it is"):
        assert words in shown
    # What does not fit is hatched, with the whole reason where it is pointed at.
    *fitting, last = bars.split('class="bar"')[1:]
    assert HATCHED in last
    assert why in last
    assert all(HATCHED not in bar for bar in fitting)


def test_what_rounding_left_of_nothing_has_no_colour():
    plan = predicted(1, 4)
    (stage,) = plan.predicted.stages
    spent = (("compute_seconds", plan.predicted.step_seconds), ("bubble_seconds", 1e-17))
    found = replace(plan, predicted=replace(plan.predicted, stages=(replace(stage, spent=spent),)))
    text = seconds_section(found)
    assert "compute" in text
    assert "bubble" not in text


class Balanced(HTMLParser):
    """Says which tags were not closed in order, and collects text."""

    VOID = frozenset({"meta", "path", "use", "rect", "line"})

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.text, self.tags = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def parsed(text):
    found = Balanced()
    found.feed(text)
    found.close()
    assert (found.open, found.wrong) == ([], [])
    return found


def test_a_page_needs_nothing_else():
    found = parsed(
        html_report.page(
            "a < b", [html_report.title_line("<x>"), "", html_report.section("s", html_report.paragraph("1 & 2"))]
        )
    )
    assert "<x>" in found.text
    assert "1 & 2" in found.text
    assert not [attrs for tag, attrs in found.tags if tag in ("script", "link", "img") or "src" in attrs]
    assert "prefers-color-scheme: dark" in html_report.STYLE
    assert "@media print" in html_report.STYLE


def test_what_is_empty_is_left_out():
    assert html_report.section("s", "", "") == ""
    assert (
        html_report.paragraph("")
        == html_report.items([])
        == html_report.pairs([])
        == html_report.warning("w", [])
        == html_report.bar_rows([])
        == ""
    )


def test_tables_set_words_to_the_left_and_ours_first():
    text = html_report.table(["plan", "step"], [["<ours>", "1 s"], ["x", "2 s"]], text=("plan",), ours=0)
    assert '<th class="text">plan</th><th>step</th>' in text
    assert '<tr class="ours"><td class="text">&lt;ours&gt;</td><td>1 s</td></tr>' in text
    parsed(text)


def test_bars_are_as_long_as_what_they_stand_for():
    text = html_report.bar_rows([html_report.StackedBar("stage 0", (("#000000", 0.25, 'a "b"'),), "1 GiB", mark=0.5)])
    assert "width:25.000%;background:#000000" in text
    assert "left:50.000%" in text
    assert "a &quot;b&quot;" in text
    parsed(text)
