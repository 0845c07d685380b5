"""Loss curves of real architectures: twenty optimizer steps under mist are those under DDP, on every rank."""

import json
import subprocess

import pytest

from tests.ranks import command_of, environment
from tests.tiers import asked_for

pytestmark = pytest.mark.thorough  # gradients and gloo have tests of their own in the first tier

TWO = ["gpt2:split", "llama:sharded", "bert:two", "vit:split", "demo:two", "nano:two"]
TWO += [
    "llama:zero3",
    "lora_llama:zero3",
    "gpt2_even:tensor",
    "llama_even:sequence",
    "lora_llama:tensor",
    "gpt2:chunks",
]
FOUR = ["gpt2_even:grid", "llama_even:mixed", "gpt2:hybrid", "nano_even:tensor and shards"]


@pytest.fixture(scope="module")
def curves(request, tmp_path_factory):
    asked = asked_for(request, "pair")
    return {
        name: pair
        for size, pairs in ((2, [pair for pair in TWO if pair in asked]), (4, [pair for pair in FOUR if pair in asked]))
        if pairs
        for name, pair in run(tmp_path_factory, size, pairs)
    }


def run(tmp_path_factory, size, pairs):
    """For every pair what each rank saw."""
    folder = tmp_path_factory.mktemp("curves")
    done = subprocess.run(
        command_of(size, "tests.integration.curves_worker", str(folder), *pairs),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
    return [(pair, [rank[pair] for rank in ranks]) for pair in pairs]


@pytest.mark.parametrize("pair", [*TWO, *FOUR])
def test_curves_are_ddps(curves, pair):
    for rank in curves[pair]:
        assert len(rank["ddp"]) == 20
        assert rank["ddp"][-1] < rank["ddp"][0] * 1.2
        assert rank["mist"] == pytest.approx(rank["ddp"], rel=1e-5)


def test_ranks_see_different_batches(curves):
    assert curves["gpt2:chunks"][0]["ddp"] != curves["gpt2:chunks"][1]["ddp"]
