import pytest

from lightning_mist.report.figures import save
from lightning_mist.report.frontier import Frontier, FrontierPoint, frontier_figure
from tests.explain.test_baseline_plans import plan

GIB = 2**30


def frontier(*seconds):
    """Points at 1, 2 ... GiB, of plans that take so long; None where none fits. Equal seconds are the same plan."""
    plans = {item: plan(item) for item in seconds if item is not None}
    points = [
        FrontierPoint(share=(index + 1) / len(seconds), memory_limit=(index + 1) * GIB, plan=plans.get(item))
        for index, item in enumerate(seconds)
    ]
    return Frontier(points=tuple(points))


def texts_of(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_plan_that_is_another_is_named_once_and_the_chosen_one_apart():
    figure = frontier_figure(frontier(4.0, 3.0, 3.0, 2.0))
    assert texts_of(figure) == ["4 s\n2 stages", "3 s\n2 stages", "2 s\nthis plan"]
    steps, others, chosen = figure.axes[0].lines
    assert steps.get_xdata().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert steps.get_ydata().tolist() == [4.0, 3.0, 3.0, 2.0]
    assert [len(others.get_xdata()), len(chosen.get_xdata())] == [3, 1]
    assert steps.get_drawstyle() == "steps-post"  # A plan that fits in less fits in more.


def test_where_nothing_fits_is_shaded_and_said():
    (axes,) = frontier_figure(frontier(None, None, 2.0)).axes
    assert [text.get_text() for text in axes.texts] == ["2 s\nthis plan", "no plan fits"]
    (shade,) = axes.patches
    left, right = shade.get_x(), shade.get_x() + shade.get_width()
    assert left < 1.0
    assert right == pytest.approx(2.0)


@pytest.mark.parametrize(("seconds", "unit", "height"), [(0.002, "ms", 2.0), (2.0, "s", 2.0)])
def test_seconds_have_a_unit_in_which_they_are_read(seconds, unit, height):
    (axes,) = frontier_figure(frontier(seconds)).axes
    assert axes.get_ylabel() == f"one step ({unit})"
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([height])
    low, high = axes.get_ylim()
    assert low == 0
    assert high > height


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_files_name_says_the_kind(tmp_path, name, begins):
    save(frontier_figure(frontier(None, 2.0)), str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(begins)
