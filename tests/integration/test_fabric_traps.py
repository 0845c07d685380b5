"""Loops written to be trained wrongly by a plan, on two ranks: as under DDP, or an error."""

import lightning.fabric as lf
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

from lightning_mist import MistFabricStrategy
from tests.fits import VOCABULARY, plan
from tests.integration.test_fabric import STAGES, WHOLE, Logits, Loss
from tests.machine import assume_profile
from tests.tiers import asked_for, tiered
from tests.workers import launched

SHARDED = {"layout": WHOLE, "microbatches": 1, "zero": 2}
SHARDED_3 = {"layout": WHOLE, "microbatches": 1, "zero": 3}
PIPELINE = {"layout": STAGES, "microbatches": 2}


def batch_of(index, rank):
    generator = torch.Generator().manual_seed(100 * index + rank)
    tokens = torch.randint(0, VOCABULARY, (4, 11), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def cross_entropy(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def updated(fabric, optimizer, loss):
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def two_forwards(fabric, model, optimizer, index):
    losses = [model(*batch_of(2 * index + one, fabric.global_rank))["loss"] for one in (0, 1)]
    updated(fabric, optimizer, losses[0] + 3.0 * losses[1])


def two_forwards_of_logits(fabric, model, optimizer, index):
    batches = [batch_of(2 * index + one, fabric.global_rank) for one in (0, 1)]
    updated(fabric, optimizer, sum(cross_entropy(logits, y) for logits, y in [(model(x), y) for x, y in batches]))


def factor_of_the_rank(fabric, model, optimizer, index):
    loss = model(*batch_of(index, fabric.global_rank))["loss"]
    updated(fabric, optimizer, loss * (1.0 + fabric.global_rank))


def other_output(fabric, model, optimizer, index):
    found = model(*batch_of(index, fabric.global_rank))
    updated(fabric, optimizer, found["loss"] + 0.1 * found["logits"].square().mean())


def looked_at_output(fabric, model, optimizer, index):
    found = model(*batch_of(index, fabric.global_rank))
    right = (found["logits"].argmax(-1) == batch_of(index, fabric.global_rank)[1]).float().mean()
    updated(fabric, optimizer, found["loss"] * (1.0 + fabric.all_reduce(right)))


def never_averaged(fabric, model, optimizer, index):
    x, y = batch_of(index, fabric.global_rank)
    with fabric.no_backward_sync(model):
        updated(fabric, optimizer, cross_entropy(model(x), y))


def stepped_in_between(fabric, model, optimizer, index):
    x, y = batch_of(index, fabric.global_rank)
    updated(fabric, optimizer, cross_entropy(model(x), y))
    loss = cross_entropy(model(x), y)
    optimizer.step()
    fabric.backward(loss)


def trained_in_eval_mode(fabric, model, optimizer, index):
    model.eval()
    x, y = batch_of(index, fabric.global_rank)
    updated(fabric, optimizer, cross_entropy(model(x), y))


def written_over_in_place(fabric, model, optimizer, index):
    x, y = batch_of(index, fabric.global_rank)
    logits = model(x)
    logits /= 2.0
    updated(fabric, optimizer, cross_entropy(logits, y))


def clipped_by_hand(fabric, model, optimizer, index):
    x, y = batch_of(index, fabric.global_rank)
    fabric.backward(cross_entropy(model(x), y))
    for parameter in model.parameters():
        parameter.grad.clamp_(-1e-3, 1e-3)
    optimizer.step()
    optimizer.zero_grad()


def averaged_by_hand(fabric, model, optimizer, index):
    x, y = batch_of(index, fabric.global_rank)
    updated(fabric, optimizer, cross_entropy(model(x), y))
    with torch.no_grad():
        sum(parameter.square().sum() for parameter in model.parameters())


def backward_of_its_own(fabric, model, optimizer, index):
    x, y = batch_of(index, fabric.global_rank)
    cross_entropy(model(x), y).backward()
    optimizer.step()


def evaluated_in_between(fabric, model, optimizer, index):
    """A target without gradients between a forward and its backward, as self-distillation has it."""
    x, y = batch_of(index, fabric.global_rank)
    logits = model(x)
    with torch.no_grad():
        target = model(x).softmax(-1)
    updated(fabric, optimizer, cross_entropy(logits, y) + F.mse_loss(logits.softmax(-1), 0.5 * target))


def evaluated_without_no_grad(fabric, model, optimizer, index):
    x, y = batch_of(index, fabric.global_rank)
    updated(fabric, optimizer, cross_entropy(model(x), y))
    model.eval()
    float(cross_entropy(model(x), y))
    model.train()


def divided(fabric, model, optimizer, index):
    updated(fabric, optimizer, model(*batch_of(index, fabric.global_rank))["loss"] / 3.0)


TRAPS = {
    "two forwards": (Loss, two_forwards, PIPELINE, {}),
    "two forwards of logits": (Logits, two_forwards_of_logits, SHARDED, {}),
    "two forwards of logits, plain": (Logits, two_forwards_of_logits, {"layout": WHOLE, "microbatches": 1}, {}),
    "factor of the rank": (Loss, factor_of_the_rank, PIPELINE, {}),
    "factor of the rank, loss outside": (Loss, factor_of_the_rank, SHARDED, {"returns_loss": False}),
    "other output": (Loss, other_output, PIPELINE, {}),
    "other output, loss outside": (Loss, other_output, SHARDED_3, {"returns_loss": False}),
    "looked at output": (Loss, looked_at_output, PIPELINE, {}),
    "never averaged": (Logits, never_averaged, SHARDED, {}),
    "stepped in between": (Logits, stepped_in_between, SHARDED_3, {}),
    "trained in eval mode": (Logits, trained_in_eval_mode, SHARDED, {}),
    "written over in place": (Logits, written_over_in_place, SHARDED, {}),
    "clipped by hand": (Logits, clipped_by_hand, SHARDED, {}),
    "averaged by hand": (Logits, averaged_by_hand, SHARDED_3, {}),
    "averaged by hand, whole": (Logits, averaged_by_hand, SHARDED, {}),
    "backward of its own": (Logits, backward_of_its_own, SHARDED, {}),
    "evaluated in between": (Logits, evaluated_in_between, SHARDED, {}),
    "evaluated in between, away": (Logits, evaluated_in_between, SHARDED_3, {}),
    "evaluated without no_grad": (Logits, evaluated_without_no_grad, SHARDED_3, {}),
    "stages of logits": (Logits, evaluated_without_no_grad, PIPELINE, {}),
    "stages of a scaled loss": (Loss, two_forwards, PIPELINE, {}),
    "scaled loss": (Loss, divided, SHARDED, {}),
}


def scaled():
    """The first scale overflows half precision: it depends on the losses' factors at which one nothing does."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=4)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def trained(strategy, kind, loop, options, batches=3):
    fabric = lf.Fabric(strategy=strategy, accelerator="cpu", devices=2, **options)
    fabric.launch()
    fabric.seed_everything(5, verbose=False)
    module = kind()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3))
    for index in range(batches):
        loop(fabric, model, optimizer, index)
    return fabric.strategy.get_module_state_dict(model._forward_module)


def outcome(name, folder):
    kind, loop, layout, options = TRAPS[name]
    layout, error, ours = dict(layout), "", {}
    strategy = MistFabricStrategy(
        plan=plan(layout.pop("layout"), rows=4, **layout), profile_directory=str(folder / "profiles"), **options
    )
    try:
        ours = trained(strategy, kind, loop, scaled() if "scaled" in name else {}, 9 if "scaled" in name else 3)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    try:
        ddp = trained("ddp", kind, loop, scaled() if "scaled" in name else {}, 9 if "scaled" in name else 3)
    except RuntimeError as raised:
        return {"error": error, "ddp": str(raised)}
    return {"error": error, "difference": max((float((ours[k] - ddp[k]).abs().max()) for k in ours), default=None)}


class Pair(nn.Module):
    """Trained against each other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).tanh()


def adversaries(strategy):
    """Two modules, each with its optimizer, and gradients through one into the other."""
    fabric = lf.Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    fabric.seed_everything(5, verbose=False)
    pairs = []
    for _ in range(2):
        module = Pair()
        pairs.append(fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1)))
    (maker, first), (judge, second) = pairs
    for index in range(3):
        noise = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * index + fabric.global_rank))
        updated(fabric, second, judge(maker(noise).detach()).mean())
        updated(fabric, first, -judge(maker(noise)).mean())
        second.zero_grad()
    return [p.detach().flatten() for model in (maker, judge) for p in model.parameters()]


