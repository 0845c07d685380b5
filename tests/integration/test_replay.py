"""Replayed allocations against those of the runtime, byte by byte on a CPU."""

import itertools

import pytest
import torch

from lightning_mist.cost import replay_plan
from lightning_mist.model import derive_splits, trace_model
from tests import zoo
from tests.integration.metered import measure_peaks
from tests.integration.parity import make_plan, map_of
from tests.integration.test_memory import PLANS

TOLERANCE = 0.001
"""Largest relative error of a peak: scalars (losses, counters of optimizers) are not replayed."""

ROWS = 12

MODELS = ("gpt2_dropout", "bert")


def whole_batch(make_batch, rows):
    """A batch without padding in any row: with padding in one, models mask some microbatches and not others."""
    batch = make_batch(rows)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    return batch


@pytest.fixture(scope="module")
def traced():
    """Each model with its batches and its costs, traced once."""
    known = {}

    def of(name):
        if name not in known:
            torch.manual_seed(0)
            module, make_batch = zoo.make(name)
            batch, call = whole_batch(make_batch, ROWS), zoo.step(module)
            optimizer = torch.optim.AdamW(module.parameters())
            found = derive_splits(module, call, batch, map_of(module, batch), (2,))
            known[name] = (
                module,
                make_batch,
                trace_model(module, batch, call=call, module_map=found, optimizer=optimizer),
            )
        return known[name]

    return of


@pytest.mark.parametrize(("model", "name"), [*itertools.product(MODELS, PLANS)])
def test_replayed_equals_measured(traced, model, name):
    module, make_batch, spec = traced(model)
    plan = make_plan(rows=ROWS, **PLANS[name])
    batches = [whole_batch(make_batch, ROWS) for _ in range(plan.world_size)]
    measured = measure_peaks(module, spec.module_map, plan, batches)
    replays = replay_plan(spec, plan, plain=False)
    for stage, (replay, peak) in enumerate(zip(replays, measured, strict=True)):
        assert replay.peak_bytes == pytest.approx(peak, rel=TOLERANCE), f"stage {stage}, {replay.phase}"
        assert replay.peak_bytes <= peak
