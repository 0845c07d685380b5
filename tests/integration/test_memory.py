"""Predicted peaks against those of the runtime, byte by byte on a CPU."""

from statistics import fmean

import pytest
import torch

from lightning_mist.cost import stage_memory
from lightning_mist.model import derive_splits, trace_model
from tests import zoo
from tests.integration.metered import measure_peaks, measure_plain_peak
from tests.integration.parity import make_plan, map_of

UNDER, OVER = 0.01, 0.07
"""How far a prediction may be below and above what is measured, relative to that. Of these small models the fullest
rank owns far more than others and every parameter is a large part of what a layer holds, so sharding is told less
exactly than of large ones."""

MEAN = 0.02
"""Largest mean of the relative errors of all stages of a model."""

ROWS = 8
"""Rows of every rank: enough that every microbatch has two. A single row may lie in memory so that torch copies less,
or keeps more, than of several rows, which no expression through several can tell."""

PLANS = {
    "accumulation": {"layers": [4], "parts": 2},
    "recomputation": {"layers": [4], "checkpointed": 3, "parts": 4},
    "ZeRO-1": {"layers": [4], "degrees": [3], "zero": 1},
    "ZeRO-2": {"layers": [4], "degrees": [2], "zero": 2, "parts": 2},
    "ZeRO-3": {"layers": [4], "degrees": [3], "zero": 3, "parts": 2, "checkpointed": 2},
    "everything sharded, two stages": {"layers": [3, 1], "degrees": [2, 2], "zero": [3, 2], "parts": 4},
    "tensor parallelism": {"layers": [4], "tensor": 2, "parts": 2},
    "sequence parallelism": {"layers": [2, 2], "tensor": 2, "sequence": True, "parts": 2, "checkpointed": 1},
    "two stages": {"layers": [1, 3], "parts": 2, "checkpointed": [1, 1]},
    "a stage per layer": {"layers": [1, 1, 1, 1], "parts": 1},
    "two replicas": {"layers": [3, 1], "degrees": [2, 2], "parts": 4, "zero": [1, 0], "checkpointed": 1},
    "uneven degrees": {"layers": [2, 2], "degrees": [1, 2], "parts": 2},
    "interleaved": {"layers": [1, 1, 1, 1], "chunks": 2, "parts": 4, "schedule": "interleaved-1f1b"},
    "zero bubble": {"layers": [2, 2], "parts": 4, "schedule": "zb-h1"},
    "gpipe": {"layers": [2, 2], "parts": 4, "schedule": "gpipe"},
    "whole batches": {"layers": [4], "parts": 1},
    "zero bubble, gradients sharded": {
        "layers": [2, 2],
        "degrees": [2, 2],
        "zero": 2,
        "parts": 2,
        "schedule": "zb-h1",
        "checkpointed": 1,
    },
}

MODELS = {
    "vit": [*PLANS][1::2],
    "gpt2_dropout": [*PLANS],
    "llama_tied": [*PLANS],
    "bert": [*PLANS][::2],
    "lora_llama": [*PLANS][::3],
}
"""Plans of each model."""


@pytest.fixture(scope="module")
def traced():
    """Each model with its batches and what it is said to cost, traced once."""
    known = {}

    def of(name):
        if name not in known:
            module, make_batch = zoo.make(name)
            optimizer, batch, call = torch.optim.AdamW(module.parameters()), make_batch(ROWS), zoo.step(module)
            found = derive_splits(module, call, batch, map_of(module, batch), (2,))
            spec = trace_model(module, batch, call=call, module_map=found, optimizer=optimizer)
            known[name] = module, make_batch, spec
        return known[name]

    return of


def errors_of(model, options, traced):
    """Relative errors of all stages of a plan; nothing if the model does not allow it."""
    module, make_batch, spec = traced(model)
    plan = make_plan(rows=ROWS, **options)
    if any(stage.mesh.sequence_parallel for stage in plan.stages) and not any(
        item.sequence_parallel for item in spec.splits
    ):
        assert spec.module_map.excludes("sequence")
        return []
    batches = [make_batch(ROWS) for _ in range(plan.world_size)]
    if plan.is_plain:
        measured = [measure_plain_peak(module, spec.module_map, plan, batches[0])]
    else:
        measured = measure_peaks(module, spec.module_map, plan, batches)
    predicted = [memory.peak_bytes for memory in stage_memory(spec, plan)]
    return [(mine - peak) / peak for mine, peak in zip(predicted, measured, strict=True)]


@pytest.mark.sample
@pytest.mark.parametrize("model", MODELS)
def test_predicted_equals_measured(traced, model):
    found = {name: errors_of(model, PLANS[name], traced) for name in MODELS[model]}
    errors = [error for of_plan in found.values() for error in of_plan]
    assert min(errors) >= -UNDER, found
    assert max(errors) <= OVER, found
    assert fmean(map(abs, errors)) <= MEAN, found
