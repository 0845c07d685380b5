import pytest

from lightning_mist.report.step_clock import clock, path_lines, render_clock
from lightning_mist.schedule import simulate_plan
from tests.report.networks import predicted


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_every_group_adds_up_to_the_step(schedule):
    plan = predicted(4, 8, schedule=schedule)
    found, simulation = clock(plan), simulate_plan(plan)
    assert found.step_seconds == simulation.makespan == pytest.approx(plan.predicted.step_seconds)
    for group, bubble in zip(found.groups, simulation.bubble, strict=True):
        assert group.busy_seconds + group.waiting_seconds == pytest.approx(found.step_seconds)
        assert group.waiting_seconds == pytest.approx(bubble)
        assert 0 < group.longest_wait <= group.waiting_seconds
    assert [group.most_in_flight for group in found.groups] == ([8] * 4 if schedule == "gpipe" else [4, 3, 2, 1])


def test_what_is_said_of_a_step():
    found = clock(predicted(2, 4))
    text = render_clock(found)
    assert text.startswith("one step on a clock: ")
    assert f"busiest: stage {found.busiest}, " in text
    assert "critical path" in text
    single = render_clock(clock(predicted(1, 4)))
    assert "devices wait" not in single
    assert "busiest" not in single


def test_chunks_and_long_chains_in_words():
    found = clock(predicted(2, 4, schedule="interleaved-1f1b", chunks=2))
    assert "stages 1 and 3 work for" in " ".join(path_lines(found))
    many = clock(predicted(16, 32, layers=16))
    assert " more ..., then " in path_lines(many)[-1]
    assert "; and " in path_lines(many)[1]
