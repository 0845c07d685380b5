"""Optimizers over pieces of parameters: two ranks end where one process does, to the bit."""

import copy
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.parity.cell import ROWS as PARITY_ROWS
from benchmarks.parity.cell import Subject, on_all_ranks, subject, train_batch
from lightning_mist.errors import PlanError
from lightning_mist.plan import OffloadRatios
from lightning_mist.runtime.communication.transport import complete
from lightning_mist.runtime.parameters import AbsentGradient
from lightning_mist.schedule.flats import stage_flats
from tests.integration.parity import make_plan, map_of, train_reference
from tests.tiers import tiered

RANKS, STEPS, ROWS = 2, 4, 3


class Odd(nn.Module):
    """Sizes that no cut meets, a weight used twice, one frozen, a number, nothing, and some without gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(23, 31), nn.Linear(31, 23, bias=False)
        self.norm = nn.LayerNorm(31)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.sometimes, self.never = nn.Parameter(torch.randn(70)), nn.Parameter(torch.randn(3))

    def training_step(self, batch, batch_idx):
        x = self.norm(self.first(batch["x"])).tanh()
        x = self.second(x) * self.scale + batch["x"] + self.nothing.sum()
        x = self.first(x).tanh().mean(-1)
        # The row says whether it counts, as a gate does that not every batch opens.
        if bool(batch["x"][0, 0] > 0):
            x = x * self.sometimes.sigmoid().mean()
        return (x - batch["y"]).square().mean() + self.frozen.sum() * 0


def make(cls, module, **options):
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:2], "lr": 3e-3}, {"params": trained[2:5]}, {"params": trained[5:], "weight_decay": 0}]
    return cls(groups, lr=1e-2, weight_decay=0.1, **options)


OPTIMIZERS = {
    **{
        cls.__name__: partial(make, cls)
        for cls in (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.Adamax,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
            torch.optim.ASGD,
            torch.optim.RMSprop,
        )
    },
    "Rprop": lambda module: torch.optim.Rprop([p for p in module.parameters() if p.requires_grad]),
    "SGD, momentum": partial(make, torch.optim.SGD, momentum=0.9, nesterov=True),
    "AdamW, fused": partial(make, torch.optim.AdamW, fused=True, amsgrad=True),
    "Adam, foreach": partial(make, torch.optim.Adam, foreach=True),
    "RMSprop, centered": partial(make, torch.optim.RMSprop, centered=True, momentum=0.5),
}


def batches_of(step):
    found = [{"x": torch.randn(ROWS, 23), "y": torch.randn(ROWS)} for _ in range(RANKS)]
    for rank, batch in enumerate(found):
        batch["x"][:, 0] = 1.0 if step == 2 or (step > 0 and rank == 1) else -1.0
    return found


def trained(engine, model, optimize):
    optimizer = optimize(engine.module)
    engine.take_optimizer(optimizer)
    engine.hollow()
    losses = []
    for batches in model.batches:
        optimizer.zero_grad()
        losses.append(train_batch(engine, batches[engine.rank]))
        optimizer.step()
        complete(engine.executor.gather_parameters())
    return losses, engine.module_values(), engine.owned(optimizer).state()


MOVED = OffloadRatios(optimizer=0.3, gradients=1.0, parameters=0.5)


@pytest.mark.parametrize("offload", [None, MOVED])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", tiered(OPTIMIZERS, ["AdamW, fused", "SGD, momentum", "Adagrad", "ASGD"]))
def test_two_ranks_train_as_one_to_the_bit(name, zero, offload):
    torch.manual_seed(3)
    module, steps = Odd(), tuple(tuple(batches_of(step)) for step in range(STEPS))
    module_map = map_of(module, steps[0][0])
    model = Subject(name="odd", module=module, module_map=module_map, batches=steps, dtype=torch.float32)
    plan = make_plan([max(1, len(module_map.blocks))], degrees=[RANKS], rows=ROWS, zero=zero, offload=offload)
    assert stage_flats(plan, module_map, 0)
    expected = train_reference(module, steps, OPTIMIZERS[name], math.inf)
    ranks = on_all_ranks(model, plan, partial(trained, model=model, optimize=OPTIMIZERS[name]))
    for rank, (losses, *_) in enumerate(ranks):
        assert losses == [found[rank] for found in expected.losses]
    for key, value in expected.parameters.items():
        assert torch.equal(ranks[0][1][key], value), key
    state, wanted = ranks[0][2]["state"], expected.optimizer["state"]
    assert state.keys() == wanted.keys()
    for number, entry in wanted.items():
        assert state[number].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(state[number][key]), torch.as_tensor(value)), (number, key)


def accumulated(engine, model, *, set_to_none):
    """Two steps, of two batches each; what is left of the first one's gradients goes, or becomes zeros."""
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    engine.take_optimizer(optimizer)
    engine.hollow()
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        for batch in [step[engine.rank] for step in model.batches[:2]]:
            train_batch(engine, batch)
        engine.clip_by_value(optimizer, 1e-2)
        optimizer.step()
        complete(engine.executor.gather_parameters())
    return engine.module_values()


