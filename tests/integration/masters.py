"""The arithmetic of master weights in a single process."""

import copy

import torch

from tests.integration.parity import MAX_NORM, loss_of, microbatches


def sgd(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def train_alone(module, plan, steps, compute, optimize, seen=lambda masters: None):
    """The arithmetic in one process: casts computed with, gradients added up and masters updated in the masters' type.

    Data-parallel ranks' gradients are rounded to the computing type and added in it, once per batch, from ZeRO-2 on for
    every microbatch.
    """
    masters = copy.deepcopy(module)
    computed = copy.deepcopy(module).to(compute)
    for mine, master in zip(computed.parameters(), masters.parameters(), strict=True):
        mine.grad_dtype = master.dtype  # also of several uses in one step
    optimizer = optimize(masters)
    trained = [(name, p) for name, p in masters.named_parameters() if p.requires_grad]
    losses = []
    for batches in steps:
        with torch.no_grad():
            for mine, master in zip(computed.parameters(), masters.parameters(), strict=True):
                mine.copy_(master)
        found = {}
        totals = {name: None for name, _ in trained}
        (stage,) = {(s.mesh.data_parallel_degree, int(s.zero_stage)) for s in plan.stages}
        (degree, zero), mesh = stage, plan.stages[0].mesh
        columns = [microbatches(plan, mesh.devices[i * mesh.tensor_parallel_degree], batches) for i in range(degree)]
        gradients = [[gradients_of(computed, part, found) for part in column] for column in columns]
        for name, _ in trained:
            totals[name] = total(
                [[g[name] for g in column] for column in gradients], plan.world_size, compute, zero >= 2
            )
        optimizer.zero_grad()
        for name, p in trained:
            p.grad = None if totals[name] is None else totals[name].to(p.dtype)
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], MAX_NORM)
        optimizer.step()
        seen({name: p.detach().clone() for name, p in masters.named_parameters()})
        losses.append(found)
    return losses, masters, optimizer


def gradients_of(module, part, found):
    module.zero_grad()
    loss = loss_of(module.training_step(part.value, 0))
    (loss * part.weight).backward()
    found[part.owner] = found.get(part.owner, 0.0) + part.weight * loss.detach()
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def total(columns, world, compute, each):
    """One parameter's gradient over ranks and microbatches."""
    wide = torch.float64 if compute is torch.float32 else torch.float32
    if len(columns) == 1:
        return sum(g.to(wide) for g in columns[0]) * (1 / world)
    if each:
        return sum(
            sum((g.to(wide) * (1 / world)).to(compute) for g in row).to(wide) for row in zip(*columns, strict=True)
        )
    return sum((sum(g.to(wide) for g in column) * (1 / world)).to(compute) for column in columns).to(wide)
