import copy

import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model import derive_splits, map_module
from lightning_mist.plan.grid import plan_of
from lightning_mist.strategy.planning import local_machine as overheads
from lightning_mist.strategy.training.engine import Engine, connected
from lightning_mist.strategy.training.log_records import replay
from tests.integration.parity import make_plan, map_of
from tests.memory_transport import InMemoryWorld

CPU = torch.device("cpu")
ROWS = 4


class Net(nn.Module):
    """Two blocks; logs like a LightningModule."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.logged = []

    def log(self, name, value, **arguments):
        self.logged.append((name, value.item(), arguments))

    def log_dict(self, dictionary, **arguments):
        for name, value in dictionary.items():
            self.log(name, value, **arguments)

    def training_step(self, batch, batch_idx):
        h = batch
        for block in self.blocks:
            h = block(h)
        loss = h.square().mean()
        self.log("loss", loss, on_step=True)
        return {"loss": loss, "rows": h, "name": "net"}


def make_engine(parts=2, module=None):
    module = module or Net()
    plan = make_plan([2], parts=parts, rows=ROWS)
    module_map = map_of(module, torch.randn(ROWS, 3))
    module.logged.clear()
    (transport,) = InMemoryWorld(1).transports
    return Engine(module, plan, module_map, transport, device=CPU)


def train(engine, batch, **arguments):
    return engine.train_batch(batch, lambda part: engine.module.training_step(part, 0), **arguments)


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def plain(module, *batches):
    """Gradients of the sum of the batches' losses."""
    module = copy.deepcopy(module)
    for batch in batches:
        module.training_step(batch, 0)["loss"].backward()
    return gradients(module)


def assert_close(found, wanted, factor=1.0):
    torch.testing.assert_close(found, [factor * gradient for gradient in wanted])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_gradients_wait_for_the_backward_of_the_loss(parts):
    engine, batch = make_engine(parts), torch.randn(ROWS, 3)
    result, loss = train(engine, batch)
    assert gradients(engine.module) == [None] * 4
    assert loss.item() == pytest.approx(engine.module.training_step(batch, 0)["loss"].item())
    assert result.loss.item() == loss.item()
    loss.backward()
    assert_close(gradients(engine.module), plain(engine.module, batch))


def test_whatever_gradient_arrives_at_the_loss_is_a_factor():
    engine, batch = make_engine(), torch.randn(ROWS, 3)
    _, loss = train(engine, batch)
    (loss / 4).backward()
    assert_close(gradients(engine.module), plain(engine.module, batch), 0.25)


def test_a_scaled_loss_has_its_scale_once():
    engine, batch = make_engine(), torch.randn(ROWS, 3)
    _, loss = train(engine, batch, loss_scale=8.0)
    assert loss.item() == pytest.approx(engine.module.training_step(batch, 0)["loss"].item())
    (loss * 8.0).backward()
    assert_close(gradients(engine.module), plain(engine.module, batch), 8.0)


def test_gradients_of_batches_add_up_unless_they_are_about_to_go():
    batches = torch.randn(ROWS, 3), torch.randn(ROWS, 3)
    engine = make_engine()
    for batch in batches:
        train(engine, batch)[1].backward()
    assert_close(gradients(engine.module), plain(engine.module, *batches))
    _, loss = train(engine, batches[0], keeps_gradients=False)
    # What an optimizer that clears in place would write to must not be the gradients that are still to come.
    assert gradients(engine.module) == [None] * 4
    loss.backward()
    assert_close(gradients(engine.module), plain(engine.module, batches[0]))


def test_a_second_backward_is_refused():
    engine = make_engine()
    _, loss = train(engine, torch.randn(ROWS, 3))
    loss.backward(retain_graph=True)
    before = gradients(engine.module)
    with pytest.raises(TraceError, match="backward ran twice on the loss of one training_step"):
        loss.backward()
    assert_close(gradients(engine.module), before)
    with pytest.raises(TraceError, match="use a plan with a single stage"):
        engine.install(torch.ones(()))


def test_what_the_step_returned_and_logged_comes_as_for_a_whole_batch():
    engine, batch = make_engine(parts=2), torch.randn(ROWS, 3)
    result, loss = train(engine, batch)
    engine.module.logged.clear()
    replay(engine.module, result.records)
    whole = engine.module.training_step(batch, 0)
    torch.testing.assert_close(result.extras["rows"], whole["rows"].detach())
    assert not result.extras["rows"].requires_grad
    assert result.extras["name"] == "net"
    (replayed, once) = engine.module.logged
    logged = ("loss", pytest.approx(loss.item()), {"on_step": True})
    assert (replayed, once) == (logged, logged)


def test_a_step_without_a_loss_has_no_backward():
    engine = make_engine()
    result, loss = engine.train_batch(torch.randn(ROWS, 3), lambda part: None)
    assert (result.loss, loss) == (None, None)


def test_parameters_have_one_name():
    engine = make_engine()
    names = [name for name, _ in engine.module.named_parameters()]
    assert [engine.canonical_name(p) for p in engine.module.parameters()] == names
    values = engine.module_values()
    assert sorted(values) == sorted(names)
    assert all(torch.equal(values[name], p) for name, p in engine.module.named_parameters())


def _train_after_a_graph_was_left():
    """A step on parameters that are parts, where a reference cycle still holds the graph of a step on whole ones."""
    module, batch = overheads._Network(), torch.randn(2, overheads.LENGTH, overheads.WIDTH)
    found = map_module(module, module.training_step, batch, blocks="blocks")
    found = derive_splits(module, module.training_step, batch, found, (2,))
    assert found.splits
    loss = module.training_step(batch)
    cycle = [loss]
    cycle.append(cycle)
    del loss, cycle
    plan = plan_of(overheads.LAYERS, world_size=2, global_batch_size=4, tensor_parallel_degree=2)
    engine = Engine(module, plan, found, connected(plan, found, CPU), device=CPU)
    engine.begin(None)
    _, loss = engine.train_batch(batch, module.training_step)
    if loss is not None:
        loss.backward()
    shapes = [p.grad is not None and p.grad.shape == p.shape for p in engine.stages.parameters.values()]
    engine.fill()
    return all(shapes)


def test_graphs_that_planning_left_behind_do_not_disturb_parts(gloo_workers):
    assert gloo_workers.run(2, _train_after_a_graph_was_left) == [True, True]


def test_the_engine_has_the_rank_of_its_transport_and_the_plans_schedule():
    module, plan = Net(), make_plan([2], parts=2, rows=ROWS)
    found = map_of(module, torch.randn(ROWS, 3))
    (transport,) = InMemoryWorld(1).transports
    engine = Engine(module, plan, found, transport, device=CPU)
    assert (engine.rank, engine.plan) == (0, plan)
