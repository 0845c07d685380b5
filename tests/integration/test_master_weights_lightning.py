"""Master weights under Lightning, in two processes: as the same arithmetic in one, to the bit, for twenty steps."""

import json
import subprocess

import pytest

from tests.ranks import command_of, environment
from tests.tiers import asked_for

PAIRS = ["ddp", "zero1", "zero3", "split", "ddp>zero1", "zero2>zero3"]
THOROUGH = ["zero2", "two", "chunks"]


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("masters")
    asked = [pair for pair in [*PAIRS, *THOROUGH] if pair in asked_for(request, "pair")]
    command = command_of(2, "tests.integration.master_weights_worker", str(folder), *asked)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("pair", [*PAIRS, *(pytest.param(pair, marks=pytest.mark.thorough) for pair in THOROUGH)])
def test_twenty_steps_checkpoints_and_averages(ranks, pair):
    for rank in ranks:
        found = rank[pair]
        assert found["losses"] == found["expected"]
        assert found["off"] == 0.0
        assert found["average"] == 0.0
        assert found["saved"] == ["torch.float32"]
        assert {"in the step torch.bfloat16", "in validation torch.bfloat16"} <= set(found["types"])


def test_hooks_see_masters_and_their_gradients(ranks):
    if "ddp" in ranks[0]:
        assert "in hooks torch.float32 torch.float32" in ranks[0]["ddp"]["types"]
