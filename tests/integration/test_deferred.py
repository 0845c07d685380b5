"""Modules built without values train as DDP trains them with values, and no rank holds more than its part."""

import json
import math
import subprocess

import pytest
import torch

from tests.integration import deferred_worker
from tests.ranks import command_of, environment
from tests.tiers import asked_for

pytestmark = pytest.mark.thorough  # tests/strategy/test_empty_parameters.py says the same of one process


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("deferred")
    command = command_of(2, deferred_worker.__name__, str(out), *asked_for(request, "name"))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return out


@pytest.fixture(scope="module")
def ranks(folder):
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", [*deferred_worker.PLANS])
def test_losses_are_those_of_ddp_with_the_same_values(ranks, name):
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(rank["ddp"]["losses"], abs=1e-5)
        assert len(rank[name]["losses"]) == 6


@pytest.mark.parametrize("name", [*deferred_worker.PLANS])
def test_checkpoints_are_resumed_into_modules_without_values(ranks, name):
    for rank in ranks:
        assert rank[name]["later"] == pytest.approx(rank["ddp"]["later"], abs=1e-5)


def test_no_rank_holds_the_whole(ranks):
    for rank in ranks:
        assert rank["pipeline"]["bytes"] < 0.6 * rank["pipeline"]["all_bytes"]
        assert rank["tensor"]["bytes"] < 0.9 * rank["tensor"]["all_bytes"]
        assert rank["zero3"]["bytes"] < 0.6 * rank["zero3"]["all_bytes"]
        assert rank["too_large"]["bytes"] < 0.6 * rank["too_large"]["all_bytes"]


def test_afterwards_rank_zero_has_everything(ranks, folder):
    first, second = (rank["pipeline"] for rank in ranks)
    assert first["weights"] == pytest.approx(ranks[0]["ddp"]["weights"], rel=1e-5)
    assert first["state"] == ""
    assert all(math.isnan(value) for value in second["weights"].values())
    assert "on rank 1 after fit: a module that no device could hold is whole on rank 0 only" in second["state"]
    saved = torch.load(folder / "pipeline" / "after.ckpt", weights_only=False)["state_dict"]
    assert float(saved["embed.weight"].double().pow(2).sum()) == first["weights"]["embed.weight"]


def test_evaluation_and_another_fit_get_the_values_of_rank_zero(ranks):
    for rank in ranks:
        assert rank["pipeline"]["weights_then"] == ranks[0]["pipeline"]["weights"]
        assert rank["pipeline"]["validated"][0] == pytest.approx(rank["ddp"]["validated"][0], abs=1e-5)
        # Its optimizer starts anew, so it goes another way than the resumed one.
        assert max(rank["pipeline"]["refitted"]) < max(rank["pipeline"]["losses"])
        assert rank["pipeline"]["refitted"] == pytest.approx(rank["plain"]["refitted"], abs=1e-4)


def test_modules_may_be_built_in_configure_model_and_tie_parameters(ranks):
    for rank in ranks:
        assert rank["configured"]["losses"] == pytest.approx(rank["tied"]["losses"], abs=1e-4)


def test_a_module_with_values_above_the_limit_starts_from_those_of_rank_zero(ranks):
    assert all(rank["too_large"]["ranks_differ"] for rank in ranks)
    for rank in ranks:
        assert all(map(math.isfinite, rank["too_large"]["losses"]))


def test_what_cannot_be_initialised_is_named(ranks):
    for rank in ranks:
        assert "parameter gate.gate is on the meta device" in rank["nameless"]["error"]
        assert "init_module" in rank["nameless"]["error"]
