"""Directories that two processes write while training goes on: what resumes from them, and what is refused of them."""

import json
import subprocess

import pytest

from benchmarks.checkpoints.fits import STEPS
from tests.integration.checkpoints_worker import PLANS
from tests.ranks import command_of, environment

pytestmark = pytest.mark.thorough  # in the first tier, ranks of one process write and read directories


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("checkpoints")
    done = subprocess.run(
        command_of(2, "tests.integration.checkpoints_worker", str(folder)),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("index", range(len(PLANS)))
def test_another_plan_goes_on_from_what_was_written_while_training_went_on(seen, index):
    first, second = PLANS[index], PLANS[(index + 1) % len(PLANS)]
    for rank in seen:
        assert rank[f"{first} -> {second}"] == pytest.approx(rank[first][STEPS:], rel=1e-10)
    assert seen[0][first] == seen[1][first]


def test_plain_data_parallelism_has_the_buffers_and_the_names_of_rank_0(seen):
    assert seen[0]["names"] == ["rank=0.0.ckpt"]
    first, second = (rank["plain"] for rank in seen)
    assert first["is plain"]
    assert first["weights"] == second["weights"]
    assert (first["mean"], second["mean"]) == (3.0, 6.0)
    # Both have read rank 0's.
    assert [rank["plain -> plain"]["mean"] for rank in seen] == [3.0 + 3.0, 3.0 + 6.0]


def test_a_missing_shard_is_refused_on_every_rank(seen):
    for rank in seen:
        before, error = rank["refused"]
        assert before == "resumed"
        assert error.startswith("PATH/__1_0.distcp is missing: .metadata says that")
