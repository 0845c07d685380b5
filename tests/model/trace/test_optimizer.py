from typing import Any

import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model import describe_optimizer
from lightning_mist.optimizers import tensors_within
from lightning_mist.runtime.recording import StorageMeter, state_tensors
from tests import own_optimizers as own

SHAPES = [(32, 48), (48,), (64, 64), (64,)]


def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (torch.optim.RMSprop, {}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize(("cls", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_step_of_the_real_optimizer_needs_what_the_description_says(
    cls: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    real = parameters()
    optimizer = cls(real, **options)
    spec = describe_optimizer(optimizer)
    optimizer.step()
    total = sum(p.numel() * 4 for p in real)
    largest = max(p.numel() * 4 for p in real)
    counters = 4 * len(real)
    state = sum(t.untyped_storage().nbytes() for s in optimizer.state.values() for t in s.values())
    assert abs(state - spec.state_bytes_per_parameter_byte * total) <= counters
    module = nn.ParameterList(real)
    meter = StorageMeter()
    meter.observe(state_tensors(module, [optimizer]))
    before = meter.current_bytes
    with torch.no_grad(), meter:
        optimizer.step()
    said = spec.step_peak_bytes_per_parameter_byte * total + spec.step_peak_bytes_per_largest * largest
    # A loop frees the temporaries of one parameter while it makes those of the next: at most all of the largest size.
    assert meter.peak_bytes - before <= said + counters
    assert meter.peak_bytes - before >= said / 2 - counters
    assert spec.name == cls.__name__


def test_known_figures() -> None:
    adam = describe_optimizer(torch.optim.AdamW)
    assert adam.state_bytes_per_parameter_byte == 2.0
    # A square root and the quotient that it goes into, while the quotient of the parameter before is still named.
    assert (adam.step_peak_bytes_per_largest, adam.step_left_bytes_per_parameter_byte) == (3.0, 1.0)
    assert describe_optimizer(torch.optim.SGD(parameters(), lr=0.1)).state_bytes_per_parameter_byte == 0.0
    fused = describe_optimizer(torch.optim.AdamW(parameters(), fused=True))
    assert (fused.step_peak_bytes_per_parameter_byte, fused.step_peak_bytes_per_largest) == (0.0, 0.0)
    # Reads parameter, gradient and two moments, writes them again: torch's schema has it write the gradient too.
    assert fused.step_moved_bytes_per_parameter_byte == 8.0
    foreach = describe_optimizer(torch.optim.AdamW(parameters(), foreach=True))
    assert foreach.step_peak_bytes_per_parameter_byte == 1.0
    assert foreach.step_peak_bytes_per_largest == 0.0


def test_the_given_optimizer_is_not_touched() -> None:
    real = parameters()
    optimizer = torch.optim.AdamW(real)
    describe_optimizer(optimizer)
    assert not optimizer.state
    assert all(torch.equal(p, torch.ones_like(p)) for p in real)


def test_half_precision_parameters_keep_half_precision_state() -> None:
    spec = describe_optimizer(torch.optim.AdamW([nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))]))
    assert spec.state_bytes_per_parameter_byte == 2.0


def test_an_optimizer_that_wants_a_closure_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match=r"LBFGS cannot be planned for: .*closure"):
        describe_optimizer(torch.optim.LBFGS)


def test_on_cuda_all_parameters_are_stepped_together() -> None:
    loop = describe_optimizer(torch.optim.AdamW, device_kind="cpu")
    assert loop.step_peak_bytes_per_parameter_byte == 0 < loop.step_peak_bytes_per_largest
    together = describe_optimizer(torch.optim.AdamW, device_kind="cuda")
    assert together.step_peak_bytes_per_parameter_byte == 1  # the square roots of all second moments
    assert together == describe_optimizer(torch.optim.AdamW([nn.Parameter(torch.ones(2, 2))], foreach=True))
    chosen = torch.optim.AdamW([nn.Parameter(torch.ones(2, 2))], foreach=False)
    assert describe_optimizer(chosen, device_kind="cuda") == loop
    fused = torch.optim.AdamW([nn.Parameter(torch.ones(2, 2))], fused=True)
    assert describe_optimizer(fused, device_kind="cuda").step_peak_bytes_per_parameter_byte == 0


@pytest.mark.parametrize(
    ("make", "narrow"),
    [
        (own.Eight, "uint8"),
        (lambda p: own.Eight(p, bits=32), ""),
        (lambda p: own.Eight(p, least=20_000), ""),
        (own.EightWrapped, "uint8"),
        (lambda p: own.EightByGroup([{"params": p[:1], "bits": 8}, {"params": p[1:], "bits": 32}]), "uint8"),
        (lambda p: own.Momentum8(p, momentum=0.9), "uint8"),
        (own.Begun, ""),
        (own.Factored, ""),
        (torch.optim.Adagrad, ""),
    ],
)
def test_state_is_described_by_the_sizes_of_parameters_and_by_the_object(make: Any, narrow: str) -> None:
    real = [nn.Parameter(torch.ones(shape)) for shape in ((128, 128), (96, 96), (64, 32), (32,))]
    optimizer = make(real)
    found = describe_optimizer(optimizer)
    for parameter in real:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [tensor for p in real for tensor in tensors_within(optimizer.state[p]) if tensor.numel() > 1]
    total = sum(4 * p.numel() for p in real)
    assert found.state_bytes_per_parameter_byte == pytest.approx(sum(t.nbytes for t in held) / total)
    assert found.narrow_state == narrow
