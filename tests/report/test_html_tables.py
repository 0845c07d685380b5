from dataclasses import replace

import pytest

from lightning_mist.explain import ComparedPlan
from lightning_mist.plan.plan_text import settings_of
from lightning_mist.report.html_tables import (
    HATCHED,
    comparison_bars,
    comparison_table,
    group_name,
    memory_section,
    seconds_section,
)
from lightning_mist.units import format_seconds
from tests.report.networks import predicted
from tests.report.test_page import parsed


def test_sections_name_every_group():
    plan = predicted(2, 4, schedule="interleaved-1f1b", chunks=2)
    assert [group_name(plan, group) for group in range(2)] == ["stages 0 and 2", "stages 1 and 3"]
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
    assert f"{settings_of(ours.plan)} (the best found)" in text
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
