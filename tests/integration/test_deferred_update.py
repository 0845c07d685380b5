"""The optimizer's step, taken layer by layer in the next batch's forward, is the step taken at once, to the bit."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from benchmarks.parity.cell import on_all_ranks, subject, train_batch
from benchmarks.parity.plans import Group, Layout, make_plan
from lightning_mist.plan import OffloadRatios
from lightning_mist.runtime.communication.transport import complete
from lightning_mist.runtime.executor import Executor
from lightning_mist.runtime.offload.optimizer_state import OffloadedState
from lightning_mist.runtime.parameters.absent_parameters import AbsentParameter
from lightning_mist.schedule import ActionKind
from lightning_mist.strategy.training.whole_model import attach_engine
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture
from tests.tiers import tiered

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.usefixtures("ended_streams"),
]

STEPS, SCALED_STEPS = 8, 14
"""A cycle of the rates and the beginning of the next; with a scaler, until three steps have been skipped."""

STATE = OffloadRatios(optimizer=1.0)
SOME = OffloadRatios(optimizer=0.3, parameters=0.3)
ALL = OffloadRatios(parameters=1.0, gradients=1.0, optimizer=1.0, activations=1.0)

PLANS = {
    "one device": Layout(groups=(Group(offload=STATE),)),
    "one device, gradients": Layout(groups=(Group(offload=OffloadRatios(gradients=1.0)),), parts=2),
    "one device, all": Layout(groups=(Group(offload=ALL, checkpointed=1),), parts=2),
    "data parallel": Layout(groups=(Group(dp=2, offload=SOME),), parts=2),
    "ZeRO 1": Layout(groups=(Group(dp=2, zero=1, offload=STATE),)),
    "ZeRO 2": Layout(groups=(Group(dp=2, zero=2, offload=SOME),), parts=2),
    "ZeRO 3": Layout(groups=(Group(dp=2, zero=3, offload=ALL),), parts=2),
    "tensor parallel": Layout(groups=(Group(tp=2, offload=STATE),)),
    "pipeline": Layout(groups=(Group(offload=STATE), Group(dp=2, zero=1, offload=ALL))),
    "chunks": Layout(groups=(Group(offload=ALL),) * 2, schedule="interleaved-1f1b", chunks=2),
    "zero bubble": Layout(groups=(Group(offload=STATE),) * 2, schedule="zb-h1", parts=2),
}
FIRST = ("one device", "ZeRO 3", "pipeline")


class ClearsItself(torch.optim.SGD):
    """Lets go of every second weight's gradient in its step."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() % 16 == 0:
                    parameter.grad = None


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "rate in a tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), eps=1e-3, foreach=False),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "clears itself": lambda groups: ClearsItself(groups, lr=1e-2, momentum=0.9),
}


class Plugin:
    """Has a scaler, as a precision plugin."""

    def __init__(self, scaler):
        self.scaler = scaler