def judged(folder, names):
    """What came of loops: differences from DDP's parameters, or the error."""
    assume_profile(folder / "profiles", 2)
    results = {name: outcome(name, folder) for name in names if name != "adversaries"}
    if "adversaries" in names:
        ddp, ours = (torch.cat(adversaries(strategy)) for strategy in ("ddp", "mist"))
        results["adversaries"] = {"error": "", "difference": float((ddp - ours).abs().max())}
    return results


OFTEN = ("two forwards", "factor of the rank", "other output", "never averaged", "looked at output")
MORE = tuple(name for name in (*TRAPS, "adversaries") if name not in OFTEN)

REFUSED = {
    "two forwards of logits": "TraceError: backward through a forward that was let go: the module ran again",
    "factor of the rank": "TraceError: ranks multiply the module's loss by 1 to 2",
    "other output": "TraceError: the loop's loss depends on another output of the module than its loss",
    "never averaged": "TraceError: optimizer.step after a forward inside no_backward_sync",
    "stepped in between": "TraceError: backward through a forward that was let go: the optimizer stepped",
    "trained in eval mode": "TraceError: backward through a forward that the plan does not train",
    "clipped by hand": "PlanError: the plan has zero_stage of 2, which this module rules out: the loop may look at",
    "averaged by hand": "PlanError: square of ",
    "backward of its own": "RuntimeError: The current strategy and precision selection requires you to call",
    "evaluated in between, away": "TraceError: backward through a forward that was let go: the module was evaluated",
    "stages of a scaled loss": "PlanError: the plan has 2 stages, which this module rules out: losses are scaled",
    "stages of logits": "PlanError: the plan has 2 stages, which this module rules out: the loop computes the loss",
}


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return launched(judged, tmp_path_factory.mktemp("traps"), asked_for(request, "trap"))


@pytest.mark.parametrize("trap", tiered((*OFTEN, *MORE), OFTEN))
def test_traps_train_as_under_ddp_or_are_refused(found, trap):
    for result in found:
        assert result[trap]["error"].startswith(REFUSED.get(trap, ""))
        assert bool(result[trap]["error"]) == (trap in REFUSED)
    if trap not in REFUSED:  # rank 0 has the whole module
        assert found[0][trap]["difference"] < 1e-5
