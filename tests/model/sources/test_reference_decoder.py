from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_mist.model.sources.reference_decoder import LanguageModel, LanguageModelShape, hollow

TINY = LanguageModelShape(hidden=16, ffn=24, layers=2, heads=4, vocabulary=11)

SHAPES = {
    "gpt": TINY,
    "falcon": replace(TINY, parallel=True, rotary_fraction=0.5),
    "llama": replace(TINY, feed_forward="swiglu", norm="rmsnorm", rotary_fraction=1.0, key_value_heads=2),
    "tied": replace(TINY, tied=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_each_kind_trains(name):
    model = LanguageModel(SHAPES[name], 8)
    tokens = torch.randint(11, (3, 9))
    batch = tokens[:, :-1], tokens[:, 1:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model.training_step(batch, 0)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", SHAPES)
def test_no_place_sees_the_tokens_after_it(name):
    model = LanguageModel(SHAPES[name], 8).double()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-12)
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("name", ["gpt", "falcon", "llama"])
def test_places_are_told_apart(name):
    model = LanguageModel(SHAPES[name], 8).double()
    first = model(torch.tensor([[1, 2, 3, 4]]))[0, -1]
    second = model(torch.tensor([[2, 1, 3, 4]]))[0, -1]
    assert not torch.allclose(first, second)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    attention = LanguageModel(SHAPES["llama"], 8).double().blocks[0].attention
    query, key = torch.randn(4, dtype=torch.double), torch.randn(4, dtype=torch.double)

    def rotated(vector):
        return torch.cat(attention._rotate(vector.expand(1, 1, 8, 4)), dim=-1)[0, 0]

    products = rotated(query) @ rotated(key).T
    assert torch.allclose(rotated(query).norm(dim=-1), query.norm().expand(8))
    assert torch.allclose(products[3, 1], products[6, 4])
    assert not torch.allclose(products[3, 1], products[3, 2])


def test_hollow_modules_take_no_memory_and_keep_sharing():
    shape = replace(TINY, hidden=4096, ffn=16384, layers=8, vocabulary=50304, tied=True)
    model = hollow(lambda: LanguageModel(shape, 2048), dtype=torch.bfloat16)
    parameters = list(model.parameters())
    assert sum(parameter.numel() for parameter in parameters) > 10**9
    assert sum(parameter.untyped_storage().nbytes() for parameter in parameters) == 2 * len(parameters)
    assert model.head.weight is model.tokens.weight
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    assert {parameter.device.type for parameter in parameters} == {"cpu"}


def test_hollow_keeps_element_types_buffers_and_frozen_parameters():
    def build():
        module = nn.BatchNorm1d(3)
        module.weight.requires_grad_(False)
        module.first_mean = module.running_mean
        object.__setattr__(module, "table", torch.arange(4))
        return module

    module = hollow(build)
    module.running_mean += 1
    module.table += 1
    assert module.first_mean is module.running_mean
    assert (module.running_mean.shape, module.num_batches_tracked.dtype) == ((3,), torch.long)
    assert not module.weight.requires_grad
    assert module.bias.requires_grad
    assert hollow(build, dtype=torch.float64).running_mean.dtype == torch.float64
    assert hollow(build, dtype=torch.float64).num_batches_tracked.dtype == torch.long