@pytest.mark.parametrize(("zero", "set_to_none"), [(1, False), (3, True)])
def test_gradients_of_several_batches_are_added_up_in_pieces(zero, set_to_none):
    model = subject("nano_even", torch.float64)
    plans = [
        make_plan([len(model.module_map.blocks)], degrees=[RANKS], rows=PARITY_ROWS, zero=stage) for stage in (0, zero)
    ]
    work = partial(accumulated, model=model, set_to_none=set_to_none)
    wanted, found = (on_all_ranks(model, plan, work)[0] for plan in plans)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def clipped(engine, optimizer):
    """A scaler's factor, and clipping, behind the first of two batches too."""
    inverse = torch.tensor(1 / 64, dtype=torch.float64)
    with engine.unscaling(optimizer, inverse):
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(inverse)
    engine.clip_by_norm(optimizer, 0.05)


def cleared(engine, optimizer):
    optimizer.zero_grad()


def two_of_two(engine, model, change):
    """Two steps of two batches each, with a change of gradients behind the first batch."""
    optimizer = torch.optim.AdamW(engine.module.parameters(), lr=1e-2)
    engine.take_optimizer(optimizer)
    engine.hollow()
    for _ in range(2):
        optimizer.zero_grad()
        for place, step in enumerate(model.batches[:2]):
            train_batch(engine, step[engine.rank])
            if place == 0:
                change(engine, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        train_batch(engine, model.batches[0][engine.rank])
        optimizer.zero_grad()
        optimizer.step()  # of nothing
        complete(engine.executor.gather_parameters())
    return engine.module_values()


@pytest.mark.parametrize("change", [clipped, cleared])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_is_asked_of_gradients_is_asked_of_those_elsewhere(zero, change):
    model, layers = subject("nano_even", torch.float64), 4
    moved = OffloadRatios(gradients=0.5, optimizer=0.5)
    plans = [
        make_plan([layers], degrees=[RANKS], rows=PARITY_ROWS, zero=stage, offload=offload)
        for stage, offload in ((0, None), (zero, moved))
    ]
    wanted, found = (on_all_ranks(model, plan, partial(two_of_two, model=model, change=change))[0] for plan in plans)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def in_lightnings_order(engine, model):
    """Gradients are cleared between forward and backward, of one layer again behind it; a step is left out."""
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    engine.take_optimizer(optimizer)
    engine.hollow()
    norms = []
    for step in range(3):
        batch = copy.copy(model.batches[step % 2][engine.rank])
        _, loss = engine.train_batch(batch, lambda part: engine.module.training_step(part, 0), keeps_gradients=True)
        optimizer.zero_grad()
        loss.backward()
        if step == 2:
            for name, parameter in engine.module.named_parameters():
                parameter.grad = None if ".0." in name else parameter.grad
        norms.append(engine.clip_by_norm(optimizer, 0.05))
        if step != 1:
            optimizer.step()
            complete(engine.executor.gather_parameters())
    return norms, engine.module_values()


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_is_cleared_is_gone_wherever_it_is(zero, looks):
    model = subject("nano_even", torch.float64)
    if looks:
        seen = model.module_map.excluding("a hook reads parameters", "sharded_parameters")
        model = replace(model, module_map=seen)
    plans = [
        make_plan([4], degrees=[RANKS], rows=PARITY_ROWS, zero=stage, offload=offload)
        for stage, offload in ((0, None), (zero, OffloadRatios(gradients=1.0)))
    ]
    work = partial(in_lightnings_order, model=model)
    (norms, wanted), (found, values) = (on_all_ranks(model, plan, work)[0] for plan in plans)
    torch.testing.assert_close(found, norms, rtol=1e-12, atol=0)
    for name, value in wanted.items():
        torch.testing.assert_close(values[name], value, rtol=1e-12, atol=1e-12)


def overflown(engine, model, *, set_to_none):
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    engine.take_optimizer(optimizer)
    engine.hollow()
    batch, one = copy.copy(model.batches[0][engine.rank]), torch.ones(())
    _, loss = engine.train_batch(batch, lambda part: engine.module.training_step(part, 0) * torch.inf, loss_scale=one)
    loss.backward()
    found = [float(engine.agree_on_overflow({})[engine.device])]
    if engine.rank == 1:
        for name, parameter in engine.module.named_parameters():
            parameter.grad = parameter.grad if ".0." in name else None
        found.append(float(engine.executor.gradients.found))
    optimizer.zero_grad(set_to_none=set_to_none)
    return [*found, float(engine.agree_on_overflow({})[engine.device])]


@pytest.mark.parametrize(("zero", "set_to_none"), [(0, False), (1, False), (2, True)])
def test_an_overflow_counts_until_it_is_cleared(zero, set_to_none):
    model = subject("nano_even", torch.float32)
    plan = make_plan([4], degrees=[RANKS], rows=PARITY_ROWS, zero=zero, offload=OffloadRatios(gradients=1.0))
    assert on_all_ranks(model, plan, partial(overflown, model=model, set_to_none=set_to_none)) == [[1, 0], [1, 1, 0]]


class Raising(torch.optim.AdamW):
    left = 10**9

    def step(self, closure=None):
        self.left -= 1
        if self.left == 0:
            raise ValueError("at its end")
        return super().step(closure)


def raised(engine, model):
    optimizer = Raising(engine.module.parameters(), lr=1e-3)
    engine.take_optimizer(optimizer)
    engine.hollow()
    for left in (10**9, 2):
        optimizer.zero_grad()
        train_batch(engine, model.batches[0][engine.rank])
        before, optimizer.left = engine.module_values(), left
        with pytest.raises(ValueError, match="at its end") if left == 2 else nullcontext():
            optimizer.step()
            engine.executor.flush()
    optimizer.left = 10**9
    return before, engine.module_values()


@pytest.mark.parametrize("zero", [1, 3])
def test_values_are_those_of_their_parameters_after_an_optimizer_has_raised(zero):
    model = subject("nano_even", torch.bfloat16, masters=torch.float32)
    plan = make_plan([4], degrees=[RANKS], rows=PARITY_ROWS, zero=zero, offload=OffloadRatios(optimizer=1.0))
    with mock.patch("lightning_mist.runtime.offload.optimizer_state.defers_update", return_value=False):
        before, after = on_all_ranks(model, plan, partial(raised, model=model))[0]
    assert max(float((after[name] - value).abs().max()) for name, value in before.items()) < 5e-3


class Wide(nn.Module):
    """Layers of a size that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(401, 203), nn.Linear(203, 401)) for _ in range(3)])
        self.tail = nn.Linear(401, 1)

    def training_step(self, batch, batch_idx):
        x = batch["x"]
        for block in self.blocks:
            x = x + block(x).tanh()
        return (self.tail(x).squeeze(-1) - batch["y"]).square().mean()


def counted(engine, model):
    """Elements of state that a rank has, and how often a step calls each collective."""
    optimizer = torch.optim.AdamW(engine.module.parameters())
    engine.take_optimizer(optimizer)
    engine.hollow()
    calls, transport = Counter(), engine.executor.transport
    for name in ("reduce_scatter", "all_gather_into", "all_reduce", "reduce", "broadcast"):
        called = getattr(transport, name)
        setattr(transport, name, lambda *args, name=name, called=called: (calls.update([name]), called(*args))[1])
    train_batch(engine, model.batches[0][engine.rank])
    optimizer.step()
    complete(engine.executor.gather_parameters())
    state = sum(value.numel() for entry in optimizer.state.values() for value in entry.values() if value.dim())
    return state, calls


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("degree", tiered([2, 4, 8], [8]))
def test_ranks_have_alike_and_a_layer_takes_one_call_each_way(degree, zero):
    module, rows = Wide(), 2
    batches = tuple({"x": torch.randn(rows, 401), "y": torch.randn(rows)} for _ in range(degree))
    module_map = map_of(module, batches[0])
    model = Subject(name="wide", module=module, module_map=module_map, batches=(batches,), dtype=torch.float32)
    plan = make_plan([3], degrees=[degree], rows=rows, zero=zero)
    found = on_all_ranks(model, plan, partial(counted, model=model))
    states = [state for state, _ in found]
    assert sum(states) == 2 * sum(parameter.numel() for parameter in module.parameters())
    assert max(states) <= 1.01 * sum(states) / degree
    # Three layers and the tail; under ZeRO-1 layers are joined. The tail, and the layer below it, are there for both
    # passes. One call more says which gradients there are.
    reductions, gathers = {1: (2, 2), 2: (4, 4), 3: (4, 6)}[zero]
    wanted = {"reduce_scatter": reductions, "all_gather_into": gathers, "all_reduce": 1}
    assert all(calls == wanted for _, calls in found), found


def test_a_rank_without_anything_of_a_unit_takes_part():
    model = subject("nano_even", torch.bfloat16, masters=torch.float32)
    plans = [
        make_plan([4], degrees=[8], rows=PARITY_ROWS, zero=1, offload=offload)
        for offload in (None, OffloadRatios(optimizer=0.5))
    ]
    work = partial(two_of_two, model=model, change=lambda engine, optimizer: None)
    wanted, found = (on_all_ranks(model, plan, work)[0] for plan in plans)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def test_gradients_in_pieces_cannot_be_looked_at():
    model = subject("nano_even", torch.float64)
    plan = make_plan([len(model.module_map.blocks)], degrees=[RANKS], rows=PARITY_ROWS, zero=1)

    def look(engine):
        engine.take_optimizer(torch.optim.SGD(engine.module.parameters(), lr=0.1))
        engine.hollow()
        train_batch(engine, model.batches[0][engine.rank])
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape
                with pytest.raises(PlanError, match=r"shared out over ranks.*zero_stage = 0"):
                    parameter.grad.norm()

    on_all_ranks(model, plan, look)


@pytest.mark.parametrize("late", ["gradient", "strides"])
def test_what_is_put_in_place_later_ends_training_with_parameters_whole(late):
    model = subject("nano_even", torch.float64)
    plan = make_plan([len(model.module_map.blocks)], degrees=[RANKS], rows=PARITY_ROWS, zero=1)

    def change(engine):
        optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
        engine.take_optimizer(optimizer)
        engine.hollow()
        train_batch(engine, model.batches[0][engine.rank])
        *_, parameter = (p for group in optimizer.param_groups for p in group["params"] if p.dim() == 2)
        if late == "gradient":
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.data = parameter.data.t().contiguous().t()
        before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        with pytest.raises(PlanError, match=f"the {late} of .* were replaced"):
            optimizer.step()
        for name, p in engine.module.named_parameters():
            assert torch.equal(p, before[name])

    on_all_ranks(model, plan, change)


def test_stand_ins_are_cleared_beside_gradients_that_are_here():
    whole, here = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))
    whole.grad, here.grad = AbsentGradient.of(whole), torch.ones(())
    whole.grad.piece = piece = torch.ones(2)
    torch.optim.AdamW([whole, here], foreach=True).zero_grad(set_to_none=False)
    assert piece.eq(0).all()
    assert here.grad == 0
