"""Optimizer state in host memory: the same bits whatever the delays, and every wait is needed."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_mist.devices import HostOps, ops_of
from lightning_mist.leaves import plain_leaves
from lightning_mist.runtime.host_memory import CopyStreams, DeviceBuffers, HostPool, is_host, padded_bytes
from lightning_mist.runtime.offload.optimizer_state import OffloadedState
from lightning_mist.runtime.recording import StorageMeter
from lightning_mist.schedule.action import TAIL
from lightning_mist.schedule.stage_program import update_rows
from tests.devices.happens_before import HappensBefore
from tests.devices.kinds import DEVICES
from tests.devices.late_host import LateHost
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture
from tests.packed import PACKED, Packed
from tests.runtime.offload.weak import weak_copies

pytestmark = pytest.mark.usefixtures("ended_streams")

UNITS, STEPS = 5, 4


def make(side=4, device=None):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(side, side, generator=generator).to(device)) for _ in range(UNITS)]


def offloaded(parameters, optimizer, ops, *, moved=None, pool=None):
    units = {(0, index): [parameter] for index, parameter in enumerate(parameters)}
    moved = parameters if moved is None else moved
    keys = [key for key, (parameter,) in units.items() if any(parameter is item for item in moved)]
    pool = pool or HostPool(ops)
    return OffloadedState(
        optimizer, units, moved, update_rows(list(units), {"O": keys}), streams=CopyStreams(ops), pool=pool
    )


def give_gradients(parameters, number):
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)


def train(ops=None, *, steps=STEPS, moved=None, optimizer=torch.optim.AdamW, side=4, device=None):
    parameters = make(side, device)
    made = optimizer(parameters, lr=1e-2)
    state = None if ops is None else offloaded(parameters, made, ops, moved=moved and [parameters[i] for i in moved])
    for number in range(steps):
        give_gradients(parameters, number)
        made.step()
    if state is not None:
        state.settle()
    return parameters, made


def assert_same(found, wanted):
    for p, other in zip(found[0], wanted[0], strict=True):
        assert torch.equal(p, other)
        for key, value in wanted[1].state[other].items():
            assert torch.equal(found[1].state[p][key].to(value.device), value), key


@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_delays_change_no_bit(first_seed):
    wanted = train()
    with weak_copies():
        for seed in range(first_seed, first_seed + 20):
            assert_same(train(LateHost(seed=seed)), wanted)


def test_what_the_optimizer_made_is_kept_until_it_has_left():
    with (
        weak_copies(),
        mock.patch.object(OffloadedState, "_free", lambda _, leaving: leaving.clear()),
        pytest.raises(RuntimeError, match="freed while it was copied"),
    ):
        train(LateHost(seed=1))


@pytest.mark.parametrize("moved", [[0, 1, 2, 3, 4], [1, 3], [4]])
def test_nothing_but_events_orders_the_copies(moved):
    races = HappensBefore()
    train(LateHost(seed=1, observer=races), moved=moved)
    assert races.races == []


def test_rooms_are_made_where_memory_may_be_in_use():
    """An allocator gives out at once what computing has used last, and may not have begun to use."""
    races = HappensBefore()
    ops, ensure = LateHost(seed=1, observer=races), DeviceBuffers.ensure

    def made(buffers, units):
        before = list(map(id, buffers._buffers))
        result = ensure(buffers, units)
        ops.launch(lambda: None, writes=[buffer for buffer in buffers._buffers if id(buffer) not in before])
        return result

    with mock.patch.object(DeviceBuffers, "ensure", made):
        train(ops)
    assert races.races == []


BROKEN = {
    "what arrives is not waited for": ("wait", lambda streams, event: None),
    "a buffer is filled before it is empty": (
        "load",
        lambda streams, targets, sources, after: streams._copy(streams._load, targets, sources, ()),
    ),
    "state leaves before it is updated": (
        "store",
        lambda streams, targets, sources: streams._copy(streams._store, targets, sources, ()),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_every_wait_is_needed(what):
    name, broken = BROKEN[what]
    races = HappensBefore()
    with mock.patch.object(CopyStreams, name, broken):
        train(LateHost(observer=races))
    assert races.races


def test_between_steps_state_is_in_host_memory():
    parameters, optimizer = train(HostOps(), moved=[0, 2])
    for index, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        assert is_host(state["exp_avg"].untyped_storage()) == is_host(state["exp_avg_sq"].untyped_storage())
        assert is_host(state["exp_avg"].untyped_storage()) == (index in (0, 2))
        assert not is_host(state["step"].untyped_storage())


def test_state_that_was_there_before_moves_and_keeps_its_place():
    parameters, optimizer = train(None, steps=2)
    wanted = copy.deepcopy([p.detach() for p in parameters])
    pool = HostPool(HostOps())
    state = offloaded(parameters, optimizer, HostOps(), pool=pool)
    taken = pool.nbytes
    assert taken == 2 * UNITS * 64
    give_gradients(parameters, 2)
    optimizer.step()
    state.end()
    give_gradients(parameters, 3)
    optimizer.step()
    assert pool.nbytes == taken
    assert_same((parameters, optimizer), train(None))
    assert not torch.equal(parameters[0], wanted[0])


class Replacing(torch.optim.Optimizer):
    """Makes a new tensor for its state in every step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + p.grad
                p.sub_(state["mean"], alpha=group["lr"])


