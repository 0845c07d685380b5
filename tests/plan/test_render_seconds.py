from dataclasses import replace

import pytest

from lightning_mist.plan import PredictedStage, render
from lightning_mist.plan.plan_tables import per_second, rate_lines, seconds_table, speed_line
from tests.plan.test_plan_tables import PLAN
from tests.plan.test_throughput import WORK
from tests.plans import plan_of

SPENT = {
    "compute_seconds": 0.8,
    "recompute_seconds": 0.1,
    "communication_seconds": 0.2,
    "copies_seconds": 0.05,
    "optimizer_seconds": 0.1,
    "overhead_seconds": 0.05,
    "bubble_seconds": 0.2,
}


def planned(*spent, work=WORK, plan=PLAN):
    stages = tuple(
        replace(found, spent=tuple(terms.items()))
        for found, terms in zip(plan.predicted.stages, spent or [{}] * plan.num_stages, strict=True)
    )
    return replace(plan, predicted=replace(plan.predicted, stages=stages, work=work))


def cells(text):
    """Rows of the table of seconds, joined where headings take two lines."""
    lines = text.splitlines()
    below = lines[next(index for index, line in enumerate(lines) if line.startswith("where")) :]
    return [
        [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]
        for line in below
        if "│" in line or "┃" in line
    ]


def test_every_stage_adds_up_to_the_step():
    first = {**SPENT, "recompute_seconds": 0.0, "bubble_seconds": 0.3}
    shown = cells(render(planned(first, SPENT)))
    headings = [" ".join(part for part in pair if part) for pair in zip(*shown[:2], strict=True)]
    terms = ["compute", "recompute", "exposed transfers", "exposed copies", "optimizer", "overhead", "bubble"]
    assert headings == ["stage", *terms]
    assert shown[2] == ["0", "0.8 53%", "-", "0.2 13%", "0.05  3%", "0.1  7%", "0.05  3%", "0.3 20%"]
    assert shown[3][2] == "0.1  7%"
    for row in shown[2:]:
        assert sum(float(cell.split()[0]) for cell in row[1:] if cell != "-") == pytest.approx(1.5)


def test_terms_that_are_nothing_have_no_column():
    terms = {"compute_seconds": 1.3, "copies_seconds": 0.0, "bubble_seconds": 0.2}
    shown = cells(render(planned(terms, terms)))
    assert shown[0] == ["stage", "compute", "bubble"]


def test_the_unit_is_that_of_the_step():
    terms = {"compute_seconds": 0.0123}
    plan = planned(terms, terms)
    text = render(replace(plan, predicted=replace(plan.predicted, step_seconds=0.0123)))
    assert "where 12.3 ms per step go, by stage (ms, and part of the step)" in text
    assert cells(text)[1] == ["0", "12.3 100%"]
    assert cells(text)[2] == ["1", "12.3 100%"]


def test_plans_that_do_not_say_have_no_table():
    assert seconds_table(PLAN) is None
    assert seconds_table(replace(PLAN, predicted=None)) is None


def test_chunks_of_one_group_are_one_row():
    predicted = replace(PLAN.predicted, stages=(PLAN.predicted.stages[0],) * 4)
    plan = plan_of(2, 2, *[{}] * 4, groups=2, schedule="interleaved-1f1b", predicted=predicted)
    terms = {"compute_seconds": 1.5}
    assert [row[0] for row in cells(render(planned(*[terms] * 4, plan=plan)))] == ["stage", "0 and 2", "1 and 3"]


@pytest.mark.parametrize("width", [80, 120])
def test_all_of_it_fits(width):
    text = render(planned(SPENT, SPENT), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("recompute", "transfers", "optimizer", "backward"):
        assert word in text


def test_what_rounding_left_of_nothing_has_no_column():
    terms = {"compute_seconds": 1.5, "bubble_seconds": 2e-16}
    _, table = seconds_table(planned(terms, {**terms, "copies_seconds": 0.1}))
    assert [str(column.header) for column in table.columns] == ["stage", "compute", "exposed\ncopies"]
    assert list(table.columns[2].cells) == ["-", "0.1  7%"]


def test_one_line_says_what_the_step_achieves():
    assert speed_line(planned()) == "1.5 s per step, 533 tokens/s per device, MFU 33.3% of 4 TFLOP/s (a data sheet)"
    assert speed_line(planned(work=None)) == "1.5 s per step, 5.33 rows/s per device"
    unknown = replace(WORK, peak_flops_per_second=0.0)
    assert speed_line(planned(work=unknown)) == "1.5 s per step, 533 tokens/s per device, 1.33 TFLOP/s per device"


def test_lines_say_what_the_step_achieves():
    assert rate_lines(planned()) == (
        "predicted step: 1.5 s, 21.3 rows/s, 2,133 tokens/s",
        "8 TFLOP of the model per step, 1.33 TFLOP/s per device: 33.3% of 4 TFLOP/s (a data sheet)",
        "roofline: 500 ms with every operator at the limit of its device and no waiting; the step takes 3 times that",
    )


def test_what_is_not_known_is_not_said():
    assert rate_lines(replace(PLAN, predicted=None)) == ()
    assert rate_lines(planned(work=None)) == ("predicted step: 1.5 s",)
    work = replace(WORK, peak_flops_per_second=0.0, peak_source="nobody knows", roofline_seconds=0.0)
    assert rate_lines(planned(work=replace(work, sequence_length=None))) == (
        "predicted step: 1.5 s, 21.3 rows/s",
        "8 TFLOP of the model per step, 1.33 TFLOP/s per device: nobody knows",
    )


@pytest.mark.parametrize(("value", "text"), [(0.1234, "0.123"), (21.33, "21.3"), (123.4, "123"), (54321.0, "54,321")])
def test_numbers_per_second(value, text):
    assert per_second(value) == text


def test_a_term_that_is_not_known_here_is_shown_by_its_name():
    stage = PredictedStage(
        steady_seconds=1.5,
        boundary_seconds=0.0,
        forward_seconds=0.5,
        backward_seconds=1.0,
        peak_bytes=1,
        spent=(("compute_seconds", 1.0), ("thinking_seconds", 0.5)),
    )
    text = render(replace(PLAN, predicted=replace(PLAN.predicted, stages=(stage, stage))))
    assert cells(text)[0] == ["stage", "compute", "thinking"]
