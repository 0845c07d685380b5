"""Published peaks of memory as the planner estimates them: what becomes of rows, and what is said to be missing."""

import pytest

from benchmarks.accuracy.published_planned_memory import planned, planned_columns
from benchmarks.accuracy.published_rows import DATA, read_plans, read_points

PLANS = read_plans(sorted(DATA.glob("*_plans.json")))
ROWS = {row["id"]: row for row in read_points(DATA / "memory_points.json")}

TINY = {
    "id": "fms-tiny",
    "arch": {"family": "llama", "h": 64, "ffn": 128, "layers": 2, "heads": 4, "kv": 2, "vocab": 256},
    "world": 2,
    "micro_batch": 2,
    "seq": 128,
    "checkpoint": "full(HF per layer)",
    "parallel": {"fsdp1": 2},
    "precision": "pure bf16",
    "gpu": "A100-80GB",
    "measured": {"peak_allocated_bytes": 10**8},
}


def test_a_run_that_its_row_describes_becomes_a_plan():
    estimate, stage, others = planned(TINY, {})
    assert (stage, others) == (0, ())
    assert estimate.plan.world_size == 2
    assert estimate.plan.stages[0].zero_stage == 3
    assert estimate.plan.stages[0].checkpointing.layers == 2
    assert set(planned_columns(TINY, {})) == {
        "planned_verdict",
        "planned_as",
        "planned_allocated_bytes",
        "planned_allocated_error",
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arch": {**TINY["arch"], "family": "mixtral"}}, "family = 'mixtral'"),
        ({"precision": "nf4"}, "precision = 'nf4'"),
        ({"checkpoint": "every second"}, "checkpoint = 'every second'"),
        ({"gpu": "MI300"}, "gpu = 'MI300'"),
    ],
)
def test_what_no_plan_says_is_named(change, said):
    columns = planned_columns({**TINY, **change}, {})
    assert set(columns) == {"not_planned"}
    assert said in str(columns["not_planned"])


def test_runs_whose_plans_are_not_known_are_named():
    row = next(row for name, row in ROWS.items() if "mixtral" in name)
    assert "how it was run is not known" in str(planned_columns(row, PLANS)["not_planned"])


def test_runs_whose_loss_takes_less_are_named():
    row = next(row for name, row in ROWS.items() if "tp4_pp1" in name)
    assert "within one float32 tensor" in str(planned_columns(row, PLANS)["not_planned"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "mist-gpt/1.3b-s_2048-v_50304-b_32-n_1-m_2-f_True-stage0",
        "mist-gpt/7b-s_2048-v_50304-b_128-n_1-m_8-f_False-stage2",
        "litgpt-tinyllama-full",
        "fms-santacoder-full-1g-b8",
        "fms-santacoder-full-2g-b4",
    ],
)
def test_what_others_executed_needs_what_the_planner_says(name):
    columns = planned_columns(ROWS[name], PLANS)
    assert abs(float(str(columns["planned_allocated_error"]))) < 0.05
    assert columns["planned_verdict"] != "does not fit"
    assert ("reserved_not_planned" in columns) == ("reserved_bytes" in ROWS[name]["measured"])
