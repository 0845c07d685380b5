import dataclasses
import warnings

import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.cuts.mapping import map_module
from lightning_mist.model.user_code import unchanged
from lightning_mist.runtime.checks import check_stages, loss_of, refuse_unchecked
from lightning_mist.runtime.gradients.weight_gradients import WeightGradients
from lightning_mist.runtime.recording import StorageMeter, state_tensors
from lightning_mist.tensors import slice_rows
from tests import zoo


def mapped(name, rows=3):
    module, make_batch = zoo.make(name)
    batch = make_batch(rows)
    found = map_module(module, zoo.step(module), batch, second_batch=slice_rows(batch, 0, rows - 1))
    return module, batch, found


def halves(found):
    layers = len(found.blocks)
    return (0, layers // 2), (layers // 2, layers)


@pytest.mark.sample
@pytest.mark.parametrize("splits_backwards", [False, True])
@pytest.mark.parametrize("name", ["nano_dropout", "mixtral", "noise", "sequence_first", "try_except"])
def test_correct_cuts_pass_and_leave_no_trace(name, splits_backwards):
    module, batch, found = mapped(name)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    state, attributes = torch.get_rng_state(), {n: dict(vars(m)) for n, m in module.named_modules()}
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    step = zoo.step(module)
    with unchanged(module):
        check_stages(module, found, halves(found), step, batch, splits_backwards=splits_backwards)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in module.parameters())
    assert all(torch.equal(b, buffers[n]) for n, b in module.named_buffers())
    for name, child in module.named_modules():
        assert vars(child).keys() == attributes[name].keys()
        assert all(vars(child)[key] is value for key, value in attributes[name].items())


def test_a_wrong_map_is_found_by_the_gradient():
    module, batch, found = mapped("plain")
    blind = tuple(dataclasses.replace(live, requires_grad=False) for live in found.cuts[1])
    wrong = dataclasses.replace(found, cuts=(found.cuts[0], blind, found.cuts[2]))
    with pytest.raises(TraceError, match="requires a gradient now and did not in the trace"):
        check_stages(module, wrong, halves(found), zoo.step(module), batch)


def test_a_module_that_counts_its_calls_differs():
    module, batch, found = mapped("plain")
    calls = []

    def step(batch):
        calls.append(0)
        loss = zoo.step(module)(batch)
        return loss * len(calls)

    with pytest.raises(TraceError, match=r"cut into 2 stages differs from the whole: its loss is .* instead of"):
        check_stages(module, found, halves(found), step, batch)


def test_a_gradient_that_differs_is_named():
    module, batch, found = mapped("plain")
    calls = []

    def step(batch):
        calls.append(0)
        penalty = module.head.weight.sum() * len(calls)
        return zoo.step(module)(batch) + penalty - penalty.detach()

    with pytest.raises(TraceError, match=r"the gradient of head\.weight differs by .* the tolerance is 1e-04"):
        check_stages(module, found, halves(found), step, batch)


class Wide(nn.Module):
    """Of two rows nearly all memory is parameters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(96, 96), nn.ReLU()) for _ in range(12)])

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


@pytest.mark.parametrize("keeps_at_home", [False, True])
def test_comparing_takes_the_memory_of_one_set_of_gradients(keeps_at_home):
    """At home, on a CPU, they are as much: what the device has meanwhile is one of them at a time."""
    module, batch = Wide(), torch.randn(2, 96)
    found, meter = map_module(module, zoo.step(module), batch, second_batch=batch[:1]), StorageMeter()
    meter.observe(state_tensors(module))
    held = meter.current_bytes
    with meter:
        check_stages(module, found, halves(found), zoo.step(module), batch, keeps_at_home=keeps_at_home)
    assert meter.peak_bytes <= 2.25 * held  # two sets took 3.2 times
    assert all(parameter.grad is None for parameter in module.parameters())


def test_gradients_at_home_are_compared_as_well():
    module, batch, found = mapped("plain")
    calls, present = [], []

    def step(batch):
        calls.append(0)
        present.append([name for name, parameter in module.named_parameters() if parameter.grad is not None])
        penalty = module.head.weight.sum() * len(calls)
        return zoo.step(module)(batch) + penalty - penalty.detach()

    with pytest.raises(TraceError, match=r"the gradient of head\.weight differs by .* the tolerance is 1e-04"):
        check_stages(module, found, halves(found), step, batch, keeps_at_home=True)
    assert not any(present)


def test_gradients_of_weights_that_are_made_later_are_compared(monkeypatch):
    module, batch, found = mapped("plain")
    monkeypatch.setattr(WeightGradients, "run", lambda self, key: self.forget())
    with pytest.raises(TraceError, match=r"the gradient of .*weight differs .* Use schedule = '1f1b' or a plan with"):
        check_stages(module, found, halves(found), zoo.step(module), batch, splits_backwards=True)


def test_rows_whose_entries_do_not_lie_together_are_refused():
    class Folded(zoo.Plain):
        def training_step(self, batch, batch_idx):
            h = self.first(batch["x"])
            h = torch.stack([h, 2 * h]).flatten(0, 1)
            for block in self.blocks:
                h = block(h)
            return self.loss(h.unflatten(0, (2, -1)).mean(0), batch)

    module = Folded()
    batch = zoo.xy_batch(4)
    found = map_module(module, zoo.step(module), batch, second_batch=slice_rows(batch, 0, 3))
    assert [live.batch_dim for live in found.cuts[1]] == [0]
    with pytest.raises(TraceError, match=r"shape \(8, 16\) for 4 rows, and the entries of a row do not lie together"):
        check_stages(module, found, halves(found), zoo.step(module), batch)


def test_a_step_without_loss():
    with pytest.raises(TraceError, match="returned NoneType without a loss"):
        loss_of(None)
    with pytest.raises(TraceError, match="returned dict without a loss"):
        loss_of({"loss": torch.zeros(())})


def test_no_warning_reaches_the_user():
    module, batch, found = mapped("skips")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_stages(module, found, halves(found), zoo.step(module), batch)
    assert not caught


class Deep(zoo.Plain):
    """A loss on the first layer's output besides the last."""

    def training_step(self, batch, batch_idx):
        h, early = self.first(batch["x"]), None
        for block in self.blocks:
            h = block(h)
            early = self.loss(h, batch) if early is None else early
        return early + self.loss(h, batch)


def test_losses_on_inner_layers_do_not_cross_to_ranks_with_other_rows():
    module, batch = Deep().double(), zoo.xy_batch(3)
    batch["x"] = batch["x"].double()
    found = map_module(module, zoo.step(module), batch, second_batch=slice_rows(batch, 0, 2))
    check_stages(module, found, halves(found), zoo.step(module), batch)
    with pytest.raises(TraceError, match="one value for all rows of a batch"):
        check_stages(module, found, halves(found), zoo.step(module), batch, divided=[0])
    with pytest.raises(TraceError, match="one value for all rows of a batch"):
        check_stages(module, found, halves(found), zoo.step(module), slice_rows(batch, 0, 1), divided=[0])
    with pytest.raises(TraceError, match="one value for all rows of a batch"):
        refuse_unchecked(found, halves(found), [0])
    refuse_unchecked(found, halves(found), [])


def test_what_depends_on_parameters_alone_may_cross_to_ranks_with_other_rows():
    module, batch, found = mapped("t5")
    check_stages(module, found, halves(found), zoo.step(module), batch, divided=[0])
