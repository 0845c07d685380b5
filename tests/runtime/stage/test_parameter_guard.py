import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from lightning_mist.errors import TraceError
from lightning_mist.runtime.stage.parameter_guard import ParameterGuard


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def away(*shape):
    parameter = nn.Parameter(torch.ones(shape))
    parameter.data = torch.full((), math.nan).expand(shape)
    return parameter


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.pow(2).sum(),
        lambda p: p + 1,
        lambda p: torch.stack([p, p]),
        lambda p: p.detach(),
        torch.linalg.vector_norm,
        lambda p: bool((p > 1).any()),
        lambda p: p[0, 0].item(),
        lambda p: p.tolist(),
    ],
)
def test_a_use_of_what_is_away_is_refused(use):
    parameter = away(2, 3)
    with (
        ParameterGuard({"net.weight": parameter}).watched(),
        pytest.raises(TraceError, match=r"net\.weight at .*test_parameter_guard"),
    ):
        use(parameter)


def test_before_the_first_layer_of_a_later_stage_it_makes_ghosts():
    parameter, other = away(2, 3), torch.ones(2, 3)
    guard = ParameterGuard({"net.weight": parameter})
    with guard.watched(FakeTensorMode(allow_non_fake_inputs=True)):
        made = parameter.pow(2).sum()
        assert isinstance(made, FakeTensor)
        assert isinstance(made + other.sum(), FakeTensor)
        assert [type(item) for item in torch.unbind(parameter)] == [FakeTensor] * 2
        # What would be something that is no number, and not a fake, is refused there too.
        for use in (lambda: other.add_(parameter), parameter[0, 0].item, parameter.tolist):
            with pytest.raises((TraceError, DataDependentOutputException)):
                use()
        guard.leave()
        guard.enter()
        with pytest.raises(TraceError, match=r"net\.weight at .*test_parameter_guard"):
            parameter.pow(2)


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: p.shape,
        lambda p: p.requires_grad,
        lambda p: p.numel(),
        lambda p: p.device,
        torch.zeros_like,
        lambda p: p.grad,
        lambda p: p.dtype.is_floating_point,
    ],
)
def test_asking_for_its_form_is_no_use(ask):
    parameter = away(2, 3)
    with ParameterGuard({"weight": parameter}).watched():
        ask(parameter)


def test_what_is_here_and_what_is_not_watched_may_be_used():
    here, other = nn.Parameter(torch.ones(2, 3)), away(2, 3)
    with ParameterGuard({"weight": here}).watched():
        (here * 2).sum()
        other + 1


def test_layers_are_not_watched():
    parameter = away(2, 3)
    guard = ParameterGuard({"weight": parameter})
    with guard.watched():
        guard.leave()
        parameter + 1
        guard.enter()
        with pytest.raises(TraceError):
            parameter + 1
    parameter + 1


def test_modes_of_the_users_own_stay_in_order():
    parameter = away(2, 3)
    guard = ParameterGuard({"weight": parameter})
    with guard.watched():
        with Mode():
            guard.leave()
            guard.enter()
        with pytest.raises(TraceError):
            parameter + 1
    parameter + 1
