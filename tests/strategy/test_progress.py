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
