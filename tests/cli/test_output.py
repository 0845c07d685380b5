import pytest

from lightning_mist.cli.output import say, show_plan, terminal_width
from lightning_mist.plan import plan_of


@pytest.mark.parametrize(("columns", "width"), [("40", 80), ("100", 100)])
def test_tables_get_the_terminal_s_width_and_never_less_than_80(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width


def test_a_plan_goes_to_stdout_within_the_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "90")
    show_plan(plan_of(4, world_size=2, global_batch_size=8, pipeline_stages=2))
    shown = capsys.readouterr()
    assert shown.out.startswith("2 stages on 2 devices, 1f1b: 8 rows in 2 microbatches\n")
    assert "\x1b" not in shown.out  # no colours where nobody sees them
    assert max(map(len, shown.out.splitlines())) <= 90
    assert shown.err == ""


def test_progress_goes_to_stderr(capsys):
    say("tracing net")
    assert capsys.readouterr() == ("", "mist: tracing net\n")
