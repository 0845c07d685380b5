"""Real processes, without torch in them where it is not the matter."""

import pytest

from benchmarks.launch import run_module


def test_processes_run_and_the_file_is_read() -> None:
    found = run_module(
        "tests.benchmarks.worker", ["--say", "hello"], processes=2, environment={"LAUNCHED_WITH": "care"}
    )
    assert found == {"said": "hello", "world": "2", "environment": "care"}


def test_failure_shows_the_output() -> None:
    with pytest.raises(RuntimeError, match="the worker fails on purpose"):
        run_module("tests.benchmarks.worker", ["--say", "fail"], processes=1)
