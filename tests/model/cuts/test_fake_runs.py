import random
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mist.model.child_process import BUDGET
from lightning_mist.model.cuts.recorder import run_twice

BLOCKS = ("blocks.0", "blocks.1")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.register_buffer("seen", torch.zeros(()))
        self.count = 0

    def step(self, batch):
        self.count += 1
        self.seen += 1
        h = batch
        for block in self.blocks:
            h = block(h)
        return h.sum()


def run(module, step=None, batches=None):
    batches = batches or (torch.ones(4, 2), torch.ones(3, 2))
    return run_twice(module, step or module.step, batches, BLOCKS)


def test_two_runs_on_fakes_leave_the_module_as_it_was():
    module = Net()
    seen = []
    parameters = list(module.parameters())
    module.blocks[0].register_forward_hook(lambda block, args, output: seen.append(type(output)))
    state, generator = torch.get_rng_state(), random.getstate()
    runs = run(module, lambda batch: module.step(batch) + torch.rand(()) + random.random())
    assert runs.failure == ""
    assert runs.rows == (4, 3)
    assert [record.order for record in runs.records] == [list(BLOCKS)] * 2
    assert seen == [FakeTensor] * 2
    assert runs.outside == ("Python's random module",)
    assert list(runs.states[1].changed_buffers(runs.states[2])) == ["seen"]
    assert ("", "count") in list(runs.states[1].differs(runs.states[2]))
    assert (module.count, module.seen.item()) == (0, 0.0)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert not any("forward" in vars(block) for block in module.blocks)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == generator


def test_a_step_that_fails_is_put_into_words_and_undone():
    module = Net()

    def fail(batch):
        module.step(batch)
        raise KeyError("label")

    runs = run(module, fail)
    assert runs.records == ()
    assert runs.failure == "KeyError: 'label'"
    assert (module.count, module.seen.item()) == (0, 0.0)
    assert not isinstance(module.blocks[0].weight, FakeTensor)


def test_where_no_is_a_wrong_guess_yes_is_tried():
    module, answers = Net(), []

    def step(batch):
        answers.append(bool(module.step(batch) > 0))
        if not answers[-1]:
            raise ValueError("never so")
        return module.step(batch)

    assert len(run(module, step).records) == 2
    assert answers == [False, True, True]


def test_a_failure_names_the_read_that_may_have_led_there():
    module = Net()

    def step(batch):
        module.step(batch).item()
        raise ValueError("no way on")

    assert "item" in (failure := run(module, step).failure)
    assert "reads a value that depends on parameters (ValueError: no way on)" in failure


@pytest.mark.parametrize("writes", [False, True])
def test_writes_into_a_batch_are_noticed_and_stay_in_a_copy(writes):
    module, batches = Net(), (torch.ones(4, 2), torch.ones(3, 2))

    def step(batch):
        if writes:
            batch.zero_()
        return module.step(batch)

    assert run(module, step, batches).batch_changed is writes
    assert all(batch.all() for batch in batches)


class Loops(nn.Module):
    """Ends by what it has computed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def by_value(self, batch):
        old, new = 2 * batch, batch
        while not (new - old).abs().max() < 1e-3:
            old, new = new, 0.5 * self.blocks[0](new).tanh()
        return new.sum()

    def by_number(self, batch):
        now, length = 0.0, 1.0
        while now < 1.0:
            length = 0.5 * length if float((length * self.blocks[0](batch)).norm()) > 0.1 else length
            now += 0.0 if length < 0.1 else length
        return batch.sum()

    def silently(self, batch):
        while not isinstance(batch, float):
            batch = self.blocks[0](batch)


@pytest.mark.parametrize("way", ["by_value", "by_number", "silently"])
def test_a_loop_without_an_end_is_given_up_and_named(way, monkeypatch):
    monkeypatch.setattr(BUDGET, "rounds", 8)
    monkeypatch.setattr(BUDGET, "operators", 100)
    monkeypatch.setattr(BUDGET, "most_operators", 1_000)
    module = Loops()
    runs = run(module, lambda batch: (getattr(module, way)(batch), getattr(module, way)(-batch)))
    if way == "by_value":  # which ends if its condition holds
        assert runs.failure == ""
    else:
        first = getattr(Loops, way).__code__.co_firstlineno
        line = int(re.search(rf"{re.escape(__file__)}:(\d+)", runs.failure)[1])
        assert first < line <= first + 4, runs.failure
