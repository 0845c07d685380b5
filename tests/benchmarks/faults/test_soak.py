"""What the soak calls growth."""

import pytest

from benchmarks.faults.soak import COUNTS, faults_of, growth_of, notes_of, rows_of

MIB = 2**20


def fits(count=100, bytes_per_fit=0.0, **late):
    """Fits of which the first ten grow fast, and of which counts may be other ones in the last ten."""
    return [
        {
            "fit": number,
            "fit_seconds": 1.0,
            "resident_bytes": 500 * MIB + min(number, 10) * 10 * MIB + int(number * bytes_per_fit),
            "objects": 1000,
            **dict.fromkeys(COUNTS, 5),
            **(late if number >= count - 10 else {}),
            "step": number,
            "val": 1.0,
        }
        for number in range(count)
    ]


def test_what_stays_as_it_is_after_the_first_tenth_is_no_fault():
    assert growth_of(fits()) == (pytest.approx(0.0, abs=1e-3), 0.0)
    assert faults_of(0, fits()) == []


def test_memory_may_grow_by_little_only():
    slope, total = growth_of(fits(bytes_per_fit=MIB))
    assert (slope, total) == (pytest.approx(MIB), 80 * MIB)
    assert faults_of(1, fits(bytes_per_fit=MIB)) == ["rank 1: resident memory grows by 80.0 MiB"]
    assert faults_of(1, fits(bytes_per_fit=MIB / 10)) == []


@pytest.mark.parametrize("name", COUNTS)
def test_one_more_of_anything_else_is_a_fault(name):
    assert faults_of(0, fits(**{name: 6})) == [f"rank 0: {name} grow from 5 to 6"]


def test_a_thread_that_is_still_ending_when_it_is_counted_is_no_fault():
    found = fits()
    found[-1]["threads"] = 7
    assert faults_of(0, found) == []


def test_every_tenth_has_a_row_and_the_notes_name_what_grows():
    rows = rows_of(1, fits())
    assert [(row["part"], row["fits"], row["last_step"]) for row in rows][-1] == (9, 10, 99)
    faults = faults_of(0, fits(threads=6))
    assert "Faults: rank 0: threads grow from 5 to 6." in notes_of([fits(), fits()], faults, 10.0, "to the end")
    assert "Nothing else grows." in notes_of([fits(), fits()], [], 10.0, "to the end")
