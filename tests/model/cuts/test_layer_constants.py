"""What layers read beside their arguments, and which parameters get gradients."""

from functools import lru_cache

import pytest
import torch
from torch import nn

from lightning_mist.model.cuts import map_module


@lru_cache(maxsize=2)
def one(width):
    return torch.arange(width).float()


@lru_cache(maxsize=None)  # noqa: UP033
def several(width):
    return torch.zeros(width), torch.arange(width).float()


@lru_cache(maxsize=2)
def drawn(width):
    return torch.rand(width)


KEPT = {}


def kept(width):
    if width not in KEPT:
        KEPT[width] = torch.arange(width).float()
    return KEPT[width]


class Layer(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), table

    def forward(self, x):
        return self.linear(x) + self.table(x.shape[1])


class Net(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.layers = nn.ModuleList([Layer(table) for _ in range(3)])
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + self.spare(x)


@pytest.mark.parametrize(
    "table", [one, lambda width: several(width)[1], drawn, kept], ids=["one", "several", "drawn", "kept"]
)
def test_layers_that_read_what_others_made_are_not_recomputed(table):
    """A cache gives the same for the same question, but which a layer asks it may hang on the batch."""
    KEPT.clear()
    for cache in (one, several, drawn):
        cache.cache_clear()
    module, x = Net(table), torch.ones(3, 4)
    found = map_module(module, lambda batch: module(batch).sum(), x, second_batch=x[:2])
    assert "test_layer_constants.py" in found.excludes("checkpointing")[0]


def outer(module, x):
    with torch.no_grad():
        left = module.spare(x).mean()
    return {"loss": module.layers[0](x).sum() + left, "left": module.layers[1](x).sum()}


@pytest.mark.parametrize(
    ("step", "leaves_out"),
    [
        (lambda module, x: module(x).sum(), False),
        (lambda module, x: {"loss": module(x).sum()}, False),
        (lambda module, x: module(x.requires_grad_()).sum() + module.spare(x).detach().sum(), False),
        (lambda module, x: sum(layer(x).sum() for layer in module.layers) + module.spare(x).detach().sum(), True),
        (outer, True),
    ],
)
def test_a_parameter_without_a_gradient_is_left_out_though_it_takes_part(step, leaves_out):
    module = Net(one)
    assert map_module(module, lambda batch: step(module, batch), torch.ones(3, 4)).leaves_out is leaves_out
