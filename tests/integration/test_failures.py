"""Whatever goes wrong on one rank soon ends all of them, with its traceback; bad input is refused on every rank."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiers import asked_for, tiered

WORKER = Path(__file__).with_name("failure_worker.py")
ROOT = Path(__file__).parents[2]

RUNNING = {
    "raise:1": "RuntimeError: broken on rank 1",
    "kill:1": "rank 1: its process has ended without a word|Connection closed by peer",
    "interrupt:0": "KeyboardInterrupt",
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
FAULTS = (
    "first batch/leave/plain",
    "map/error/zero1",
    "checks/exit/zero3",
    "groups/kill/pp2",
    "engine/leave/zero3",
    "first forward/term/plain",
    "after backward/error/pp2",
    "backward/memory/zero1",
    "save/term/pp2",
    "gather optimizer/interrupt/tp2",
    "teardown/kill/pp2",
    "batch end/all-error/pp2",
    "forward/all-term/zero3",
)
"""Harm at a point of a fit, of a kind, under a plan; what callbacks save on exceptions is tried in all."""

SAVED = ("batch end/all-error/pp2", "forward/all-term/zero3")
"""All ranks fail alike, so that they can still gather a checkpoint."""

FIRST = (
    "raise:1",
    "stuck:0",
    "wrong_world",
    "branch:1",
    "groups/kill/pp2",
    "first forward/term/plain",
    "batch end/all-error/pp2",
)


def start(*command):
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def finish(process, seconds):
    try:
        # Every rank that Lightning started holds the pipe, so this ends when the last of them has ended.
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"still running after {seconds} s: {output[-3000:]}")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What became of all worlds: of those of this folder, and of those of the program that sweeps over all faults."""
    folder = tmp_path_factory.mktemp("failures")
    faults = folder / "faults.json"
    commands = (
        ("-m", "tests.integration.failure_worker", folder / "modes", *asked_for(request, "mode")),
        ("-m", "benchmarks.faults.sweep", "--hasty", "--jobs", "7", "--out", faults, *asked_for(request, "name")),
    )
    with ThreadPoolExecutor(2) as pool:
        modes, sweep = pool.map(lambda command: finish(start(*command), 400), commands)
    assert faults.is_file(), sweep[-3000:]
    return json.loads(modes.splitlines()[-1]), {cell["cell"]: cell for cell in json.loads(faults.read_text())}


@pytest.mark.parametrize("mode", tiered(RUNNING, FIRST))
def test_one_failing_rank_ends_all(found, mode):
    codes, output = found[0][mode]
    assert None not in codes
    assert any(codes)
    assert "trained to the end" not in output
    assert re.search(RUNNING[mode], output), output[-3000:]


@pytest.mark.parametrize("mode", tiered(REFUSED, FIRST))
def test_bad_input_is_refused_before_training(found, mode):
    codes, output = found[0][mode]
    assert None not in codes
    assert any(codes)
    assert re.search(REFUSED[mode], output), output[-3000:]


@pytest.mark.parametrize("name", tiered(FAULTS, FIRST))
def test_harm_to_one_rank_ends_all(found, name):
    cell = found[1][name]
    assert cell["verdict"] == "ends", f"{cell['verdict']}: {cell['output'][-3000:]}"
    assert cell["saved"] or name not in SAVED


@pytest.mark.thorough
def test_a_failing_rank_ends_all_that_lightning_has_started(tmp_path):
    process = start(WORKER, "raise:1", tmp_path)
    output = finish(process, 200)
    assert process.returncode != 0
    assert "RuntimeError: broken on rank 1" in output
