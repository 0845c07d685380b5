from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_mist.errors import TraceError
from lightning_mist.model import map_module, trace_model
from lightning_mist.model.fakes.origins import Origins, find_obstacle
from lightning_mist.model.sources.reference_decoder import hollow
from lightning_mist.model.trace.ledger import Ledger
from lightning_mist.without_values import READS, guess_read


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * 2  # line of inner


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Inner(), Inner()

    def forward(self, x):
        return self.two(self.one(x)).exp()  # line of outer


def line_of(text):
    with open(__file__, encoding="utf-8") as file:
        return next(f"test_origins.py:{number}" for number, line in enumerate(file, 1) if f"# line of {text}" in line)


def seen(module, run):
    names = {id(item): name for name, item in module.named_modules()}
    parameters = {id(p): name for name, p in module.named_parameters()}
    origins = Origins(names, parameters)
    ledger = Ledger(1, origins)
    with ledger, origins.watching():
        loss = run(module).sum()
        ledger.enter(0, backward=True)
        loss.backward()
    return ledger.storages


def test_operators_of_backward_come_from_the_module_and_line_that_they_undo():
    module = Outer()
    made = seen(module, lambda m: m(torch.ones(2, 3)))
    forward = [(s.operator.split(".")[1], s.origin) for s in made if s.cause == "forward"]
    assert ("tanh", ("one", line_of("inner"))) in forward
    assert ("tanh", ("two", line_of("inner"))) in forward
    assert ("exp", ("", line_of("outer"))) in forward
    assert ("addmm", ("one.linear", line_of("inner"))) in forward
    backward = [(s.operator.split(".")[1], s.origin) for s in made if s.cause == "backward"]
    assert ("tanh_backward", ("two", line_of("inner"))) in backward
    assert ("tanh_backward", ("one", line_of("inner"))) in backward
    assert ("mm", ("one.linear", line_of("inner"))) in backward


def test_hooks_on_modules_are_gone_afterwards_also_after_an_error():
    class Failing(Outer):
        def forward(self, x):
            raise KeyError("no")

    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    with pytest.raises(KeyError):
        seen(Failing(), lambda m: m(torch.ones(2, 3)))
    assert len(hooks) == before


def test_a_repeated_forward_is_told_from_the_backward_around_it():
    class Repeating(Outer):
        def forward(self, x):
            with_context = lambda y: self.two.forward(self.one(y))  # noqa: E731
            return checkpoint(with_context, x, use_reentrant=False)

    made = seen(Repeating(), lambda m: m(torch.ones(2, 3, requires_grad=True)))
    again = [s.origin for s in made if s.cause == "backward" and s.operator == "aten.tanh.default"]
    assert ("one", line_of("inner")) in again


def test_a_gradient_that_is_copied_belongs_to_its_parameter():
    class Broadcast(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (self.scale.sum() * x).sum()

    made = seen(Broadcast(), lambda m: m(torch.ones(2)))
    copies = [s for s in made if s.cause == "accumulate"]  # an expanded gradient gets elements of its own
    assert [s.bytes for s in copies] == [16]


@pytest.mark.parametrize("name", sorted(READS - {"__array__", "__contains__", "__index__"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_guesses_have_the_type_of_answers(name, dtype):
    tensor = torch.ones(1, dtype=dtype)[0] if name in ("__format__", "__bool__") else torch.ones(1, dtype=dtype)
    args = {"__format__": (tensor, ""), "equal": (tensor, tensor), "allclose": (tensor, tensor)}.get(name, (tensor,))
    owner = torch if name in ("equal", "allclose", "is_nonzero") else torch.Tensor
    answer, guess = getattr(owner, name)(*args), guess_read(name, args, {}, tensor, truth=True, number=1.25)
    assert type(guess) is type(answer)
    if isinstance(answer, torch.Tensor):
        assert guess.dtype == answer.dtype
        assert guess.shape[1:] == answer.shape[1:]


def test_positions_by_where():
    tensor = torch.ones(2, 3)
    guess = guess_read("where", (tensor,), {}, tensor)
    assert len(guess) == 2
    assert all(part.shape == (6,) for part in guess)


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


class Failing(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x))


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Failing(change)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.inner(batch).mean()


BATCH = torch.ones(4, 4)

IN_INNER = r"in module 'inner' at \S*test_origins.py:\d+"

CASES = [
    (double, rf"mist_tests::double {IN_INNER} has no kernel for fake tensors. Give it a fake kernel with "
     r"torch.library.register_fake\('mist_tests::double'\), or say what it returns with "
     r"lightning_mist.register_memory_rule\('mist_tests::double', ...\)"),
    (keep, r"mist_tests::undo at \S*test_origins.py:\d+ has no kernel for fake tensors"),
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
