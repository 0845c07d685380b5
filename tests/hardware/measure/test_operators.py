import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.hardware.measure import operators
from lightning_mist.hardware.measure.operators import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    MOST_CALLS,
    Session,
    heating_calls,
    kernel_rates,
    measure,
    memory_rates,
    summarize,
)

SESSION = Session(device=torch.device("cpu"), world=None)


def test_every_kind_that_memory_limits_is_measured_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "CPU_SIZES", (2**14, 2**16))
    random = torch.get_rng_state()
    rates = memory_rates(SESSION, 1e-3)
    assert [rate.kind for rate in rates] == ["elementwise", "reduction", "index", "copy"]
    for rate in rates:
        # Two tensors are read or written at least, and three at most.
        assert 2 * 2**14 <= rate.bytes[0] <= 3 * 2**14
        assert rate.bytes[1] == 4 * rate.bytes[0]
        for found in (rate.forward_bytes_per_second, rate.backward_bytes_per_second):
            assert len(found) == 2
            assert min(found) > 1e6
    assert torch.equal(random, torch.get_rng_state())


def test_attention_and_convolutions_are_measured_in_every_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "CPU_HEADS", (1, 1, 64, 16))
    monkeypatch.setattr(operators, "CPU_IMAGES", (1, 4, 8, 8))
    random = torch.get_rng_state()
    rates = kernel_rates(SESSION, [torch.float32, torch.bfloat16], 1e-3)
    kinds = ["attention", "causal_attention", "convolution"]
    assert [(rate.dtype, rate.kind) for rate in rates] == [(d, k) for d in ("float32", "bfloat16") for k in kinds]
    assert all(min(rate.forward_flops_per_second, rate.backward_flops_per_second) > 1e5 for rate in rates)
    assert torch.equal(random, torch.get_rng_state())


def test_what_is_measured_is_counted_as_when_a_network_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_mist.model.operator_costs import computes, flops, kind_of, moved_bytes, tensors_in
    from tests.model.test_operator_costs import Calls

    monkeypatch.setattr(operators, "CPU_IMAGES", (1, 4, 8, 8))

    def counted(run: operators.Operators) -> list[tuple[str, int, int]]:
        with Calls() as calls:
            run()
        found = []
        for operator, args, kwargs, value in calls.seen:
            inputs, outputs = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))], list(tensors_in(value))
            if computes(operator, inputs, outputs):
                moved = moved_bytes(operator, args, kwargs, inputs, outputs)
                found.append((kind_of(operator, args, kwargs), flops(operator, args, kwargs, value), moved))
        return found

    for kind, forward, backward, calls in operators._memory_operators(torch.device("cpu"), 2**18):
        for run, amount in (forward, backward):
            work = counted(run)
            assert {found for found, _, _ in work} == {kind}
            # Vectors of weights and of numbers per row are left out.
            assert sum(moved for _, _, moved in work) == pytest.approx(amount, rel=0.06)
            assert len(work) == calls
    for kind, attend, inputs, amount, ratio in operators._kernels(torch.device("cpu"), torch.float32):
        work = counted(attend)
        assert sum(count for found, count, _ in work if found == kind) == amount
        result = attend()
        back = counted(lambda: torch.autograd.grad(result, inputs, torch.ones_like(result)))  # noqa: B023
        assert sum(count for found, count, _ in back if found == kind) == ratio * amount


SINGLE = Session(device=torch.device("cpu"), world=None)


def test_outliers_are_rejected() -> None:
    timing = summarize([1.0, 1.1, 0.9, 1.0, 50.0])
    assert (timing.seconds, timing.samples, timing.outliers) == (1.0, 4, 1)
    assert timing.spread == pytest.approx(0.05)


def test_equal_samples_have_no_spread_and_any_other_is_an_outlier() -> None:
    assert summarize([2.0, 2.0, 2.0, 7.0]).seconds == 2.0
    assert summarize([2.0]).spread == 0.0


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summarize([])


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20))
def test_summary_lies_within_the_samples(samples: list[float]) -> None:
    timing = summarize(samples)
    assert min(samples) <= timing.seconds <= max(samples)
    assert timing.samples + timing.outliers == len(samples)
    assert timing.spread >= 0


def test_short_functions_are_called_many_times_per_sample_long_ones_a_few_times() -> None:
    calls = []
    timing = measure(lambda: calls.append(1), session=SINGLE, budget_seconds=0.01)
    assert len(calls) > 1000
    assert MIN_SAMPLES <= timing.samples + timing.outliers <= MAX_SAMPLES
    slow = []
    product = torch.randn(600, 600)
    timing = measure(lambda: slow.append(product @ product), session=SINGLE, budget_seconds=0.0)
    assert timing.samples + timing.outliers == MIN_SAMPLES


def test_a_single_process_agrees_with_itself() -> None:
    assert SINGLE.agree([1.0, 2.0]) == [1.0, 2.0]


def test_a_device_is_heated_for_about_as_long_as_asked() -> None:
    assert heating_calls(0.0, 1e-3) == 0
    assert heating_calls(0.1, 3e-3) == 34
    assert heating_calls(0.1, 1.0) == 1
    assert heating_calls(0.1, 1e-7) == MOST_CALLS


def test_heating_is_no_sample() -> None:
    calls: list[None] = []

    # A thousand seconds of what takes microseconds are more calls than the most.
    timing = measure(lambda: calls.append(None), session=SINGLE, budget_seconds=1e-9, heat_seconds=1e3)
    assert timing.samples + timing.outliers == MIN_SAMPLES
    assert len(calls) >= MOST_CALLS
