"""Loss curves of real architectures: twenty optimizer steps under mist are those under DDP, on every rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("curves_worker.py")
ROOT = Path(__file__).parents[2]

PAIRS = ["gpt2:two", "gpt2:split", "llama:two", "llama:sharded", "bert:two", "vit:split"]
PAIRS += ["nano:two", "nano:sharded", "demo:two", "gpt2:zero2", "llama:zero3", "lora_llama:zero3", "lora_llama:two"]


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curves")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER)]
    done = subprocess.run(
        [*command, str(folder), *PAIRS],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("pair", PAIRS)
def test_curves_are_ddps(curves, pair):
    for rank in curves:
        assert len(rank[pair]["ddp"]) == 20
        assert rank[pair]["ddp"][-1] < rank[pair]["ddp"][0] * 1.2
        assert rank[pair]["mist"] == pytest.approx(rank[pair]["ddp"], rel=1e-5)


def test_ranks_see_different_batches(curves):
    assert curves[0]["gpt2:two"]["ddp"] != curves[1]["gpt2:two"]["ddp"]
