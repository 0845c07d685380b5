from dataclasses import replace

from lightning_mist.report.figures import save
from lightning_mist.report.frontier import frontier_figure, frontier_lines, memory_frontier
from lightning_mist.tuner import Planner, SearchSpace
from tests.report.networks import MACHINE
from tests.specs import cluster, spec

ASKED = {"global_batch_size": 16, "memory_limit": 3_000_000, "search": SearchSpace(offload=(), schedules=("1f1b",))}


def found(**options):
    planner = Planner(spec(4, measured=True), cluster(2), profile=MACHINE)
    return memory_frontier(planner, planner.tune(**ASKED).plan, **ASKED, **options)


def test_less_memory_is_never_faster(tmp_path):
    frontier = found(shares=(0.05, 0.4, 0.5, 0.7, 0.9))
    limits = [point.memory_limit for point in frontier.points]
    assert limits == sorted(limits)
    assert limits[-1] == 3_000_000
    seconds = [point.seconds for point in frontier.points if point.seconds is not None]
    assert seconds == sorted(seconds, reverse=True)
    assert all(point.peak_bytes <= point.memory_limit for point in frontier.points if point.plan is not None)
    assert frontier.points[0].plan is None
    lines = frontier_lines(frontier)
    assert len(lines) == len(frontier.points) - 1
    assert lines[0].endswith("no plan fits")
    save(frontier_figure(frontier), str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    texts = [text.get_text() for text in frontier_figure(frontier).axes[0].texts]
    assert sum("this plan" in text for text in texts) == 1
    assert "no plan fits" in texts


def test_a_plan_that_fits_in_less_is_not_searched_again(monkeypatch):
    planner = Planner(spec(4, measured=True), cluster(2), profile=MACHINE)
    chosen = planner.tune(**ASKED).plan
    asked = []
    tune = Planner.tune
    monkeypatch.setattr(Planner, "tune", lambda self, **asks: asked.append(asks) or tune(self, **asks))
    peak = max(stage.peak_bytes for stage in chosen.predicted.stages)
    fits, does_not = (peak + 2) / 3_000_000, (peak - 2) / 3_000_000
    frontier = memory_frontier(planner, chosen, shares=(does_not, fits), **ASKED)
    assert frontier.points[1].plan is chosen
    assert frontier.points[0].plan is not chosen
    assert [item["memory_limit"] for item in asked] == [peak - 2]
    assert Planner.tune(planner, **{**ASKED, "memory_limit": peak + 2}).plan == chosen


def test_what_there_is_no_time_for_is_said():
    frontier = found(shares=(0.4, 0.5), seconds=-1.0)
    assert frontier.left_out == (0.5, 0.4)
    assert len(frontier.points) == 1
    assert frontier_lines(frontier) == ("not tried for want of time, of which --explain-seconds gives more: 50%, 40%",)
    frontier_figure(frontier)


def test_plans_of_searches_that_were_cut_short_are_said_to_be_no_more_than_that(monkeypatch):
    tune = Planner.tune
    monkeypatch.setattr(Planner, "tune", lambda self, **asks: replace(tune(self, **asks), status="time limit"))
    frontier = found(shares=(0.5,))
    (line,) = frontier_lines(frontier)
    assert not frontier.points[0].proven
    assert line.endswith(", the best that was found")


def test_what_was_found_in_time_is_no_more_than_that_under_less_memory_too(monkeypatch):
    tune = Planner.tune
    monkeypatch.setattr(Planner, "tune", lambda self, **asks: replace(tune(self, **asks), status="time limit"))
    first = found(shares=(0.5,)).points[0]
    again = (max(stage.peak_bytes for stage in first.plan.predicted.stages) + 2) / 3_000_000
    assert again < 0.5
    points = found(shares=(again, 0.5)).points
    assert points[0].plan == points[1].plan
    assert not points[0].proven
