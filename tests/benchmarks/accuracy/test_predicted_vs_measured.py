import pytest

from benchmarks.accuracy.predicted_vs_measured import kendall, sample_of, summary

REPORT = {
    "predicted_step_seconds": 0.9,
    "measured_step_seconds": 1.0,
    "stages": [
        {"predicted_bytes": 50, "measured_bytes": 40},
        {"predicted_bytes": 110, "measured_bytes": 100},
    ],
}


def test_sample_has_the_errors_of_time_and_of_the_fullest_stage() -> None:
    sample = sample_of("pp2", REPORT)
    assert sample["time_error"] == pytest.approx(-0.1)
    assert sample["memory_error"] == pytest.approx(0.1)
    assert (sample["predicted_peak_bytes"], sample["measured_peak_bytes"]) == (110, 100)


@pytest.mark.parametrize(
    ("second", "tau"), [((1, 2, 3, 4), 1.0), ((4, 3, 2, 1), -1.0), ((1, 2, 4, 3), 2 / 3), ((1, 1, 1, 1), 0.0)]
)
def test_rank_correlation(second: tuple[int, ...], tau: float) -> None:
    assert kendall((1, 2, 3, 4), second) == pytest.approx(tau)


def test_summary() -> None:
    other = {**REPORT, "predicted_step_seconds": 2.6, "measured_step_seconds": 2.0}
    assert summary([sample_of("a", REPORT), sample_of("b", other)]) == (
        "2 plans: mean absolute error of time 20.0% (largest 30.0%), of peak memory 10.0% (largest 10.0%); "
        "rank correlation of time 1.00."
    )
