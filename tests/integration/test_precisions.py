"""Predicted peaks against measured ones in every precision that Lightning runs on a CPU, by its own plugins."""

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_mist.cost import stage_memory
from lightning_mist.estimate.replay import replay_plan
from lightning_mist.model import trace_model
from lightning_mist.model.presets.named_models import PRECISIONS
from lightning_mist.model.sources.text_sources import parameter_dtype, precision_context
from tests import zoo
from tests.integration.metered import measure_peaks
from tests.integration.parity import make_plan, map_of
from tests.tiers import tiered

pytestmark = pytest.mark.thorough  # each precision is traced anew

PLUGINS = {
    "32-true": Precision,
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
    "16-mixed": lambda: MixedPrecision("16-mixed", "cpu"),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "16-true": lambda: HalfPrecision("16-true"),
    "64-true": DoublePrecision,
}

# One device each: default types and autocast belong to a process, which several ranks would share here.
PLANS = {
    "accumulation": {"layers": [4], "parts": 2},
    "recomputation": {"layers": [4], "checkpointed": 3, "zero": 1},
}

ROWS, TOLERANCE = 4, 0.01


class InPrecision(nn.Module):
    """A module whose step runs as a precision plugin lets it run."""

    def __init__(self, model, plugin):
        super().__init__()
        self.model, self.plugin = plugin.convert_module(model), plugin

    def training_step(self, batch, batch_idx):
        with self.plugin.train_step_context():
            return self.model.training_step(batch, batch_idx)


def converted(name, precision):
    plugin = PLUGINS[precision]()
    module, make_batch = zoo.make(name)
    return InPrecision(module, plugin), lambda rows: plugin.convert_input(make_batch(rows))


@pytest.mark.sample
@pytest.mark.parametrize(("name", "precision"), [("llama", "bf16-mixed"), *(("vit", name) for name in PLUGINS)])
def test_peaks(name, precision):
    module, make_batch = converted(name, precision)
    batch = make_batch(ROWS)
    spec = trace_model(
        module,
        batch,
        call=zoo.step(module),
        module_map=map_of(module, batch),
        optimizer=torch.optim.AdamW(module.parameters()),
        precision=precision,
    )
    for how in PLANS.values():
        plan = make_plan(rows=ROWS, **how)
        (measured,) = measure_peaks(module, spec.module_map, plan, [make_batch(ROWS)])
        (predicted,) = stage_memory(spec, plan)
        assert predicted.peak_bytes == pytest.approx(measured, rel=TOLERANCE), how


@pytest.mark.parametrize("checkpointed", [0, 1, 2])
def test_what_waits_for_gradients_of_weights_is_what_autocast_has_cast(checkpointed):
    module, make_batch = converted("nano", "bf16-mixed")
    batch, rows = make_batch(2 * ROWS), 2 * ROWS
    spec = trace_model(
        module,
        batch,
        call=zoo.step(module),
        module_map=map_of(module, batch),
        optimizer=torch.optim.AdamW(module.parameters()),
        precision="bf16-mixed",
    )
    # From ZeRO-2 on the runtime keeps no casts of weights from one microbatch to the next.
    how = {"layers": [2, 2], "degrees": [2, 2], "zero": 2, "parts": 4, "schedule": "zb-h1"}
    plan = make_plan(rows=rows, checkpointed=checkpointed, **how)
    measured = measure_peaks(module, spec.module_map, plan, [batch] * plan.world_size)
    replays, found = replay_plan(spec, plan), stage_memory(spec, plan)
    for peak, replay, stage in zip(measured, replays, found, strict=True):
        assert replay.peak_bytes == pytest.approx(peak, rel=0.004)
        assert stage.peak_bytes >= (1 - TOLERANCE) * peak


@pytest.mark.thorough
@pytest.mark.parametrize("precision", tiered(["bf16-mixed", "64-true"], ["bf16-mixed"]))
def test_modules_are_traced_without_lightning_as_its_plugins_run_them(precision):
    module, make_batch = converted("vit", precision)
    plain = zoo.make("vit")[0]
    dtype, context = parameter_dtype(precision), precision_context(precision)
    plain = plain if dtype is None else plain.to(dtype)
    batch = make_batch(ROWS)

    def call(item):
        with context():
            return plain.training_step(dict(item), 0)

    specs = [
        trace_model(given, batch, call=step, optimizer=torch.optim.AdamW)
        for given, step in ((module, zoo.step(module)), (plain, call))
    ]
    for name in ("saved_bytes", "forward_peak_bytes", "recompute_backward_peak_bytes"):
        first, second = (getattr(spec.layers[0], name) for spec in specs)
        assert first == second
    assert PLUGINS.keys() == set(PRECISIONS)
