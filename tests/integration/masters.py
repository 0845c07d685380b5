"""Training with master weights in a single process."""

import torch

from benchmarks.parity.masters import Masters
from tests.integration.parity import MAX_NORM


def sgd(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def train_alone(module, plan, module_map, steps, compute, optimize, seen=lambda masters: None, max_norm=MAX_NORM):
    """Losses by step and rank, the masters and their optimizer; ``seen`` gets the masters' values after each step."""
    masters, losses = Masters.of(module, compute), []
    optimizer = optimize(masters.module)
    for batches in steps:
        optimizer.zero_grad()
        losses.append(masters.train_batch(plan, module_map, batches))
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], max_norm)
        optimizer.step()
        seen({name: p.detach().clone() for name, p in masters.module.named_parameters()})
    return losses, masters.module, optimizer
