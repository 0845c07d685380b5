"""A manual step is tried without its backwards and updates, and nothing of it stays."""

from types import SimpleNamespace

import pytest
import torch

from lightning_mist.errors import TraceError
from lightning_mist.strategy.planning.first_batch import rehearse


@pytest.fixture
def fit():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    strategy = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)])
    return SimpleNamespace(strategy=strategy, weight=weight, optimizer=optimizer, scheduler=scheduler)


def test_losses_are_added_up_and_nothing_is_done(fit):
    def step(batch):
        fit.strategy.backward(fit.weight * batch)
        fit.strategy.optimizer_step(fit.optimizer, lambda: fit.strategy.backward(fit.weight.sum()))
        fit.scheduler.step()

    total = rehearse(fit, fit.strategy, step, 3.0)
    assert total.item() == 8.0
    assert fit.weight.grad is None
    assert fit.weight.tolist() == [1.0, 1.0]
    (group,) = fit.optimizer.param_groups
    assert (group["lr"], fit.scheduler.last_epoch, group["params"]) == (1.0, 0, [fit.weight])
    assert not hasattr(fit.strategy, "backward")


def test_a_step_without_a_loss_gives_what_it_returns(fit):
    assert rehearse(fit, fit.strategy, lambda batch: batch, 5) == 5


def test_gradients_that_are_not_averaged_are_refused(fit):
    with pytest.raises(TraceError, match="sync_grad=False"):
        rehearse(fit, fit.strategy, lambda batch: fit.strategy.block_backward_sync(), None)
    assert not hasattr(fit.strategy, "block_backward_sync")
