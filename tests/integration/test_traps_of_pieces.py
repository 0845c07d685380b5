"""Ways in which even pieces might train another thing than DDP without a word; docs/parity.md lists them all."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.parity.cell import Subject, on_all_ranks, train_batch
from lightning_mist.errors import PlanError
from lightning_mist.plan import OffloadRatios
from lightning_mist.runtime.communication.transport import complete
from lightning_mist.runtime.parameters.even_shards import FlatShard
from lightning_mist.strategy.training.whole_model import attach_engine
from tests.integration.parity import make_plan, map_of
from tests.integration.test_even_shards import MOVED, RANKS, ROWS, Odd, batches_of

PLANS = [(1, None), (2, MOVED), (3, None)]
STEPS = (2, 3, 0, 0)
"""Of batches: in the first all ranks use every parameter, in the second one does, in the others nobody uses one."""


class Small(Odd):
    """With a parameter of one entry, whose state has the same form, whole and in pieces."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.randn(1))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.one.sigmoid().mean()


class Full(Small):
    """Without a gradient of no entries, of which torch knows no largest one, under DDP neither."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.ones(2))


def odd(dtype=torch.float64, kind=Small, masters=None):
    torch.manual_seed(3)
    module = kind().to(masters or dtype)
    steps = tuple(
        tuple({name: value.to(dtype) for name, value in batch.items()} for batch in batches_of(step)) for step in STEPS
    )
    return Subject(
        name="odd",
        module=module,
        module_map=map_of(copy.deepcopy(module).to(dtype), steps[0][0]),
        batches=steps,
        dtype=dtype,
        has_masters=masters is not None,
    )


def plan_of(model, zero, offload):
    layers = max(1, len(model.module_map.blocks))
    return make_plan([layers], degrees=[RANKS], rows=ROWS, zero=zero, offload=offload)


def compare(habit, zero, offload, *, model=None, tolerance=1e-10):
    """What a habit ends with is what it ends with where every rank updates everything."""
    model = model or odd()
    plans = plan_of(model, 0, None), plan_of(model, zero, offload)
    wanted, found = (on_all_ranks(model, plan, partial(habit, model=model)) for plan in plans)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def begun(engine, make):
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    optimizer = make(trained)
    engine.take_optimizer(optimizer)
    engine.hollow()
    return optimizer


def stepped(engine, optimizer, *closure):
    optimizer.step(*closure)
    complete(engine.executor.gather_parameters())


class Looking(torch.optim.SGD):
    """Has every gradient in the shape of its parameter, which would be broadcast otherwise."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            assert all(p.grad is None or p.grad.shape == p.shape for p in group["params"])
        return loss


momentum = partial(Looking, lr=0.1, momentum=0.9, weight_decay=0.1)


def nodes_are_kept(engine, model):
    """Somebody holds the nodes that accumulate gradients, made before pieces were ever shown, and more in each step."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    held = [parameter.view_as(parameter) for parameter in trained]
    optimizer, losses = begun(engine, momentum), []
    for batches in model.batches:

        def closure(batches=batches):
            optimizer.zero_grad()
            losses.append(train_batch(engine, batches[engine.rank]))
            return losses[-1]

        stepped(engine, optimizer, closure)
    assert all(one.grad_fn.next_functions[0][0].variable.shape == one.shape for one in held)
    return losses, engine.module_values()


def several_batches_add_up(engine, model, *, set_to_none):
    """A step for two batches, of which one alone may use a parameter; what is zeros goes on to decay and to move."""
    optimizer, losses = begun(engine, momentum), []
    for index, batches in enumerate(model.batches * 2):
        losses.append(train_batch(engine, batches[engine.rank]))
        if index % 2:
            stepped(engine, optimizer)
            optimizer.zero_grad(set_to_none=set_to_none)
    return losses, engine.module_values()


def clipped_by(engine, model, *, norm_type, max_norm):
    optimizer, norms = begun(engine, momentum), []
    for batches in model.batches:
        optimizer.zero_grad()
        norms.append(engine.clip_by_norm(optimizer, max_norm, norm_type=norm_type))
        train_batch(engine, batches[engine.rank])
        norms.append(engine.clip_by_norm(optimizer, max_norm, norm_type=norm_type))
        stepped(engine, optimizer)
    return norms, engine.module_values()


class Plugin:
    def __init__(self, scaler):
        self.scaler = scaler


def scaled(engine, model, *, make):
    """One rank's gradients overflow in the second and in the last step, which all ranks skip."""
    optimizer, losses = begun(engine, make), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    attach_engine(Plugin(scaler), engine)
    for index, batches in enumerate(model.batches):
        optimizer.zero_grad()
        factor = torch.inf if index % 2 and engine.rank == 0 else 1.0
        step = lambda batch, factor=factor: engine.module.training_step(batch, 0) * factor  # noqa: E731
        _, loss = engine.train_batch(
            dict(batches[engine.rank]), step, loss_scale=scaler.scale(torch.ones((), dtype=torch.float32))
        )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        complete(engine.executor.gather_parameters())
        losses.append(scaler.get_scale())
    attach_engine(Plugin(scaler), None)
    state = engine.owned(optimizer).state().get("state", {})
    return losses, engine.module_values(), {number: dict(entry) for number, entry in state.items()}


