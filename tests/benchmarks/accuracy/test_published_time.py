"""The executed runs of Mist's study, as our model predicts them. Every model is traced once."""

import json
from dataclasses import replace

import pytest

from benchmarks.accuracy.published_rows import DATA, UnpredictableError, read_plans
from benchmarks.accuracy.published_time import (
    MACHINES,
    PARTS,
    WITHOUT,
    Run,
    lacking,
    read_runs,
    run_of,
    sample_of,
    summary,
    traced,
)
from lightning_mist.plan import OffloadRatios

# Every model is traced at its real size.
pytestmark = pytest.mark.thorough

PLANS = read_plans([DATA / "mist_plans.json"])
RUNS = {run.name: run for run in read_runs([DATA / "mist_plans.json"], [DATA / "mist_times.json"])}
EXECUTED = {name: run for name, run in RUNS.items() if run.measured_seconds is not None}
SHIPPED, TUNED, BASE = "l4-24gb/gpt/1.3b-s_2048-v_50304-b_32-n_1-m_2-f_False", "test-small-tuned", "test-small-base"


@pytest.fixture(scope="module")
def samples():
    return {(name, machine): sample_of(run, machine) for name, run in EXECUTED.items() for machine in MACHINES}


@pytest.mark.parametrize("machine", list(MACHINES))
def test_executed_runs_are_predicted_within_five_percent(samples, machine):
    errors = {name: samples[name, machine]["error"] for name in EXECUTED}
    assert len(errors) == 7
    assert sum(map(abs, errors.values())) / len(errors) < 0.05, errors


@pytest.mark.parametrize("machine", list(MACHINES))
def test_plans_are_ranked_as_they_ran(samples, machine):
    shipped, tuned, base = (samples[name, machine]["predicted_seconds"] for name in (SHIPPED, TUNED, BASE))
    assert shipped < tuned < base


def test_every_part_of_a_prediction_adds_to_it(samples):
    run = EXECUTED["l4-24gb/gpt/1.3b-s_2048-v_50304-b_32-n_1-m_2-f_True"]
    whole = samples[run.name, "measured"]["predicted_seconds"]
    found = {item["without"]: item["predicted_seconds"] for item in lacking([run, replace(run, measured_seconds=None)])}
    assert set(found) == set(WITHOUT)
    for name, seconds in found.items():
        # One rank per stage: it has nobody to share with.
        assert (seconds == whole) if name == "collectives of data-parallel ranks" else (seconds < whole), name


def test_sharing_costs_something_where_there_are_ranks_to_share_with(samples):
    found = {item["without"]: item["predicted_seconds"] for item in lacking([EXECUTED[BASE]])}
    assert found["collectives of data-parallel ranks"] < samples[BASE, "measured"]["predicted_seconds"]


def test_the_summary_has_every_machine_and_part(samples):
    text = summary([*samples.values(), *lacking([EXECUTED[TUNED]])])
    assert all(f"{machine}: mean error" in text for machine in MACHINES)
    assert all(f"without {name}" in text for name in WITHOUT)


def test_state_on_the_host_is_moved_and_ranks_share_it_evenly(samples):
    run = EXECUTED["gpt/7b-s_2048-v_50304-b_128-n_1-m_8-f_True"]
    stages = [replace(stage, offload=OffloadRatios()) for stage in run.plan.stages]
    without = replace(run, plan=replace(run.plan, stages=tuple(stages)))
    assert sample_of(without, "measured")["predicted_seconds"] < samples[run.name, "measured"]["predicted_seconds"]
    # Nine layers on two ranks, none of which has more than the other.
    spec = traced(run.dims, single_row=True)
    names = [item.name for item in spec.parameters if item.name.startswith("layers.3.")]
    assert len(names) == PARTS
    assert len({item.bytes for item in spec.parameters if item.name in names}) == 1


def test_cases_become_plans():
    run = RUNS["gpt/7b-s_2048-v_50304-b_128-n_1-m_8-f_False"]
    assert run.plan.world_size == 8
    assert [stage.num_layers for stage in run.plan.stages] == [7, 8, 9, 8]
    assert [stage.checkpointing.layers for stage in run.plan.stages] == [5, 1, 0, 0]
    assert [stage.offload.optimizer for stage in run.plan.stages] == [0.125, 0.875, 0.875, 0.375]
    assert run.measured_seconds is None


def test_what_is_not_understood_is_said(tmp_path):
    case = PLANS[BASE]
    split = {**case, "plan": {**case["plan"], "stages": [{**case["plan"]["stages"][0], "tp": 2, "dp": 1}]}}
    with pytest.raises(UnpredictableError, match="tp = 2"):
        run_of("split", split)
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"cases": [split, {**case, "id": "timed", "measured": {"iteration_s": 3.0}}]}))
    refused, timed = read_runs([path], [])
    assert "tp = 2" in refused["unpredicted"]
    assert isinstance(timed, Run)
    assert timed.measured_seconds == 3.0
