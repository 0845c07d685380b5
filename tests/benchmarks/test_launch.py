"""Real processes, without torch in them where it is not the matter; this file is also what they run."""

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.launch import run_module


def test_processes_run_and_the_file_is_read() -> None:
    found = run_module(__name__, ["hello"], processes=2, environment={"LAUNCHED_WITH": "care"})
    assert found == {"said": "hello", "world": "2", "environment": "care"}


def test_failure_shows_the_output() -> None:
    with pytest.raises(RuntimeError, match="the worker fails on purpose"):
        run_module(__name__, ["fail"], processes=1)


if __name__ == "__main__":
    said, _, out = sys.argv[1:]
    if said == "fail":
        raise RuntimeError("the worker fails on purpose")
    if os.environ["RANK"] == "0":
        known = {"said": said, "world": os.environ["WORLD_SIZE"], "environment": os.environ.get("LAUNCHED_WITH", "")}
        Path(out).write_text(json.dumps(known))
