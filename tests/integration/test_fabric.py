"""``Fabric(strategy="mist")`` on two ranks: loops of every kind against Fabric's DDP."""

import lightning.fabric as lf
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_mist import MistFabricStrategy
from tests.fits import LAYERS, VOCABULARY, WIDTH, Block, Tokens, plan
from tests.machine import assume_profile
from tests.workers import launched

WHOLE = [(4, [0, 1])]
STAGES = [(2, [1]), (2, [0])]
AWAY = {"parameters": 1.0, "optimizer": 1.0, "activations": 1.0}


class Logits(nn.Module):
    """Leaves its loss to the loop."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(self.embed(x) if x.dtype == torch.long else x)
        return self.head(x)


class Loss(Logits):
    """Returns its loss beside its logits."""

    def forward(self, x, y=None):
        logits = super().forward(x)
        if y is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


def loss_of(model, batch):
    module = model.module
    if isinstance(module, Loss):
        return model(batch["x"], y=batch["y"])["loss"]
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def simple(fabric, model, optimizer, batch, index, told):
    loss = loss_of(model, batch)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    told.append(loss)


def accumulated(fabric, model, optimizer, batch, index, told, **clipping):
    is_adding = index % 2 == 0
    with fabric.no_backward_sync(model, enabled=is_adding):
        loss = loss_of(model, batch)
        fabric.backward(loss / 2)
    told.append(loss)
    if not is_adding:
        if clipping:
            told.append(fabric.clip_gradients(model, optimizer, **clipping))
        optimizer.step()
        optimizer.zero_grad()


def by_norm(*args):
    accumulated(*args, max_norm=0.3)


def by_largest(*args):
    accumulated(*args, max_norm=0.01, norm_type="inf")


def by_value(*args):
    accumulated(*args, clip_val=0.003)


def evaluating(fabric, model, optimizer, batch, index, told):
    """Evaluates between steps, and changes the learning rate by hand."""
    simple(fabric, model, optimizer, batch, index, told)
    if index % 3 == 1:
        model.eval()
        with torch.no_grad():
            told.append(loss_of(model, batch))
        model.train()
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def forgetting(fabric, model, optimizer, batch, index, told):
    """Adds gradients up without no_backward_sync, clears them late, and leaves a forward without a backward."""
    loss = loss_of(model, batch)
    if index % 3 == 0:
        optimizer.zero_grad(set_to_none=index % 2 == 0)
    told.append(loss)
    if index % 4 == 3:
        return
    fabric.backward(loss)
    if index % 3 == 2:
        optimizer.step()


def shaped(fabric, model, optimizer, batch, index, told):
    """A loss that is no multiple of the module's."""
    loss = loss_of(model, batch)
    loss = loss**2 * (1.0 + fabric.global_rank) if not isinstance(model.module, Loss) else loss * 0.5 + 1.0
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    told.append(loss)


def closing(fabric, model, optimizer, batch, index, told):
    """Runs forward and backward inside of the optimizer's step."""

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        fabric.backward(loss)
        return loss

    told.append(optimizer.step(closure))


SPLIT = {"layout": WHOLE, "microbatches": 1}
CASES = {
    "plain": (Logits, simple, SPLIT, {}),
    "zero1": (Logits, by_norm, {**SPLIT, "zero": 1, "checkpointed": 2}, {}),
    "zero2": (Logits, by_value, {**SPLIT, "zero": 2}, {}),
    "zero3": (Logits, evaluating, {**SPLIT, "zero": 3, "checkpointed": 1}, {}),
    "zero3 norm": (Logits, by_largest, {**SPLIT, "zero": 3}, {}),
    "recomputed": (Logits, shaped, {**SPLIT, "checkpointed": 4}, {}),
    "moved": (Logits, evaluating, {**SPLIT, "zero": 1, "checkpointed": 1, "offload": AWAY}, {}),
    "forgetting": (Logits, forgetting, {**SPLIT, "zero": 2}, {}),
    "closing": (Logits, closing, {**SPLIT, "zero": 3}, {}),
    "bf16": (Logits, by_norm, {**SPLIT, "zero": 3}, {"precision": "bf16-mixed"}),
    "stages": (Loss, by_norm, {"layout": STAGES, "microbatches": 4}, {}),
    "tensor": (Loss, evaluating, {"layout": WHOLE, "microbatches": 2, "tensor": 2}, {}),
    "parts": (Loss, shaped, {"layout": WHOLE, "microbatches": 2, "zero": 2}, {}),
    "stages forgetting": (Loss, forgetting, {"layout": STAGES, "microbatches": 2, "checkpointed": 1}, {}),
    "stages moved": (Loss, evaluating, {"layout": STAGES, "microbatches": 2, "offload": AWAY}, {}),
    "stages bf16": (Loss, simple, {"layout": STAGES, "microbatches": 2}, {"precision": "bf16-mixed"}),
    "double": (Logits, by_norm, {**SPLIT, "zero": 3}, {"precision": "64-true"}),
    "stages double": (Loss, by_norm, {"layout": STAGES, "microbatches": 2}, {"precision": "64-true"}),
}


