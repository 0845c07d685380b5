"""A cut of the parity table over gloo: the engine that runs under Lightning, in processes of its own."""

import copy

import pytest
import torch

from benchmarks.parity.cell import CPU, gradients_of, judge_gradients, subject
from benchmarks.parity.plans import LAYOUTS, make_plan
from lightning_mist.plan.mesh import process_groups
from lightning_mist.runtime.communication.transport import DistributedTransport
from lightning_mist.strategy.training.engine import Engine
from tests.integration.parity import precision_of

CELLS = [
    ("llama", "dp 2, ZeRO 2"),
    ("lora_llama", "pp 2 x dp 2, ZeRO 3, some recomputed"),
    ("t5", "pp 2 x dp 2"),
    ("gpt2_even", "tp 2, sequence"),
    ("llama_even", "stages (dp 2, tp 1, ZeRO 3), (dp 1, tp 2, sequence)"),
    ("bert", "pp 2 x tp 2, sequence, some recomputed"),
    ("nano_even", "interleaved, dp 2, ZeRO 2"),
    ("gpt2_even", "dp 4, ZeRO 3, HSDP 2 x 2"),
    ("llama_even", "pp 2 x cp 2, ZeRO 2"),
]


def _rank(name, label):
    model = subject(name, torch.float64)
    plan = make_plan(LAYOUTS[label], len(model.module_map.blocks))
    transport = DistributedTransport(process_groups(plan, model.module_map), CPU)
    with precision_of(model.module):
        engine = Engine(copy.deepcopy(model.module), plan, model.module_map, transport, device=CPU)
        found = gradients_of(model, engine)
    transport.close()
    return found


@pytest.mark.sample
@pytest.mark.parametrize(("name", "label"), CELLS)
def test_cells_over_gloo(gloo_workers, name, label):
    model = subject(name, torch.float64)
    plan = make_plan(LAYOUTS[label], len(model.module_map.blocks))
    ranks = gloo_workers.run(plan.world_size, _rank, name, label)
    outcome = judge_gradients(model, plan, ranks)
    assert outcome.differing == ""
    assert 0 < outcome.gradient < 1e-12
