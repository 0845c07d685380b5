import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.initialization.construction import deferred_construction, recipe_of


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
