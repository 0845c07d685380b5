import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from lightning_mist.errors import TraceError
from lightning_mist.runtime.stage.parameter_guard import ParameterGuard, watched_processes


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


class Library:
    """Runs calls as code of another module would."""

    def __init__(self, name):
        self.space = {"__name__": name, "dist": dist}

    def __call__(self, text):
        return eval(text, self.space)


@pytest.fixture
def group():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def noticed(library, text, answer=True):
    found = []

    def notice(kind, what):
        found.append((kind, what.split(" at ")[0]))
        return answer

    with watched_processes(notice):
        result = Library(library)(text)
    return found, result


def test_collectives_are_noticed_and_may_do_nothing(group):
    found, result = noticed("project", "dist.barrier()")
    assert (found, result) == ([("collective", "barrier")], None)
    found, _ = noticed("project", "dist.all_gather_object([None], 1)")
    assert found[0][0] == "collective"


def test_the_rank_is_noticed_and_told(group):
    assert noticed("project", "dist.get_rank()") == ([("rank", "get_rank")], 0)


@pytest.mark.parametrize("library", ["lightning_mist.strategy", "torch.utils", "lightning.pytorch"])
def test_libraries_may_ask(group, library):
    assert noticed(library, "dist.get_rank()") == ([], 0)


def test_this_package_may_talk(group):
    assert noticed("lightning_mist.strategy", "dist.barrier()")[0] == []
    assert noticed("lightning.pytorch", "dist.barrier()")[0] == [("collective", "barrier")]


def test_the_number_of_processes_is_no_secret(group):
    assert noticed("project", "dist.get_world_size()") == ([], 1)


def test_a_notice_may_refuse(group):
    def refuse(kind, what):
        raise ValueError(what)

    with pytest.raises(ValueError, match=r"barrier at .*test_parameter_guard"), watched_processes(refuse):
        dist.barrier()
    dist.barrier()


def test_there_is_nothing_to_notice_without_processes():
    with watched_processes(lambda kind, what: True):
        pass
