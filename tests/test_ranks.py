"""What runs the ranks of the integration tests."""

import os
import subprocess
from pathlib import Path

from tests.ranks import command_of, environment

PROGRAM = """
import os, sys
import torch.distributed as dist

def main():
    if os.environ["RANK"] == sys.argv[1]:
        raise ValueError("broken on purpose")
    if sys.argv[1] != "none":
        os.read(os.pipe()[0], 1)  # For ever.
    dist.init_process_group("gloo")
    values = [None, None]
    dist.all_gather_object(values, dist.get_rank())
    dist.destroy_process_group()
    print(f"{values} of {os.environ['WORLD_SIZE']}")
"""


def run(folder: Path, broken: str) -> subprocess.CompletedProcess[str]:
    (folder / "a_rank.py").write_text(PROGRAM)
    known = environment()
    known["PYTHONPATH"] += os.pathsep + str(folder)
    command = command_of(2, "a_rank", broken)
    return subprocess.run(command, env=known, capture_output=True, text=True, timeout=120, check=False)


def test_ranks_meet(tmp_path: Path) -> None:
    done = run(tmp_path, "none")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 1] of 2"] * 2


def test_a_failing_rank_ends_all(tmp_path: Path) -> None:
    done = run(tmp_path, "1")
    assert done.returncode == 1
    assert "ValueError: broken on purpose" in done.stderr
