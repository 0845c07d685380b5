"""Whatever goes wrong on one rank soon ends all of them, with its traceback; bad input is refused on every rank."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("failure_worker.py")
ROOT = Path(__file__).parents[2]

SECONDS = 90
"""All ranks must end within a minute of the failure; the rest is for starting them on a busy machine."""

RUNNING = {
    "raise:1": "RuntimeError: broken on rank 1",
    "kill:1": "",
    "interrupt:0": "",
    # Rank 1 waits for ever where no backend wakes it: its watcher ends it.
    "stuck:0": "RuntimeError: broken on rank 0",
    # Control flow that changes between steps.
    "swap": "layer 2 .blocks.2. was called after layer 0: blocks must run in the order of the trace",
    "skip_on:0": r"returned after layer 2 without calling layer 3 \(blocks.3\)",
}
REFUSED = {
    "wrong_world": r"PlanError: the plan is for 3 devices, but 2 processes run",
    "tight": r"InfeasibleError: .*10.0 KiB",
    # Control flow that differs between ranks.
    "branch:1": r"PlanError: ranks \[1\] see another module than rank 0",
}


def run(mode, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(WORKER), mode, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        # Every rank holds the pipe, so this ends when the last of them has ended.
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        pytest.fail(f"{mode}: still running after {SECONDS} s")
    return process.returncode, output


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    modes = [*RUNNING, *REFUSED]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(modes, pool.map(lambda mode: run(mode, tmp_path_factory.mktemp("fail")), modes), strict=True))


@pytest.mark.parametrize("mode", RUNNING)
def test_one_failing_rank_ends_all(outcomes, mode):
    code, output = outcomes[mode]
    assert code != 0
    assert "trained to the end" not in output
    assert re.search(RUNNING[mode], output), output[-3000:]


@pytest.mark.parametrize("mode", REFUSED)
def test_bad_input_is_refused_before_training(outcomes, mode):
    code, output = outcomes[mode]
    assert code != 0
    assert re.search(REFUSED[mode], output), output[-3000:]
