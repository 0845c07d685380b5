import pytest
import torch

from lightning_mist.hardware.measure import operators
from lightning_mist.hardware.measure.operators import kernel_rates, memory_rates
from lightning_mist.hardware.measure.timing import Session

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
