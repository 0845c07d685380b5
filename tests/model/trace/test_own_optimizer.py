from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_mist.model.sources.text_sources import precision_context
from lightning_mist.model.trace.optimizer import describe_optimizer, optimizer_to_describe


class Own(nn.Module):
    def __init__(self, make, device="cpu"):
        super().__init__()
        self.small, self.large = nn.Linear(4, 4, device=device), nn.Linear(4, 40, device=device)
        self.make = make

    def configure_optimizers(self):
        return self.make(self)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def scheduled(module):
    return {"optimizer": sgd(module), "lr_scheduler": {"scheduler": None, "interval": "step"}}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "make",
    [
        sgd,
        scheduled,
        lambda module: [sgd(module)],
        lambda module: ([sgd(module)], [torch.optim.lr_scheduler.StepLR(sgd(module), 1)]),
        lambda module: [scheduled(module)],
    ],
)
def test_every_form_that_lightning_takes_is_understood(make, device):
    found, notes = optimizer_to_describe(Own(make, device), None, nullcontext)
    assert notes == ()
    # With momentum, which the class alone would not have.
    assert describe_optimizer(found).state_bytes_per_parameter_byte == 1.0
    assert describe_optimizer(torch.optim.SGD).state_bytes_per_parameter_byte == 0.0


def test_a_named_optimizer_is_taken_as_it_is():
    module = Own(lambda module: pytest.fail("asked"))
    assert optimizer_to_describe(module, torch.optim.Adagrad, nullcontext) == (torch.optim.Adagrad, ())


def test_where_nobody_says_one_there_is_none():
    assert optimizer_to_describe(nn.Linear(2, 2), None, nullcontext) == (None, ())
    assert optimizer_to_describe(LightningModule(), None, nullcontext) == (None, ())


def test_of_several_the_one_with_most_parameters_stands_for_all():
    def two(module):
        return torch.optim.Adagrad(module.small.parameters()), torch.optim.SGD(module.large.parameters())

    found, (note,) = optimizer_to_describe(Own(two), None, nullcontext)
    assert isinstance(found, torch.optim.SGD)
    assert note.startswith(
        "configure_optimizers makes 2 optimizers (Adagrad, SGD): all parameters are counted as if SGD"
    )


def test_one_that_cannot_be_asked_is_noted():
    def needs_a_trainer(module):
        raise RuntimeError("not attached to a Trainer")

    found, (note,) = optimizer_to_describe(Own(needs_a_trainer), None, nullcontext)
    assert found is None
    assert "configure_optimizers cannot be asked (RuntimeError: not attached to a Trainer); name the optimizer" in note
    found, (note,) = optimizer_to_describe(Own(lambda module: None), None, nullcontext)
    assert (found, note) == (None, "configure_optimizers returned NoneType without an optimizer")


def test_the_module_stays_as_it_was():
    def meddle(module):
        module.large.weight.requires_grad_(False)
        module.kept = sgd(module)
        torch.rand(3)
        with torch.no_grad():
            module.small.weight.zero_()
        assert torch.get_default_dtype() == torch.bfloat16
        return module.kept

    module = Own(meddle)
    before = {name: value.clone() for name, value in module.named_parameters()}
    parameters, state = list(module.parameters()), torch.get_rng_state()
    found, _ = optimizer_to_describe(module, None, precision_context("bf16-true"))
    assert isinstance(found, torch.optim.SGD)
    assert not hasattr(module, "kept")
    assert all(parameter is kept for parameter, kept in zip(module.parameters(), parameters, strict=True))
    assert module.large.weight.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in module.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_manual_optimization_is_noted():
    module = Own(sgd)
    module.automatic_optimization = False
    found, (note,) = optimizer_to_describe(module, None, nullcontext)
    assert isinstance(found, torch.optim.SGD)
    assert note.startswith("automatic_optimization is off")