def make_optimizer(module, name):
    matrices, rest = ([p for p in module.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    return OPTIMIZERS[name]([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": torch.tensor(3e-3)}])


def at_once():
    return mock.patch("lightning_mist.runtime.offload.optimizer_state.defers_update", return_value=False)


def clip(engine, optimizer, scaler):
    if scaler is not None:
        scaler.unscale_(optimizer)
    engine.clip_by_norm(optimizer, 0.05)


def scaled_step(engine, factor, batch):
    return engine.module.training_step(batch, 0) * factor


def train(layout, optimizer="AdamW", *, scaled=False, accumulated=1, clear=None, each=None, hook=None):
    """Losses and values of clipped steps with a rate that changes in each, and what ``each`` gave after every step."""
    model = subject("nano_even", torch.float32 if scaled else torch.float64)
    plan = make_plan(layout, len(model.module_map.blocks))

    def work(engine):
        made = make_optimizer(engine.module, optimizer)
        if hook is not None:
            made.register_step_post_hook(partial(hook, engine))
        engine.take_optimizer(made)
        engine.hollow()
        rates = torch.optim.lr_scheduler.CyclicLR(made, 1e-4, 1e-2, step_size_up=3, cycle_momentum=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
        if scaled:
            attach_engine(Plugin(scaler), engine)
        losses, seen, skipped = [], [], 0
        for step in range(SCALED_STEPS if scaled else STEPS):
            for part in range(accumulated):
                batch = model.batches[(step + part) % 2][engine.rank]
                if not scaled:
                    losses.append(train_batch(engine, batch))
                    continue
                # In some steps one rank's gradients are not finite.
                factor = torch.inf if step % 5 == 3 and engine.rank == 0 else 1.0
                step_of = partial(scaled_step, engine, factor)
                result, loss = engine.train_batch(batch, step_of, loss_scale=scaler.scale(torch.ones(())))
                scaler.scale(loss).backward()
                if factor == 1.0:
                    losses.append(result.loss.detach())
            clip(engine, made, scaler if scaled else None)
            before = scaler.get_scale()
            scaler.step(made) if scaled else made.step()
            if scaled:
                scaler.update()
                skipped += scaler.get_scale() < before
            complete(engine.executor.gather_parameters())
            rates.step()
            made.zero_grad() if clear is None else clear(engine, made, step)
            seen.append(None if each is None else each(engine))
        assert skipped > 2 or not scaled
        return losses, engine.module_values(), seen

    return on_all_ranks(model, plan, work)


def assert_same(found, wanted):
    for (losses, values, seen), (wanted_losses, expected, others) in zip(found, wanted, strict=True):
        assert all(map(torch.equal, losses, wanted_losses))
        assert values.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in values.items())
        assert seen == others


def compare(layout, *args, **kwargs):
    found = train(layout, *args, **kwargs)
    with at_once():
        assert_same(found, train(layout, *args, **kwargs))


@pytest.mark.parametrize("label", tiered(PLANS, FIRST))
def test_curves_are_those_of_steps_taken_at_once(label):
    compare(PLANS[label])


@pytest.mark.combinations
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "clears itself"])
@pytest.mark.parametrize("label", ["one device, all", "ZeRO 2"])
def test_whatever_the_optimizer(label, optimizer):
    compare(PLANS[label], optimizer)


@pytest.mark.parametrize("optimizer", tiered(["AdamW", "fused AdamW"], ["AdamW"]))
@pytest.mark.parametrize("label", tiered(["one device", "data parallel", "ZeRO 3"], ["one device"]))
def test_steps_that_a_scaler_skips(label, optimizer):
    compare(PLANS[label], optimizer, scaled=True)


@pytest.mark.parametrize("label", tiered(["one device, all", "ZeRO 1", "pipeline"], ["ZeRO 1"]))
def test_gradients_of_several_batches(label):
    compare(PLANS[label], accumulated=2)
    compare(PLANS[label], clear=lambda _, optimizer, __: optimizer.zero_grad(set_to_none=False))


def as_ddp(layout):
    """The same ranks, with all that they update in front of them."""
    return replace(layout, groups=tuple(replace(group, offload=OffloadRatios(), zero=0) for group in layout.groups))


def now_and_then(engine, optimizer, step):
    """Not after every third step, where gradients are clipped again, and after another third by zeros."""
    if step % 3:
        optimizer.zero_grad(set_to_none=step % 3 == 1)
    else:
        engine.clip_by_value(optimizer, 1e-3)


@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize("label", tiered(PLANS, ("one device, gradients", "ZeRO 1", "ZeRO 3")))
def test_gradients_that_nobody_clears_are_added_up(label, is_deferred):
    wanted = train(as_ddp(PLANS[label]), clear=now_and_then)
    with nullcontext() if is_deferred else at_once():
        found = train(PLANS[label], clear=now_and_then)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def nobody(*_):
    pass


@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize("label", tiered(PLANS, ("one device", "one device, all", "ZeRO 2", "ZeRO 3")))
def test_gradients_that_the_step_clears_are_gone(label, is_deferred):
    wanted = train(as_ddp(PLANS[label]), "clears itself", clear=nobody)
    with nullcontext() if is_deferred else at_once():
        found = train(PLANS[label], "clears itself", clear=nobody)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def checkpoint(engine):
    values = {name: value.double().sum().item() for name, value in engine.module_values().items()}
    state = engine.optimizer_state()
    moments = {number: entry["exp_avg"].sum().item() for number, entry in state.get("state", {}).items()}
    return values, moments


@pytest.mark.parametrize("label", tiered(PLANS, ("ZeRO 1",)))
def test_a_checkpoint_between_steps_is_that_of_the_last_step(label):
    compare(PLANS[label], each=checkpoint)


def look(engine):
    return sum(float(p.detach().square().sum()) for p in engine.module.parameters())


@pytest.mark.parametrize("label", ["one device", "tensor parallel"])
def test_who_looks_has_the_step_taken(label):
    compare(PLANS[label], each=look)


def clamp_module(engine, *_):
    for parameter in engine.module.parameters():
        parameter.detach().clamp_(-0.05, 0.05)


def clamp_groups(_, optimizer, *__):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.detach().clamp_(-0.05, 0.05)


@pytest.mark.parametrize("hook", [clamp_module, clamp_groups])
@pytest.mark.parametrize("label", ["one device", "one device, gradients"])
def test_a_hook_of_the_step_finds_it_taken(label, hook):
    found = train(PLANS[label], hook=hook)
    assert_same(found, train(Layout(groups=(Group(),), parts=PLANS[label].parts), hook=hook))


def test_a_step_is_left_to_the_next_batch():
    def count(engine):
        return sum(type(p) is AbsentParameter for p in engine.module.parameters())

    ((_, _, seen),) = train(PLANS["one device"], each=count)
    assert min(seen) == len(list(subject("nano_even", torch.float64).module.parameters()))


def test_a_stage_updates_two_units_before_it_waits_for_its_input(monkeypatch):
    """What the clock counts as done meanwhile."""
    updated, waiting = [], []
    run, perform = Executor.run, OffloadedState.perform

    def watched(executor, *args, **given):
        works = run(executor, *args, **given)
        if executor.mesh.stage == 1:
            updated.clear()
            work = next(works)
            waiting.append([str(action) for action in updated if action.stage == 1])
            yield work
        yield from works

    def noted(state, action):
        updated.extend([action] * (action.kind is ActionKind.UPDATE))
        perform(state, action)

    monkeypatch.setattr(Executor, "run", watched)
    monkeypatch.setattr(OffloadedState, "perform", noted)
    train(Layout(groups=(Group(offload=STATE),) * 2, parts=2))
    assert waiting == [[], *[["1UPDATE:2", "1UPDATE:3"]] * (STEPS - 1)]
