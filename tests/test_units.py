import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.units import (
    format_bytes,
    format_bytes_up,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("22GiB", 22 * 2**30),
        ("24 GB", 24 * 10**9),
        (" 1.5 MiB ", 3 * 2**19),
        (".5KiB", 512),
        ("7", 7),
        ("7 B", 7),
        ("1kB", 1000),
        ("1TiB", 2**40),
        (12, 12),
        (12.9, 12),
        (0, 0),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 gib", "1 Gib", "-1GiB", "1e3", "1,5GiB", "1 GiB 2", None, True])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match=r"is not a size: write a number and one of B, KiB.*'22GiB'"):
        parse_bytes(text)


def test_sizes_beyond_all_numbers_are_refused():
    with pytest.raises(ValueError, match=r"'9{20}'\.\.\.: sizes are finite"):
        parse_bytes("9" * 400 + "GiB")


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf")])
def test_impossible_numbers_of_bytes_are_refused(number):
    with pytest.raises(ValueError, match="sizes are finite and not negative"):
        parse_bytes(number)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (31.2 * 2**30, "31.2 GiB"), (-3 * 2**20, "-3.0 MiB")],
)
def test_sizes_are_shown(size, text):
    assert format_bytes(size) == text


@given(st.integers(0, 2**50))
def test_a_size_rounded_up_is_enough_and_hardly_more(size):
    enough = parse_bytes(format_bytes_up(size))
    # Read back a fraction of a byte may be lost.
    assert size - 1 <= enough <= 1.1 * size + 1


@given(st.integers(0, 2**50))
def test_a_shown_size_reads_back_to_within_its_digits(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12.34, "12.3 s"),
        (1234.5, "1234 s"),
        (999.7, "1000 s"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (4.56e-5, "45.6 us"),
        (9.999e-4, "1 ms"),
        (2.5e-9, "2.5 ns"),
        (-0.25, "-250 ms"),
    ],
)
def test_seconds_are_shown(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(1e-9, 1e6))
def test_shown_seconds_keep_three_digits_and_no_exponent(seconds):
    number, unit = format_seconds(seconds).split()
    scale = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert "e" not in number
    assert float(number) * scale == pytest.approx(seconds, rel=0.0051)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1.2e12, "1.2 TFLOP/s"), (9.997e8, "1 GFLOP/s"), (1500, "1.5 kFLOP/s"), (3, "3 FLOP/s"), (5e18, "5000 PFLOP/s")],
)
def test_rates_are_shown(rate, text):
    assert format_rate(rate, "FLOP/s") == text


@pytest.mark.parametrize(
    ("text", "rate"),
    [("300 GB/s", 3e11), ("100Gbit/s", 1.25e10), ("2 GiB / s", 2 * 2**30), ("1.6 Tbit/s", 2e11), (5e9, 5e9), (3, 3.0)],
)
def test_rates_are_read(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["300 GB", "300", "fast/s", "-1 GB/s", "1 Gbit", "1 Gib/s", "GB/s", "", "/s"])
def test_other_text_is_no_rate(text):
    with pytest.raises(ValueError, match=r"is not a rate: write for example '300 GB/s' or '100 Gbit/s'"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("20 us", 2e-5), ("1.5ms", 1.5e-3), ("2s", 2.0), ("7 ns", 7e-9), ("5e-5", 5e-5), (3, 3.0)]
)
def test_durations_are_read(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["1 min", "-1 s", "", "s", "1e", None, True, -1.0, float("nan")])
def test_other_text_is_no_duration(text):
    with pytest.raises(ValueError, match="is not a duration: write for example '20 us'"):
        parse_seconds(text)
