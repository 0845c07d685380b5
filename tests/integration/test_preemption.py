"""A job that SLURM ends is saved first, by all ranks at one place, and goes on from there."""

import json

import pytest

from tests.integration.preemption_worker import SITUATIONS, STEPS, run_job
from tests.tiers import asked_for, tiered
from tests.workers import forks

IN_TRAINING = {"end of batch 4": (3, 6), "end of batch 17": (STEPS, None), "loader": (0, 0)}
"""Steps that have been taken, and the first batch of what goes on. Batch 4 is the first of the third step of two."""

BATCHES_OF_RANK_0 = 3

FIRST = (
    "in a step of two, pipeline, rank 1",
    "in the last batch",
    "while planning",
    "in validation, plain",
    "in validation, sharded",
    "in validation, pipeline, longer here",
    "in validation, plain, longer here",
    "in validation alone",
)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    process = forks().Process(target=run_job, args=(folder, asked_for(request, "name")))
    process.start()
    process.join(280)
    process.kill()
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), (folder / "printed.txt").read_text(errors="replace")[-6000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", tiered(SITUATIONS, FIRST))
def test_whoever_is_told_all_save_at_one_place_and_go_on_from_there(found, name):
    _, kind, place, _ = SITUATIONS[name]
    ranks = [rank[name] for rank in found]
    for rank in ranks:
        assert rank["files"] == ["hpc_ckpt_1.ckpt"]
        assert rank["asked"] == "requeue 4711\n"
        assert rank["handler"] == "0"  # the system's own
    saved = ranks[0]
    if kind == "fit":
        assert [rank["again"]["weights"] for rank in ranks] == [rank["weights"] for rank in ranks]
    else:
        assert saved["sum"] == pytest.approx(sum(saved["weights"]))
    if place in IN_TRAINING:
        assert (saved["step"], *(rank["again"]["first"] for rank in ranks)) == (
            IN_TRAINING[place][0],
            *([IN_TRAINING[place][1]] * 2),
        )
    elif kind == "fit":
        assert saved["step"] == (0 if "check" in place else STEPS)
        batch = min(int(place.split()[1]), BATCHES_OF_RANK_0)
        is_at_end = batch == BATCHES_OF_RANK_0
        # As if Lightning had saved in the step of that batch: it is finished where training goes on.
        assert saved["evaluated"] == {
            **dict.fromkeys(("ready", "started"), batch + (not is_at_end)),
            **dict.fromkeys(("processed", "completed"), batch),
        }
