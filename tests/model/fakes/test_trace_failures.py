from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.errors import TraceError
from lightning_mist.model import map_module, trace_model
from lightning_mist.model.fakes.trace_failures import find_obstacle
from lightning_mist.model.sources.reference_decoder import hollow


@torch.library.custom_op("mist_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return 2 * x


double.register_autograd(lambda ctx, gradient: 2 * gradient)


@torch.library.custom_op("mist_tests::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("mist_tests::undo", mutates_args=())
def undo(x: Tensor) -> Tensor:
    return x.clone()


keep.register_fake(torch.empty_like)
keep.register_autograd(lambda ctx, gradient: undo(gradient))


class Inner(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x))


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(change)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.inner(batch).mean()


BATCH = torch.ones(4, 4)

IN_INNER = r"in module 'inner' at \S*test_trace_failures.py:\d+"

CASES = [
    (double, rf"mist_tests::double {IN_INNER} has no kernel for fake tensors. Give it a fake kernel with "
     r"torch.library.register_fake\('mist_tests::double'\), or say what it returns with "
     r"lightning_mist.register_memory_rule\('mist_tests::double', ...\)"),
    (keep, r"mist_tests::undo at \S*test_trace_failures.py:\d+ has no kernel for fake tensors"),
    (lambda x: x[x.sum(-1) > 0], rf"aten::index.Tensor {IN_INNER} gives a result whose size depends on values. "
     r"Say what it returns with lightning_mist.register_memory_rule\('aten::index.Tensor', ...\), or write that "
     "line without it"),
    (lambda x: x + torch.from_numpy(x.detach().numpy()), rf"\.numpy\(\) {IN_INNER} reads the memory of a tensor. Put "
     "that line into an operator of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), CASES)
def test_what_does_not_run_on_fakes_is_named(change: Callable[[Tensor], Tensor], text: str) -> None:
    spec = trace_model(Net(change), BATCH, optimizer=torch.optim.SGD)
    assert spec.head.forward_flops != 0
    with pytest.raises(AssertionError, match=f"the step does not run on fake tensors: {text}.*counted on real tensors"):
        raise AssertionError(spec.notes[0])


@pytest.mark.parametrize(("change", "text"), CASES)
def test_without_values_it_is_an_error(change: Callable[[Tensor], Tensor], text: str) -> None:
    module = hollow(lambda: Net(change))
    with pytest.raises(TraceError, match=f"^the step does not run on fake tensors: {text}"):
        trace_model(module, BATCH, optimizer=torch.optim.SGD)


def test_a_map_names_the_operator_too() -> None:
    module = Net(double)
    found = map_module(module, lambda batch: module.training_step(batch, 0), BATCH)
    (reason, *_) = found.excludes("pipeline")
    assert "mist_tests::double in module 'inner' at" in reason
    assert "torch.library.register_fake('mist_tests::double')" in reason


def test_numbers_of_another_device_say_so() -> None:
    spec = trace_model(Net(double), BATCH, optimizer=torch.optim.SGD, device_kind="cuda")
    assert "counted on real tensors of the CPU, which keeps other ones than cuda" in spec.notes


def test_the_users_own_mistakes_are_told_once_and_with_their_place() -> None:
    with pytest.raises(TraceError, match=rf"RuntimeError: shape '\[3, 7\]' is invalid.*\({IN_INNER}\)$") as caught:
        trace_model(Net(lambda x: x.view(3, 7)), BATCH, optimizer=torch.optim.SGD)
    assert str(caught.value).count("is invalid") == 1


def raised(function: Callable[[], Any]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_errors_around_the_one_that_matters_are_looked_through() -> None:
    with FakeTensorMode():
        x = torch.ones(3)

    def wrapped() -> None:
        try:
            x.nonzero()
        except Exception as error:
            raise ValueError("selection failed") from error

    found = find_obstacle(raised(wrapped), nn.Linear(1, 1))
    assert found is not None
    assert (found.operator, found.module, found.need) == ("aten::nonzero", "", "size")
    assert find_obstacle(raised(lambda: torch.ones(3).view(7)), nn.Linear(1, 1)) is None
    assert find_obstacle(raised(x.numpy), nn.Linear(1, 1)).need == "memory"
