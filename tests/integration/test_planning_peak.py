"""What planning does before there is a plan keeps within the memory that the plan keeps within."""

import json
import subprocess

import pytest

from tests.integration import planning_peak_worker
from tests.machine import assume_profile
from tests.ranks import command_of, environment
from tests.tiers import tiered


@pytest.mark.parametrize("share", tiered((0.6, 0.4, 0.1), (0.6,)))
def test_planning_keeps_within_the_limit(tmp_path, share):
    assume_profile(tmp_path, 2)
    command = command_of(2, planning_peak_worker.__name__, str(tmp_path), str(share))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(2):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert report["held"] < report["peak"] <= report["limit"], report
        assert report["steps"] == 2
        # A module that is whole nowhere is not there to be tried; this one is, and is trained in parts of some kind.
        assert report["stages"] > 1 or report["shards"] == 3 or share < 0.5, report
