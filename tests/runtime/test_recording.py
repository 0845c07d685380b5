"""Bytes against sums by hand, to the byte; seconds only for their number and order."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_mist.devices import ops
from lightning_mist.runtime.communication.transport import complete
from lightning_mist.runtime.recording import (
    ActionRecorder,
    AllocatorMeter,
    Recorded,
    StorageMeter,
    meter_memory,
    state_tensors,
)
from lightning_mist.schedule import Action
from lightning_mist.tensors import batch_tensors
from tests.integration.parity import make_plan
from tests.runtime.test_executor import World

ROWS, WIDTH, HIDDEN = 8, 16, 64
X, H, W = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN, 4 * WIDTH * HIDDEN  # bytes: input rows, hidden rows, one weight


def mlp() -> nn.Sequential:
    """Two weights of W bytes; its forward keeps the hidden row before the activation and after."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False))


def meter_of(*values: object) -> StorageMeter:
    meter = StorageMeter()
    meter.observe(batch_tensors(values))
    return meter


def test_counts_what_exists_at_entry_once() -> None:
    module, batch = mlp(), torch.randn(ROWS, WIDTH)
    meter = StorageMeter()
    meter.observe(state_tensors(module, batch={"x": [batch, batch[1:]], "y": (batch.T,)}))
    assert meter.current_bytes == meter.peak_bytes == 2 * W + X


def test_forward_without_gradients_keeps_one_operator_s_input_and_output() -> None:
    module, batch = mlp(), torch.randn(ROWS, WIDTH)
    meter = meter_of(list(module.parameters()), batch)
    with meter, torch.no_grad():
        out = module(batch)
    assert meter.peak_bytes == 2 * W + X + 2 * H  # around the activation: what goes in, what comes out
    assert meter.current_bytes == 2 * W + X + X
    del out
    assert meter.current_bytes == 2 * W + X


def test_forward_keeps_what_backward_needs() -> None:
    module, batch = mlp(), torch.randn(ROWS, WIDTH)
    meter = meter_of(list(module.parameters()), batch)
    with meter:
        out = module(batch)
    assert meter.current_bytes == 2 * W + X + (2 * H + X)
    del out
    gc.collect()
    assert meter.current_bytes == 2 * W + X


def test_backward_peak_and_gradients() -> None:
    module, batch = mlp(), torch.randn(ROWS, WIDTH)
    meter = meter_of(list(module.parameters()), batch)
    with meter:
        out = module(batch)
        seed = torch.ones_like(out)
        meter.reset()
        before = meter.current_bytes
        torch.autograd.backward([out], [seed])
    assert before == 2 * W + X + 2 * H + 2 * X
    # Nothing is freed before the second product's backward has made its weight's and its input's gradient: W + H. After
    # it the activation's output H is free, the activation's backward makes an H: W + H again. After that its input and
    # its output's gradient are free, and the first product's backward makes a W: 2 W + H - 2 H, which is less.
    assert meter.peak_bytes == before + W + H
    assert meter.current_bytes == 2 * W + X + 2 * W + 2 * X


def test_optimizer_step() -> None:
    module = mlp()
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False, fused=False)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    meter = StorageMeter()
    meter.observe(state_tensors(module, [optimizer]))
    assert meter.current_bytes == 4 * W
    with meter:
        optimizer.step()
    state = 2 * (2 * W + 4)  # two moments and a count of steps, for each weight
    assert meter.current_bytes == 4 * W + state
    # Each weight makes a square root and a denominator of its size, and the last one's denominator is freed only when
    # the next one's takes its name.
    assert meter.peak_bytes == 4 * W + state + 3 * W
    again = StorageMeter()
    again.observe(state_tensors(module, [optimizer]))
    assert again.current_bytes == 4 * W + state


def test_checkpointed_layer_keeps_its_input_only_and_its_recomputation_counts() -> None:
    first, second, batch = mlp(), mlp(), torch.randn(ROWS, WIDTH, requires_grad=True)
    base = 4 * W + X
    meter = meter_of(list(first.parameters()), list(second.parameters()), batch)
    with meter:
        out = checkpoint(second, checkpoint(first, batch, use_reentrant=False), use_reentrant=False)
        assert meter.current_bytes == base + 2 * X
        seed = torch.ones_like(out)
        meter.reset()
        torch.autograd.backward([out], [seed])
    # The second half of backward is the larger: the second layer's gradients exist, 2 W; the first layer's hidden rows
    # are recomputed, 2 H (not its output: recomputation stops with the last saved tensor); then as without
    # checkpointing, W + H. Of rows there are the output, its seed, and the gradient between the layers.
    assert meter.peak_bytes == base + 2 * W + 2 * H + W + H + 3 * X
    assert meter.current_bytes == base + 4 * W + 3 * X


