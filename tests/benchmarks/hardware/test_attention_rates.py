"""Fitting rates of attention kernels to measurements that follow the formula, and to none."""

import pytest

from benchmarks.hardware.attention_rates import fits, usable


def row(length: int, rate: float, **changes: object) -> dict[str, object]:
    told = {"device": "H100", "kernel": "cudnn", "dtype": "bf16", "head_dim": 128, "pass": "forward", "causal": False}
    return {**told, "seq": length, "batch": 16384 // length, "heads": 16, "tflops": rate, **changes}


def test_measurements_that_follow_the_formula_give_its_numbers_back() -> None:
    rows = []
    for width, large in ((64, 400.0), (128, 600.0)):
        for causal, half in ((False, 100.0), (True, 500.0)):
            for length in (512, 1024, 2048, 4096, 8192):
                tail = 64 * 132 / (16384 * 16)
                rate = large / (1 + half / length) / (1 + tail)
                rows.append(row(length, rate, head_dim=width, causal=causal))
    found = fits(rows)["H100", "cudnn", "forward"]
    assert (found.half_full, found.half_causal, found.count) == (100.0, 500.0, 20)
    assert found.large == pytest.approx({64: 400.0, 128: 600.0})
    assert found.error == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "fp8"},
        {"deterministic": True},
        {"faulty": True},
        {"seq": 65536},
        {"seq": None},
        {"pass": "both"},
        {"device_stated": False},
    ],
)
def test_what_is_not_an_ordinary_measurement_is_left_out(changes: dict[str, object]) -> None:
    assert usable(row(4096, 500.0))
    assert not usable(row(4096, 500.0, **changes))
    assert fits([row(4096, 500.0, **changes)]) == {}
