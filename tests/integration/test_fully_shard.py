"""ZeRO-2 and ZeRO-3 against torch's own: accumulated gradients and AdamW steps equal ``fully_shard``'s over gloo."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_mist.plan import Plan
from lightning_mist.plan.mesh import process_groups
from lightning_mist.runtime.communication.transport import DistributedTransport, complete
from lightning_mist.runtime.parameters.gather import ParameterGatherer
from lightning_mist.tensors import slice_rows
from tests import zoo
from tests.integration.parity import Rank, cast, make_plan, map_of, microbatches

RANKS, ROWS, PARTS, STEPS = 2, 4, 2, 2

Result = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Gradients of the first step, and parameters after the last, by name."""


def _inputs() -> tuple[nn.Module, list[list[Any]]]:
    torch.manual_seed(3)
    module, make_batch = zoo.make("llama")
    steps = [[cast(make_batch(ROWS), torch.float64) for _ in range(RANKS)] for _ in range(STEPS)]
    return module.double(), steps


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def _mist(zero: int, checkpointed: int) -> Result:
    module, steps = _inputs()
    plan = make_plan([4], degrees=[RANKS], parts=PARTS, rows=ROWS, zero=zero, checkpointed=checkpointed)
    module_map = map_of(module, steps[0][0])
    transport = DistributedTransport(process_groups(plan, module_map), torch.device("cpu"))
    rank = Rank.make(module, module_map, plan, transport.rank, transport)
    optimizer = _optimizer(module)
    gradients: dict[str, Tensor] = {}
    for batches in steps:
        optimizer.zero_grad()
        _run(rank, plan, batches)
        with rank.showing():
            # A rank has no gradient of what lies in other ranks' pieces.
            every = ((name, p.grad) for name, p in module.named_parameters())
            gradients = gradients or {name: torch.empty(0).double() if g is None else g.clone() for name, g in every}
            optimizer.step()
        complete(rank.executor.gather_parameters())
    values: dict[str, Tensor] = {}
    gatherer = ParameterGatherer(
        plan, transport.rank, rank.executor.stages.every, module_map, transport, rank.executor.even.shards
    )
    complete(gatherer.run(lambda name, value: values.update({name: value.clone()})))
    parts = rank.every_part()
    joined = {name: transport.all_gather_object((parts[name].index, g), range(RANKS)) for name, g in gradients.items()}
    transport.close()
    return {name: parts[name].join([g for _, g in sorted(found)]) for name, found in joined.items()}, values


def _run(rank: Rank, plan: Plan, batches: Sequence[Any]) -> None:
    complete(rank.run(microbatches(plan, rank.executor.mesh.rank, batches)))


def _torch(zero: int) -> Result:
    module, steps = _inputs()
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (*module.model.model.layers, module.model):
        fully_shard(part, mesh=mesh, reshard_after_forward=zero == 3)
    model, optimizer = module.model, _optimizer(module)
    assert isinstance(model, FSDPModule)
    gradients: dict[str, Tensor] = {}
    for batches in steps:
        optimizer.zero_grad()
        for part in range(PARTS):
            model.set_is_last_backward(part == PARTS - 1)
            model.set_reshard_after_backward(zero == 3 or part == PARTS - 1)
            rows = slice_rows(batches[mesh.get_rank()], ROWS * part // PARTS, ROWS * (part + 1) // PARTS)
            (module.training_step(rows, 0) / PARTS).backward()
        gradients = gradients or {name: _whole(p.grad) for name, p in module.named_parameters()}
        optimizer.step()
    return gradients, {name: _whole(p.detach()) for name, p in module.named_parameters()}


def _whole(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().clone()


@pytest.mark.parametrize(("zero", "checkpointed"), [(2, 0), (3, 0), (3, 2)])
def test_accumulated_gradients_and_steps(gloo_workers, zero, checkpointed):
    ours = gloo_workers.run(RANKS, _mist, zero, checkpointed)
    (gradients, values), _ = gloo_workers.run(RANKS, _torch, zero)
    for mine, _ in ours:
        assert mine.keys() == gradients.keys()
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12)
    for _, mine in ours:
        assert mine.keys() == values.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, values[name], rtol=1e-10, atol=1e-12)
