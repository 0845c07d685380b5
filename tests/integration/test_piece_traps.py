"""What people do to weights, gradients and options between batches, while ranks have pieces of parameters.

Every project is held against one process that does the same, in double precision but where it says so.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.parity.cell import Subject, on_all_ranks, train_batch
from lightning_mist.errors import PlanError
from lightning_mist.plan import OffloadRatios
from lightning_mist.runtime.communication.transport import complete
from lightning_mist.schedule.flats import stage_flats
from tests.integration.parity import make_plan, map_of
from tests.plans import plan_of
from tests.tiers import tiered

STEPS, ROWS = 4, 4

STATE, SOME = OffloadRatios(optimizer=0.5), OffloadRatios(optimizer=0.4, gradients=1.0, parameters=0.5)

PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "moved1": {"zero": 1, "offload": STATE},
    "moved2": {"zero": 2, "offload": SOME},
    "moved3": {"zero": 3, "offload": SOME},
    "hybrid1": {"zero": 1, "degrees": [4], "shard": 2},
    "hybrid3": {"zero": 3, "degrees": [4], "shard": 2},
    "moved0": {"zero": 0, "offload": OffloadRatios(gradients=1.0)},
}
WHOLE = ("zero1", "zero2", "hybrid1")
"""Plans that leave all parameters on every rank between batches."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(13, 20), nn.LayerNorm(13), nn.Linear(20, 13, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    def __init__(self, last=None) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(9, 13), nn.ModuleList([Block(), Block()]), nn.Linear(13, 9)
        self.double()
        self.behind = nn.Identity() if last is None else last()

    def training_step(self, batch, batch_idx):
        x = self.first(batch["x"])
        for block in self.blocks:
            x = block(x)
        return (self.behind(self.last(x)).mean(-1) - batch["y"]).square().mean()


class Phases(nn.Module):
    """Complex weights, which a row uses or not."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.mix = (nn.Parameter(torch.randn(shape, dtype=torch.complex128)) for shape in ((70,), (9, 9)))

    def forward(self, x):
        if x.detach().sum() > 0:
            return x
        mixed = x.to(torch.complex128) @ self.mix
        return (
            mixed.real + 0.1 * mixed.imag.square() + (self.turn * self.turn.conj()).real.mean() + self.turn.imag.mean()
        )


class Signed(nn.Module):
    """Gradients are zeros with signs, and some that are no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rest = (nn.Parameter(-torch.zeros(count, dtype=torch.float64)) for count in (300, 70))

    def forward(self, x):
        signs = torch.where(torch.arange(300) % 3 == 0, -0.0, 0.0).double()
        signs[1::50] = torch.nan
        self.weight.register_hook(lambda gradient: signs)
        return x + 0 * self.weight.sum() + (0 * self.rest.sum() if x.detach().sum() > 0 else 0)


class Wide(nn.Module):
    """A norm in 32 bits inside of layers in 16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(9, 40), nn.LayerNorm(40), nn.Linear(40, 9)

    def forward(self, x):
        return self.down(self.norm(self.up(x).float()).to(x.dtype)).tanh()


def in_16_bits(module):
    module.bfloat16()
    module.behind.norm.float()


def adam(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.05)


def turns_on(module, optimizer, step):
    for group in optimizer.param_groups:
        group.update(momentum=0.9 if step else 0.0, nesterov=step > 1, maximize=step == 2, weight_decay=0.1 * step)


def toggles(module, optimizer, step):
    module.blocks[1].requires_grad_(step % 2 == 1)
    module.first.bias.requires_grad_(step % 2 == 0)


def rebinds(module, optimizer, step):
    for parameter in module.blocks.parameters():
        parameter.data = parameter.data * 0.9


def by_vector(module, optimizer, step):
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat * 0.99, module.parameters())


def loads(module, optimizer, step):
    module.load_state_dict({name: value * 0.9 for name, value in module.state_dict().items()})


def ties(module, optimizer, step):
    module.blocks[1].up.weight.data = module.blocks[0].up.weight.data


def transposes(module, optimizer, step):
    module.first.weight.data = module.first.weight.data.t().contiguous().t()


def presets(module, optimizer, step):
    optimizer.zero_grad = lambda: None
    for parameter in module.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """A project, the order of the norm that it clips to, what it does behind each step, and why it is refused."""

    last: Any = None
    clips: float | None = None
    change: Any = None
    optimize: Any = adam
    act: Any = lambda *_: None
    plans: tuple[str, ...] = tuple(PLANS)
    tolerance: float = 1e-10
    reason: str = ""
    first: tuple[str, ...] = field(default=())


TRAPS = {
    "options turned on": Trap(optimize=sgd, act=turns_on, first=("moved2",)),
    "toggled": Trap(act=toggles, first=("zero2", "moved3")),
    "rebound": Trap(act=rebinds, plans=WHOLE, first=("hybrid1",)),
    "rebound by vector": Trap(act=by_vector, plans=WHOLE, first=("zero2",)),
    "loaded": Trap(act=loads, plans=WHOLE, first=("zero1",)),
    "clipped": Trap(clips=2.0, first=("hybrid3", "moved2")),
    "clipped by the largest": Trap(clips=float("inf"), plans=(*WHOLE, "zero3", "hybrid3"), first=("hybrid1",)),
    "complex": Trap(last=Phases, first=("zero1", "moved3")),
    "signs of zeros": Trap(last=Signed, optimize=sgd, plans=tuple(PLANS)[:6], tolerance=0, first=("zero2", "moved3")),
    "wide norms": Trap(last=Wide, change=in_16_bits, plans=tuple(PLANS)[:6], tolerance=0, first=("moved2",)),
    "tied": Trap(act=ties, plans=WHOLE, reason="come to lie in the same memory", first=("zero1",)),
    "transposed": Trap(act=transposes, plans=WHOLE, reason="the strides of first.weight", first=("hybrid1",)),
    "gradients preset": Trap(act=presets, plans=WHOLE, reason="the gradient of .* replaced", first=("zero2",)),
    "gradients preset, moved": Trap(
        act=presets, plans=("moved0",), reason="the gradient of .* replaced", first=("moved0",)
    ),
}


@cache
def prepared(name):
    """A project's module, map and batches, and the values that one process ends with, by number of ranks."""
    torch.manual_seed(3)
    trap = TRAPS[name]
    module = Net(trap.last)
    if trap.change is not None:
        trap.change(module)
    dtype = module.first.weight.dtype
    batches = tuple(
        tuple({"x": torch.randn(ROWS, 9, dtype=dtype), "y": torch.randn(ROWS, dtype=dtype)} for _ in range(4))
        for _ in range(STEPS)
    )
    found = map_of(module, batches[0][0])
    return Subject(name=name, module=module, module_map=found, batches=batches, dtype=dtype)


