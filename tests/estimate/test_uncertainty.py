"""Spreads are those of the committed records, by the stated rule."""

from collections.abc import Iterable
from math import ceil, hypot

import pytest

from benchmarks.record import RECORDS, read_record
from lightning_mist.estimate.device_need import SPREADS, Interval, Spread


def spread_of(errors: Iterable[float], source: tuple[str, ...]) -> Spread:
    """The spread of predictions with these relative errors.

    Of few rows the largest factor is taken, for nothing is known beyond it. A middle below the prediction is not
    believed: predictions that were too high stay as they are.
    """
    factors = sorted(1.0 / (1.0 + error) for error in errors)
    middle = max(1.0, factors[(len(factors) - 1) // 2])
    high = factors[min(len(factors), ceil(0.95 * len(factors))) - 1]
    return Spread(middle=middle, high=max(middle, high), source=source)


def errors_of(names: tuple[str, ...], column: str) -> list[float]:
    found = []
    for name in names:
        rows = read_record(RECORDS / f"{name}.json").samples
        found += [float(row[column]) for row in rows if row.get(column) is not None]  # type: ignore[arg-type]
    return found


def test_what_is_said_of_tensors_is_what_the_records_hold() -> None:
    stated = SPREADS["allocated"]
    found = spread_of(errors_of(stated.source, "memory_error"), stated.source)
    assert (stated.middle, stated.high) == (round(found.middle, 2), ceil(found.high * 100) / 100)


def test_what_is_said_of_sums_is_what_replays_were_off_from_them() -> None:
    tensors, reserved = SPREADS["summed"], SPREADS["summed reserved"]
    rows = read_record(RECORDS / f"{tensors.source[0]}.json").samples
    assert max(row["tensor_bytes"] / row["summed_bytes"] for row in rows) <= tensors.high  # type: ignore[operator]
    found = spread_of((1 / row["unlimited_over_summed"] - 1 for row in rows), ("as recorded",))  # type: ignore[operator]
    own = SPREADS["reserved over allocated"]
    both = found.middle + hypot(found.high - found.middle, own.high - own.middle)
    assert (reserved.middle, reserved.high) == (round(found.middle, 2), ceil(both * 100) / 100)


def test_half_and_nearly_all_of_the_needs_lie_below() -> None:
    # Needs of 1.00 to 1.39 times the prediction, 40 of them.
    found = spread_of([1 / (1 + index / 100) - 1 for index in range(40)], ("made up",))
    assert (found.middle, found.high) == (pytest.approx(1.19), pytest.approx(1.37))


def test_of_few_rows_the_largest_counts() -> None:
    found = spread_of([0.0, -0.2, 0.1], ("made up",))
    assert (found.middle, found.high) == (1.0, 1.25)


def test_predictions_that_were_too_high_stay() -> None:
    assert spread_of([0.5, 0.5], ("made up",)) == Spread(middle=1.0, high=1.0, source=("made up",))


def test_an_interval_is_in_whole_bytes() -> None:
    assert Spread(middle=1.1, high=1.2, source=()).of(101) == Interval(p50=111, p95=121)


def test_spreads_without_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"middle = 1\.2, high = 1\.1"):
        Spread(middle=1.2, high=1.1, source=())


@pytest.mark.parametrize("column", ["allocated_error", "reserved_error"])
def test_other_runtimes_that_are_replayed_lie_within_a_hundredth(column: str) -> None:
    source = ("published-memory_amd-epyc-2-cores_202611",)
    errors = errors_of(source, column)
    assert len(errors) >= 26
    found = spread_of(errors, source)
    assert (round(found.middle, 2), ceil(found.high * 100) / 100) == (1.0, 1.01)
