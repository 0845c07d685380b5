import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_mist.runtime.stage.skipped_blocks import FakeParameters, SkippedBlocks
from tests import zoo
from tests.integration.parity import map_of


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.calls = width, 0

    def forward(self, h, mask, *, step):
        self.calls += 1
        return {"h": (h @ h.new_zeros(h.shape[-1], self.width)).transpose(0, 1), "mask": mask, "step": step + 1}


def fake(*shape):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return mode, torch.empty(*shape)


def form(output):
    h = output["h"]
    return tuple(h.shape), h.stride(), h.dtype, output["step"]


def test_an_answer_has_the_form_of_the_block_s_own():
    mode, h = fake(3, 4)
    block, mask = Block(5), torch.ones(3)
    skipped = SkippedBlocks([block], mode, ())
    first, second = (skipped.answer(0, block.forward, (h, mask), {"step": 1}, None) for _ in range(2))
    assert block.calls == 1
    assert isinstance(second["h"], FakeTensor)
    assert second["h"] is not first["h"]
    assert form(first) == form(second) == ((5, 3), (1, 5), torch.float32, 2)
    assert second["mask"] is mask


def test_other_forms_run_again():
    mode, h = fake(3, 4)
    block = Block(5)
    skipped = SkippedBlocks([block], mode, ())
    skipped.answer(0, block.forward, (h, None), {"step": 1}, None)
    assert skipped.answer(0, block.forward, (h, None), {"step": 7}, None)["step"] == 8
    assert skipped.answer(0, block.forward, (h[:2], None), {"step": 1}, None)["h"].shape == (5, 2)
    skipped.answer(0, block.forward, (h, None), {"step": 1}, "autocast")
    assert block.calls == 4


def test_blocks_of_one_kind_share_what_is_remembered():
    mode, h = fake(3, 4)
    blocks = [Block(4), Block(4), Block(5)]
    skipped = SkippedBlocks(blocks, mode, ())
    for rows in (3, 2, 1):
        shapes = [
            skipped.answer(i, b.forward, (h[:rows], None), {"step": 1}, None)["h"].shape for i, b in enumerate(blocks)
        ]
        assert shapes == [(4, rows), (4, rows), (5, rows)]
    assert [block.calls for block in blocks] == [3, 1, 3]


def test_real_results_and_leaking_blocks_are_computed_each_time():
    class Real(Block):
        def forward(self, h, mask, *, step):
            self.calls += 1
            return h, mask * 2

    mode, h = fake(3, 4)
    for leaking, block in (((), Real(1)), ((0,), Block(4))):
        skipped = SkippedBlocks([block], mode, leaking)
        for _ in range(2):
            skipped.answer(0, block.forward, (h, torch.ones(3)), {"step": 1}, None)
        assert block.calls == 2


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
