import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.initialization import (
    InitialValues,
    OnRankZero,
    deferred_construction,
    empty_out,
    find_sources,
    load_hollow,
    recipe_of,
)
from lightning_mist.tensors import is_hollow


def built(make, number=0):
    with deferred_construction(number):
        return make()


def values(module, seed=0):
    return {name: recipe_of(p).value(seed) for name, p in module.named_parameters()}


class Various(nn.Module):
    """What constructors do to tensors."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(40, 30)
        self.tied = nn.Linear(40, 30)
        self.tied.weight = self.plain.weight
        self.scaled = nn.Parameter(torch.randn(50, 40) * 0.02 + 1)
        self.by_data = nn.Linear(40, 30)
        self.by_data.weight.data.normal_(0, 0.02)
        self.by_data.bias.data = torch.full((30,), 0.5)
        self.padded = nn.Embedding(20, 30, padding_idx=3)
        self.copied = copy.deepcopy(self.plain)
        self.orthogonal = nn.init.orthogonal_(nn.Parameter(torch.empty(20, 20)))
        self.from_generator = nn.Parameter(torch.empty(64).normal_(generator=torch.Generator().manual_seed(1)))
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, batch_first=True), 2, enable_nested_tensor=False
        )
        self.scaled.is_special = True
        self.register_buffer("table", (torch.arange(6.0) / 6).sin())
        self.register_buffer("mask", torch.ones(4, 4).triu(1).bool(), persistent=False)
        self.attribute = 1.0 / torch.arange(1.0, 5.0)
        self.rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
        self.as_list = torch.arange(3).tolist()
        self.positive = bool(torch.tensor(3.0) > 2)
        self.where = torch.tensor([0.0, 2.0, 0.0, 5.0]).nonzero().flatten() + 1


def test_parameters_leave_on_meta_and_all_else_with_its_values():
    module, plain = built(Various), Various()
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for parameter, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        assert type(parameter) is nn.Parameter
        assert parameter.is_meta
        assert (parameter.shape, parameter.stride()) == (wanted.shape, wanted.stride())
        assert (parameter.dtype, parameter.requires_grad) == (wanted.dtype, wanted.requires_grad)
    for buffer, wanted in zip(module.buffers(), plain.buffers(), strict=True):
        assert type(buffer) is torch.Tensor
        assert torch.equal(buffer, wanted)
    for name in ("rates", "as_list", "positive"):
        assert getattr(module, name) == getattr(plain, name)
    assert torch.equal(module.attribute, plain.attribute)
    assert module.where.tolist() == [2, 4]
    assert module.tied.weight is module.plain.weight
    assert module.scaled.is_special
    assert module.copied.weight is not module.plain.weight


def test_values_are_those_of_the_constructor():
    module = built(Various)
    found, plain = values(module), dict(Various().named_parameters())
    for name, value in found.items():
        assert (value.shape, value.stride(), value.dtype) == (plain[name].shape, plain[name].stride(), value.dtype)
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
        if value.numel() >= 1000:
            assert value.mean().item() == pytest.approx(plain[name].mean().item(), abs=0.1 * plain[name].std().item())
            assert value.std().item() == pytest.approx(plain[name].std().item(), rel=0.1)
    assert found["by_data.bias"].eq(0.5).all()
    assert found["padded.weight"][3].eq(0).all()
    assert torch.equal(found["copied.weight"], found["plain.weight"])
    assert torch.equal(found["layers.layers.0.linear1.weight"], found["layers.layers.1.linear1.weight"])
    torch.testing.assert_close(found["orthogonal"] @ found["orthogonal"].T, torch.eye(20))
    weight = found["norm.parametrizations.weight.original1"]
    torch.testing.assert_close(found["norm.parametrizations.weight.original0"], weight.norm(dim=1, keepdim=True))


def test_values_depend_on_the_seed_and_the_parameter_only():
    state = torch.get_rng_state()
    module = built(Various)
    one = values(module, 7)
    assert torch.equal(torch.get_rng_state(), state)
    other = {name: recipe_of(p).value(7) for name, p in reversed(list(built(Various).named_parameters()))}
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["plain.weight"], values(module, 8)["plain.weight"])
    assert not torch.equal(one["plain.weight"], one["by_data.weight"])
    assert not torch.equal(one["plain.weight"], values(built(Various, 1), 7)["plain.weight"])


def test_parameters_that_share_memory_agree():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = nn.Parameter(torch.randn(4, 3))
            self.part = nn.Parameter(self.whole.data[1:3])

    found = values(built(Shared))
    assert torch.equal(found["whole"][1:3], found["part"])


def test_real_tensors_are_read_and_written():
    table = torch.rand(3, 3)
    running = torch.zeros(3)

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 3))
            with torch.no_grad():
                self.weight.copy_(table).mul_(2)
                running.add_(torch.ones(3))

    module = built(Reads)
    assert torch.equal(running, torch.ones(3))
    assert torch.equal(values(module)["weight"], table * 2)
    table.zero_()
    with pytest.raises(TraceError, match=r"shape \(3, 3\) that the module was built from has changed"):
        values(module)


def test_it_travels_to_other_processes():
    module = built(Various)
    other = pickle.loads(pickle.dumps(module.plain.weight))
    assert torch.equal(recipe_of(other).value(3), recipe_of(module.plain.weight).value(3))


@pytest.mark.sample
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit"])
def test_library_models_are_initialised_as_the_library_does(name):
    import transformers

    sizes = {
        "gpt2": (transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64), "GPT2LMHeadModel"),
        "llama": (
            transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64),
            "LlamaForCausalLM",
        ),
        "t5": (transformers.T5Config(d_model=32, d_ff=64, num_layers=2, vocab_size=64), "T5ForConditionalGeneration"),
        "vit": (transformers.ViTConfig(hidden_size=36, num_hidden_layers=2), "ViTForImageClassification"),
    }
    config, cls = sizes[name]
    make = getattr(transformers, cls)
    module, plain = built(lambda: make(config)), make(config)
    found = values(module)
    for parameter_name, wanted in plain.named_parameters():
        value = found[parameter_name]
        if wanted.numel() >= 1000:
            assert value.std().item() == pytest.approx(wanted.std().item(), rel=0.15), parameter_name
        elif wanted.std() == 0:
            assert torch.equal(value, wanted), parameter_name
    for (buffer_name, buffer), wanted in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, wanted), buffer_name


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


class Noted(nn.Module):
    """Notes on its parameters how they are to be initialised, one of them under a name of its own."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(3))
        self.register_buffer("scale", torch.empty(()))
        self.weight.init_value, self.bias._no_reinit = 0.5, True
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.weight, self.weight.init_value)
        nn.init.constant_(self.bias, 7.0 if getattr(self.bias, "_no_reinit", False) else 0.0)
        self.scale.fill_(self.weight.init_value)


def on_meta(make):
    with torch.device("meta"):
        return make()


def test_modules_find_what_they_noted_on_their_parameters():
    module = on_meta(Noted)
    values = InitialValues(module, find_sources(module), seed=3, device=CPU)
    values.materialize(values.names)
    assert module.weight.tolist() == [0.5, 0.5]
    assert module.bias.tolist() == [7.0, 7.0, 7.0]
    assert module.scale.item() == 0.5


def test_values_are_drawn_in_the_form_that_was_built():
    """Whatever parameters have become since: parts, or of the type that is computed in."""
    (wanted, every), (module, values) = (
        (module, InitialValues(module, find_sources(module), seed=3, device=CPU))
        for module in (on_meta(lambda: nn.Linear(30, 20)), on_meta(lambda: nn.Linear(30, 20)))
    )
    every.materialize(every.names)
    module.weight.data = torch.empty(10, 30, dtype=torch.bfloat16)
    found = {}
    values.materialize(values.names, give=found.__setitem__)
    assert torch.equal(found["weight"], wanted.weight.bfloat16())
    assert torch.equal(found["bias"], wanted.bias)
    assert module.weight.shape == (10, 30)


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
