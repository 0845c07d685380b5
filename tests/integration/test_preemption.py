"""A job that SLURM ends is saved first, by all ranks at once, and goes on from there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from tests.tiers import tiered

WORKER = Path(__file__).with_name("preemption_worker.py")


def environment(rank, tools):
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(WORKER.parents[2]),
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "MASTER_ADDR": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "training",
        "SLURM_JOB_ID": "4711",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def run(how, folder, tools, port, told):
    """What both ranks of a job print."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), how, str(folder), str(told)],
            env={**environment(rank, tools), "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = []
    for process in ranks:
        out, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors[-5000:]
        (line,) = [line for line in out.splitlines() if line.startswith("RESULT")]
        results.append(json.loads(line.removeprefix("RESULT")))
    return results


@pytest.mark.parametrize(("how", "told"), tiered([("pipeline", 1), ("pipeline", 0), ("plain", 1)], [("pipeline", 1)]))
def test_whoever_is_told_all_save_between_steps_and_go_on_from_there(tmp_path, how, told):
    tools = tmp_path / "tools"
    tools.mkdir()
    asked = tmp_path / "asked"
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    (tools / "scontrol").chmod(0o755)
    whole = run(how, tmp_path, tools, find_free_network_port(), told)
    assert asked.read_text() == "requeue 4711\n"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    assert whole[0]["first"] == 0
    resumed = run(how, tmp_path, tools, find_free_network_port(), -1)
    # Told in batch 4, the first of the third step of two.
    assert [result["first"] for result in resumed] == [6, 6]
    assert [result["weights"] for result in resumed] == [result["weights"] for result in whole]
