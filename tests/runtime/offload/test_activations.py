"""What layers keep for backward, in host memory meanwhile: the same bits whatever the delays, every wait needed."""

import gc
from collections import defaultdict
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_mist.devices import HostOps, ops_of
from lightning_mist.errors import TraceError
from lightning_mist.runtime.host_memory import CopyStreams, HostPool
from lightning_mist.runtime.offload.activations import OffloadedActivations
from lightning_mist.runtime.recording import StorageMeter
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.stage_program import StageUnits, lines_of
from tests.devices.happens_before import HappensBefore
from tests.devices.kinds import DEVICES
from tests.devices.late_host import LateHost
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture
from tests.runtime.offload.weak import weak_copies

pytestmark = pytest.mark.usefixtures("ended_streams")

WIDTH, ROWS = 24, 32


class Fused(nn.Module):
    """Keeps three views of one storage, its input twice, and a row sum that is too small to move."""

    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.wide(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(torch.tanh(q) * k.sigmoid() * v)


class Marker(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, reach):
        ctx.reach = reach
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.reach()
        return gradient, None


class Walk:
    """Layers one after another with what the schedule says between them."""

    def __init__(self, layers, ops, *, ratio=1.0, pool=None):
        self.layers, self.streams = layers, CopyStreams(ops)
        self.pool = HostPool(ops) if pool is None else pool
        held = [p for layer in layers for p in (*layer.parameters(), *layer.buffers())]
        self.activations = OffloadedActivations(defaultdict(lambda: ratio), held, self.streams, self.pool)
        units = range(len(layers))
        self.units = {0: StageUnits(order=tuple(units), activations=frozenset(units))}

    def lines(self, kind, microbatch):
        actions = [Action(0, way, microbatch) for way in (ActionKind.FORWARD, ActionKind.BACKWARD)]
        forward, backward = lines_of(actions, self.units)
        return list(forward if kind is ActionKind.FORWARD else backward)

    def forward(self, x, microbatch=0):
        self.left = self.lines(ActionKind.FORWARD, microbatch)
        with self.activations.hooks(()):
            for unit, layer in enumerate(self.layers):
                self.reach(ActionKind.FORWARD, unit)
                x = layer(x)
                x = Marker.apply(x, lambda unit=unit: self.reach(ActionKind.BACKWARD, unit))
            self.rest()
        return x

    def backward(self, loss, microbatch=0):
        self.left = self.lines(ActionKind.BACKWARD, microbatch)
        loss.backward()
        self.rest()

    def reach(self, kind, unit):
        while (action := self.left.pop(0)).kind is not kind:
            self.activations.perform(action)
        assert action.unit == unit
        moves = any(line.kind is ActionKind.STORE_ACTIVATIONS and line.unit == unit for line in self.left)
        self.activations.reach(action, moves=moves)

    def rest(self):
        for action in self.left:
            self.activations.perform(action)
        self.left = []


def make_layers(count=4, cls=Fused):
    torch.manual_seed(5)
    return [cls() for _ in range(count)]


def inputs(device=None):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(6)).to(device).requires_grad_()


def gradients(layers, *, ops=None, ratio=1.0, microbatches=2, device=None):
    walk = None if ops is None else Walk(layers, ops, ratio=ratio)
    x, losses = inputs(device), []
    for number in range(microbatches):
        if walk is None:
            y = x * (number + 1)
            for layer in layers:
                y = layer(y)
            losses.append((y**2).mean())
        else:
            losses.append((walk.forward(x * (number + 1), number) ** 2).mean())
    for number, loss in enumerate(losses):
        loss.backward() if walk is None else walk.backward(loss, number)
    if walk is not None:
        walk.activations.forget()
        ops.synchronize()
    found = [x.grad, *(p.grad for layer in layers for p in layer.parameters()), *map(torch.Tensor.detach, losses)]
    for layer in layers:
        layer.zero_grad()
    return found


@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("first_seed", range(0, 100, 20))
def test_delays_change_no_bit(first_seed, ratio):
    layers = make_layers()
    wanted = gradients(layers)
    with weak_copies():
        for seed in range(first_seed, first_seed + 20):
            assert all(map(torch.equal, gradients(layers, ops=LateHost(seed=seed), ratio=ratio), wanted)), seed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_each_device_does_it(ratio, device):
    layers = [layer.to(device) for layer in make_layers(12)]
    found = gradients(layers, ops=ops_of(device), ratio=ratio, microbatches=4, device=device)
    assert all(map(torch.equal, found, gradients(layers, microbatches=4, device=device)))


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_nothing_but_events_orders_the_copies(ratio):
    races = HappensBefore()
    gradients(make_layers(), ops=LateHost(seed=1, observer=races), ratio=ratio)
    assert races.races == []


def test_what_leaves_is_kept_until_it_has_left():
    ops = LateHost(seed=3)
    with weak_copies(), mock.patch.object(CopyStreams, "wait", return_value=None):
        # What a graph keeps is gone with it.
        Walk(make_layers(), ops).forward(inputs())
        with pytest.raises(RuntimeError, match="freed while it was copied"):
            ops.synchronize()


BROKEN = {
    "what is stored is not computed yet": ("store", lambda streams, t, s: streams._copy(streams._store, t, s, ())),
    "what is loaded has not left": ("load", lambda streams, t, s, after: streams._copy(streams._load, t, s, ())),
}


@pytest.mark.parametrize("what", BROKEN)
def test_every_wait_is_needed(what):
    name, broken = BROKEN[what]
    layers, races = make_layers(), HappensBefore()
    ops = LateHost(observer=races)
    with mock.patch.object(CopyStreams, name, broken):
        walk = Walk(layers, ops)
        for number in range(3):
            with _told(ops):
                walk.backward((walk.forward(inputs(), number) ** 2).mean(), number)
        ops.synchronize()
    assert races.races


