import copy

import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.runtime.recording import StorageMeter
from lightning_mist.runtime.stage.unit_runner import UnitRunner
from lightning_mist.schedule import Action
from lightning_mist.schedule.action import HEAD
from tests import zoo
from tests.integration.metered import Elsewhere
from tests.integration.parity import Rank, assert_equal, cast, make_plan, map_of, microbatches, reference, run_plan
from tests.memory_transport import InMemoryWorld, drive


class Recorder:
    """Stands in for values and gradients: notes what is asked of it."""

    def __init__(self):
        self.notes = []

    def __getattr__(self, name):
        return lambda key=None: self.notes.append(name if key is None else f"{name} {key[1]}")


LINES = {
    "0F0": "0UNSHARD:head 0UNSHARD:0 0F0:head 0RESHARD:head 0UNSHARD:1 0F0:0 0F0:1",
    "0B0": "0B0:1 0REDUCE:1 0RESHARD:1 0UNSHARD:head 0B0:0 0REDUCE:0 0RESHARD:0 0B0:head 0RESHARD:head",
}


@pytest.fixture
def runner():
    lines = {Action.parse(key): tuple(map(Action.parse, text.split())) for key, text in LINES.items()}
    recorder = Recorder()
    found = UnitRunner(lambda *_: lines, (), recorder, recorder, device=torch.device("cpu"), last_layer=1)
    return found, recorder.notes


def forward(runner, notes, values, blocks=(0, 1)):
    """A head and blocks that multiply by their values."""
    runner.begin(Action.parse("0F0"), marks=True)
    runner.start()
    notes.append("head")
    x = values[0] * 2.0
    for position in blocks:
        runner.before_block(position)
        notes.append(f"block {position}")
        x = x * values[position + 1]
        runner.after_block(position)
    runner.finish()
    return x, runner.take_marker()


def note_gradients(values, notes):
    for index, value in enumerate(values):
        value.register_post_accumulate_grad_hook(lambda _, index=index: notes.append(f"gradient {index - 1}"))


def test_forward_and_backward_keep_to_the_lines(runner):
    runner, notes = runner
    values = [torch.ones((), requires_grad=True) for _ in range(3)]
    x, marker = forward(runner, notes, values)
    expected = f"unshard {HEAD},unshard 0,ready {HEAD},head,reshard {HEAD},unshard 1,ready 0,block 0,ready 1,block 1"
    assert notes == expected.split(",")
    notes.clear()
    note_gradients(values, notes)
    runner.begin(Action.parse("0B0"), marks=False)
    runner.start()
    torch.autograd.backward([x, marker])
    runner.finish()
    expected = (
        f"ready 1,gradient 1,reduce 1,reshard 1,unshard {HEAD},ready 0,gradient 0,reduce 0,reshard 0,ready {HEAD},"
        f"gradient -1,reshard {HEAD}"
    )
    assert notes == expected.split(",")


def test_values_that_need_no_gradient_change_nothing(runner):
    """The markers are a chain of their own: frozen layers at the bottom do not hide where backward is."""
    runner, notes = runner
    values = [torch.ones(()), torch.ones(()), torch.ones((), requires_grad=True)]
    x, marker = forward(runner, notes, values)
    notes.clear()
    runner.begin(Action.parse("0B0"), marks=False)
    runner.start()
    torch.autograd.backward([x, marker])
    assert notes[-1] == f"ready {HEAD}"


def test_two_forwards_before_their_backwards(runner):
    runner, notes = runner
    values = [torch.ones((), requires_grad=True) for _ in range(3)]
    ends = [forward(runner, notes, values) for _ in range(2)]
    for x, marker in ends:
        notes.clear()
        runner.begin(Action.parse("0B0"), marks=False)
        runner.start()
        torch.autograd.backward([x, marker])
        runner.finish()
        assert [note for note in notes if "reduce" in note] == ["reduce 1", "reduce 0"]


@pytest.mark.parametrize("action", LINES)
def test_a_rank_without_rows_does_all_that_its_peers_wait_for(runner, action):
    runner, notes = runner
    runner.begin(Action.parse(action), marks=True)
    runner.finish()
    words = {"UNSHARD": "unshard", "RESHARD": "reshard", "REDUCE": "reduce"}
    lines = [Action.parse(text) for text in LINES[action].split()]
    assert notes == [f"{words[line.kind.value]} {line.unit}" for line in lines if line.microbatch is None]


def test_a_layer_that_is_left_out_is_passed_over(runner):
    runner, notes = runner
    forward(runner, notes, [torch.ones((), requires_grad=True)] * 3, blocks=(1,))
    assert "ready 0" not in notes
    assert [note for note in notes if "unshard" in note] == [f"unshard {HEAD}", "unshard 0", "unshard 1"]


