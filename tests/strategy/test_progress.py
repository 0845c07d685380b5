import pickle

import pytest

from lightning_mist.strategy.progress import Progress


def test_a_rank_that_speaks_prints_what_it_is_told(capsys):
    with Progress(enabled=True) as progress:
        progress.say("layers [0, 4] of /a/b[c]")
        progress.update("first", 0.1)
        progress.update("first", 0.5)
        progress.update("second", 0.6)
        progress.show("a [bold]table[/]")
    shown = capsys.readouterr().err
    assert "layers [0, 4] of /a/b[c]" in shown
    assert shown.count("first") == 1
    assert "60% second" in shown
    assert "a [bold]table[/]" in shown


@pytest.mark.parametrize("call", [lambda p: p.say("x"), lambda p: p.update("x", 1.0), lambda p: p.show("x")])
def test_the_others_keep_silent(capsys, call):
    with Progress(enabled=False) as progress:
        call(progress)
    assert capsys.readouterr().err == ""


def test_what_users_need_not_know_is_said_only_where_that_is_asked_for(capsys):
    with Progress(enabled=True, verbose=False) as progress:
        progress.say("why")
        progress.update("how far", 0.5)
        progress.details("where")
        progress.tell("what")
        progress.conclude("in short", "at length")
    assert capsys.readouterr().err.splitlines() == ["mist what", "mist in short"]
    with Progress(enabled=True, verbose=True) as progress:
        progress.details("where")
        progress.conclude("in short", "at length")
    assert capsys.readouterr().err.splitlines() == ["where", "at length"]


def test_it_can_be_pickled():
    progress = Progress(enabled=True)
    progress.say("x")
    assert isinstance(pickle.loads(pickle.dumps(progress)), Progress)
