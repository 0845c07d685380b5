"""However processes are started, and in both copies of Lightning, a pipeline gives rank 0 what DDP gives it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import tiered

WORKER = Path(__file__).with_name("launch_worker.py")


def run(root, how, folder):
    done = subprocess.run(
        [sys.executable, str(WORKER), root, how, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return run("lightning.pytorch", "ddp_fork", tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize(
    ("root", "how"),
    tiered(
        [("lightning.pytorch", "spawn"), ("lightning.pytorch", "fork"), ("pytorch_lightning", "popen")],
        [("lightning.pytorch", "fork")],
    ),
)
def test_results_come_back_as_under_ddp(tmp_path, expected, root, how):
    result = run(root, how, tmp_path)
    assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-5)
