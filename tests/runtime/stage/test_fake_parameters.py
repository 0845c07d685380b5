import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_mist.runtime.stage.fake_parameters import FakeParameters
from tests import zoo
from tests.integration.parity import map_of


class Tied(nn.Module):
    """An embedding that is also the head, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(3, 3, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.outlet = nn.Linear(3, 3, bias=False)
        self.outlet.weight = self.inlet.weight
        self.spare = nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        h = self.inlet(batch)
        for block in self.blocks:
            h = block(h)
        return self.outlet(h).square().mean()


BOUNDS = ((0, 1), (1, 2))


def slots_of(module, batch, index, bounds=BOUNDS):
    module_map = map_of(module, batch)
    held = frozenset(name for name, stages in module_map.owners(bounds).items() if index in stages)
    return FakeParameters(module, module_map, bounds, index, held, FakeTensorMode(allow_non_fake_inputs=True))


def fakes(module):
    """Slots with a fake; a tied parameter has two slots."""
    return {
        f"{name}.{attribute}".removeprefix(".")
        for name, child in module.named_modules()
        for attribute, parameter in child._parameters.items()
        if isinstance(parameter, FakeTensor)
    }


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, {"blocks.1.0.weight", "blocks.1.0.bias", "outlet.weight", "spare"}),
        (1, {"blocks.0.0.weight", "blocks.0.0.bias", "inlet.weight"}),
    ],
)
def test_ghosts_stand_where_other_stages_compute(index, expected):
    module = Tied()
    before = {id(child): dict(child._parameters) for child in module.modules()}
    slots = slots_of(module, torch.ones(4, 3), index)
    assert fakes(module) == set()
    with slots.filled():
        assert fakes(module) == expected
    for child in module.modules():
        assert list(child._parameters) == list(before[id(child)])
        assert all(child._parameters[name] is parameter for name, parameter in before[id(child)].items())


def test_one_stage_has_no_ghosts():
    module = Tied()
    with slots_of(module, torch.ones(4, 3), 0, ((0, 2),)).filled():
        assert fakes(module) == set()


def test_ghosts_have_the_form_of_their_parameter_and_no_gradient():
    module = Tied()
    module.blocks[1][0].weight.data = torch.ones(3, 3).t()
    module.blocks[1][0].bias.data = torch.zeros(()).expand(3)  # without values of its own
    slots = slots_of(module, torch.ones(4, 3), 0)
    with slots.filled():
        weight, bias = module.blocks[1][0].weight, module.blocks[1][0].bias
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.stride(), weight.dtype) == ((3, 3), (1, 3), torch.float32)
        assert (bias.shape, bias.stride()) == ((3,), (1,))
        assert not weight.requires_grad


def test_recurrent_layers_see_their_ghosts():
    module, make_batch = zoo.make("recurrent")
    real = module.rnn._flat_weights
    with slots_of(module, make_batch(4), 1, ((0, 2), (2, 4))).filled():
        assert all(isinstance(weight, FakeTensor) for weight in module.rnn._flat_weights)
    assert module.rnn._flat_weights is real
    with slots_of(module, make_batch(4), 0, ((0, 2), (2, 4))).filled():
        assert not any(isinstance(weight, FakeTensor) for weight in module.rnn._flat_weights)


def test_an_error_inside_brings_the_parameters_back():
    module = Tied()
    with pytest.raises(KeyError), slots_of(module, torch.ones(4, 3), 0).filled():
        raise KeyError
    assert fakes(module) == set()
