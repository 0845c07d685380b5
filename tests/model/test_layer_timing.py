from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model import (
    LayerSeconds,
    ModelSpec,
    attach_seconds,
    map_module,
    time_layers,
    time_update,
    trace_model,
)
from lightning_mist.model import layer_timing as update_timing
from lightning_mist.model.layer_timing import measured_sizes, robust_median
from tests import zoo

CPU = torch.device("cpu")


def module():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def test_parameters_and_optimizer_stay_as_they_are():
    net = module()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    before, state = [p.detach().clone() for p in net.parameters()], torch.get_rng_state()
    assert time_update(optimizer, device=CPU) > 0
    assert all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    assert all(p.grad is None for p in net.parameters())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), state)


def test_groups_keep_their_settings(monkeypatch):
    net, seen = module(), []
    optimizer = torch.optim.SGD(
        [{"params": net[0].parameters(), "momentum": 0.5}, {"params": net[1].parameters()}], lr=0.25, momentum=0.9
    )
    step = torch.optim.SGD.step

    def watched(self, *arguments):
        seen.append([(group["lr"], group["momentum"], len(group["params"])) for group in self.param_groups])
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    assert time_update(optimizer, device=CPU) > 0
    assert seen == [[(0.25, 0.5, 2), (0.25, 0.9, 2)]] * (update_timing.WARM_UP + update_timing.STEPS)


def test_seconds_are_of_a_byte(monkeypatch):
    times = iter([0.0, 1.0] * 100)
    monkeypatch.setattr(update_timing, "perf_counter", lambda: next(times))
    parameters = [nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(15)), nn.Parameter(torch.zeros(3), False)]
    assert time_update(torch.optim.SGD(parameters, lr=0.1), device=CPU) == pytest.approx(1 / 100)


def test_what_is_too_large_is_left_out_or_copied_in_part():
    parameters = [nn.Parameter(torch.zeros(size, 2)) for size in (25, 10, 2)]
    groups, total = update_timing._copies(torch.optim.SGD(parameters, lr=0.1), CPU, 100)
    # Of the first, which is too large by itself, as many rows as there is room for.
    assert ([p.shape[0] for group in groups for p in group["params"]], total) == ([12], 96)
    groups, total = update_timing._copies(torch.optim.SGD(parameters[1:], lr=0.1), CPU, 100)
    assert ([p.shape[0] for group in groups for p in group["params"]], total) == ([10, 2], 96)


def test_what_groups_keep_for_themselves_is_not_shared():
    group = {"params": [nn.Parameter(torch.zeros(3))], "scratch": [[0.0]]}
    (copied,), _ = update_timing._copies(torch.optim.SGD([group], lr=0.1), CPU, 100)
    copied["scratch"][0][0] = 1.0
    assert group["scratch"] == [[0.0]]


def test_launching_does_not_grow_with_the_parameters():
    assert update_timing.per_byte((100, 1.5), (300, 2.5)) == 1 / 200
    assert update_timing.per_byte((100, 1.5), (300, 1.5)) == 0.0
    assert update_timing.per_byte((100, 1.5), (100, 1.5)) == 0.0


def test_parameters_without_values_are_copied_too():
    parameter = nn.Parameter(torch.empty(6, device="meta"))
    assert time_update(torch.optim.SGD([parameter], lr=0.1), device=CPU) > 0


@pytest.mark.parametrize("steps", [False, True])
def test_an_optimizer_that_asks_for_more_is_not_timed(steps):
    class Strange(torch.optim.SGD):
        def __init__(self, params, lr=0.1, *, wanted=None):
            if wanted is None and not steps:
                raise TypeError("wanted is missing")
            super().__init__(params, lr=lr)

        def step(self, closure=None):
            raise RuntimeError("a closure is needed")

    assert time_update(Strange([nn.Parameter(torch.zeros(3))], wanted=1), device=CPU) == 0.0


RUNS: Counter[int] = Counter()


