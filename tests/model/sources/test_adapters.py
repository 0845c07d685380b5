import pytest
import torch
from torch import nn

from lightning_mist.model.sources import with_adapters


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)


def layers():
    return nn.Sequential(nn.Embedding(5, 8), Attention(), Attention())


def trained(module):
    return {name: tuple(item.shape) for name, item in module.named_parameters() if item.requires_grad}


@pytest.mark.parametrize(
    ("targets", "names"), [((), {"q_proj": 8, "v_proj": 4}), (("k_proj",), {"k_proj": 4})], ids=["default", "named"]
)
def test_adapters_alone_are_trained(targets, names):
    found = trained(with_adapters(layers(), 2, targets))
    assert len(found) == 2 * 2 * len(names)
    for number in (1, 2):
        for name, width in names.items():
            shapes = sorted(shape for key, shape in found.items() if key.startswith(f"{number}.{name}."))
            assert shapes == sorted([(2, 8), (width, 2)])


def test_gradients_reach_all_adapters_and_nothing_else():
    module = with_adapters(nn.ModuleDict({"query": nn.Linear(8, 4).double()}), 2)
    module["query"](torch.ones(3, 8, dtype=torch.double)).sum().backward()
    has_gradient = {name for name, item in module.named_parameters() if item.grad is not None}
    assert has_gradient == set(trained(module))


@pytest.mark.parametrize(
    ("rank", "targets", "message"),
    [
        (0, (), "lora_rank = 0: the width of adapters must be positive"),
        (2, ("w1",), "no linear layer is named w1; there are k_proj, q_proj, v_proj"),
    ],
)
def test_what_makes_no_adapters_is_refused(rank, targets, message):
    with pytest.raises(ValueError, match=message):
        with_adapters(layers(), rank, targets)


def test_a_network_without_attention_needs_names():
    with pytest.raises(ValueError, match=r"lora_targets: .*queries and values; there are 0, 1"):
        with_adapters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
