from dataclasses import replace

import numpy as np

from benchmarks.planner.against_brute_force import compared, predicted, sample_of
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION


def test_instances_are_compared_and_counted() -> None:
    found = [compared(seed) for seed in (0, 5)]
    assert [seed for seed, _, _ in found] == [0, 5]
    verdicts = [verdict for _, _, verdict in found]
    sample = sample_of("some", verdicts)
    assert sample["instances"] == sample["equal"] == 2
    assert sample["of these infeasible"] == 1
    assert sample["largest difference"] <= PRECISION


def test_what_differs_does_not_count_as_equal() -> None:
    verdict = next(verdict for seed in range(20) for _, _, verdict in [compared(seed)] if np.isfinite(verdict.seconds))
    worse = replace(verdict, seconds=1.001 * verdict.seconds)
    missing = replace(verdict, seconds=np.inf, status="infeasible")
    sample = sample_of("some", [verdict, worse, missing])
    assert (sample["equal"], sample["proven optimal"]) == (1, 2)
    assert sample["largest difference"] == np.inf


def test_instances_on_unlike_devices_are_told_apart() -> None:
    found = [predicted(seed) for seed in (1, 8)]
    assert [kind for _, kind, _ in found] == [
        "3 kinds of devices, without masters, with offload",
        "2 kinds of devices, with masters, with offload",
    ]
    assert sample_of("all", [verdict for _, _, verdict in found])["equal"] == 2