class Counting(nn.Module):
    """Remembers, outside of any module, how often each block ran on real numbers."""

    def __init__(self, position: int, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(16, width)
        self.back = nn.Linear(width, 16)
        self.position = position

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if type(self.linear.weight) is nn.Parameter:
            RUNS[self.position] += 1
        return h + self.back(torch.relu(self.linear(h)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.relu(self.linear(h))


class Stack(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(Counting(i, 32 if i == 3 else 16) for i in range(layers))
        self.outlet = nn.Linear(16, 1)
        self.steps: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.steps.append(len(batch))
        h = torch.dropout(self.inlet(batch), 0.1, True)
        for block in self.blocks:
            h = block(h)
        return self.outlet(h).mean()


def make_batch(rows: int) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))


def timed(module: nn.Module, described: Any = None, **options: Any) -> tuple[LayerSeconds, ...]:
    call = zoo.step(module)
    described = described or map_module(module, call, make_batch(4), second_batch=make_batch(3))
    return time_layers(module, described, make_batch, [4, 2], call, device=CPU, **options)


def test_every_kind_has_seconds_at_every_size_and_only_examples_run() -> None:
    module = Stack()
    RUNS.clear()
    seconds = timed(module)
    assert [item.kind for item in seconds] == ["head", "Counting", "Counting#2", "tail"]
    assert [item.layers for item in seconds] == [(), (0, 1, 2, 4, 5), (3,), ()]
    for item in seconds:
        assert item.rows == (2, 4)
        assert all(x > 0 for x in (*item.forward, *item.backward))
    steps = RUNS[0]
    # Trace and kinds aside, whose blocks run on fake numbers, only the first block of each kind runs.
    assert steps >= 2 * (1 + 3)
    assert dict(RUNS) == {0: steps, 3: steps}


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_blocks_that_are_compiled_are_timed_so(how: str) -> None:
    """And what is around them runs eagerly, as do blocks of a trace."""
    ran = Counter[str]()

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran["compiled"] += 1
            return graph(*args)

        return run

    module = Stack()
    module.blocks = nn.ModuleList(Residual() for _ in range(6))
    for number, block in enumerate(module.blocks):
        if how == "wrapped":
            module.blocks[number] = torch.compile(block, backend=backend)  # type: ignore[assignment]
        else:
            block.compile(backend=backend)
    call = zoo.step(module)
    with torch.compiler.set_stance("force_eager"):  # as while a fit is planned
        spec = trace_model(module, make_batch(4), call=call)
        assert spec.compiled == "blocks 0-5 compiled"
        assert not ran
        timed(module, spec)
    # Warmed up and three times over, on batches of two sizes.
    assert ran["compiled"] >= (1 + 3) * 2


def test_the_module_is_as_before() -> None:
    module = Stack()
    module.training_step(make_batch(2), 0).backward()
    before = {n: (p, p.detach().clone(), p.grad, p.grad.clone()) for n, p in module.named_parameters()}
    state = torch.get_rng_state()
    timed(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.steps == [2]
    for n, p in module.named_parameters():
        original, value, grad, grad_value = before[n]
        assert p is original
        assert p.grad is grad
        assert torch.equal(p, value)
        assert torch.equal(p.grad, grad_value)
    assert all("forward" not in vars(block) for block in module.blocks)


def test_models_whose_blocks_hand_on_more_than_a_tensor_are_timed() -> None:
    for name in ("tuple_dict", "batch_norm", "closure", "no_blocks"):
        module, make = zoo.make(name)
        call = zoo.step(module)
        found = map_module(module, call, make(4), second_batch=make(3))
        seconds = time_layers(module, found, make, [4], call, device=CPU, budget_seconds=0.0)
        assert seconds[0].kind == "head"
        assert seconds[-1].kind == "tail"
        assert sorted(i for item in seconds for i in item.layers) == list(range(len(found.blocks)))


def test_progress_is_told_and_ends() -> None:
    told: list[tuple[str, float]] = []
    timed(Stack(), progress=lambda text, fraction: told.append((text, fraction)))
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_outliers_do_not_move_the_median() -> None:
    assert robust_median([1.0, 1.01, 0.99, 1.02, 0.98, 9.0, 50.0]) == pytest.approx(1.0, abs=0.011)
    assert robust_median([3.0]) == 3.0
    assert robust_median([0.0, 0.0]) == 0.0


def spec_and_seconds() -> tuple[ModelSpec, tuple[LayerSeconds, ...]]:
    module = Stack()
    return trace_model(module, make_batch(4), call=zoo.step(module)), timed(module, budget_seconds=0.0)


def test_a_specification_gets_the_seconds_of_the_kinds_its_layers_were_timed_in() -> None:
    spec, seconds = spec_and_seconds()
    assert [item.kind for item in attach_seconds(spec, seconds).seconds] == ["head", "Counting", "Counting#2", "tail"]
    # A specification that tells more kinds apart than the measurement did.
    finer = replace(spec, layers=(*spec.layers, replace(spec.layers[0], kind="Counting#3")), kinds=(0, 0, 0, 1, 0, 2))
    attached = attach_seconds(finer, seconds).seconds
    assert [(item.kind, item.layers) for item in attached[1:-1]] == [
        ("Counting", (0, 1, 2, 4)),
        ("Counting#2", (3,)),
        ("Counting#3", (5,)),
    ]
    assert attached[3].forward == attached[1].forward == seconds[1].forward
    assert attach_seconds(spec, ()).seconds == ()
    with pytest.raises(TraceError, match=r"layer 3 \(Counting#2\) was not timed"):
        attach_seconds(spec, [item for item in seconds if item.kind != "Counting#2"])


def test_a_failing_step_and_no_sizes_are_refused() -> None:
    module = Stack()
    found = map_module(module, zoo.step(module), make_batch(4), second_batch=make_batch(3))
    with pytest.raises(TraceError, match="the step failed while it was timed: RuntimeError"):
        time_layers(module, found, lambda rows: torch.randn(rows, 5), [2], zoo.step(module), device=CPU)
    with pytest.raises(ValueError, match="rows is empty"):
        time_layers(module, found, make_batch, [], zoo.step(module), device=CPU)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, [1]), (2, [1, 2]), (7, [1, 7]), (8, [1, 2, 4, 8]), (12, [1, 3, 4, 12]), (64, [1, 4, 16, 64])],
)
def test_few_sizes_are_measured_between_the_smallest_and_the_largest(rows, sizes):
    assert measured_sizes(rows) == sizes
