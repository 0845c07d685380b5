from types import SimpleNamespace

import pytest

from lightning_mist.cli import command
from tests.cli.networks import refused
from tests.cli.test_plan_command import plan_arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "lightning-mist: error: the following arguments are required: {plan,show,simulate,estimate,profile}"),
        (["plan", "--modle", "gpt3-1.3b"], "unrecognized arguments: --modle; did you mean --model?"),
        (["show", "-x"], "unrecognized arguments: -x"),
        (["dance"], "invalid choice: 'dance'"),
        (["show"], "are required: plan; see"),
        (["show", "a", "--agaist", "b"], "unrecognized arguments: --agaist; did you mean --against?"),
        (["show", "a", "--zzz"], "unrecognized arguments: --zzz; see"),
        (["plan", "--model", "m"], "are required: --cluster, --global-batch-size; see lightning-mist plan --help"),
        (plan_arguments(checkpointing="maybe"), "--checkpointing: true or false is needed in place of maybe"),
        (plan_arguments(num_stages="1,'8',2"), "--num-stages: a whole number is needed"),
        (plan_arguments(global_batch_size="x"), "--global-batch-size: a whole number is needed in place of x"),
        (plan_arguments(num_stages="two"), "--num-stages: a whole number is needed in place of two"),
        (
            plan_arguments(schedules="2f2b"),
            "--schedules: one of '1f1b', 'gpipe', 'interleaved-1f1b', 'zb-h1' is needed",
        ),
        (plan_arguments(zero_stage="3"), "unrecognized arguments: --zero-stage; did you mean --zero-stages?"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(capsys, arguments, said):
    text = refused(capsys, *arguments)
    assert said in text
    assert text.startswith("lightning-mist")
    assert text.count("\n") == 1
    assert text.endswith("--help\n")


@pytest.mark.parametrize("value", ["0,7", "[0,7]", "(0, 7)", "7"])
def test_lists_may_go_without_brackets(capsys, value):
    """ZeRO has no stage 7, so that the list is read and refused."""
    for arguments in (plan_arguments(zero_stages=value), [*plan_arguments(), f"--zero-stages={value}"]):
        assert "7" in refused(capsys, *arguments).partition("zero_stages=(")[2].partition(")")[0]


def test_glibc_keeps_what_arrays_leave_and_other_libraries_are_let_be(monkeypatch):
    told = {}
    monkeypatch.setattr(command.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=told.__setitem__))
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    command._keep_freed_memory()
    assert told == {command._MMAP_THRESHOLD: 8 * 2**20, command._TRIM_THRESHOLD: 32 * 2**20}
    monkeypatch.setattr(command.ctypes, "CDLL", lambda name: SimpleNamespace())
    command._keep_freed_memory()


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"])
def test_what_a_user_has_set_of_malloc_stays(monkeypatch, name):
    told = {}
    monkeypatch.setattr(command.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=told.__setitem__))
    monkeypatch.setenv(name, "1000000")
    command._keep_freed_memory()
    assert not told
