"""Predicted peaks against those of the runtime, byte by byte on a CPU."""

import itertools

import pytest
import torch

from lightning_mist.cost import stage_memory
from lightning_mist.model import derive_splits, trace_model
from tests import zoo
from tests.integration.metered import measure_peaks
from tests.integration.parity import make_plan, map_of

TOLERANCE = 0.05
"""Largest relative error of a prediction."""

ROWS = 4

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
}

MODELS = ("gpt2_dropout", "llama_tied", "bert", "vit")


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


@pytest.mark.parametrize(("model", "plan"), [*itertools.product(MODELS, PLANS)])
def test_predicted_equals_measured(traced, model, plan):
    module, make_batch, spec = traced(model)
    plan = make_plan(rows=ROWS, **PLANS[plan])
    if any(stage.mesh.sequence_parallel for stage in plan.stages) and not any(
        item.sequence_parallel for item in spec.splits
    ):
        assert spec.module_map.excludes("sequence")
        return
    batches = [make_batch(ROWS) for _ in range(plan.world_size)]
    measured = measure_peaks(module, spec.module_map, plan, batches)
    for index, (memory, peak) in enumerate(zip(stage_memory(spec, plan), measured, strict=True)):
        assert memory.peak_bytes == pytest.approx(peak, rel=TOLERANCE), f"stage {index}: {memory}"