@cache
def alone(name, ranks):
    trap, model = TRAPS[name], prepared(name)
    module = copy.deepcopy(model.module)
    optimizer = trap.optimize(module)
    for step, batches in enumerate(model.batches):
        optimizer.zero_grad()
        for batch in batches[:ranks]:
            (module.training_step(batch, 0) / ranks).backward()
        if trap.clips is not None:
            nn.utils.clip_grad_norm_(module.parameters(), 0.05, trap.clips)
        optimizer.step()
        trap.act(module, optimizer, step)
    return {key: parameter.detach() for key, parameter in module.named_parameters()}


def trained(engine, trap, model):
    optimizer = trap.optimize(engine.module)
    engine.take_optimizer(optimizer)
    engine.hollow()
    for step, batches in enumerate(model.batches):
        optimizer.zero_grad()
        train_batch(engine, batches[engine.rank])
        if trap.clips is not None:
            engine.clip_by_norm(optimizer, 0.05, norm_type=trap.clips)
        optimizer.step()
        complete(engine.executor.gather_parameters())
        trap.act(engine.module, optimizer, step)
    return engine.module_values()


def bits(value):
    return (torch.view_as_real(value) if value.is_complex() else value).contiguous().view(torch.uint8)


CASES = [(name, plan) for name, trap in TRAPS.items() for plan in trap.plans]
FIRST = [(name, plan) for name, trap in TRAPS.items() for plan in trap.first]


@pytest.mark.parametrize(("name", "label"), tiered(CASES, FIRST))
def test_it_ends_where_one_process_does_or_is_refused(name, label):
    trap, model, options = TRAPS[name], prepared(name), {"degrees": [2], **PLANS[label]}
    plan = make_plan([len(model.module_map.blocks)], rows=ROWS, **options)
    assert bool(stage_flats(plan, model.module_map, 0)) == (options["zero"] > 0)
    work = partial(trained, trap=trap, model=model)
    if trap.reason:
        with pytest.raises(PlanError, match=trap.reason):
            on_all_ranks(model, plan, work)
        return
    found = on_all_ranks(model, plan, work)[0]
    for key, value in alone(name, options["degrees"][0]).items():
        if trap.tolerance == 0:
            assert torch.equal(bits(found[key]), bits(value)), key
        else:
            torch.testing.assert_close(found[key], value, rtol=0, atol=trap.tolerance, msg=key)


def test_devices_in_another_order_than_their_ranks_share_parameters_out_whole():
    name, plan = "toggled", plan_of(2 * ROWS, 1, {"layers": 2, "devices": (1, 0), "zero": 2})
    model = prepared(name)
    assert stage_flats(plan, model.module_map, 0) == ()
    found = on_all_ranks(model, plan, partial(trained, trap=TRAPS[name], model=model))[0]
    for key, value in alone(name, 2).items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-10, msg=key)


@pytest.mark.parametrize(("zero", "is_noticed"), [(0, False), (1, True)])
def test_hooks_of_steps_that_come_in_training_are_noticed(zero, is_noticed):
    model = prepared("loaded")

    def hook(optimizer, *_):
        raise AssertionError("never called")

    def work(engine):
        optimizer = adam(engine.module)
        engine.take_optimizer(optimizer)
        owned = engine.owned(optimizer)
        owned.check()
        handles = [optimizer.register_step_pre_hook(hook), register_optimizer_step_post_hook(hook)]
        for handle in handles:
            with pytest.raises(PlanError, match=r"hook .*hook was put on") if is_noticed else nullcontext():
                owned.check()
            handle.remove()
        owned.check()

    on_all_ranks(model, make_plan([2], degrees=[2], rows=ROWS, zero=zero), work)