def run(strategy, case, out, *, start=None, batches=7):
    kind, step, _, options = CASES[case]
    fabric = lf.Fabric(strategy=strategy, accelerator="cpu", devices=2, **options)
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    module = kind()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3))
    state = {"model": model, "optimizer": optimizer, "number": 0}
    if start is not None:
        fabric.load(start, state)
    loader = fabric.setup_dataloaders(DataLoader(Tokens(8 * batches, 1), batch_size=4, shuffle=True))
    told = []
    for index, batch in enumerate(loader):
        step(fabric, model, optimizer, batch, index, told)
    saved = out / f"{case}-{getattr(strategy, '_start_method', 'ddp')}-{batches}-{start is None}.ckpt"
    state["number"] = state["number"] + batches
    fabric.save(saved, state)
    mean = float(fabric.all_reduce(torch.tensor(float(fabric.global_rank))))
    content = torch.load(saved, weights_only=True)
    fresh = kind().to(next(iter(content["model"].values())).dtype)
    fresh.load_state_dict(content["model"])
    states = content["optimizer"]["state"]
    return {
        "told": [float(value) for value in told if value is not None],
        "weights": {name: value.double().flatten()[:9].tolist() for name, value in fresh.state_dict().items()},
        "sums": {name: float(value.double().pow(2).sum()) for name, value in fresh.state_dict().items()},
        "moments": [float(states[key]["exp_avg_sq"].double().sum()) for key in sorted(states)],
        "steps": [float(states[key]["step"]) for key in sorted(states)],
        "number": content["number"],
        "mean": mean,
        "plan": type(fabric.strategy).__name__,
        "path": str(saved),
    }


def mist(case, folder, **options):
    layout = dict(CASES[case][2])
    return MistFabricStrategy(
        plan=plan(layout.pop("layout"), rows=4, **layout), profile_directory=str(folder / "profiles"), **options
    )


def both(out, names, resumed):
    """What a rank sees of loops under either strategy, and of those that go on, each from the other's checkpoint."""
    assume_profile(out / "profiles", 2)
    results = {}
    for name in names:
        ddp, ours = run("ddp", name, out), run(mist(name, out), name, out)
        results[name] = {"ddp": ddp, "mist": ours}
        if name in resumed:
            results[name]["ddp resumed"] = run("ddp", name, out, start=ours["path"], batches=4)
            results[name]["mist resumed"] = run(mist(name, out), name, out, start=ddp["path"], batches=4)
    return results


TOLERANCE = {"double": 1e-10, "stages double": 1e-10}
OFTEN = ("zero1", "zero3", "forgetting", "stages double")
RESUMED = ("zero3",)
"""Cases that every change runs, and those of them that are gone on from."""


@pytest.fixture(scope="module")
def often(tmp_path_factory):
    return launched(both, tmp_path_factory.mktemp("often"), OFTEN, RESUMED)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    names = [name for name in CASES if name not in OFTEN]
    return launched(both, tmp_path_factory.mktemp("others"), names, names)


def numbers(value, name=""):
    if isinstance(value, dict):
        return {key: number for item in value for key, number in numbers(value[item], f"{name}/{item}").items()}
    if isinstance(value, list):
        return {key: x for index, item in enumerate(value) for key, x in numbers(item, f"{name}/{index}").items()}
    return {} if isinstance(value, str) else {name: value}


def compare(results, case):
    for rank, result in enumerate(results):
        for start in ("", " resumed") if "mist resumed" in result[case] else ("",):
            ddp, ours = (result[case][f"{strategy}{start}"] for strategy in ("ddp", "mist"))
            assert (ddp["plan"], ours["plan"]) == ("DDPStrategy", "MistFabricStrategy")
            assert ours["told"], rank
            assert numbers(ours) == pytest.approx(numbers(ddp), abs=TOLERANCE.get(case, 1e-5))


@pytest.mark.parametrize("case", OFTEN)
def test_losses_parameters_and_states_are_those_of_ddp(often, case):
    compare(often, case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [name for name in CASES if name not in OFTEN])
def test_so_they_are_in_further_cases(others, case):
    compare(others, case)
