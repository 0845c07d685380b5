"""Nothing that a fit makes outlives it: neither groups of processes, nor threads, nor files."""

import json
import subprocess

import pytest
import torch

from tests.integration import many_fits_worker
from tests.ranks import command_of, environment
from tests.tiers import tiered


@pytest.mark.parametrize("fits", tiered((4, 20), (4,)))
def test_many_fits_leave_as_much_as_one(tmp_path, fits):
    command = command_of(2, many_fits_worker.__name__, str(tmp_path), str(fits))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(2):
        counts = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(counts) == fits
        groups, threads, files = zip(*counts[1:], strict=True)  # the first makes what the process has from then on
        assert set(groups) == {1}
        assert set(threads) == {threads[0]}
        assert max(files) == files[0]  # sockets that were closed may be gone a little later
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    assert len(saved) == 8
    assert all(entry["exp_avg"].abs().sum() > 0 for entry in saved.values())
