import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.initialization.construction import deferred_construction
from lightning_mist.model.initialization.initial_values import (
    InitialValues,
    OnRankZero,
    empty_out,
    find_sources,
    load_hollow,
)
from lightning_mist.tensors import is_hollow

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x + self.scale * self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(4)])
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def prepared(make=Net, seed=0):
    with deferred_construction():
        module = make()
    return module, InitialValues(module, find_sources(module), seed=seed, device=CPU)


def test_hollow_parameters_keep_object_shape_and_attributes():
    with deferred_construction():
        module = Net()
    before = dict(module.named_parameters())
    module.embed.weight.mark = 1
    InitialValues(module, find_sources(module), seed=0, device=CPU)
    for name, parameter in module.named_parameters():
        assert parameter is before[name]
        assert is_hollow(parameter)
        assert not parameter.is_meta
        assert parameter.untyped_storage().nbytes() == parameter.element_size()
        assert parameter.isnan().all()
        assert parameter.requires_grad
    assert module.embed.weight.mark == 1
    assert module.head.weight is module.embed.weight


def test_values_are_given_to_some_and_taken_again():
    module, values = prepared()
    names = ["embed.weight", "blocks.2.scale"]
    values.materialize(names)
    assert [name for name, p in module.named_parameters() if not is_hollow(p)] == names
    first = module.embed.weight.detach().clone()
    values.free(names)
    assert all(is_hollow(p) for p in module.parameters())
    other, other_values = prepared()
    other_values.materialize(other_values.names)
    assert torch.equal(other.embed.weight, first)
    assert other(torch.arange(5)).isfinite().all()


def test_lean_modules_run_with_the_parameters_of_one_block():
    module, values = prepared()
    whole, whole_values = prepared()
    whole_values.materialize(whole_values.names)
    for block in whole.blocks[1:]:
        block.load_state_dict(whole.blocks[0].state_dict())
    with values.lean([f"blocks.{index}" for index in range(4)]):
        assert torch.equal(module(torch.arange(5)), whole(torch.arange(5)))
        held = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in module.parameters()}
        assert sum(held.values()) == 4 * (60 + 36 + 6 + 6)
    assert all(is_hollow(p) for p in module.parameters())
    assert len(list(module.parameters())) == 13


class Odd(nn.Module):
    """Holds a parameter that it cannot initialise."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(3))


class WithTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.weight = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self):
        self.table.copy_(torch.arange(4.0))
        nn.init.constant_(self.weight, 2)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Odd())

    def _init_weights(self, module):
        if isinstance(module, Odd):
            nn.init.constant_(module.gate, 0.25)


def on_meta(make):
    with torch.device("meta"):
        return make()


def test_modules_on_meta_initialise_themselves():
    module = on_meta(lambda: nn.Sequential(nn.Linear(30, 30), nn.LayerNorm(30), WithTable()))
    values = InitialValues(module, find_sources(module), seed=3, device=CPU)
    assert module[2].table.tolist() == [0, 1, 2, 3]
    state = torch.get_rng_state()
    values.materialize(values.names)
    assert torch.equal(torch.get_rng_state(), state)
    assert module[1].weight.eq(1).all()
    assert module[2].weight.eq(2).all()
    assert module[0].weight.std().item() == pytest.approx(1 / 90**0.5, rel=0.1)
    again = on_meta(lambda: nn.Sequential(nn.Linear(30, 30), nn.LayerNorm(30), WithTable()))
    values = InitialValues(again, find_sources(again), seed=3, device=CPU)
    values.materialize(["0.weight"])
    assert torch.equal(again[0].weight, module[0].weight)
    assert is_hollow(again[0].bias)


def test_a_model_around_a_module_initialises_it():
    module = on_meta(Around)
    values = InitialValues(module, find_sources(module), seed=0, device=CPU)
    values.materialize(values.names)
    assert module.inner[0].gate.eq(0.25).all()


def test_what_has_no_values_is_named():
    with pytest.raises(
        TraceError, match=r"parameter 1\.gate is on the meta device.*Odd has no reset_parameters.*init_module"
    ):
        find_sources(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Odd())))

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(2))

    with pytest.raises(TraceError, match=r"buffer 0\.table is on the meta device"):
        find_sources(on_meta(lambda: nn.Sequential(Table())))


def test_states_are_loaded_into_hollow_parameters():
    torch.manual_seed(5)
    plain = Net()
    module = on_meta(Net)
    module.blocks[1] = Block(6)
    parameters = dict(module.named_parameters())
    load_hollow(module, plain.state_dict(), strict=True)
    assert dict(module.named_parameters()) == parameters
    assert module.embed.weight is module.head.weight
    assert torch.equal(module.blocks[1].scale, plain.blocks[1].scale)
    values = InitialValues(module, find_sources(module), seed=0, device=CPU)
    values.materialize(values.names)
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert module.embed.weight.data_ptr() != plain.embed.weight.data_ptr()
    with pytest.raises(RuntimeError, match="Missing key"):
        load_hollow(on_meta(Net), {}, strict=True)


def test_values_of_rank_zero_are_shared():
    module = Net()
    held = {name: p.detach().clone() for name, p in module.named_parameters()}
    sent = []
    sources = {name: OnRankZero(value) for name, value in held.items()}
    values = InitialValues(module, sources, seed=0, device=CPU, share=lambda t: sent.append(t.clone()))
    values.materialize(["head.weight", "embed.weight"])
    assert len(sent) == len(held)
    assert torch.equal(module.embed.weight, held["embed.weight"])
    assert is_hollow(module.blocks[0].scale)
    queue = list(sent)
    other = InitialValues(
        Net(),
        {name: OnRankZero(None) for name in held},
        seed=0,
        device=CPU,
        is_first=False,
        share=lambda t: t.copy_(queue.pop(0)),
    )
    other.materialize(other.names)
    assert all(torch.equal(p, held[name]) for name, p in other._module.named_parameters())
    values.free(["embed.weight"])
    values.materialize(["blocks.0.scale"], alone=True)
    assert len(sent) == len(held)
    values.forget()
    assert values.names == frozenset()


def test_emptying_frees_memory():
    weight = nn.Parameter(torch.ones(5, 5))
    empty_out(weight)
    assert is_hollow(weight)
    assert weight.isnan().all()
    numbers = nn.Parameter(torch.ones(5, dtype=torch.int64), requires_grad=False)
    empty_out(numbers)
    assert numbers.eq(0).all()
