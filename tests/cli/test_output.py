import json
import subprocess
import sys

import pytest

from lightning_mist.cli.output import display, say, terminal_width
from lightning_mist.plan import plan_of, render
from tests.cli.loud import PRINTED, print_in_every_way
from tests.cli.networks import make_net, run
from tests.cli.test_plan_command import plan_arguments
from tests.ranks import environment


def make_loud_net():
    print_in_every_way()
    return make_net()


@pytest.mark.parametrize(("columns", "width"), [("40", 80), ("100", 100)])
def test_tables_get_the_terminal_s_width_and_never_less_than_80(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width


def test_a_plan_goes_to_stdout_within_the_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "90")
    display(render, plan_of(4, world_size=2, global_batch_size=8, pipeline_stages=2))
    shown = capsys.readouterr()
    assert shown.out.startswith("2 stages on 2 devices, 1f1b: 8 rows in 2 microbatches\n")
    assert "\x1b" not in shown.out  # no colours where nobody sees them
    assert max(map(len, shown.out.splitlines())) <= 90
    assert shown.err == ""


def test_progress_goes_to_stderr(capsys):
    say("tracing net")
    assert capsys.readouterr() == ("", "mist: tracing net\n")


def test_libraries_and_the_user_s_own_code_print_nothing_among_the_answer(capfd):
    run(*plan_arguments(model="tests.cli.test_output:make_loud_net"), "--json")
    shown = capfd.readouterr()
    assert json.loads(shown.out)["plan"]["global_batch_size"] == 8
    assert all(text in shown.err for text in PRINTED)
    print_in_every_way()
    sys.stdout.flush()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("9", ["before", *["an answer"] * 9, "after"]),
        ("9 2>&-", ["before", *["an answer"] * 9, "after"]),
        ("9 >&-", []),
        ("100000 | head -n 3", ["before", "an answer", "an answer"]),
    ],
)
def test_answers_alone_are_on_stdout_however_a_command_was_started(arguments, expected):
    command = f"{sys.executable} -W error -m tests.cli.loud {arguments}"
    shown = subprocess.run(["sh", "-c", command], env=environment(), capture_output=True, text=True, check=False)
    assert shown.stdout.splitlines() == expected
    assert "Error" not in shown.stderr
    assert [text in shown.stderr for text in PRINTED] == ["2>&-" not in arguments] * len(PRINTED)
