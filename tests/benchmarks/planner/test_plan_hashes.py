from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.plan_hashes import (
    COMMANDED,
    KEY,
    PAPER,
    UNLIKE,
    differences,
    of_case,
    of_command,
    of_paper,
    of_unlike,
    plan_hash,
)
from benchmarks.planner.search_times import CASES, spaces
from benchmarks.record import RECORDS, read_record
from lightning_mist.hardware import parse_cluster
from lightning_mist.tuner import SearchSpace, tune
from tests.specs import spec

SMALL = SearchSpace(offload=(), max_stages=1, num_microbatches=(2, 4))


def test_the_hash_is_of_what_a_plan_decides() -> None:
    plan = tune(spec(4), parse_cluster("1x2xL4"), global_batch_size=8, search=SMALL).plan
    versions = replace(plan, fingerprint=(("version.torch", "2.13.0"),))
    assert len({plan_hash(plan), plan_hash(replace(plan, predicted=None)), plan_hash(versions)}) == 1
    decisions = (
        replace(plan, schedule="gpipe"),
        replace(plan, fingerprint=(("num_layers", "4"),)),
        replace(plan, stages=(replace(plan.stages[0], layers=(0, 3)),)),
    )
    assert len({plan_hash(item) for item in (plan, *decisions)}) == 4


def test_every_question_of_a_case_is_asked() -> None:
    samples = list(of_case(CASES[0], "small", SMALL))
    assert len({tuple(item[name] for name in KEY) for item in samples}) == len(samples) == 4
    assert all(item["same_if_asked_again"] for item in samples)
    assert all(item["bound_seconds"] > 0 and item["peak_bytes"] > 0 for item in samples)


def test_devices_may_be_unlike() -> None:
    sample = of_unlike(UNLIKE[0], "small", SMALL)
    assert (sample["cluster"], sample["stages"]) == ("1x4xA100-40+1x4xL4", 1)


def test_with_few_rows_other_schedules_win() -> None:
    sample = of_command(COMMANDED[0])
    assert (sample["model"], sample["batch"], sample["schedule"], sample["status"]) == (
        "gpt3-1.3b",
        4,
        "zb-h1",
        "explored",
    )


def test_the_papers_example_is_its_published_plan() -> None:
    sample = of_paper("as published")
    assert (sample["stages"], sample["microbatches"], sample["status"]) == (2, 16, "optimal")
    assert sample["predicted_step_seconds"] == pytest.approx(9.26892465)
    assert of_paper("nothing")["plan"] == sample["plan"]


def test_differences_are_named_with_their_size() -> None:
    before = of_paper("as published")
    key = " ".join(str(before[name]) for name in KEY)
    rounded = {**before, "predicted_step_seconds": before["predicted_step_seconds"] * (1 + 1e-12)}
    assert differences([before], [rounded]) == []
    changed = {**before, "plan": "0" * 16, "bound_seconds": 0.99 * before["bound_seconds"]}
    (line,) = differences([before], [changed])
    assert line.startswith(f"{key}: plan {before['plan']} -> {'0' * 16}, bound_seconds -1.000% (9.26892 -> ")
    assert differences([before], [{**before, "peak_bytes": 5}]) == [f"{key}: peak_bytes None -> 5"]
    assert differences([], [before]) == [f"{key}: is new"]


@pytest.mark.parametrize("path", sorted(RECORDS.glob("plan-hashes*.json")), ids=lambda path: path.stem)
def test_a_committed_table_has_every_question_once(path: Path) -> None:
    samples = read_record(path).samples
    keys = [tuple(item[name] for name in KEY) for item in samples]
    assert len(keys) == len(set(keys))
    count = 4 * len(CASES) * len(spaces()) + sum(len(item.spaces) for item in UNLIKE) + len(PAPER)
    # What was asked before the command's own questions were there.
    assert len(keys) == (count if "-before_" in path.name else count + len(COMMANDED))