@pytest.mark.parametrize("blocks", [(1, 0), (0, 0)])
def test_layers_in_another_order_are_refused(runner, blocks):
    runner, notes = runner
    with pytest.raises(TraceError, match=r"layer 0 was called after a later one, or twice.*zero_stage=1"):
        forward(runner, notes, [torch.ones((), requires_grad=True)] * 3, blocks=blocks)


class _Wide(nn.Module):
    """Eight equal layers whose parameters are all that takes memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(8))

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def peaks_of(zero):
    """Bytes that each of two ranks has before a batch, and at most in it, in layers; and the ranks."""
    module, layer = _Wide(), 256 * 256 * 4
    batches = [{"x": torch.randn(1, 256)} for _ in range(2)]
    plan = make_plan([8], degrees=[2], zero=zero, rows=1)
    module_map = map_of(module, batches[0], even_shards=False)
    world = InMemoryWorld(2)
    ranks = [
        Rank.make(copy.deepcopy(module), module_map, plan, index, Elsewhere(transport))
        for index, transport in enumerate(world.transports)
    ]

    def run(index):
        rank, meter = ranks[index], StorageMeter()
        rank.executor.engage()
        meter.observe(rank.module.parameters())
        start = meter.current_bytes
        works = rank.run(microbatches(plan, index, batches))
        while True:
            with meter:
                try:
                    work = next(works)
                except StopIteration:
                    return start / layer, meter.peak_bytes / layer
            yield work

    return drive([run(0), run(1)]), ranks


def test_the_peak_is_what_is_owned_and_two_layers():
    """Two ranks own every other of eight equal layers, so of two that are unsharded each rank lacks one."""
    sharded, ranks = peaks_of(3)
    whole, _ = peaks_of(2)
    for (start, peak), (start_whole, peak_whole) in zip(sharded, whole, strict=True):
        assert (start, start_whole) == (pytest.approx(4, rel=1e-3), 8)
        # Owned gradients, those of one layer on their way, and those of the layer that computes.
        assert peak <= (4 + 1) + (4 + 1 + 1) + 0.1
        assert peak_whole - peak == pytest.approx(8 - (4 + 1), abs=0.1)
    for rank in ranks:
        assert all(torch.isnan(parameter).all() for parameter in rank.executor.shards.away.values())


class _Penalised(nn.Module):
    """A step with a gradient penalty."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def training_step(self, batch, batch_idx):
        x = batch["x"].clone().requires_grad_()
        y = x
        for layer in self.layers:
            y = layer(y)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.pow(2).mean() + gradient.pow(2).mean()


def test_a_backward_inside_the_step():
    module = _Penalised().double()
    batches = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(2)]
    module_map = map_of(module, batches[0])
    original = torch.autograd._engine_run_backward
    plan = make_plan([3], degrees=[2], zero=2)
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))
    with pytest.raises(TraceError, match=r"the step runs a backward of its own .* use zero_stage=2"):
        run_plan(module, module_map, make_plan([3], degrees=[2], zero=3), batches)
    assert torch.autograd._engine_run_backward is original


def test_a_batch_that_failed_leaves_nothing_behind():
    torch.manual_seed(0)
    module, make_batch = zoo.make("plain")
    module.double()
    plan = make_plan([4], degrees=[2], zero=3)
    batches = [cast(make_batch(4), torch.float64) for _ in range(2)]
    module_map = map_of(module, batches[0])
    world = InMemoryWorld(2)
    ranks = [
        Rank.make(copy.deepcopy(module), module_map, plan, index, transport)
        for index, transport in enumerate(world.transports)
    ]
    parts = [microbatches(plan, index, batches) for index in range(2)]

    def step(rank):
        def fail(microbatch):
            rank.module.training_step(microbatch.value, 0)
            raise RuntimeError("the step failed")

        return fail

    def failing(rank, mine):
        with pytest.raises(RuntimeError, match="the step failed"):
            yield from rank.executor.run(mine, step(rank))

    drive([failing(rank, mine) for rank, mine in zip(ranks, parts, strict=True)])
    drive([rank.run(mine) for rank, mine in zip(ranks, parts, strict=True)])
    for batch in batches:
        (module.training_step(batch, 0) / 2).backward()
    for rank in ranks:
        for name, gradient in rank.gradients().items():
            wanted = module.get_parameter(name).grad
            torch.testing.assert_close(gradient, rank.every_part()[name].take(wanted))