def test_state_that_is_replaced_leaves_from_where_it_is():
    races = HappensBefore()
    assert_same(train(LateHost(seed=1, observer=races), optimizer=Replacing), train(None, optimizer=Replacing))
    assert races.races == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["foreach", "fused", "loop", "Adafactor", "Replacing"])
def test_each_device_does_it(name, device):
    optimizer = {
        "foreach": partial(torch.optim.AdamW, foreach=True),
        "fused": partial(torch.optim.AdamW, fused=True),
        "loop": partial(torch.optim.AdamW, foreach=False),
        "Adafactor": torch.optim.Adafactor,
        "Replacing": Replacing,
    }[name]
    found = train(ops_of(device), optimizer=optimizer, side=256, device=device)
    assert_same(found, train(None, optimizer=optimizer, side=256, device=device))
    large = [value for state in found[1].state.values() for value in state.values() if value.numel() > 1]
    assert large
    assert all(is_host(value.untyped_storage()) for value in large)


def test_a_vocabulary_passes_in_parts_beside_what_has_none():
    """One element, and what gets its first gradient late, are updated whole, through buffers of layers' size."""
    shapes, rooms, trained = [(40, 40), (40, 40), (400, 40), (1,), (40, 40)], [], []
    ensure = DeviceBuffers.ensure
    for ops in (None, LateHost(seed=1)):
        generator = torch.Generator().manual_seed(1)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        made, units = torch.optim.AdamW(parameters), {(0, 0): parameters[:1], (0, 1): parameters[1:2]}
        units[0, TAIL] = parameters[2:]
        if ops is not None:
            rows = update_rows(list(units), {"O": list(units)})
            state = OffloadedState(made, units, parameters, rows, streams=CopyStreams(ops), pool=HostPool(ops))
        with mock.patch.object(DeviceBuffers, "ensure", lambda *given: (rooms.append(given[1]), ensure(*given))[1]):
            for number in range(STEPS):
                give_gradients(parameters, number)
                if number < 2:
                    parameters[-1].grad = None
                made.step()
        trained.append((parameters, made))
    state.settle()
    assert_same(trained[1], trained[0])
    assert max(map(padded_bytes, rooms[-1])) == 2 * 4 * 40 * 40


def test_the_device_holds_two_units_of_state():
    side = 64
    parameters, ops = make(side), HostOps()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    state = offloaded(parameters, optimizer, ops)
    meter, peaks = StorageMeter(), []
    for number in range(3):
        give_gradients(parameters, number)
        meter.observe([t for p in parameters for t in (p, p.grad)])
        meter.reset()
        with meter:
            optimizer.step()
        peaks.append(meter.peak_bytes)
    state.settle()
    unit = side * side * 4
    base = 2 * UNITS * unit
    # Two buffers of two moments, and what a step of AdamW takes beside for one parameter: twice its size.
    assert base + 4 * unit <= max(peaks) <= base + 6.1 * unit
    assert max(peaks[1:]) <= base + 6.1 * unit


@pytest.mark.parametrize("name", PACKED)
def test_packed_state_is_moved_as_what_it_is_made_of(name):
    """With delays: codes and scales move, also those of a new object; one table for all stays."""
    (wanted, plain), (found, optimizer) = (
        train(ops, optimizer=lambda parameters, lr: PACKED[name](parameters), side=16)
        for ops in (None, LateHost(seed=3))
    )
    for p, q in zip(wanted, found, strict=True):
        assert torch.equal(p, q)
        mine, other = (dict(plain_leaves(state)) for state in (optimizer.state[q], plain.state[p]))
        assert mine.keys() == other.keys()
        for path, leaf in mine.items():
            assert torch.equal(leaf, other[path])
            assert is_host(leaf.untyped_storage()) == (path != ("qmap1",))
        if name == "under a key":
            assert optimizer.state[q]["qmap1"] is optimizer.table
            assert optimizer.state[q]["step"] == STEPS
        else:
            assert type(optimizer.state[q]["momentum"]) is Packed


class Shares(torch.optim.SGD):
    """Every parameter's state leads to the parameter, to numbers of all, to what has a note, and to one thing twice."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.all = {"count": 0}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    own = torch.zeros_like(parameter)
                    own.note = "mine"
                    state |= {"weight": parameter.data, "noted": own, "all": self.all, "mean": torch.zeros(4)}
                    state |= {"one": (one := torch.zeros(4)), "same": [one]}
                state["mean"].lerp_(parameter.grad.mean(1), 0.5)
                state["one"].add_(state["mean"])
                state["mean"].sub_(state["same"][0])
                state["noted"].add_(parameter.grad)
                state["all"]["count"] += 1
                parameter.sub_(state["noted"] + state["mean"][:, None] + state["weight"], alpha=group["lr"])


def test_what_is_not_a_parameters_own_stays_where_it_is():
    (wanted, plain), (found, optimizer) = (train(ops, optimizer=Shares) for ops in (None, LateHost(seed=3)))
    assert optimizer.all == plain.all == {"count": UNITS * STEPS}
    for p, q in zip(wanted, found, strict=True):
        assert torch.equal(p, q)
        state = optimizer.state[q]
        assert state["all"] is optimizer.all
        assert state["weight"].data_ptr() == q.data_ptr()
        assert state["noted"].note == "mine"
        assert state["same"][0] is state["one"]
        assert [path for path, leaf in plain_leaves(state) if is_host(leaf.untyped_storage())] == [("mean",)]
