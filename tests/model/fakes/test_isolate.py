from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_mist.model.fakes.isolate import isolated, substitute_parameters
from lightning_mist.recomputation import OwnFunction, users_checkpoints


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.seen: list[int] = []


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_put_back_even_after_an_error(fails: bool) -> None:
    module = Tied()
    before = {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}
    mean = module.norm.running_mean.clone()
    state = torch.get_rng_state()

    def change() -> None:
        with isolated(module):
            substitute_parameters(module, FakeTensorMode(allow_non_fake_inputs=True), {})
            module.seen.append(1)
            module.new = 3
            module.norm.running_mean.add_(1)
            module.norm.training = False
            torch.rand(3)
            if fails:
                raise KeyError("inside")

    if fails:
        with pytest.raises(KeyError):
            change()
    else:
        change()
    assert {name: id(p) for name, p in module.named_parameters()} == {name: i for name, (i, _) in before.items()}
    assert module.second.weight is module.first.weight
    assert not hasattr(module, "new")
    assert (module.seen, module.norm.training) == ([], True)
    assert torch.equal(module.norm.running_mean, mean)
    assert torch.equal(torch.get_rng_state(), state)


def test_slots_of_one_parameter_share_a_stand_in_unless_others_use_them() -> None:
    module = Tied()
    with isolated(module):
        made = substitute_parameters(module, None, {})
        assert module.first.weight is module.second.weight
        assert any(module.first.weight is one for one in made)
    with isolated(module):
        substitute_parameters(module, None, {("first", "weight"): (0,), ("second", "weight"): (1,)})
        assert module.first.weight is not module.second.weight


def test_real_stand_ins_share_values_and_not_gradients() -> None:
    module = Tied()
    with isolated(module):
        substitute_parameters(module, None, {})
        module.first(torch.ones(1, 3)).sum().backward()
        assert module.first.weight.grad is not None
        pointer = module.first.weight.data_ptr()
    assert module.first.weight.data_ptr() == pointer
    assert module.first.weight.grad is None


def test_parameters_without_memory_of_their_own_and_on_meta_get_fakes_of_full_size() -> None:
    hollow = nn.Linear(3, 5)
    hollow.weight.data = torch.zeros(()).expand(5, 3)
    absent = nn.BatchNorm1d(4, device="meta")
    for module, name in ((hollow, "weight"), (absent, "running_mean")):
        with isolated(module):
            substitute_parameters(module, FakeTensorMode(allow_non_fake_inputs=True), {})
            tensor = getattr(module, name)
            assert isinstance(tensor.data, FakeTensor)
            assert tensor.device.type == "cpu"
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 4


def test_recurrent_modules_use_their_stand_ins() -> None:
    module = nn.LSTM(3, 4)
    with isolated(module):
        substitute_parameters(module, FakeTensorMode(allow_non_fake_inputs=True), {})
        assert isinstance(module(torch.ones(2, 1, 3))[0], FakeTensor)
    assert not isinstance(module(torch.ones(2, 1, 3))[0], FakeTensor)


def test_only_our_own_checkpoints_recompute_inside() -> None:
    runs = []

    def square(x: torch.Tensor) -> torch.Tensor:
        runs.append(torch.is_grad_enabled())
        return x.sin() ** 2

    def times(function: object, *, reentrant: bool = False) -> int:
        runs.clear()
        x = torch.ones(3, requires_grad=True)
        torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant).sum().backward()
        return len(runs)

    with isolated(nn.Linear(1, 1)):
        assert times(square) == 1
        assert times(square, reentrant=True) == 1
        assert times(OwnFunction(square)) == 2
    assert times(square) == 2
    assert times(square, reentrant=True) == 2


def test_behind_the_blocks_users_recompute_and_in_what_they_repeat() -> None:
    runs, entered = [], []

    def inner(x: torch.Tensor) -> torch.Tensor:
        runs.append("inner")
        return x.sin() ** 2

    def outer(x: torch.Tensor) -> torch.Tensor:
        runs.append("outer")
        return torch.utils.checkpoint.checkpoint(inner, x.exp(), use_reentrant=False)

    @contextmanager
    def repeating() -> Iterator[None]:
        entered.append(len(runs))
        yield

    def train(*, reentrant: bool = False) -> tuple[torch.Tensor, list[str]]:
        runs.clear()
        x = torch.ones(3, requires_grad=True)
        torch.utils.checkpoint.checkpoint(outer, x, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None
        return x.grad, list(runs)

    plain = train()
    for reentrant in (False, True):
        with isolated(nn.Linear(1, 1)), users_checkpoints(repeating):
            gradient, found = train(reentrant=reentrant)
        assert torch.equal(gradient, plain[0])
        assert found == plain[1]
        assert entered.pop(0) == 2
        entered.clear()
