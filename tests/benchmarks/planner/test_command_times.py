import json
import sys

import pytest

from benchmarks.planner.command_times import Run, command_of, run_once, sample_of
from benchmarks.planner.search_times import CASES


def test_a_command_is_run_with_what_it_took() -> None:
    found = run_once([sys.executable, "-c", "import json; print(json.dumps({'size': sum(range(10))}))"])
    assert found.answer == {"size": 45}
    assert found.seconds > 0
    assert found.processor_seconds > 0


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="ended with status 3"):
        run_once([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_answer_of_the_real_command_is_understood() -> None:
    case = CASES[0]
    found = run_once([*command_of(case), "--max-stages", "1", "--zero-stages", "[0,1]"])
    sample = sample_of(case, [found])
    assert (sample["model"], sample["stages"], sample["limit_seconds"]) == (case.model, 1, 3.0)
    assert json.dumps(sample)


def test_medians_of_seconds_are_kept() -> None:
    runs = [
        Run(seconds=float(item), processor_seconds=2.0 * item, answer={"plan": {"stages": [{}, {}]}})
        for item in (3, 1, 2)
    ]
    sample = sample_of(CASES[-1], runs)
    names = ("command_seconds", "processor_seconds", "limit_seconds", "stages")
    assert [sample[name] for name in names] == [2.0, 4.0, None, 2]
