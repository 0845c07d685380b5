import pytest

from lightning_mist.cli.output import display, explanation_of
from lightning_mist.explain import render_explanation
from lightning_mist.tuner import Planner, SearchSpace
from tests.specs import cluster, profile, spec

ASKED = {"global_batch_size": 8, "search": SearchSpace(offload=(), schedules=("1f1b",), zero_stages=(0, 1))}


@pytest.fixture(scope="module")
def found():
    planner = Planner(spec(4, measured=True), cluster(2), profile=profile())
    return planner, planner.tune(**ASKED)


def test_in_short_nothing_is_searched(found, capsys, monkeypatch):
    planner, result = found
    monkeypatch.setattr(Planner, "tune", None)  # It would be an error to search.
    explanation_of(planner, result, seconds=0.0, **ASKED)
    assert capsys.readouterr() == ("", "")


def test_all_of_it_is_searched_for_and_said_so_meanwhile(found, capsys):
    planner, result = found
    why = explanation_of(planner, result, seconds=5.0, **ASKED)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "searching plans without each technique" in captured.err
    display(render_explanation, why)
    shown = capsys.readouterr().out
    assert "--explain" not in shown
    assert "etter machine" in shown
    assert "\x1b" not in shown  # No colours where nobody sees them.
