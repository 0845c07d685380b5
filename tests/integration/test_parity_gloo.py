"""A cut of the parity table over gloo: processes of their own, real transfers, three clipped optimizer steps."""

from typing import Any

import pytest
import torch

from lightning_mist.model.split.splits import derive_splits
from lightning_mist.plan.mesh import process_groups
from lightning_mist.runtime.communication.transport import DistributedTransport, complete
from tests import zoo
from tests.integration.parity import assert_trained_equal, cast, make_plan, map_of, precision_of, train, train_reference

ROWS = 4

CASES = {
    "two stages": ("gpt2", {"layers": [1, 3], "parts": 2, "checkpointed": 1}),
    "two by two, sharded": ("llama_tied", {"layers": [2, 2], "degrees": [2, 2], "zero": 1}),
    "three stages of different degrees": ("nano", {"layers": [2, 1, 1], "degrees": [1, 2, 1], "zero": [0, 1, 0]}),
    "encoder and decoder": ("t5", {"layers": [2, 2, 2], "parts": 2, "schedule": "gpipe"}),
    "four stages": ("vit", {"layers": [1, 1, 1, 1], "parts": 2}),
    "data parallel": ("nano", {"layers": [4], "degrees": [4], "zero": 1}),
    "all sharded": ("lora_llama", {"layers": [2, 2], "degrees": [2, 2], "zero": 3, "parts": 2, "checkpointed": 1}),
    "two groups of two chunks": (
        "gpt2",
        {"layers": [1, 1, 1, 1], "chunks": 2, "schedule": "interleaved-1f1b", "parts": 2, "checkpointed": 1},
    ),
    "zero bubble": ("llama", {"layers": [2, 2], "degrees": [2, 1], "schedule": "zb-h1", "checkpointed": [1, 0]}),
    "two by two layers shared": ("llama", {"layers": [2, 2], "tensor": 2, "sequence": True, "checkpointed": 1}),
    "slices to ranks that share layers": (
        "nano",
        {"layers": [2, 2], "degrees": [2, 1], "tensor": [1, 2], "sequence": [False, True], "zero": [1, 0]},
    ),
    "gradients sharded": ("sometimes", {"layers": [4], "degrees": [3], "zero": 2, "parts": 2}),
    "optimizer sharded in groups": ("sometimes", {"layers": [4], "degrees": [4], "zero": 1, "shard": 2}),
    "gradients sharded in groups": ("sometimes", {"layers": [4], "degrees": [4], "zero": 2, "shard": 2, "parts": 2}),
}


def _inputs(name: str, world_size: int) -> tuple[Any, list[list[Any]]]:
    torch.manual_seed(11)
    module, make_batch = zoo.make(name)
    batches = [cast(make_batch(ROWS), torch.float64) for _ in range(3 * world_size)]
    return module.double(), [batches[world_size * step : world_size * (step + 1)] for step in range(3)]


def _rank(name: str, options: dict[str, Any]) -> Any:
    plan = make_plan(rows=ROWS, **options)
    module, steps = _inputs(name, plan.world_size)
    module_map = map_of(module, steps[0][0])
    degrees = {stage.mesh.tensor_parallel_degree for stage in plan.stages}
    with precision_of(module):
        call = lambda batch: module.training_step(batch, 0)  # noqa: E731
        module_map = derive_splits(module, call, steps[0][0], module_map, sorted(degrees))
    transport = DistributedTransport(process_groups(plan, module_map), torch.device("cpu"))
    with precision_of(module):
        result = complete(train(module, module_map, plan, steps, transport))
    transport.close()
    return result


@pytest.mark.sample
@pytest.mark.parametrize("label", CASES)
def test_training_over_gloo(gloo_workers, label):
    name, options = CASES[label]
    world_size = make_plan(rows=ROWS, **options).world_size
    ranks = gloo_workers.run(world_size, _rank, name, options)
    assert_trained_equal(ranks, train_reference(*_inputs(name, world_size)))
