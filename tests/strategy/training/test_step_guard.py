import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_mist.errors import PlanError
from lightning_mist.model.user_code.reach import Reach
from lightning_mist.runtime.executor import Microbatch
from lightning_mist.strategy.training.step_guard import StepGuard
from tests.plans import plan_of

HELD = {"count": 0}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("centre", torch.zeros(2))
        self.count, self.table = 0, None
        self.norm.eval()

    def forward(self):
        return self.count, self.table, HELD["count"]


def plan(*, stages=1, parts=1, checkpointed=0):
    return plan_of(8, stages * parts, *[{"data": 2 // stages, "checkpointed": checkpointed}] * stages)


WHOLE, CUT, SHARED, RECOMPUTED = plan(), plan(parts=2), plan(stages=2), plan(checkpointed=1)


def guard_of(net, plan):
    acted = []
    guard = StepGuard(net, plan, 0, Reach(net, net.forward, {}), acted.append)
    return guard, acted


def microbatch(rows=4, owner=1):
    return Microbatch(value=torch.zeros(rows, 3), weight=1.0, owner=owner, index=0)


def run(guard, step, rows=4, behind=None):
    with guard.batch():
        with guard.run(microbatch(rows)):
            step()
        if behind is not None:
            behind()


def count(net):
    net.count += 1


CHANGES = {
    "attribute": (count, "the attribute count of the module"),
    "global": (lambda net: HELD.update(count=HELD["count"] + 1), "HELD"),
    "buffer": (lambda net: net.centre.add_(1), "buffer centre"),
    "python": (lambda net: random.random(), "Python's or numpy's generator"),
    "numpy": (lambda net: np.random.rand(), "Python's or numpy's generator"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("found", [CUT, SHARED])
def test_a_step_that_begins_to_change_something_is_stopped(name, found):
    net = Net()
    guard, _ = guard_of(net, found)
    run(guard, lambda: None)
    change, text = CHANGES[name]
    with pytest.raises(PlanError, match=f"batch 2 of this fit: the step .*{text}"):
        run(guard, lambda: change(net))


@pytest.mark.parametrize("name", CHANGES)
def test_a_rank_on_its_own_whole_batches_may_do_what_it_likes(name):
    net = Net()
    guard, acted = guard_of(net, WHOLE)
    for _ in range(3):
        run(guard, lambda: CHANGES[name][0](net))
    assert set(acted) == {None}


def test_a_layer_that_counts_when_it_is_recomputed_is_stopped():
    net = Net()
    guard, _ = guard_of(net, RECOMPUTED)
    run(guard, lambda: count(net))
    with pytest.raises(PlanError, match="count of the module is changed by a layer that is recomputed"):
        run(guard, lambda: count(net), behind=lambda: count(net))


def test_what_a_backward_of_the_steps_own_changes_again_is_named():
    net = Net()
    guard, _ = guard_of(net, RECOMPUTED)
    with guard.batch():
        count(net)
        with guard.backward():
            pass
        count(net)  # behind backward, where nothing is recomputed
    with guard.batch(), guard.backward():
        count(net)  # a hook of a gradient, say
    with guard.batch():
        count(net)
        with guard.backward():
            pass
        again = pytest.raises(PlanError, match="count of the module is changed by a layer that is recomputed")
        with again, guard.backward():
            count(net)


@pytest.mark.parametrize("records_metrics", [True, False])
def test_a_metric_that_is_updated_when_a_layer_is_recomputed_is_named(records_metrics):
    net = Net()
    net.means = {"hidden": MeanMetric()}
    reach = Reach(net, net.forward, {})
    guard = StepGuard(net, RECOMPUTED, 0, reach, lambda owner: None, records_metrics=records_metrics)

    def update():
        net.means["hidden"].update(1.0)

    run(guard, update)
    named = r"of metric means\['hidden'\] is changed by a layer that is recomputed .* \(checkpointed_layers = 0\)"
    with nullcontext() if records_metrics else pytest.raises(PlanError, match=named):
        run(guard, update, behind=update)


def test_what_grows_with_the_longest_batch_is_no_state():
    net = Net()
    guard, _ = guard_of(net, SHARED)
    for rows in (1, 2, 3):
        run(guard, lambda: setattr(net, "table", torch.zeros(1)), rows=rows)
    with pytest.raises(PlanError, match="table"):
        run(guard, lambda: setattr(net, "table", torch.zeros(1)), rows=3)


def test_it_is_known_whose_rows_a_step_sees():
    guard, acted = guard_of(Net(), SHARED)
    run(guard, lambda: None)
    assert acted == [1, None]


def test_values_that_differ_between_ranks_that_share_batches_are_named():
    nets = Net(), Net()
    guards = [guard_of(net, SHARED)[0] for net in nets]
    assert guards[0].note() == guards[1].note()
    nets[1].count = 5
    notes = [guard.note() for guard in guards]
    other = guards[1]._survey.details()
    with pytest.raises(PlanError, match="the attribute count of the module, which the step may read, is another"):
        guards[0].compare(notes, lambda mine: [mine, other])
    guards[0].compare([1, 1], lambda mine: [])


def test_unfrozen_parameters_and_statistics_that_begin_are_named():
    net = Net()
    net.layer.weight.requires_grad_(False)
    guard, _ = guard_of(net, SHARED)
    net.layer.weight.requires_grad_(True)
    with pytest.raises(PlanError, match=r"layer\.weight was unfrozen"):
        run(guard, lambda: None)
    net.layer.weight.requires_grad_(False)
    net.norm.train()
    with pytest.raises(PlanError, match=r"norm \(BatchNorm1d\) was set to train"):
        run(guard, lambda: None)


def test_an_error_of_the_step_itself_is_not_covered():
    net = Net()
    guard, _ = guard_of(net, SHARED)

    def step():
        count(net)
        raise ValueError("mine")

    with nullcontext(), pytest.raises((ValueError, PlanError)) as caught:
        run(guard, step)
    assert isinstance(caught.value, ValueError)


def test_a_parameter_that_is_added_ends_training():
    net = Net()
    guard, _ = guard_of(net, CUT)
    net.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    with guard.batch():
        pass
    net.layer.adapter = nn.Linear(2, 2, bias=False)
    with (
        pytest.raises(PlanError, match=r"parameter layer\.adapter\.weight was added after the plan was made"),
        guard.batch(),
    ):
        pass