def test_views_and_in_place_operators_cost_nothing() -> None:
    tensor = torch.zeros(4, 6)
    meter = meter_of(tensor)
    with meter:
        views = [tensor.view(24), tensor.t(), tensor[1:], tensor.add_(1)]
    assert meter.peak_bytes == 96
    assert len(views) == 4


def test_tensors_first_seen_as_an_operator_s_input_count() -> None:
    left, right = torch.zeros(100), torch.zeros(100)
    meter = meter_of(left)
    with meter:
        left.add_(right)
    assert meter.current_bytes == 800


def test_storage_resized_in_place_is_followed_and_the_method_put_back() -> None:
    original = torch.UntypedStorage.resize_
    tensor = torch.zeros(100)
    meter = meter_of(tensor)
    with meter:
        tensor.untyped_storage().resize_(0)
        assert meter.current_bytes == 0
        tensor.untyped_storage().resize_(800)
        assert meter.current_bytes == 800
    assert meter.peak_bytes == 800
    assert torch.UntypedStorage.resize_ is original


def test_compiled_code_runs_eagerly_inside_and_compiled_again_afterwards() -> None:
    """Under a mode torch would give a function up for good."""
    ran = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        return lambda *args: ran.append(True) or graph(*args)

    compiled = torch.compile(lambda x: 2 * x, backend=backend)
    with StorageMeter():
        compiled(torch.ones(3))
    assert not ran
    compiled(torch.ones(3))
    assert ran == [True]


def test_code_is_compiled_again_whichever_thread_stops_counting_last() -> None:
    ran, entered, left = [], threading.Event(), threading.Event()

    def elsewhere() -> None:
        with StorageMeter():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=elsewhere)
    with StorageMeter():
        thread.start()
        entered.wait(60)
    left.set()
    thread.join()

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        return lambda *args: ran.append(True) or graph(*args)

    torch.compile(lambda x: 3 * x, backend=backend)(torch.ones(3))
    assert ran == [True]


def test_meters_of_two_threads_count_what_their_own_thread_resizes() -> None:
    mine, other = StorageMeter(), StorageMeter()
    original = torch.UntypedStorage.resize_
    tensor = torch.zeros(100)

    def elsewhere() -> None:
        with other:
            tensor.untyped_storage().resize_(800)

    mine.__enter__()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    torch.zeros(1).untyped_storage().resize_(40)
    mine.__exit__(None, None, None)
    assert (other.peak_bytes, mine.peak_bytes) == (800, 40)
    assert torch.UntypedStorage.resize_ is original


def test_tensor_resized_by_an_operator_is_followed() -> None:
    tensor = torch.zeros(10)
    meter = meter_of(tensor)
    with meter:
        tensor.resize_(1000)
    assert meter.current_bytes == 4000


def test_a_failing_step_leaves_no_patch_and_no_mode() -> None:
    original = torch.UntypedStorage.resize_
    meter = StorageMeter()
    with pytest.raises(RuntimeError, match="shape"), meter:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert torch.UntypedStorage.resize_ is original
    before = meter.peak_bytes
    torch.zeros(1000)
    assert meter.peak_bytes == before


def test_entered_again_it_goes_on_counting() -> None:
    meter = StorageMeter()
    with meter:
        kept = torch.zeros(100)
    torch.zeros(10_000)  # not inside
    with meter:
        more = torch.zeros(50)
    assert meter.current_bytes == 600
    del kept, more
    meter.reset()
    assert meter.peak_bytes == 0


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_buffers_of_collectives_count() -> None:
    shard = torch.zeros(100)
    meter = meter_of(shard)
    with meter:
        whole = torch.empty(100)
        work = dist.broadcast(whole, 0, async_op=True)
        assert work is not None
        work.wait()
        dist.all_reduce(shard)
        parts = [torch.empty(100)]
        dist.all_gather(parts, shard)
    assert meter.peak_bytes == meter.current_bytes == 3 * 400
    del whole, parts, work
    gc.collect()
    assert meter.current_bytes == 400


def test_fake_tensors_take_no_memory() -> None:
    meter = StorageMeter()
    with FakeTensorMode(), meter:
        fake = torch.zeros(1000) + 1
    assert fake.shape == (1000,)
    assert meter.peak_bytes == 0


def test_memory_freed_between_operators_can_be_used_again() -> None:
    meter = StorageMeter()
    with meter:
        for _ in range(100):
            torch.zeros(1000)
    assert meter.peak_bytes == 4000
    assert meter.current_bytes == 0