class _told(torch.utils._python_dispatch.TorchDispatchMode):
    """Tells a host's observer what operators of this thread use."""

    def __init__(self, ops):
        super().__init__()
        self.ops = ops

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        reads = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        writes = [a for a in torch.utils._pytree.tree_leaves(result) if isinstance(a, torch.Tensor)]
        self.ops.launch(lambda: None, reads=reads, writes=[t for t in writes if all(t is not r for r in reads)])
        return result


def test_with_all_operators_told_nothing_is_reported():
    races = HappensBefore()
    ops = LateHost(seed=2, observer=races)
    walk = Walk(make_layers(), ops)
    for number in range(3):
        with _told(ops):
            walk.backward((walk.forward(inputs(), number) ** 2).mean(), number)
    ops.synchronize()
    assert races.races == []


def test_layers_take_no_memory_of_the_device_until_their_backward():
    layers, meter = make_layers(8), StorageMeter()
    peaks = {}
    for ratio in (0.0, 0.5, 1.0):
        walk = Walk(layers, HostOps(), ratio=ratio)
        for _ in range(2):
            gc.collect()
            meter.reset()
            start = meter.current_bytes
            with meter:
                walk.backward((walk.forward(inputs()) ** 2).mean())
            walk.activations.forget()
        peaks[ratio] = meter.peak_bytes - start
    kept = ROWS * WIDTH * 4 * 6
    assert peaks[0.0] - peaks[0.5] == pytest.approx((peaks[0.0] - peaks[1.0]) / 2, rel=0.1)
    assert peaks[0.0] - peaks[1.0] > 4 * kept
    assert walk.pool.nbytes == pytest.approx(walk.streams.stored_bytes / 2, rel=0.05)


def test_what_arrives_when_a_batch_fails_is_waited_for():
    races = HappensBefore()
    ops = LateHost(seed=1, observer=races)
    walk = Walk(make_layers(), ops)
    y = walk.forward(inputs())
    whole = []
    load = walk.streams.load
    walk.streams.load = lambda targets, sources, after: (whole.extend(targets), load(targets, sources, after))[1]
    walk.activations.perform(Action(0, ActionKind.LOAD_ACTIVATIONS, 0, 1))
    walk.activations.forget()
    ops.launch(lambda: None, writes=whole)
    assert whole
    assert races.races == []
    del y


def test_host_memory_is_used_again():
    walk = Walk(make_layers(), HostOps())
    for number in range(4):
        walk.backward((walk.forward(inputs(), number) ** 2).mean(), number)
        taken = walk.pool.nbytes
        if number == 0:
            first = taken
    assert taken == first
    for number in range(2):
        walk.forward(inputs(), number)
        walk.activations.forget()
    assert walk.pool.nbytes == first


def test_one_storage_moves_once_however_many_layers_save_it():
    class Sharing(nn.Module):
        def forward(self, x):
            return (x * x[:, :1]).tanh() + x.sigmoid()

    layers = make_layers(3, Sharing)
    wanted = gradients(layers)
    ops = LateHost(seed=4)
    assert all(map(torch.equal, gradients(layers, ops=ops), wanted))
    walk = Walk(layers, ops)
    walk.backward(walk.forward(inputs()).sum())
    # Each layer keeps its input, the tanh and the sigmoid.
    assert walk.streams.stored_bytes == 9 * ROWS * WIDTH * 4
    assert walk.streams.loaded_bytes == walk.streams.stored_bytes


def test_a_small_view_of_a_large_storage_stays():
    big = torch.randn(50 * ROWS, WIDTH)

    class Masked(nn.Module):
        def forward(self, x):
            return x * big[:ROWS]

    walk = Walk(make_layers(2, Masked), HostOps())
    x = inputs()
    y = walk.forward(x)
    assert walk.streams.stored_bytes <= ROWS * WIDTH * 4
    walk.backward(y.sum())
    assert torch.equal(x.grad, big[:ROWS] ** 2)


def test_a_change_in_place_is_found_as_autograd_finds_it():
    class Careless(nn.Module):
        def forward(self, x):
            y = x * 2.0
            z = y.sigmoid() * y
            y.add_(1.0)
            return z

    walk = Walk(make_layers(1, Careless), HostOps())
    with pytest.raises(TraceError, match="needed for backward was changed in place"):
        walk.backward(walk.forward(inputs()).sum())


def test_a_change_in_place_of_what_stays_is_found_too():
    small = torch.ones(WIDTH)

    class Careless(nn.Module):
        def forward(self, x):
            return x * small

    walk = Walk(make_layers(2, Careless), HostOps())
    y = walk.forward(inputs())
    small.add_(1.0)
    with pytest.raises(TraceError, match="needed for backward was changed in place"):
        walk.backward(y.sum())


def test_a_backward_inside_the_step_is_refused():
    walk = Walk(make_layers(), HostOps())
    x = inputs()
    y = walk.forward(x)
    walk.reach = lambda kind, unit: None
    with pytest.raises(TraceError, match=r"may not run a backward of its own .* use offload\.activations = 0"):
        torch.autograd.grad(y.sum(), x)


def test_casts_of_weights_are_not_moved():
    layers = [nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)]
    walk = Walk(layers, HostOps())
    with torch.autocast("cpu", torch.bfloat16):
        y = walk.forward(inputs())
    assert walk.streams.stored_bytes == ROWS * WIDTH * 2 * 3
    walk.backward(y.float().sum())
