import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.groups import RankGroup
from lightning_mist.hardware.measure.collective_fit import collective_call, fit_collective, measure_collectives
from lightning_mist.hardware.measure.timing import Session

PAYLOADS = [2**12, 2**16, 2**20, 2**24]


@given(st.floats(1e-6, 1e-1), st.floats(1e6, 1e12))
def test_fit_recovers_a_line(latency: float, rate: float) -> None:
    seconds = [latency + payload / rate for payload in PAYLOADS]
    fit = fit_collective("all_reduce", 4, 2, PAYLOADS, seconds)
    for payload, second in zip(PAYLOADS, seconds, strict=True):
        assert fit.latency_seconds + payload / fit.bytes_per_second == pytest.approx(second, rel=1e-4)
    assert fit.spread < 1e-4
    assert (fit.operation, fit.group_size, fit.num_nodes) == ("all_reduce", 4, 2)


def test_small_messages_count_as_much_as_large_ones() -> None:
    noise = [1.1, 0.9, 1.05, 0.95]
    seconds = [(1e-4 + payload / 1e9) * factor for payload, factor in zip(PAYLOADS, noise, strict=True)]
    fit = fit_collective("all_reduce", 2, 1, PAYLOADS, seconds)
    assert fit.latency_seconds == pytest.approx(1e-4, rel=0.2)
    assert fit.bytes_per_second == pytest.approx(1e9, rel=0.2)
    assert 0.01 < fit.spread < 0.2


def test_latency_is_not_negative() -> None:
    fit = fit_collective("all_reduce", 2, 1, [1000, 2000], [1e-6, 4e-6])
    assert fit.latency_seconds == 0.0
    # The best line through the origin in relative terms: b = sum(p / t) / sum((p / t)^2).
    assert fit.bytes_per_second == pytest.approx((1e9**2 + 0.5e9**2) / (1e9 + 0.5e9))


def test_a_disturbed_small_message_takes_no_longer_than_a_larger_one() -> None:
    clean = fit_collective("send_recv", 2, 1, PAYLOADS, [1e-4, 1e-4, 1e-3, 1.6e-2])
    disturbed = fit_collective("send_recv", 2, 1, PAYLOADS, [4e-3, 1e-4, 1e-3, 1.6e-2])
    assert disturbed.latency_seconds == clean.latency_seconds
    assert disturbed.bytes_per_second == clean.bytes_per_second
    assert disturbed.spread > 0.4 > clean.spread  # of four points one is off by all of its value


def test_time_that_does_not_grow_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"all_gather among 2 ranks takes .* for 4.0 KiB .*: time must grow"):
        fit_collective("all_gather", 2, 1, [4096, 8192], [2e-3, 1e-3])


def test_unknown_operation() -> None:
    group = RankGroup(ranks=(0,), num_nodes=1, handle=None)
    with pytest.raises(ValueError, match="'gossip' is not an operation: known are all_reduce"):
        collective_call("gossip", group, 8, torch.device("cpu"))


def test_without_groups_there_is_nothing_to_measure() -> None:
    session = Session(device=torch.device("cpu"), world=None)
    assert measure_collectives(session, (), 1.0, lambda text, fraction: None) == ()