def test_meter_is_chosen_by_device() -> None:
    assert isinstance(meter_memory(torch.device("cpu")), StorageMeter)
    assert isinstance(meter_memory(torch.device("cuda", 0)), AllocatorMeter)


@pytest.mark.gpu
def test_device_meter() -> None:
    device = torch.device("cuda", 0)
    meter = meter_memory(device)
    base = meter.current_bytes
    with meter:
        tensor = torch.zeros(2**20, device=device)
        other = tensor + 1
        del other
    assert meter.peak_bytes - base == 2 * 2**22
    assert meter.current_bytes - base == 2**22


CPU = torch.device("cpu")


class Pending:
    """Work whose waiting takes some seconds of the fake clock."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def wait(self):
        self.clock.now += self.seconds


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def run(self, *steps):
        """Compute for the first number of seconds, wait for the second, and so on."""
        for index, seconds in enumerate(steps):
            if index % 2:
                yield Pending(self, seconds)
            else:
                self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ops, "perf_counter", clock)
    return clock


def test_waiting_is_part_of_an_action_and_told_apart(clock):
    recorder, forward = ActionRecorder(CPU), Action.parse("0F1")
    recorder.is_on = True
    complete(recorder.around(forward, clock.run(1.0, 0.5, 2.0, 0.25, 4.0)))
    complete(recorder.around("sends", clock.run(0.0, 8.0)))
    clock.now += 16.0
    with recorder.phase("update"):
        clock.now += 32.0
    with recorder.phase("results", waits=True):
        clock.now += 64.0
    assert recorder.take() == (
        Recorded(action=forward, seconds=7.75, waited_seconds=0.75),
        Recorded(action="sends", seconds=8.0, waited_seconds=8.0),
        Recorded(action="update", seconds=32.0),
        Recorded(action="results", seconds=64.0, waited_seconds=64.0),
    )
    assert recorder.take() == ()


def test_off_it_runs_the_action_and_records_nothing(clock):
    recorder = ActionRecorder(CPU)
    complete(recorder.around("action", clock.run(1.0, 0.5)))
    with recorder.phase("update"):
        clock.now += 1.0
    assert clock.now == 102.5
    assert recorder.take() == ()


def test_an_error_goes_through(clock):
    recorder = ActionRecorder(CPU)
    recorder.is_on = True

    def run():
        yield Pending(clock, 1.0)
        raise ValueError("in the step")

    with pytest.raises(ValueError, match="in the step"):
        complete(recorder.around("action", run()))
    assert recorder.take() == ()


def test_a_work_that_was_waited_for_is_let_go():
    """Its tensor would otherwise stay until the next work comes."""
    recorder, alive = ActionRecorder(CPU), []
    recorder.is_on = True

    def run():
        work = Pending(Clock(), 0.0)
        alive.append(weakref.ref(work))
        yield work
        del work
        gc.collect()
        alive.append(alive[0]())
        yield Pending(Clock(), 0.0)

    complete(recorder.around("action", run()))
    assert alive[1] is None


@pytest.mark.parametrize("plan", [make_plan([2, 2], parts=2), make_plan([4], degrees=[2], zero=3)])
def test_every_action_of_a_batch_is_recorded_and_nothing_changes(plan):
    quiet, measured = World(plan), World(plan)
    measured.batches, measured.parts = quiet.batches, quiet.parts
    for rank in measured.ranks:
        rank.executor.recorder.is_on = True
    quiet.run()
    measured.run()
    for plain, rank in zip(quiet.ranks, measured.ranks, strict=True):
        found = rank.executor.recorder.take()
        assert [item.action for item in found] == [*rank.executor.actions, "sends"]
        assert all(0 <= item.waited_seconds <= item.seconds for item in found)
        assert any(item.seconds > 0 for item in found)
        assert plain.executor.recorder.take() == ()
        for name, gradient in plain.gradients().items():
            other = rank.gradients()[name]
            assert (gradient is None) == (other is None)
            assert gradient is None or torch.equal(gradient, other)


@pytest.mark.gpu
def test_on_a_device_events_tell_when_it_came_there():
    device = torch.device("cuda")
    recorder, values = ActionRecorder(device), torch.ones(4096, 4096, device=device)
    recorder.is_on = True
    with recorder.phase("products"):
        for _ in range(20):
            values = values @ values
    with recorder.phase("nothing"):
        pass
    torch.cuda.synchronize(device)
    products, nothing = recorder.take()
    assert products.seconds > nothing.seconds >= 0
