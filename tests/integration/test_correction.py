"""What a fit on two ranks measures is kept, and used by the next one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import correction_worker

# What runs teach is tested in one process too.
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("correction")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", correction_worker.__file__, str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "later plans for this machine are corrected by it: forward x " in done.stderr
    assert "predictions are corrected by what earlier runs measured: forward x " in done.stderr
    assert len(list((out / "profiles").glob("corrections-*.json"))) == 1
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def by_term(corrections):
    return {item["term"]: item for item in corrections}


def test_the_first_fit_learns_and_the_second_one_uses_it(ranks):
    first, second = ranks[0]["first"], ranks[0]["second"]
    assert first["before"] == []
    assert {"forward", "backward", "update"} <= set(by_term(first["after"]))
    assert second["before"] == first["after"]
    assert {item["samples"] for item in second["before"]} == {1}
    assert second["after"] == second["kept"] != second["before"]
    assert {item["samples"] for item in second["after"]} == {2}
    assert first["warning"] is second["warning"] is None


def test_predictions_move_to_where_it_was_measured(ranks):
    first, second = ranks[0]["first"], ranks[0]["second"]
    factor = by_term(first["after"])["forward"]["factor"]
    overhead = len(first["forward"]) * first["microbatches"] * first["action overhead"]
    measured = sum(times["forward_seconds"] for times in first["times"])
    expected = first["microbatches"] * sum(first["uncorrected forward"]) + overhead
    assert (factor > 1) == (measured > expected)
    assert first["forward"] == first["uncorrected forward"]
    assert second["forward"] == pytest.approx([factor * seconds for seconds in second["uncorrected forward"]])


def test_a_given_plan_teaches_nothing(ranks):
    assert "before" not in ranks[0]["given"]
    assert all(stage["forward_seconds"] > 0 for stage in ranks[0]["given"]["times"])


def test_ranks_agree_on_the_plan_and_only_the_first_learns(ranks):
    for name in ("first", "second", "given"):
        assert ranks[0][name]["plan"] == ranks[1][name]["plan"]
        assert ranks[0][name]["times"] == ranks[1][name]["times"]
        assert "before" not in ranks[1][name]