HABITS = {
    "nodes are kept": nodes_are_kept,
    "zeros stay": partial(several_batches_add_up, set_to_none=False),
    "batches add up": partial(several_batches_add_up, set_to_none=True),
}


@pytest.mark.parametrize(("zero", "offload"), PLANS)
@pytest.mark.parametrize("habit", HABITS)
def test_habits_train_as_where_every_rank_updates_everything(habit, zero, offload):
    compare(HABITS[habit], zero, offload)


@pytest.mark.parametrize(("norm_type", "max_norm"), [(1.0, 1.0), (3.0, 0.1), (float("inf"), 0.01), (2.0, 0.0)])
def test_norms_of_every_order_are_of_whole_gradients(norm_type, max_norm):
    compare(partial(clipped_by, norm_type=norm_type, max_norm=max_norm), 1, None, model=odd(kind=Full))


@pytest.mark.parametrize(("zero", "offload"), PLANS)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_scaler_skips_a_step_of_all_pieces(name, zero, offload):
    more = {"momentum": 0.9} if name == "SGD" else {"amsgrad": True}
    make = partial(getattr(torch.optim, name), lr=1e-2, fused=True, **more)
    compare(partial(scaled, make=make), zero, offload, model=odd(torch.float32), tolerance=1e-6)


@pytest.mark.parametrize("zero", [1, 3])
def test_what_lies_between_parameters_is_in_no_norm_and_no_overflow(zero):
    def unwritten(shard, dtype, extra=0):
        return torch.full((shard.numel + extra,), torch.inf, dtype=dtype)

    habit = partial(scaled, make=partial(torch.optim.AdamW, lr=1e-2))
    with mock.patch.object(FlatShard, "buffer", unwritten):
        compare(habit, zero, None, model=odd(torch.float32), tolerance=1e-6)
        compare(partial(clipped_by, norm_type=2.0, max_norm=0.05), zero, None)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_closure_that_raises_leaves_parameters_whole(zero):
    def raising(engine, model):
        optimizer = begun(engine, momentum)
        train_batch(engine, model.batches[0][engine.rank])
        before = engine.module_values()

        def closure():
            raise ValueError("in the closure")

        with pytest.raises(ValueError, match="in the closure"):
            optimizer.step(closure)
        shapes = [parameter.shape for parameter in engine.module.parameters()]
        assert shapes == [parameter.shape for parameter in model.module.parameters()]
        after = engine.module_values()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        stepped(engine, optimizer)
        return engine.module_values()

    compare(raising, zero, None)


@pytest.mark.parametrize("offload", [None, OffloadRatios(optimizer=1.0)])
def test_state_made_with_the_optimizer_has_the_type_of_masters(offload):
    def types(engine, model):
        optimizer = begun(engine, partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1))
        for batches in model.batches:
            optimizer.zero_grad()
            train_batch(engine, batches[engine.rank])
            stepped(engine, optimizer)
        engine.executor.flush()
        assert {entry["sum"].dtype for entry in optimizer.state.values()} <= {torch.float32}
        return engine.module_values()

    compare(types, 1, offload, model=odd(torch.bfloat16, masters=torch.float32), tolerance=1e-6)


@pytest.mark.parametrize(("zero", "offload"), [(0, None), *PLANS])
def test_torchs_fused_momentum_that_begins_late_raises_as_under_ddp(zero, offload):
    def late(engine, model):
        optimizer = begun(engine, partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True))
        for batches in (model.batches[2], *model.batches):
            optimizer.zero_grad()
            train_batch(engine, batches[engine.rank])
            stepped(engine, optimizer)

    model = odd()
    with pytest.raises(TypeError, match="but got NoneType"):
        on_all_ranks(model, plan_of(model, zero, offload), partial(late, model=model))


class Looked(Odd):
    """Looks a table up in a way that has sparse gradients, which no module's attribute says."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 23))

    def training_step(self, batch, batch_idx):
        found = F.embedding((batch["x"][:, 0] > 0).long(), self.table, sparse=True)
        return super().training_step({**batch, "x": batch["x"] + found}, batch_idx)


@pytest.mark.parametrize(("zero", "offload"), PLANS)
def test_sparse_gradients_are_refused_on_every_rank(zero, offload):
    def refused(engine, model):
        begun(engine, momentum)
        with pytest.raises(PlanError, match=r"the gradient of table is torch\.sparse_coo"):
            train_batch(engine, model.batches[0][engine.rank])

    model = odd(kind=Looked)
    on_all_ranks(model, plan_of(model, zero, offload), partial(refused, model=model))
