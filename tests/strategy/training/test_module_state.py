from contextlib import nullcontext

import torch
from torch import nn

from lightning_mist.strategy.training.engine import module_state


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


class Engine:
    def __init__(self, module, values, *, is_filled=False):
        self.values, self.is_filled = values, is_filled
        self.names = {parameter: name for name, parameter in module.named_parameters()}

    def parts_may_leave(self):
        return nullcontext()

    def canonical_name(self, parameter):
        return self.names[parameter]

    def module_values(self):
        return self.values


def test_both_names_of_a_tied_parameter_get_the_gathered_value():
    module, value = Tied(), torch.full((3, 2), 5.0)
    state = module_state(module, Engine(module, {"embed.weight": value}))
    assert list(state) == list(module.state_dict())
    assert state["embed.weight"] is value
    assert state["head.weight"] is value
    assert int(state["steps"]) == 7


def test_a_rank_without_values_gives_what_it_has():
    module = Tied()
    assert torch.equal(module_state(module, Engine(module, {}))["embed.weight"], module.embed.weight)


def test_a_whole_module_needs_no_gathering():
    module = Tied()
    state = module_state(module, Engine(module, {"embed.weight": torch.zeros(1)}, is_filled=True))
    assert torch.equal(state["head.weight"], module.embed.weight)
