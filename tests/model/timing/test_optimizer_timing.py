import pytest
import torch
from torch import nn

from lightning_mist.model import time_update
from lightning_mist.model.timing import optimizer_timing as update_timing

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
