from contextlib import contextmanager

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn

from lightning_mist.strategy.training.whole_model import attach_engine


class Engine:
    """Answers as the engine does, and remembers being asked."""

    def __init__(self, overflow=0.0):
        self.clipped, self.overflow = [], overflow

    def clip_by_norm(self, optimizer, max_norm):
        self.clipped.append((optimizer, max_norm))

    @contextmanager
    def unscaling(self, optimizer, factor):
        yield

    def agree_on_overflow(self, found):
        return {device: value + self.overflow for device, value in found.items()}


def optimizer_with_gradient(value):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), value)
    return torch.optim.SGD([parameter], lr=1.0), parameter


def test_clipping_by_norm_asks_the_engine_and_only_while_there_is_one():
    plugin, engine = Precision(), Engine()
    optimizer, parameter = optimizer_with_gradient(3.0)
    attach_engine(plugin, engine)
    plugin.clip_gradients(optimizer, 1.0)
    assert engine.clipped == [(optimizer, 1.0)]
    assert parameter.grad.tolist() == [3.0, 3.0]
    attach_engine(plugin, None)
    plugin.clip_gradients(optimizer, 1.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-4)


def test_the_plugin_keeps_its_class_for_checkpoints():
    plugin = MixedPrecision("bf16-mixed", "cpu")
    attach_engine(plugin, Engine())
    assert isinstance(plugin, MixedPrecision)
    assert type(plugin).__qualname__ == "MixedPrecision"
    attach_engine(plugin, Engine())
    assert len([cls for cls in type(plugin).__mro__ if cls.__name__ == "_Whole"]) == 1


def test_a_plugin_without_engine_is_left_alone():
    plugin = Precision()
    attach_engine(plugin, None)
    assert type(plugin) is Precision


@pytest.mark.parametrize(("overflow", "steps"), [(0.0, True), (1.0, False)])
def test_a_step_is_skipped_when_another_rank_overflowed(overflow, steps):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    attach_engine(plugin, Engine(overflow))
    optimizer, parameter = optimizer_with_gradient(1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert bool(parameter.detach().abs().sum() > 0) == steps


def test_without_an_engine_a_plugin_and_its_scaler_are_as_they_were():
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    before = {**vars(plugin)}, {**vars(plugin.scaler)}
    attach_engine(plugin, Engine())
    attach_engine(plugin, None)
    assert type(plugin) is MixedPrecision
    assert type(plugin.scaler) is torch.amp.GradScaler
    assert (vars(plugin), vars(plugin.scaler)) == before
