from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_mist.model.cuts.recorder import Refused, StepRecorder
from lightning_mist.model.fakes.fake_modules import address_of, fake_parameters
from lightning_mist.plan.calls import block_value, intercepted, is_block_value

A, B = "blocks.0", "blocks.1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.register_buffer("mean", torch.zeros(3))


class Run:
    """One run of a step on fakes: ``run(lambda net, x: ...)`` gives its record."""

    def __init__(self, attempt=0):
        self.net = Net()
        originals = {id(p): name for name, p in self.net.named_parameters()}
        self.real = dict(self.net.named_parameters())
        self.slots = fake_parameters(self.net, FakeTensorMode(allow_non_fake_inputs=True))
        self.recorder = StepRecorder(
            slots=self.slots,
            originals=originals,
            buffers={address_of(b): name for name, b in self.net.named_buffers()},
            guess=False,
            attempt=attempt,
        )

    def __call__(self, step):
        x = torch.ones(2, 3)
        self.recorder.know([x])
        blocks = [self.net.get_submodule(name) for name in (A, B)]
        with intercepted(blocks, lambda at, run: partial(self.recorder.call_block, (A, B)[at], run)), self.recorder:
            output = step(self.net, x)
        return self.recorder.finish(output)


def through(net, x):
    for block in net.blocks:
        x = block(x)
    return x


def test_blocks_outputs_and_uses_of_parameters():
    record = Run()(lambda net, x: through(net, net.first(x)) @ net.first.weight)
    assert record.order == [A, B]
    assert [output.leaves for output in record.outputs] == [(("tensor", (2, 3), True),)] * 2
    assert record.parameter_uses["first", "weight"] == {-1, 1}
    assert record.parameter_uses["blocks.1.0", "bias"] == {1}
    noticed = (record.leaking, record.closures, record.reads, record.problems, record.stray_parameters)
    assert not any(noticed)


def test_values_are_known_by_where_they_were_made_and_last_used():
    def step(net, x):
        early = net.first(x)
        h = through(net, early)
        return h + early

    record = Run()(step)
    assert (record.values[block_value(0, 0)].defined, record.values[block_value(0, 0)].last_used) == (0, 1)
    assert record.values[block_value(1, 0)].requires_grad
    crossing = {key[2] for key, value in record.values.items() if value.defined < 0 <= 1 == value.last_used}
    assert crossing == {"linear"}
    assert not any(is_block_value(key) for key, value in record.values.items() if value.defined < 0)


def test_what_does_not_depend_on_parameters_is_no_value():
    record = Run()(lambda net, x: through(net, x * 2 + torch.arange(3)))
    assert all(value.defined >= 0 for value in record.values.values())


@pytest.mark.parametrize(("attempt", "is_zero"), [(0, False), (1, True)])
def test_drawn_numbers_are_values_and_differ_between_runs(attempt, is_zero):
    drawn = []

    def step(net, x):
        drawn.append(torch.rand(2, 3))
        return through(net, x) * drawn[0]

    record = Run(attempt)(step)
    (value,) = [value for key, value in record.values.items() if key[2] == "rand"]
    assert (value.defined, value.last_used) == (-1, 1)
    assert (not drawn[0].any()) is is_zero


def test_a_random_number_that_is_read_is_noted_with_its_value():
    record = Run()(lambda net, x: through(net, x) * torch.full((), 0.5).bernoulli_(1.0).item())
    (read,) = record.reads
    assert (read.function, read.source, read.value, read.region) == (".item()", "random numbers", 1.0, 1)
    assert "test_recorder.py" in read.line


def test_reads_of_what_depends_on_parameters_are_guessed():
    answers = []

    def step(net, x):
        h = net.blocks[0](net.first(x))
        answers.extend([bool(h.sum() > 0), h.sum().item()])
        return net.blocks[1](h)

    record = Run()(step)
    assert answers == [False, 1.0]
    assert [(r.function, r.region, r.is_inner, r.source) for r in record.reads] == [
        ("__bool__()", 0, False, "parameters"),
        (".item()", 0, False, "parameters"),
    ]


def test_references_past_the_slots_are_noticed():
    run = Run()
    record = run(lambda net, x: through(net, x) @ run.real["first.weight"])
    assert list(record.stray_parameters) == ["first.weight"]


def test_a_block_that_reads_more_than_its_arguments_is_noticed():
    run = Run()
    inner = run.net.blocks[1][0]
    hidden = {}
    inner.register_forward_hook(lambda module, args, output: output + hidden["early"])

    def step(net, x):
        hidden["early"] = net.first(x)
        return through(net, x)

    assert list(run(step).closures) == [B]


def test_inner_values_that_are_read_outside_leak():
    run, kept = Run(), []
    run.net.blocks[0][0].register_forward_hook(lambda module, args, output: kept.append(output))
    record = run(lambda net, x: through(net, x) + kept[0])
    assert record.leaking == {0}


def test_repeated_and_nested_blocks():
    record = Run()(lambda net, x: net.blocks[0](through(net, x)))
    assert list(record.repeated) == [A]
    run = Run()
    run.net.blocks[0][0].register_forward_hook(lambda module, args, output: run.net.blocks[1](output))
    assert run(lambda net, x: net.blocks[0](x)).nested == {B: A}


def test_writes_are_told_apart_by_their_target():
    def step(net, x):
        h = net.first(x)
        net.mean.copy_(h.mean(0))
        net.first.weight.data.add_(1)
        with torch.no_grad():
            net.first.bias.add_(1)
        h = h + 1
        return through(net, h.mul_(2))

    record = Run()(step)
    assert list(record.buffers) == ["mean"]
    assert "first.bias" in record.written_parameters
    assert [region for _, region in record.writes if region < 0]
    assert record.problems == []


def test_a_real_tensor_that_receives_an_unknown_value_is_unknown_until_undone():
    run, kept = Run(), []

    def step(net, x):
        total = torch.zeros(3)
        kept.append(total)
        total += net.first(x).sum(0)
        return through(net, x) + total

    record = run(step)
    assert isinstance(kept[0], FakeTensor)
    assert record.problems == []
    run.recorder.undo()
    assert type(kept[0]) is torch.Tensor
    assert kept[0].tolist() == [0.0] * 3


def test_an_unknown_value_in_a_part_of_a_known_tensor_is_a_problem():
    def step(net, x):
        rows = torch.zeros(2, 3)
        rows[0].add_(net.first(x)[0])
        return through(net, x)

    (problem,) = Run()(step).problems
    assert "written into a part of another tensor (add_ at " in problem


def test_talking_to_other_processes_ends_the_run():
    def step(net, x):
        try:
            return torch.ops._c10d_functional.wait_tensor(net.first(x))
        except Exception:
            return None

    with pytest.raises(Refused, match=r"talks to other processes itself \(_c10d_functional::wait_tensor at "):
        Run()(step)


def test_sizes_that_depend_on_values_end_the_run_with_a_read():
    run = Run()
    with pytest.raises(Refused):
        run(lambda net, x: torch.unique(through(net, x)))
    assert [read.source for read in run.recorder.record.reads] == ["parameters"]


def test_masks_that_are_known_select_a_known_number_of_rows():
    def step(net, x):
        return through(net, net.first(x)[torch.tensor([True, False])])

    record = Run()(step)
    assert record.indexes_by_mask
    assert record.outputs[0].leaves[0][1] == (1, 3)
    assert record.reads == []
