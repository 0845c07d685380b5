import dataclasses
import re

import pytest
import torch

from benchmarks.parity import cell, masters
from benchmarks.parity.cell import Outcome, attempt, compare_curves, compare_gradients, subject
from benchmarks.parity.plans import LAYOUTS, Group, Layout, make_plan
from lightning_mist.runtime.gradients.reducer import GradientReducer
from lightning_mist.runtime.parameters import EvenShards
from lightning_mist.strategy.training.engine import Engine

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

TWO_BY_TWO = Layout(groups=(Group(dp=2, zero=1), Group(dp=2, checkpointed=1)), parts=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_right_plan_is_equal(dtype):
    outcome = attempt(compare_gradients, subject("nano", dtype), TWO_BY_TWO)
    assert (outcome.differing, outcome.refused) == ("", "")
    assert 0 < outcome.gradient < (1e-12 if dtype is torch.float64 else 1e-5)
    assert outcome.text == f"{max(outcome.loss, outcome.gradient):.1e}"


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.loaders and "tp" not in name])
def test_ranks_that_share_a_loader_have_its_losses_and_gradients(name):
    outcome = attempt(compare_gradients, subject("nano", torch.float64), LAYOUTS[name])
    assert (outcome.differing, outcome.refused) == ("", "")
    assert 0 < outcome.gradient < 1e-12


def test_a_curve_is_equal():
    outcome = attempt(compare_curves, subject("nano", torch.float64), TWO_BY_TWO)
    assert (outcome.differing, outcome.refused) == ("", "")
    assert 0 < outcome.gradient < 1e-10


@pytest.mark.parametrize(("compare", "zero"), [(compare_gradients, 2), (compare_curves, 0)])
def test_master_weights_are_equal_to_the_bit_and_a_wrong_sum_is_named(monkeypatch, compare, zero):
    model = subject("vit", torch.bfloat16, masters=torch.float32)
    layout = Layout(groups=(Group(dp=2, zero=zero),), parts=2)
    assert attempt(compare, model, layout) == Outcome()
    monkeypatch.setattr(masters, "_sum", lambda tensors: tensors[0])
    assert attempt(compare, model, layout).text == "differs"


def test_wrong_gradients_are_named(monkeypatch):
    monkeypatch.setattr(GradientReducer, "reduce_tied", lambda self: iter(()))
    outcome = attempt(compare_gradients, subject("nano", torch.float64), TWO_BY_TWO)
    assert outcome.differing.startswith("gradient of transformer.wte.weight on rank 0: off by")
    assert outcome.text == "differs"


def test_a_missing_gradient_is_named(monkeypatch):
    install, forgotten = EvenShards.install, "transformer.h.1.ln_1.weight"

    def forget(self, factor):
        for shard in self.trained:
            shard.present = [name != forgotten for name in shard.flat.names]
        install(self, factor)

    monkeypatch.setattr(EvenShards, "install", forget)
    outcome = attempt(compare_gradients, subject("nano", torch.float64), TWO_BY_TWO)
    assert re.fullmatch(rf"gradient of {forgotten} on rank [01]: off by inf", outcome.differing)


def test_wrong_losses_are_named(monkeypatch):
    model = subject("nano", torch.float64)
    plan = make_plan(TWO_BY_TWO, 4)
    batches = tuple(tuple(reversed(step[:4])) for step in model.batches)
    reference = cell._reference
    monkeypatch.setattr(cell, "_reference", lambda s, world: reference(dataclasses.replace(s, batches=batches), world))
    assert compare_gradients(model, plan).differing.startswith("loss of rank 0 in step 0: ")


def test_a_wrong_curve_is_named(monkeypatch):
    monkeypatch.setattr(Engine, "clip_by_norm", lambda self, optimizer, max_norm: None)
    outcome = attempt(compare_curves, subject("nano", torch.float64), TWO_BY_TWO)
    assert "loss of rank 0 in step 1" in outcome.differing


def test_what_cannot_run_is_refused_with_its_reason():
    outcome = attempt(compare_gradients, subject("nano", torch.float64), Layout(groups=(Group(tp=3),)))
    assert "tensor_parallel_degree = 3" in outcome.refused
    assert outcome.text == "refused"
    assert Outcome().text == "0.0e+00"


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        ("plain", "tp 2", r"tensor_parallel_degree = 2: .*Sequential stays whole: no two linear layers"),
        ("vit", "tp 2, sequence", r"stages\[0\]\.sequence_parallel = True: ViTLayer: the sequence has 17 positions"),
        ("skips", "all of it together", r"tensor_parallel_degree = 2: .*stays whole"),
    ],
)
def test_a_model_that_does_not_allow_a_plan_is_refused_with_the_reason_of_its_map(name, layout, reason):
    outcome = attempt(compare_gradients, subject(name, torch.float64), LAYOUTS[layout])
    assert re.search(reason, outcome.refused)


@pytest.mark.sample
@pytest.mark.sample
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_cut_of_the_table(name):
    """All of it: ``python -m benchmarks.parity.table``."""
    outcome = attempt(compare_gradients, subject("nano_even", torch.float64), LAYOUTS[name])
    assert (outcome.differing, outcome.refused) == ("", "")
    assert 0 < outcome.gradient < 1e-12
